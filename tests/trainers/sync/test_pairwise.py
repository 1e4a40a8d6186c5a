"""Sums in pairs: the same weights in every layout, on real processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.sync.pairwise import pairwise
from trainers.training.build import digest
from trainers.training.trainer import Training

ONE = TrialConfig(
    data=DataConfig(name="copy", args={"examples": 80, "test": 8, "length": 3}),
    model=ModelConfig(name="gpt", args={"layers": 2, "heads": 2, "width": 8}),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    optimizer=OptimizerConfig(name="sgd", lr=0.1),
    batch_size=16,
    epochs=1,
    layout=Layout(micro_batches=8, pairwise=True),
)
FOUR = {
    "dp 4": Layout(micro_batches=2, pairwise=True),
    "dp 2 x pp 2": Layout(pp=2, micro_batches=4, pairwise=True),
    "pp 4": Layout(pp=4, micro_batches=8, pairwise=True),
    "dp 4, in order": Layout(micro_batches=2),
}


def weights(training: Training) -> dict[str, str]:
    training.train_epoch()
    return {name: digest(p.detach()) for name, p in training.model.named_parameters()}


def four_workers(rank: int, folder: str) -> dict[str, Any]:
    return {
        name: weights(Training(replace(ONE, workers=4, layout=layout), rank=rank, world_size=4))
        for name, layout in FOUR.items()
    }


@pytest.mark.slow
def test_four_workers_end_with_the_weights_of_one_in_every_layout(tmp_path: Path) -> None:
    expected = weights(Training(ONE))
    results = spawned(four_workers, tmp_path, world=4)
    for layout in FOUR:
        found = {name: value for result in results for name, value in result[layout].items()}
        assert set(found) == set(expected)
        assert (found == expected) == ("in order" not in layout)


def test_terms_are_added_in_pairs() -> None:
    assert pairwise("abcdefgh", lambda a, b: f"({a}{b})") == "(((ab)(cd))((ef)(gh)))"


def test_what_cannot_be_added_in_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="powers of two"):
        replace(ONE, batch_size=48, layout=Layout(micro_batches=3, pairwise=True))
    with pytest.raises(ValueError, match="whole gradients"):
        Layout(tp=2, pairwise=True)
    with pytest.raises(ValueError, match="adds gradients of weights later"):
        Layout(pp=2, micro_batches=4, schedule="zero_bubble", pairwise=True)
