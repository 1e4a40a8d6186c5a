"""The first result of a user without MNIST: on scikit-learn's digits updates are lost, and Kahan
summation wins them back."""

from __future__ import annotations

import statistics

import pytest

from study.config.compose import load
from study.plan.plan import make_plan
from trainers.training.trainer import Training

pytestmark = pytest.mark.slow

LOST = 2.0
"""Minimum loss of LNS everywhere in percentage points, as a mean of five seeds. At each of fifteen
seeds it was 2.0 to 8.4."""
NEAR = 1.0
"""Maximum difference of the other rows to float32 in percentage points: three of 297 images. Their
softmax, in float32, rounds differently on other machines."""


def test_on_digits_updates_are_lost_and_kahan_summation_wins_them_back() -> None:
    errors: dict[str, list[float]] = {}
    for trial in make_plan(load("quickstart", ["data=digits"])).trials:
        training = Training(trial.config)
        for _ in range(trial.config.epochs):
            training.train_epoch()
        errors.setdefault(trial.row, []).append(100 * training.test()["test/error"])
    mean = {row: statistics.fmean(each) for row, each in errors.items()}
    spread = {row: statistics.stdev(each) for row, each in errors.items()}
    assert all(len(each) == 5 for each in errors.values())
    lost = mean["lns everywhere"] - mean["float32"]
    assert lost > LOST
    assert lost > 1.5 * max(spread.values()), spread
    assert abs(mean["lns matmul"] - mean["float32"]) < NEAR
    assert abs(mean["lns everywhere + kahan"] - mean["float32"]) < NEAR
