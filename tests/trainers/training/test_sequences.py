"""Trials on sequences, with a target at each step: they learn, resume with the same bits, and can
be cut into stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import (
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrialConfig,
)
from trainers.config.layout import Layout
from trainers.training.trainer import Training

GPT = ModelConfig(name="gpt", args={"layers": 2, "heads": 2, "width": 16, "dropout": 0.1})
LSTM = ModelConfig(name="lstm", args={"width": 16, "dropout": 0.1})
VARIANT = ModelConfig(name="lstm", args={"width": 16, "dropout": 0.1, "variant": "fgr"})
COPY = TrialConfig(
    data=DataConfig(name="copy", args={"examples": 400, "test": 50, "length": 4}),
    model=GPT,
    optimizer=OptimizerConfig(name="adam", lr=0.01),
    batch_size=40,
    epochs=2,
)
LNS = PrecisionConfig(format="lns16", kahan_sum=True)


def bits(training: Training) -> list[list[Any]]:
    parameters = training.model.named_parameters()
    return [[name, storage_of(value.detach()).tolist()] for name, value in parameters]


def figures(metrics: dict[str, float]) -> dict[str, float]:
    left_out = ("samples_per_second", "bytes")
    return {key: value for key, value in metrics.items() if not key.startswith(left_out)}


@pytest.mark.parametrize("model", [GPT, LSTM, VARIANT], ids=["gpt", "lstm", "variant"])
@pytest.mark.parametrize("precision", [PrecisionConfig(), LNS], ids=lambda p: p.format)
def test_it_learns_and_resumes_with_the_same_bits(
    model: ModelConfig, precision: PrecisionConfig, tmp_path: Path
) -> None:
    config = replace(COPY, model=model, precision=precision)
    whole, begun, resumed = Training(config), Training(config), Training(config)
    expected = [figures(whole.train_epoch()) for _ in range(2)]
    assert expected[1]["train/loss"] < expected[0]["train/loss"]
    begun.train_epoch()
    begun.save(tmp_path / "checkpoint")
    resumed.restore(tmp_path / "checkpoint")
    assert figures(resumed.train_epoch()) == expected[1]
    assert bits(resumed) == bits(whole)


def test_music_is_learnt_as_labels(tmp_path: Path) -> None:
    pieces = np.empty((1, 1), object)
    pieces[0, 0] = np.tile(np.eye(88, dtype=np.uint8)[:8], (40, 1))
    path = str(tmp_path / "scale.mat")
    savemat(path, {"traindata": pieces, "validdata": pieces, "testdata": pieces})
    config = replace(
        COPY,
        data=DataConfig(name="piano_rolls", root=path, args={"context": 8}),
        model=LSTM,
        batch_size=8,
        epochs=8,
        loss=LossConfig(name="binary_cross_entropy"),
    )
    training = Training(config)
    losses = [training.train_epoch()["validation/loss"] for _ in range(8)]
    assert losses[-1] < losses[0] / 2


def staged(rank: int, folder: str) -> dict[str, Any]:
    """Two stages without dropout."""
    found = {}
    for name, model, precision in (
        ("gpt, float32", GPT, PrecisionConfig()),
        ("gpt, lns", GPT, LNS),
        ("lstm, float32", LSTM, PrecisionConfig()),
    ):
        args = model.args | {"dropout": 0.0}
        config = replace(
            COPY, model=replace(model, args=args), precision=precision, workers=2,
            layout=Layout(pp=2, micro_batches=2),
        )  # fmt: skip
        training = Training(config, rank=rank, world_size=2)
        metrics = figures(training.train_epoch())
        alone = Training(replace(config, workers=1, layout=Layout(micro_batches=2)))
        expected = figures(alone.train_epoch())
        own = dict(bits(training))
        same = all(dict(bits(alone))[key] == value for key, value in own.items())
        found[name] = [same, metrics == expected]
    return found


@pytest.mark.slow
def test_stages_have_the_bits_of_one_process(tmp_path: Path) -> None:
    for found in spawned(staged, tmp_path):
        del found["pid"]
        assert found.keys() == {"gpt, float32", "gpt, lns", "lstm, float32"}
        assert all(same == [True, True] for same in found.values())
