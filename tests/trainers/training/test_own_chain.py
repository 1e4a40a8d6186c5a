"""A user's networks that are a ``torch.nn.Sequential``: stages, shards and checkpoints."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from tests.trainers.user_network import NETWORK
from trainers.config import (
    DataConfig,
    Layout,
    MemoryConfig,
    ModelConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.data import prepare
from trainers.training.check import check
from trainers.training.trainer import Training

KAHAN = PrecisionConfig(format="lns12", scope="everywhere", kahan_sum=True)
CHECKPOINTS = MemoryConfig(activation_checkpoints=True)
CODE = (
    NETWORK
    + """

class Noise(nn.Module):
    def forward(self, x):
        return x * (1 + 0.1 * torch.rand(())) if self.training else x


def noisy(inputs, classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), Noise(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, classes)
    )


def one_module(inputs, classes):
    return nn.ModuleDict({"a": nn.Linear(2, 2)})
"""
)


def trial(file: Path, name: str = "make_net", **changes: Any) -> TrialConfig:
    args = {"norm": False} if name == "make_net" else {}
    return TrialConfig(
        model=ModelConfig(name=f"{file}:{name}", args=args),
        data=DataConfig(name=f"{file}:digits"),
        epochs=1,
        batch_size=20,
        device="cpu",
        **changes,
    )


def trained(config: TrialConfig, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """An epoch's loss, and the bits of this worker's weights."""
    training = Training(config, rank=rank, world_size=world_size)
    metrics = training.train_epoch()
    held = {name: storage_of(p.detach()) for name, p in training.model.named_parameters()}
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().tolist() for name, p in held.items()}
    return {"loss": metrics["train/loss"], "bits": sorted(map(repr, whole.values()))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("precision", [PrecisionConfig(), KAHAN], ids=lambda p: p.format)
def test_checkpoints_give_the_same_bits(file: Path, precision: PrecisionConfig) -> None:
    """Also if a user's module draws random numbers."""
    config = trial(file, "noisy", precision=precision)
    assert trained(dataclasses.replace(config, memory=CHECKPOINTS)) == trained(config)


def as_rank(rank: int, folder: str, config: TrialConfig) -> dict[str, Any]:
    return trained(config, rank, 2)


@pytest.mark.parametrize("precision", [PrecisionConfig(), KAHAN], ids=lambda p: p.format)
def test_two_stages_give_the_bits_of_one_process(
    file: Path, tmp_path: Path, precision: PrecisionConfig
) -> None:
    alone = trial(file, precision=precision, layout=Layout(micro_batches=2))
    cut = dataclasses.replace(alone, workers=2, layout=Layout(pp=2, micro_batches=2))
    first, second = spawned(partial(as_rank, config=cut), tmp_path)
    expected = trained(alone)
    assert sorted(first["bits"] + second["bits"]) == expected["bits"]
    assert first["loss"] == second["loss"] == expected["loss"]


def test_shards_train_as_replicas_do(file: Path, tmp_path: Path) -> None:
    whole = trial(file, workers=2)
    sharded = dataclasses.replace(whole, layout=Layout(fsdp=True))
    found = []
    for config in (whole, sharded):
        (folder := tmp_path / str(len(found))).mkdir()
        found.append(spawned(partial(as_rank, config=config), folder))
    (expected, _), (first, second) = found
    assert first["loss"] == second["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("one_module", {"memory": CHECKPOINTS}, "a ModuleDict is not known to be a chain"),
        (
            "noisy",
            {"workers": 4, "layout": Layout(pp=4, micro_batches=4)},
            r"layout.pp=4 with .*noisy.*: 4 stages, but its torch.nn.Sequential has 3 layers",
        ),
        ("make_net", {"memory": CHECKPOINTS}, "buffers would be updated twice a step"),
    ],
)
def test_what_is_no_chain_is_refused(
    file: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    config = trial(file, name, **changes)
    if name == "make_net":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, args={}))
    with pytest.raises(ValueError, match=said):
        check(config, prepare(config.data))
