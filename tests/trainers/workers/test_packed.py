"""Several trials in one process: each ends as if alone, and does not disturb the others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lns_ops import cuda, get_matmul_accumulation, set_matmul_accumulation
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.training.trainer import Training
from trainers.workers.executors import Context
from trainers.workers.in_process import InProcess, Packed
from trainers.workers.packed import Host

BASE = TrialConfig(
    data=DataConfig(name="digits", validation_size=300, train_size=512),
    model=ModelConfig(hidden=[16]),
    precision=PrecisionConfig(format="lns12", kahan_sum=True),
    optimizer=OptimizerConfig(lr=0.2),
    epochs=3,
    batch_size=32,
)
TRIALS = {
    "kahan": BASE,
    "other seed": replace(BASE, seed=1),
    "float32": replace(
        BASE, precision=PrecisionConfig(), optimizer=OptimizerConfig(name="adam", lr=0.01)
    ),
    "stochastic": replace(
        BASE, precision=PrecisionConfig(format="lns12", stochastic_rounding=True)
    ),
    "wide": replace(BASE, model=ModelConfig(hidden=[64, 32]), batch_size=64),
    "diverges": replace(
        BASE,
        precision=PrecisionConfig(format="lns16", scope="matmul"),
        optimizer=OptimizerConfig(lr=3e38),
    ),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
            ),
        ],
    ),
]


def course(trial: InProcess) -> list[dict[str, Any]]:
    """All epochs' metrics without times; NaN as text, because it differs from itself."""
    metrics: list[dict[str, Any]] = []
    while not metrics or metrics[-1]["done"] != "True":
        metrics.append(
            {
                name: repr(value)
                for name, value in trial.step().items()
                if name in ("epoch", "done") or "/" in name
            }
        )
    return metrics


def alone(config: TrialConfig) -> list[dict[str, Any]]:
    trial = InProcess(Context(trial="alone", plan={}))
    trial.begin(config, [])
    return course(trial)


def beside(host: Host) -> Packed:
    """A trial that shares this process."""
    return Packed(Context(trial="beside", plan={}, host=host))


@pytest.mark.parametrize("device", DEVICES)
def test_trials_side_by_side_come_out_as_alone(device: str, tmp_path: Path) -> None:
    """Six at once, different in every allowed way, one of which diverges; the checkpoints that they
    write are whole."""
    trials = {name: replace(config, device=device) for name, config in TRIALS.items()}
    expected = {name: alone(config) for name, config in trials.items()}
    assert "nan" in str(expected["diverges"])
    assert "nan" not in str(expected["kahan"])
    host = Host()
    together = threading.Barrier(len(trials))

    def train(name: str) -> list[dict[str, Any]]:
        trial = beside(host)
        trial.begin(trials[name], [])
        together.wait()
        metrics = course(trial)
        trial.save(tmp_path / name)
        trial.end()
        return metrics

    with ThreadPoolExecutor(len(trials)) as threads:
        assert dict(zip(trials, threads.map(train, trials), strict=True)) == expected
    again = Training(trials["kahan"])
    again.restore(tmp_path / "kahan")
    assert again.epoch == BASE.epochs


def test_a_process_takes_only_trials_that_share_its_settings() -> None:
    host = Host()
    first, other, large = beside(host), beside(host), beside(host)
    first.begin(BASE, [])
    with pytest.raises(ValueError, match="use another process"):
        other.begin(replace(BASE, precision=replace(BASE.precision, accumulation="float32")), [])
    with pytest.raises(ValueError, match="batch_size=100000"):
        large.begin(replace(BASE, batch_size=100_000), [])
    for trial in (first, other, large):
        trial.end()
    assert host._trials == 0


def test_a_process_of_other_sums_computes_them() -> None:
    config = replace(BASE, precision=replace(BASE.precision, accumulation="float32"), epochs=1)
    before = get_matmul_accumulation()
    trial = beside(Host())
    try:
        trial.begin(config, [])
        assert course(trial) == alone(config) != alone(replace(BASE, epochs=1))
    finally:
        set_matmul_accumulation(before)
