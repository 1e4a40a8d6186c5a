"""A user's own networks and data: made, trained, resumed with the same bits, or refused with file,
line and remedy."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lns_ops import LNSTensor
from tests.trainers.processes import spawned
from tests.trainers.user_network import NETWORK
from trainers.config import DataConfig, LossConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.data import load
from trainers.training.trainer import Training
from trainers.user_code import (
    MISSING,
    PRIVATE,
    digest_package,
    digest_source,
    find_source,
    forget,
    load_code,
    python_path,
)

KAHAN = PrecisionConfig(format="lns12", scope="everywhere", kahan_sum=True)
SIMULATED = PrecisionConfig(format="bfloat16", kahan_sum=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(NETWORK)
    return path


def trial(file: Path, *, args: dict[str, Any] | None = None, **changes: Any) -> TrialConfig:
    return TrialConfig(
        model=ModelConfig(name=f"{file}:make_net", args=args or {}),
        data=DataConfig(name=f"{file}:digits"),
        epochs=2,
        batch_size=20,
        **changes,
    )


def bits(training: Training) -> list[Tensor]:
    held = [*training.model.parameters(), *training.model.buffers()]
    return [t.codes.clone() if isinstance(t, LNSTensor) else t.detach().clone() for t in held]


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key != "samples_per_second"}


@pytest.mark.parametrize("precision", [PrecisionConfig(), KAHAN, SIMULATED], ids=lambda p: p.format)
def test_it_trains_and_resumes_with_the_same_bits(
    file: Path, tmp_path: Path, precision: PrecisionConfig
) -> None:
    """Batch norm keeps statistics and dropout draws random numbers; both continue."""
    config = trial(file, args={"dropout": 0.5}, precision=precision)
    whole, begun, resumed = Training(config), Training(config), Training(config)
    expected = [without_speed(whole.train_epoch()) for _ in range(2)]
    begun.train_epoch()
    begun.save(tmp_path / "checkpoint")
    torch.rand(7)  # draws of others in between change nothing
    resumed.restore(tmp_path / "checkpoint")
    assert without_speed(resumed.train_epoch()) == expected[1]
    for one, other in zip(bits(whole), bits(resumed), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert expected[0]["train/loss"] != expected[1]["train/loss"]


def test_it_is_evaluated_in_eval_mode(file: Path) -> None:
    training = Training(trial(file, args={"dropout": 0.5}))
    training.train_epoch()
    statistics = [buffer.clone() for buffer in training.model.buffers()]
    assert training.test() == training.test()
    assert training.model.training
    for before, after in zip(statistics, training.model.buffers(), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_weights_depend_on_the_seed_alone(file: Path) -> None:
    made = []
    for seed in (0, 0, 1):
        made.append(Training(trial(file, seed=seed)))
        torch.rand(1)  # draws of others in between change nothing
    first, again, other = made
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(again), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(bits(first), bits(other), strict=True))


def test_our_networks_take_the_users_data(file: Path) -> None:
    config = dataclasses.replace(trial(file), model=ModelConfig(hidden=[8]))
    assert Training(config).train_epoch()["validation/error"] < 1.0


@pytest.mark.parametrize(
    ("factory", "sizes"), [("digits", (180, 20)), ("three", (200, 50)), ("Examples", (180, 20))]
)
def test_data_are_split_as_the_factory_gives_them(
    file: Path, factory: str, sizes: tuple[int, int]
) -> None:
    data = load(DataConfig(name=f"{file}:{factory}"))
    assert (len(data.train.y), len(data.validation.y)) == sizes
    assert data.train.x.shape[1:] == (1, 8, 8)
    assert data.train.x.dtype == torch.float32


MODULE = """

class Module:
    def __init__(self, loaders=1):
        self.loaders = loaders

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Examples(True))

    def val_dataloader(self):
        return [torch.utils.data.DataLoader(Examples(False))] * self.loaders

    def test_dataloader(self):
        return torch.utils.data.DataLoader(Examples(False))


def line(train):
    x = torch.linspace(0, 1, 40)
    return x, 3 * x
