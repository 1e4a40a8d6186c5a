"""State that a user's code keeps, changes or draws beyond a trial's weights does not affect other
trials' figures, or is refused before the trial starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainers.processes import spawned
from trainers.config import DataConfig, LossConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.data import load, prepare
from trainers.training.check import check
from trainers.training.trainer import Training

CODE = """
import random
import sys

import numpy as np
import torch
from torch import nn

CACHE = nn.Linear(64, 10)


def digits(train, shift=0.0, noise=0.0, classes=(), shape=64):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.images).float().flatten(1) / 16 + shift, torch.tensor(bunch.target)
    if isinstance(classes, list):
        classes.append(1)
    x = x + noise * torch.randn(x.shape) + noise * np.random.rand() + noise * random.random()
    return (x[:100, :64], y[:100]) if train else (x[100:200, :shape], y[100:200])


class Pairs(torch.utils.data.Dataset):
    classes = 10

    def __init__(self, train, noise=0.0, y=None):
        self.x, self.y = digits(train)
        self.noise, self.wrong = noise, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        y = int(self.y[index])
        if self.wrong == "float":
            y = y / 9
        if self.wrong == "triple":
            return self.x[index], y, y
        x = self.x[index]
        if self.wrong == "ragged":
            x = x[: 10 + index % 2]
        return x + self.noise * torch.randn(64) + self.noise * np.random.rand(), y


class Unknown(Pairs):
    classes = None


class Module:
    def __init__(self, noise=0.0):
        self.noise = noise

    def setup(self, stage):
        self.sets = [Pairs(True, self.noise), Pairs(False), Pairs(False)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.sets[0], batch_size=7)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.sets[1])

    def test_dataloader(self):
        return torch.utils.data.DataLoader(self.sets[2])


def stops(train):
    sys.exit(0)


class Net(nn.Module):
    def __init__(self, kind="plain"):
        super().__init__()
        self.kind, self.layer, self.steps = kind, nn.Linear(64, 10), 0
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("late", None)
        self.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("third", torch.tensor([1 / 3, 0.1]))
        if kind == "shared":
            self.layer = CACHE
        if kind == "threads":
            torch.set_num_threads(2)
        if kind == "lazy":
            self.layer = nn.LazyLinear(10)

    def forward(self, x):
        self.steps += 1
        kind = self.kind
        if kind == "inplace":
            x = x.sub_(0.5)
        if kind == "numpy" and self.training:
            x = x * float(np.random.rand()) * random.random()
        if kind == "always":
            x = x * torch.rand(x.shape)
        if kind == "generator":
            x = x * torch.rand(x.shape, generator=self.generator)
        if kind == "counter":
            x = x * self.steps
        if kind == "late":
            x = x if self.late is None else x + self.late
            self.late = torch.ones(64)
        if kind == "growing":
            self.mask = torch.cat([self.mask, self.mask])
        if kind == "tuple":
            return self.layer(x), x
        if kind == "exit":
            sys.exit(0)
        if kind == "raises":
            return self.layer(x) + {}["missing"]
        if kind == "evaluation" and not self.training:
            return x
        if kind == "no_grad":
            with torch.no_grad():
                return self.layer(x)
        if kind == "frozen":
            self.layer.requires_grad_(False)
        if kind == "detached":
            return self.layer(x).detach()
        if kind == "again":
            return self.layer(x).detach().requires_grad_()
        if kind == "complex":
            return self.layer(x).to(torch.complex64)
        return self.layer(x)


def net(kind="plain"):
    return Net(kind)


def neighbour():
    from helper import WIDTH

    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def detached_loss():
    return lambda outputs, targets: nn.functional.cross_entropy(outputs.detach(), targets)


def constant_loss():
    return lambda outputs, targets: torch.tensor(1.0, requires_grad=True)


def float_loss():
    return lambda outputs, targets: 1.0


