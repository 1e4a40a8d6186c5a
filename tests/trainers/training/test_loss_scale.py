"""precision.loss_scale: the same bits in every layout if nothing underflows, and its rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import (
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    SyncConfig,
    TrialConfig,
    WireConfig,
)
from trainers.config.layout import Layout
from trainers.training.trainer import Training

BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=320, validation_size=64),
    model=ModelConfig(hidden=[16, 16]),
    optimizer=OptimizerConfig(lr=0.1, momentum=0.9),
    precision=PrecisionConfig(format="lns16", kahan_sum=True),
    batch_size=32,
    epochs=1,
)
PAIR = replace(BASE, workers=2)
ALONE = {
    "alone": BASE,
    "matmul": replace(BASE, precision=PrecisionConfig(format="lns16", scope="matmul")),
    "micro-batches": replace(BASE, layout=Layout(micro_batches=4)),
    "adamw": replace(BASE, optimizer=OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1)),
    "checkpoints": replace(BASE, memory=MemoryConfig(activation_checkpoints=True)),
    "simulated": replace(BASE, precision=PrecisionConfig(format="bfloat16", kahan_sum=True)),
}
SPREAD = {
    "replicas": PAIR,
    "pairwise": replace(PAIR, layout=Layout(pairwise=True)),
    "stages": replace(PAIR, layout=Layout(pp=2, micro_batches=4)),
    "8 bits": replace(PAIR, wire=WireConfig(name="int8")),
    "ensemble": replace(PAIR, sync=SyncConfig(name="ensemble")),
    "averaged": replace(PAIR, sync=SyncConfig(name="local_sgd", period=2)),
}


def scaled(trial: TrialConfig, factor: float) -> TrialConfig:
    return replace(trial, precision=replace(trial.precision, loss_scale=factor))


def weights(trial: TrialConfig, rank: int = 0) -> list[torch.Tensor]:
    training = Training(trial, rank=rank, world_size=trial.workers)
    training.train_epoch()
    return [storage_of(p.detach()) for p in training.model.parameters()]


def same(trial: TrialConfig, rank: int = 0, factor: float = 256) -> bool:
    pairs = zip(weights(trial, rank), weights(scaled(trial, factor), rank), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    return {name: same(trial, rank) for name, trial in SPREAD.items()}


@pytest.mark.parametrize("name", list(ALONE))
def test_one_worker_trains_the_same_bits(name: str) -> None:
    assert same(ALONE[name])


@pytest.mark.slow
def test_workers_of_every_layout_train_the_same_bits(tmp_path: Path) -> None:
    for found in spawned(in_worker, tmp_path):
        assert {name: found[name] for name in SPREAD} == dict.fromkeys(SPREAD, True)


def test_what_would_underflow_trains_other_bits() -> None:
    narrow = PrecisionConfig(format="lns(11,6)", kahan_sum=True)
    optimizer = OptimizerConfig(lr=0.5)
    assert not same(replace(BASE, precision=narrow, optimizer=optimizer), factor=64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "lns8", "loss_scale": 256}, r"from 1 to 128; use .* precision.loss_scale=128"),
        ({"loss_scale": 3}, r"precision.loss_scale=3 .*must be a power of two from 1 to"),
        ({"loss_scale": 0.5}, r"precision.loss_scale=0.5 .*use for example precision.loss_scale="),
        ({"format": "lns12", "loss_scale": 65536}, r"must be a power of two from 1 to 32768"),
        ({"format": "float16", "loss_scale": 8}, r"float16 gradients find their own scale"),
    ],
)
def test_other_scales_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrialConfig(precision=PrecisionConfig(**changes))


def test_weights_whose_gradients_wait_are_refused() -> None:
    layout = Layout(pp=2, micro_batches=4, schedule="zero_bubble")
    with pytest.raises(ValueError, match=r"layout.schedule=zero_bubble.*use layout.schedule=1f1b"):
        scaled(replace(PAIR, layout=layout), 256)


def test_an_analysis_sees_the_gradients_of_weights_as_they_arrive() -> None:
    trial = replace(BASE, analysis_every=1)
    found = [Training(each).train_epoch() for each in (trial, scaled(trial, 256))]
    names = [name for name in found[0] if "updates_lost" in name or "weight_gradient" in name]
    assert len(names) == 6
    assert [found[0][name] for name in names] == [found[1][name] for name in names]


def test_a_resumed_trial_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    twelve = PrecisionConfig(format="lns12", kahan_sum=True)
    trial = scaled(replace(BASE, precision=twelve, epochs=2), 64)
    whole, half = Training(trial), Training(trial)
    half.train_epoch()
    half.save(tmp_path)
    rest = Training(trial)
    rest.restore(tmp_path)
    rest.train_epoch()
    for _ in range(2):
        whole.train_epoch()
    pairs = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    assert all(torch.equal(storage_of(a.detach()), storage_of(b.detach())) for a, b in pairs)