"""


def test_a_list_of_one_loader_is_that_loader(file: Path) -> None:
    file.write_text(file.read_text() + MODULE)
    data = DataConfig(name=f"{file}:Module")
    assert load(data).validation.size == 100
    with pytest.raises(ValueError, match=r"its val_dataloader\(\) returned 2 of DataLoader"):
        load(dataclasses.replace(data, args={"loaders": 2}))
    with pytest.raises(ValueError, match=r"data.validation_size=30 .* gives the validation exam"):
        load(dataclasses.replace(data, validation_size=30))


def test_a_root_that_no_factory_is_told_of_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"data.root='/data' .*give the folder in data.args"):
        load(DataConfig(name=f"{file}:digits", root="/data"))


def test_examples_of_one_number_each_are_trained_on(file: Path) -> None:
    file.write_text(file.read_text() + MODULE)
    config = TrialConfig(
        data=DataConfig(name=f"{file}:line"),
        model=ModelConfig(hidden=[8]),
        loss=LossConfig(name="mse"),
        batch_size=8,
        epochs=1,
    )
    assert math.isfinite(Training(config).train_epoch()["validation/loss"])


def test_a_file_loads_under_a_private_name_and_shadows_nothing(file: Path) -> None:
    (file.parent / "json.py").write_text("raise RuntimeError('shadowed')")
    made = load_code("model.name", f"{file}:make_net")
    assert made.__module__.startswith(PRIVATE)
    assert "net" not in sys.modules
    import json

    assert json.loads("1") == 1
    assert sys.path.index(str(file.parent)) == len(sys.path) - 1


def test_a_module_is_found_and_hashed_without_being_run(file: Path) -> None:
    assert find_source("model.name", "antigravity:x").name == "antigravity.py"
    assert "antigravity" not in sys.modules
    before = digest_source("model.name", f"{file}:make_net")
    file.write_text(NETWORK + "\n")
    assert digest_source("model.name", f"{file}:make_net") != before


NEIGHBOURS = {
    "net.py": "import os, torch\nfrom plain import *\nfrom parts.deep.net import Net as make_net",
    "plain.py": "import json\nimport absent_module\npattern = '\\d'",
    "parts/__init__.py": "",
    "parts/deep/net.py": "from ..shared import scale\nfrom . import late\nclass Net: ...",
    "parts/deep/late.py": "def run():\n    import parts.lazily",
    "parts/lazily.py": "from net import make_net",  # a cycle
    "parts/shared.py": "scale = 1\ndef broken(",
    "parts/other.py": "",
    "parts/deep/other.py": "",
    "json.py": "",
    "elsewhere.py": "",
}
"""A file that names code, and other files, some of which it imports."""
REACHED = {name for name in NEIGHBOURS if "other" not in name} - {"elsewhere.py"}


@pytest.mark.parametrize(
    ("named", "init"),
    [
        ("{folder}/net.py:make_net", False),
        ("{package}.net:make_net", True),
        ("{package}.net:make_net", False),
    ],
)
def test_a_digest_covers_what_is_imported_from_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, init: bool
) -> None:
    """In a folder of files, in a package and in a namespace; with indirect imports."""
    package = tmp_path.name
    folder = tmp_path / package
    for name, source in NEIGHBOURS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if named.startswith("{package}"):
            source = source.replace("from ", f"from {package}.").replace(f"{package}..", ".")
            for imported in ("parts", "json"):
                source = source.replace(f"import {imported}", f"import {package}.{imported}")
        (folder / name).write_text(source)
    if init:
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    name = named.format(folder=folder, package=package)
    first = digest_source("model.name", name)
    for changed in NEIGHBOURS:
        source = (folder / changed).read_text()
        (folder / changed).write_text(source + "\n# changed")
        assert (digest_source("model.name", name) != first) == (changed in REACHED), changed
        (folder / changed).write_text(source)
    moved = tmp_path / "moved"
    folder.rename(moved)
    if named.startswith("{folder}"):
        assert digest_source("model.name", f"{moved}/net.py:make_net") == first


def test_the_digest_of_a_file_without_neighbours_is_that_of_its_bytes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of installed packages, which have versions, do not count."""
    expected = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    assert digest_source("model.name", f"{file}:make_net") == expected
    installed = file.parent / "site-packages" / "layered"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("from layered.net import make")
    (installed / "net.py").write_text("import layered")
    monkeypatch.syspath_prepend(installed.parent)
    expected = hashlib.sha256(b"import layered").hexdigest()[:12]
    assert digest_source("model.name", "layered.net:make") == expected