def extreme(train, x=None, y=None, dtype="int64"):
    examples, classes = digits(train)
    if x:
        examples = examples.to(torch.complex64 if x == "complex" else torch.float64)
        examples[0] = 1e300 if x == "large" else float(x) if x != "complex" else 1j
    if dtype == "uint64":
        classes = torch.from_numpy(np.full(100, y, np.uint64))
    elif y:
        classes = classes.to(getattr(torch, dtype))
        classes[0] = complex(y) if dtype == "complex64" else float(y) if "f" in dtype else int(y)
    return examples, classes


def tokens(train, token):
    return torch.full((100, 4), token), digits(train)[1]


def odd_loss():
    return lambda outputs, targets: outputs.sum() * float("1" + str(np.random.randint(9)))
"""

LNS12 = PrecisionConfig(format="lns12")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


def trial(
    file: Path, kind: str = "plain", data: str = "digits", net: str = "net", **changes: Any
) -> TrialConfig:
    options = {key: changes.pop(key) for key in ("num_workers",) if key in changes}
    return TrialConfig(
        model=ModelConfig(name=f"{file}:{net}", args={"kind": kind} if net == "net" else {}),
        data=DataConfig(name=f"{file}:{data}", args=changes.pop("data_args", {}), **options),
        **{"epochs": 2, "batch_size": 20} | changes,
    )


def checked(config: TrialConfig) -> Training:
    check(config, prepare(config.data))
    return Training(config)


def figures(training: Training) -> dict[str, float]:
    found = training.train_epoch() | training.test()
    return {name: value for name, value in found.items() if name != "samples_per_second"}


def weights(training: Training) -> Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def test_a_forward_that_changes_its_input_changes_no_examples(file: Path) -> None:
    config = trial(file, "inplace")
    before = load(config.data).validation.head(100).x
    training = checked(config)
    assert figures(training) | {"epoch": 0} == pytest.approx(
        figures(Training(config)) | {"epoch": 0}
    )
    assert training.test() == training.test()
    torch.testing.assert_close(load(config.data).validation.head(100).x, before, rtol=0, atol=0)


def test_a_trial_begins_with_weights_that_no_other_has_trained(file: Path) -> None:
    """Modules of the file are imported again for each trial; within a trial each is imported
    once."""
    config = trial(file, "shared")
    first = Training(config)
    before = weights(first).clone()
    first.train_epoch()
    torch.testing.assert_close(weights(Training(config)), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"returned before, whose weights may have been trained"):
        check(config, prepare(config.data))


def test_neighbours_of_the_same_name_are_each_files_own(file: Path, tmp_path: Path) -> None:
    for folder, width in (("a", 4), ("b", 16)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(CODE)
        (tmp_path / folder / "helper.py").write_text(f"WIDTH = {width}")
        config = trial(tmp_path / folder / "net.py", net="neighbour")
        assert len(weights(checked(config))) == 64 * width + width + width * 10 + 10


def test_neighbours_of_the_same_name_in_one_trial_are_refused(file: Path, tmp_path: Path) -> None:
    """Python has one module per name: the network would be made with the data's width."""
    for folder, width in (("a", 4), ("b", 16)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(f"import helper\n{CODE}")
        (tmp_path / folder / "helper.py").write_text(f"WIDTH = {width}")
    config = trial(tmp_path / "b" / "net.py", net="neighbour")
    mixed = replace(config, data=replace(config.data, name=f"{tmp_path}/a/net.py:digits"))
    for _ in range(2):  # also if the data are in memory
        with pytest.raises(ValueError, match=r"imports helper, and would get .*/a/helper\.py"):
            checked(mixed)
    assert len(weights(checked(config))) == 64 * 16 + 16 + 16 * 10 + 10


def test_arguments_of_different_types_are_different_data(file: Path) -> None:
    configs = [DataConfig(name=f"{file}:digits", args={"shift": value}) for value in (1, 1.0, True)]
    assert len(dict.fromkeys(configs)) == 3
    assert len({id(load(config)) for config in configs}) == 3


def test_a_factory_that_changes_its_arguments_changes_no_trial(file: Path) -> None:
    config = trial(file, data_args={"classes": [3]})
    checked(config)
    assert config.data.args == {"classes": [3]}


def test_data_that_are_drawn_at_random_are_the_same_everywhere(file: Path) -> None:
    config = DataConfig(name=f"{file}:digits", args={"noise": 1.0})
    first = prepare(config)
    load.cache_clear()
    torch.rand(3)
    assert prepare(config) == first


@pytest.mark.parametrize("kind", ["numpy", "always"])
def test_random_numbers_go_on_after_an_interruption(file: Path, tmp_path: Path, kind: str) -> None:
    config = trial(file, kind)
    whole, begun = checked(config), Training(config)
    whole.train_epoch()
    begun.train_epoch()
    begun.save(tmp_path / "checkpoint")
    resumed = Training(config)
    resumed.restore(tmp_path / "checkpoint")
    assert figures(resumed) == figures(whole)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("generator", "after an interruption it would not resume with the same bits"),
        ("counter", "after an interruption it would not resume with the same bits"),
        ("late", "after an interruption it would not resume with the same bits"),
        ("growing", "does not train.*RuntimeError"),
        ("tuple", "turns examples into a tuple; return a tensor"),
        ("exit", "SystemExit in .*code.py, line"),
        ("raises", "KeyError in .*code.py, line .*'missing'; mend the code"),
        ("evaluation", "does not train.*RuntimeError|.*into"),
        ("lazy", "lazy layers.*give them their sizes"),
        ("no_grad", r"code.py, line \d+.*its outputs have no gradient.*no_grad or detach"),
        ("detached", r"code.py, line \d+.*its outputs have no gradient.*no_grad or detach"),
        ("frozen", r"code.py, line \d+.*all its parameters are frozen.*requires_grad"),
        ("again", r"code.py, line \d+.*no parameter gets a gradient"),
        ("complex", r"code.py, line \d+.*its outputs are complex64; return real ones"),
    ],
)
def test_networks_that_could_only_fail_or_deceive_are_refused(
    file: Path, kind: str, message: str
) -> None:
    config = trial(file, kind)
    with pytest.raises(ValueError, match=message):
        check(config, prepare(config.data))


