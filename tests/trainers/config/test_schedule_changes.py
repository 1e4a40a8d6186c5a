"""Hyperparameters that change during a trial: same bits as a trial that is stopped and continued
with the new values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops import cuda
from lns_ops.tensor import storage_of
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.optimizer import OptimizerConfig
from trainers.config.schedule_changes import optimizer_at
from trainers.data import prepare
from trainers.telemetry.metrics import repeatable
from trainers.training.trainer import Training, check

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
CHANGES: list[dict[str, Any]] = [
    {"epoch": 1, "optimizer.lr": 0.02},
    {"epoch": 2, "optimizer.momentum": 0.5, "optimizer.lr": 0.01},
]
BASE = TrialConfig(
    data=DataConfig(name="digits"),
    model=ModelConfig(hidden=[16]),
    epochs=3,
    optimizer=OptimizerConfig(lr=0.1),
)
TRIALS = {
    "float32": BASE,
    "kahan": replace(BASE, precision=PrecisionConfig(format="lns12", kahan_sum=True)),
    "simulated": replace(BASE, precision=PrecisionConfig(format="bfloat16", kahan_sum=True)),
    "momentum": replace(BASE, optimizer=OptimizerConfig(lr=0.1, momentum=0.9)),
}


def course(config: TrialConfig) -> tuple[list[dict[str, float]], Training]:
    training = Training(config)
    return [repeatable(training.train_epoch()) for _ in range(config.epochs)], training


def in_pieces(config: TrialConfig, folder: Path) -> tuple[list[dict[str, float]], Training]:
    """One epoch at a time, each as a separate trial with the options of that time."""
    metrics = []
    for epoch in range(config.epochs):
        training = Training(
            replace(
                config, changes=[], optimizer=optimizer_at(config.optimizer, config.changes, epoch)
            )
        )
        if epoch:
            training.restore(folder)
        metrics.append(repeatable(training.train_epoch()))
        training.save(folder)
    return metrics, training


def same(one: Training, other: Training) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(storage_of(a.detach()), storage_of(b.detach())) for a, b in pairs)


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_a_change_is_a_break_with_other_options(name: str, device: str, tmp_path: Path) -> None:
    config = replace(TRIALS[name], changes=CHANGES, device=device)
    metrics, training = course(config)
    pieces, last = in_pieces(config, tmp_path)
    assert metrics == pieces
    assert same(training, last)
    unchanged, other = course(replace(config, changes=[]))
    assert metrics[0] == unchanged[0]
    assert metrics[1] != unchanged[1]
    assert not same(training, other)


def test_a_changing_trial_resumes_exactly(tmp_path: Path) -> None:
    config = replace(TRIALS["kahan"], changes=CHANGES)
    metrics, whole = course(config)
    begun = Training(config)
    for _ in range(2):
        begun.train_epoch()
    begun.save(tmp_path)
    continued = Training(config)
    continued.restore(tmp_path)
    assert repeatable(continued.train_epoch()) == metrics[2]
    assert same(whole, continued)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [{"epoch": 3, "optimizer.lr": 0.1}],
            "epoch=3 with epochs=3: must be after epoch 0 and before the last",
        ),
        (
            [{"epoch": 2, "optimizer.lr": 0.1}, {"epoch": 2, "optimizer.lr": 0.2}],
            "must be after epoch 2",
        ),
        ([{"epoch": 1, "batch_size": 64}], "batch_size cannot change in the middle"),
        ([{"epoch": 1, "optimizer.name": "adam"}], "optimizer.name cannot change"),
        ([{"epoch": 1}], "at least one key that changes"),
        (
            [{"epoch": 1, "optimizer.momentum": 1.5}],
            "changes, epoch 1: optimizer.momentum=1.5: must be below 1",
        ),
    ],
)
def test_what_cannot_change_is_refused(changes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, changes=changes)


def test_a_rate_that_vanishes_later_is_refused_before_training() -> None:
    config = replace(TRIALS["kahan"], changes=[{"epoch": 1, "optimizer.lr": 1e-30}])
    with pytest.raises(ValueError, match="underflows to zero"):
        check(config, prepare(BASE.data))
