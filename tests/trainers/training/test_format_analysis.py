"""Analyses of a trial's format while it trains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.optimizer import OptimizerConfig
from trainers.training.trainer import Training

BASE = TrialConfig(
    data=DataConfig(name="digits"), model=ModelConfig(hidden=[16]),
    precision=PrecisionConfig(format="lns12"), batch_size=50, epochs=3,
    optimizer=OptimizerConfig(lr=0.1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("format", "scope"), [("lns12", "everywhere"), ("lns12", "matmul"), ("bfloat16", "everywhere")]
)
def test_analyses_are_metrics_and_change_nothing(format: str, scope: str) -> None:
    trial = replace(BASE, precision=PrecisionConfig(format=format, scope=scope))
    plain, analysed = Training(trial), Training(replace(trial, analysis_every=2))
    for epoch in (1, 2, 3):
        expected, metrics = plain.train_epoch(), analysed.train_epoch()
        added = {name: value for name, value in metrics.items() if name.startswith("analysis/")}
        assert bool(added) == (epoch == 2)
        assert {
            k: v for k, v in metrics.items() if k not in added and k != "samples_per_second"
        } == {k: v for k, v in expected.items() if k != "samples_per_second"}
        if added:
            assert added.keys() >= {
                f"analysis/{n}/{m}"
                for n in ("0", "2")
                for m in ("forward_db", "updates_lost", "underflow")
            }
            assert 20 < added["analysis/2/forward_db"] < 60
            assert 0 < added["analysis/0/updates_lost"] < 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"precision": PrecisionConfig()},
            "analysis_every=1 with precision.format=float32: it compares a format with float32",
        ),
        (
            {"workers": 2, "layout": Layout(pp=2, micro_batches=2)},
            "analysis_every=1 with layout.pp=2: it runs the whole model",
        ),
        ({"analysis_every": -1}, "analysis_every=-1: must be a whole number of at least 0"),
    ],
)
def test_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(BASE, **({"analysis_every": 1} | changes))  # type: ignore[arg-type]