@pytest.mark.parametrize(
    ("data", "args", "message"),
    [
        ("stops", {}, "SystemExit in .*code.py, line"),
        ("digits", {"shape": 60}, r"training examples have the shape \(64,\), others \(60,\)"),
        ("Pairs", {"y": "float"}, "its targets are float32, and classes are whole numbers"),
        ("Pairs", {"y": "triple"}, "cannot be put together: ValueError"),
        ("Pairs", {"y": "ragged"}, "cannot be put together: RuntimeError"),
    ],
)
def test_data_that_could_only_fail_are_refused(
    file: Path, data: str, args: dict[str, Any], message: str
) -> None:
    config = trial(file, data=data, data_args=args)
    with pytest.raises(ValueError, match=rf"code.py.*{message}"):
        check(config, prepare(config.data))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("detached_loss", r"code.py, line \d+.*: has no gradient; compute it from the outputs"),
        ("constant_loss", r"code.py, line \d+.*no parameter gets a gradient"),
        ("float_loss", r"code.py.*returned a float; return a tensor"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(file: Path, loss: str, message: str) -> None:
    config = trial(file, loss=LossConfig(name=f"{file}:{loss}"))
    with pytest.raises(ValueError, match=message):
        check(config, prepare(config.data))


@pytest.mark.parametrize(
    ("args", "loss", "message"),
    [
        ({"x": "complex"}, "cross_entropy", "examples are complex64.*return real ones"),
        ({"x": "large"}, "cross_entropy", "not finite, or beyond float32's 3.4e.38; .* scale"),
        ({"y": "1j", "dtype": "complex64"}, "mse", "targets are complex64.*return real ones"),
        ({"y": "1e300", "dtype": "float64"}, "mse", "not finite, or beyond float32's"),
        ({"y": 2**63 + 5, "dtype": "uint64"}, "mse", "targets of uint64 beyond int64"),
        ({"y": 2**40}, "cross_entropy", "1,099,511,627,777 classes: needs .*from 0 without gaps"),
        ({"x": "1e9"}, "cross_entropy", r"1e\+09.*beyond lns12's 64830; scale"),
    ],
)
def test_examples_that_no_number_of_the_trial_holds_are_refused(
    file: Path, args: dict[str, Any], loss: str, message: str
) -> None:
    kind = LossConfig(name=loss)
    config = trial(file, data="extreme", data_args=args, loss=kind, precision=LNS12)
    with pytest.raises(ValueError, match=rf"code.py:extreme.*{message}"):
        check(config, prepare(config.data))


@pytest.mark.parametrize(
    ("token", "message"),
    [(-3, "its least token is -3"), (2**40, "1,099,511,627,777 tokens: needs .* without gaps")],
)
def test_tokens_that_no_embedding_has_are_refused(file: Path, token: int, message: str) -> None:
    config = TrialConfig(
        model=ModelConfig(name="lstm"),
        data=DataConfig(name=f"{file}:tokens", args={"token": token}),
        batch_size=20,
    )
    with pytest.raises(ValueError, match=rf"code.py:tokens.*{message}"):
        check(config, prepare(config.data))


def test_threads_are_the_trials(file: Path) -> None:
    Training(trial(file, "threads"))
    assert torch.get_num_threads() == 1


def replica(rank: int, folder: str) -> dict[str, Any]:
    config = trial(Path(folder) / "code.py", workers=2, batch_size=20)
    training = Training(config, rank=rank, world_size=2)
    training.train_epoch()
    return {name: buffer.tolist() for name, buffer in training.model.named_buffers()}


def test_buffers_that_do_not_change_stay_as_they_are(file: Path) -> None:
    """Averaging them would overflow the mask, and round the thirds."""
    expected = {name: value.tolist() for name, value in Training(trial(file)).model.named_buffers()}
    for found in spawned(replica, file.parent):
        del found["pid"]
        assert found == expected


@pytest.mark.parametrize("data", ["Pairs", "Module"])
def test_examples_that_are_loaded_when_needed_are_those_in_memory(file: Path, data: str) -> None:
    held, streamed = (trial(file, data=data, num_workers=number) for number in (None, 2))
    assert figures(checked(streamed)) == pytest.approx(figures(checked(held)), rel=1e-6)


def test_loaded_examples_are_drawn_alike_after_an_interruption(file: Path, tmp_path: Path) -> None:
    config = trial(file, data="Pairs", data_args={"noise": 0.5}, num_workers=2)
    whole, begun = checked(config), Training(config)
    first = whole.train_epoch()
    begun.train_epoch()
    begun.save(tmp_path / "checkpoint")
    resumed = Training(config)
    resumed.restore(tmp_path / "checkpoint")
    second = figures(whole)
    assert figures(resumed) == second
    assert second["train/loss"] != first["train/loss"]


def loading_replica(rank: int, folder: str) -> dict[str, Any]:
    config = trial(Path(folder) / "code.py", data="Pairs", num_workers=1, workers=2)
    training = Training(config, rank=rank, world_size=2)
    return figures(training)


def test_replicas_load_their_own_shares(file: Path) -> None:
    whole = figures(Training(trial(file, data="Pairs")))
    for found in spawned(loading_replica, file.parent):
        assert {name: found[name] for name in whole} == pytest.approx(whole, rel=1e-4)


def test_loading_needs_a_data_set_that_says_its_classes(file: Path) -> None:
    with pytest.raises(ValueError, match=r"how many classes there are.*attribute classes"):
        load(DataConfig(name=f"{file}:Unknown", num_workers=1))
    with pytest.raises(ValueError, match=r"data.num_workers=1 with data.name=digits: our data"):
        DataConfig(name="digits", num_workers=1)


def test_a_factory_that_gives_validation_examples_takes_no_size(file: Path) -> None:
    file.write_text(CODE + "\n\ndef three(split):\n    return digits(split == 'train')\n")
    with pytest.raises(ValueError, match=r"validation_size=5 .*leave it out"):
        load(DataConfig(name=f"{file}:three", validation_size=5))


def test_a_loss_that_raises_or_draws_is_seeded(file: Path) -> None:
    config = trial(file, loss=LossConfig(name=f"{file}:odd_loss"))
    assert figures(Training(config)) == figures(Training(config))