def test_a_neighbour_that_cannot_be_read_is_named(file: Path) -> None:
    (file.parent / "plain.py").symlink_to("/proc/self/mem")
    file.write_text("import plain")
    with pytest.raises(
        ValueError, match=r"plain\.py, which its code imports, cannot be read: Input"
    ):
        digest_source("model.name", f"{file}:make")


@pytest.mark.parametrize("on_path", [False, True])
def test_a_trial_imports_neighbours_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch, on_path: bool
) -> None:
    """Files and packages beside the file; other modules that a process has imported stay."""
    if on_path:
        monkeypatch.syspath_prepend(file.parent)
    (file.parent / "parts").mkdir()
    (file.parent / "parts" / "size.py").write_text("width = 1")
    file.write_text("import json\nfrom parts import size\ndef make():\n    return size.width")
    name = f"{file}:make"
    digest = digest_source("model.name", name)
    assert load_code("model.name", name, digest)() == 1
    (file.parent / "parts" / "size.py").write_text("width = 20")
    with pytest.raises(ValueError, match="or what it imports from beside it, has changed since"):
        load_code("model.name", name, digest)
    import json

    forget()
    assert load_code("model.name", name)() == 20
    assert (str(file.parent) in python_path()) == on_path
    forget()
    assert not {"parts", "parts.size"} & sys.modules.keys()
    assert sys.modules["json"] is json
    assert (str(file.parent) in sys.path) == on_path


