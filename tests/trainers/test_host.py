"""Several trials in one process: each comes out as alone, none disturbs another."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from trainers.gang import step

from lns_ops import cuda, get_matmul_accumulation, set_matmul_accumulation
from trainers import host
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.host import HostActor, Lane, end_hosts
from trainers.training import Training

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
    "float32": replace(BASE, precision=PrecisionConfig(), optimizer=OptimizerConfig(name="adam", lr=0.01)),
    "stochastic": replace(BASE, precision=PrecisionConfig(format="lns12", stochastic_rounding=True)),
    "wide": replace(BASE, model=ModelConfig(hidden=[64, 32]), batch_size=64),
    "diverges": replace(BASE, precision=PrecisionConfig(format="lns16", scope="matmul"), optimizer=OptimizerConfig(lr=3e38)),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"),
        ],
    ),
]


def course(begin: Any, take_step: Any) -> list[dict[str, Any]]:
    """All epochs' metrics, times left out; NaN as text, since it differs from itself."""
    begin()
    metrics: list[dict[str, Any]] = []
    while not metrics or not metrics[-1]["done"]:
        metrics.append({name: repr(value) for name, value in take_step().items() if name in ("epoch", "done") or "/" in name})
        metrics[-1]["done"] = metrics[-1]["done"] == "True"
    return metrics


def alone(config: TrialConfig) -> list[dict[str, Any]]:
    training = Training(config)
    return course(lambda: None, lambda: step(training))


@pytest.mark.parametrize("device", DEVICES)
def test_trials_side_by_side_come_out_as_alone(device: str, tmp_path: Path) -> None:
    """Six at once, different in all that may differ, one of which diverges; and the checkpoints that they write are whole."""
    trials = {name: replace(config, device=device) for name, config in TRIALS.items()}
    expected = {name: alone(config) for name, config in trials.items()}
    assert "nan" in str(expected["diverges"])
    assert "nan" not in str(expected["kahan"])
    shared = host.Host(trials["kahan"])
    together = threading.Barrier(len(trials))

    def train(name: str) -> list[dict[str, Any]]:
        def begin() -> None:
            shared.begin(name, trials[name], [])
            together.wait()

        metrics = course(begin, lambda: shared.step(name))
        shared.save(name, tmp_path / name)
        shared.end(name)
        return metrics

    with ThreadPoolExecutor(len(trials)) as threads:
        assert dict(zip(trials, threads.map(train, trials), strict=True)) == expected
    again = Training(trials["kahan"])
    again.restore(tmp_path / "kahan")
    assert again.epoch == BASE.epochs


def test_a_host_takes_only_what_shares_its_process_settings() -> None:
    shared = host.Host(BASE)
    with pytest.raises(ValueError, match="take another host"):
        shared.begin("linear sums", replace(BASE, precision=replace(BASE.precision, accumulation="float32")), [])
    with pytest.raises(ValueError, match="batch_size=100000"):
        shared.begin("too large", replace(BASE, batch_size=100_000), [])
    assert shared._trials == {}


def test_a_host_of_other_sums_computes_them() -> None:
    config = replace(BASE, precision=replace(BASE.precision, accumulation="float32"), epochs=1)
    before = get_matmul_accumulation()
    try:
        shared = host.Host(config)
        assert (
            course(lambda: shared.begin("a", config, []), lambda: shared.step("a"))
            == alone(config)
            != alone(replace(BASE, epochs=1))
        )
    finally:
        set_matmul_accumulation(before)


@ray.remote(num_cpus=0)
class Trial:
    """A trial's process, which drives a lane."""

    def __init__(self, study: str, name: str, config: TrialConfig) -> None:
        self._lane = Lane(config, study, name)
        self._config = config

    def pid(self) -> int:
        return self._lane.pid

    def course(self) -> list[dict[str, Any]]:
        metrics = course(lambda: self._lane.begin(self._config.to_dict(), []), self._lane.step)
        self._lane.close()
        return metrics

    def fail(self) -> None:
        self._lane._call("no_such_method")


@pytest.mark.slow
def test_trials_of_one_study_meet_in_one_process_that_errors_and_the_end_close(ray_cluster: None) -> None:
    trials = {name: Trial.remote("study", name, TRIALS[name]) for name in ("kahan", "float32")}
    other = Trial.remote("another study", "kahan", BASE)
    pids = ray.get([trial.pid.remote() for trial in (*trials.values(), other)])
    assert pids[0] == pids[1] != pids[2]
    assert os.getpid() not in pids
    courses = ray.get([trial.course.remote() for trial in trials.values()])
    assert courses == [alone(TRIALS[name]) for name in trials]

    with pytest.raises(ray.exceptions.RayTaskError, match="no_such_method"):
        ray.get(trials["kahan"].fail.remote())
    gone = psutil.Process(pids[0]) if psutil.pid_exists(pids[0]) else None
    if gone is not None:
        gone.wait(30)
    fresh = Trial.remote("study", "kahan", BASE)
    pid = ray.get(fresh.pid.remote())
    assert pid != pids[0]
    assert ray.get(fresh.course.remote()) == courses[0]

    processes = [psutil.Process(pid), psutil.Process(pids[2])]
    end_hosts("study")
    processes[0].wait(30)
    assert processes[1].is_running()
    end_hosts("another study")
    processes[1].wait(30)


@pytest.mark.slow
def test_a_host_that_nobody_calls_ends(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(HostActor):
        def __init__(self) -> None:
            host.IDLE_SECONDS = 1.0
            super().__init__(None, BASE.to_dict())

    actor = ray.remote(Impatient).options(num_cpus=0).remote()
    psutil.Process(ray.get(actor.pid.remote())).wait(30)