def test_packages_that_the_process_had_before_are_not_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as lns-study's own, if a user's file is in its checkout."""
    package = f"held_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "late.py").touch()
    (tmp_path / "net.py").write_text(f"import {package}.late\ndef make(): ...")
    with monkeypatch.context() as path:
        path.syspath_prepend(tmp_path)
        held = importlib.import_module(package)
    forget()
    load_code("model.name", f"{tmp_path}/net.py:make")
    late = sys.modules[f"{package}.late"]
    forget()
    assert sys.modules[package] is held
    assert sys.modules[f"{package}.late"] is late


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("{file}:raises", {}, r"RuntimeError in .*net\.py, line 38: no such weights"),
        (
            "{file}:needs",
            {},
            r"missing a required argument: 'depth'.*\(.*net\.py, line \d+\).*set model\.args",
        ),
        ("{file}:make_net", {"depth": 3}, r"unexpected keyword argument 'depth'.*set model\.args"),
        ("{file}:nothing", {}, r"line \d+\): returned a NoneType; return a torch\.nn\.Module"),
        ("{file}:wrong_shape", {}, "no parameters"),
        ("{file}:absent", {}, "has no function or class absent; it has Examples, digits"),
        ("{file}x.py:make_net", {}, "there is no file"),
        ("no_such_package:make_net", {}, "there is no module no_such_package"),
    ],
)
def test_wrong_factories_are_refused(
    file: Path, name: str, args: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(
        trial(file), model=ModelConfig(name=name.format(file=file), args=args)
    )
    with pytest.raises(ValueError, match=message):
        Training(config)


@pytest.mark.parametrize(
    ("init", "raised"),
    [
        ("\n1 / 0\n", r"ZeroDivisionError in .*__init__\.py, line 2: division by zero"),
        ("\n\nf(\n", r"SyntaxError in .*__init__\.py, line 3: "),
        ("import json\njson.loads('x')", r"JSONDecodeError in .*__init__\.py, line 2: "),
        ("import no_such", r"ModuleNotFoundError in .*__init__\.py, line 1: No module named "),
    ],
)
def test_a_package_that_raises_is_found_and_refused_with_its_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, raised: str
) -> None:
    """Its module is in a folder without ``__init__``, a namespace."""
    name = tmp_path.name
    module = tmp_path / name / "parts" / "net.py"
    module.parent.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text(init)
    module.write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_source("model.name", f"{name}.parts.net:make_net") == module
    assert digest_package(f"{name}.parts.net:make_net").startswith("code ")
    with pytest.raises(ValueError, match=rf"net\.py cannot be imported: {raised}.*; mend it there"):
        load_code("model.name", f"{name}.parts.net:make_net")


def test_the_digest_of_a_package_is_that_of_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "other"):
        (tmp_path / place / "layered").mkdir(parents=True)
        (tmp_path / place / "layered" / "__init__.py").touch()
        (tmp_path / place / "layered" / "net.py").write_text("from layered.layers import make")
        (tmp_path / place / "layered" / "layers.py").write_text(f"make = {place!r}")
    digests = []
    for place in ("one", "other"):
        with monkeypatch.context() as path:
            path.syspath_prepend(tmp_path / place)
            digests.append(digest_package("layered.net:make"))
    assert digests[0] != digests[1]
    assert MISSING not in digests
    installed = tmp_path / "site-packages"
    (tmp_path / "one").rename(installed)
    with monkeypatch.context() as path:
        path.syspath_prepend(installed)
        assert digest_package("layered.net:make") == f"{digests[0]}, installed"
    (tmp_path / "alone").mkdir()
    for name in ("alone", "neighbour"):
        (tmp_path / "alone" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "alone")
    before = digest_package("alone:make")
    (tmp_path / "alone" / "neighbour.py").write_text("# other")
    assert digest_package("alone:make") == before  # a module in a folder of its name, not a package
    for absent in ("layered.net:make", "json.nothing:x", "json.decoder.more:x"):
        assert digest_package(absent) == MISSING


def test_code_that_changed_after_planning_is_refused(file: Path) -> None:
    name = f"{file}:make_net"
    model = ModelConfig(name=name, code=digest_source("model.name", name))
    file.write_text(NETWORK.replace("width=4", "width=5"))
    with pytest.raises(ValueError, match="has changed since the study was planned"):
        Training(dataclasses.replace(trial(file), model=model))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my net:make", "must be file.py:name or package.module:name"),
        ("vgg", "must be one of mlp, cnn, .*, gpt, or a factory of your own"),
        *(
            (name, f"no network of this version; examples/{name}/study.yaml of the .* has it")
            for name in ("capsules", "densenet", "vanilla")
        ),
    ],
)
def test_wrong_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(name=name)


def test_only_factories_take_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"model.args.width=3 with .*mlp: there is no such argument"
    ):
        ModelConfig(args={"width": 3})
    with pytest.raises(ValueError, match="only mlp and cnn have it"):
        ModelConfig(name="net.py:make", hidden=[3])


def test_a_row_leaves_an_argument_of_the_base_out_by_null() -> None:
    assert ModelConfig(name="mlp", args={"depth": None, "activation": None}) == ModelConfig()
    own = ModelConfig(name="net.py:make", args={"width": None})
    assert own.args == {"width": None}  # its meaning is up to the factory
    assert DataConfig(name="text", args={"stride": None}).args == {"stride": None}
    with pytest.raises(ValueError, match=r"in a row by model.args.width=null"):
        ModelConfig(args={"width": 3})


def replica(rank: int, folder: str) -> dict[str, Any]:
    file = Path(folder) / "net.py"
    training = Training(trial(file, args={"dropout": 0.5}, workers=2), rank=rank, world_size=2)
    training.train_epoch()
    other = ModelConfig(name=f"{file}:random_net")
    try:
        Training(dataclasses.replace(training.config, model=other), rank=rank, world_size=2)
    except ValueError as error:
        refused = str(error)
    return {"state": [tensor.tolist() for tensor in bits(training)], "refused": refused}


def test_replicas_keep_one_set_of_weights_and_statistics(file: Path, tmp_path: Path) -> None:
    first, second = spawned(replica, tmp_path)
    assert first["state"] == second["state"]
    assert "made something else on another worker" in first["refused"]
    assert first["refused"] == second["refused"]


def test_layers_are_those_of_the_factory(file: Path) -> None:
    model = Training(trial(file, args={"width": 6, "norm": False})).model
    assert [type(layer) for layer in model][:2] == [nn.Conv2d, nn.ReLU]
    assert model[0].out_channels == 6
