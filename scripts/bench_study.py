"""Times the study engine beside bare Ray Tune, both in the same run on the same machine.

    python scripts/bench_study.py [--trials N] [--only WORD ...] [--long] [--json FILE]

No-op trials report once and end, so that what is left is the engine's own cost: plan, ledger (fsynced), Ray Tune, MLflow.

    noop        trials a second, tracking off; beside it Ray Tune with a class Trainable and reused actors, and with a function
    tracked     the same, every trial a run in MLflow (sqlite)
    metrics     30 trials x 10 reports x 10 metrics, tracked; beside it Ray Tune with MLflowLoggerCallback
    gang        seconds of a two-worker trial of scikit-learn's digits: the first, and the median of those after it
    memory      of the driver: MB that 1,000 no-op trials add
    --long      seconds a trial at 10,000 trials over those at 1,000
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
import study.trial
from ray import tune

from study.config import RowConfig, StudyConfig
from study.engine import run_study
from study.ledger import Event
from study.runner import ENVIRONMENT
from study.state import FINISHED, StudyState
from trainers.config import DataConfig, ModelConfig, TrialConfig

DIGITS = TrialConfig(data=DataConfig(name="digits", validation_size=300), model=ModelConfig(hidden=[16]), epochs=3, batch_size=32)
_RESULTS: dict[str, float] = {}


class Noop(tune.Trainable):  # type: ignore[misc]
    """Reports ``reports`` times and ends."""

    reports, metrics = 1, 1

    def setup(self, config: dict[str, Any]) -> None:
        """Begin to count."""
        self._count = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial."""
        self._count = 0
        return True

    def step(self) -> dict[str, Any]:
        """One report."""
        self._count += 1
        values = {f"validation/m{index}": 1.0 / self._count for index in range(self.metrics)}
        done = self._count >= self.reports
        return {"epoch": self._count, "validation/error": 0.1, **values, "done": done} | (
            {"test/error": 0.1, "test/loss": 0.1} if done else {}
        )

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing to keep."""

    def load_checkpoint(self, checkpoint: str) -> None:
        """Nothing to read."""


class Metrics(Noop):
    """Ten reports of ten metrics."""

    reports, metrics = 10, 10


class View:
    """Sees events go by."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def start(self, state: StudyState) -> None:
        """Nothing to show."""

    def listen(self, event: Event) -> None:
        """Keep those that tell times."""
        if event["event"] in ("started", "finished"):
            self.events.append(event)

    def stop(self) -> None:
        """Nothing to clear."""


def report(name: str, value: float, unit: str, note: str = "") -> None:
    print(f"{name:58s} {value:9.2f} {unit}  {note}", flush=True)
    _RESULTS[name] = value


def run(trials: int, trainable: type[Any] | None, *, tracked: bool, config: TrialConfig = DIGITS) -> tuple[float, View]:
    """Seconds of a whole study through the engine, from plan to report."""
    with tempfile.TemporaryDirectory() as storage:
        settings = StudyConfig(
            name="bench",
            trial=config,
            rows=[RowConfig(label="a")],
            seeds=list(range(trials)),
            storage=storage,
            tracking_uri=None if tracked else "none",
            checkpoint_every=10**6,
        )
        real = study.trial.StudyTrial
        study.trial.StudyTrial = trainable or real  # type: ignore[misc]
        view = View()
        try:
            start = time.perf_counter()
            outcome = run_study(settings, view, lambda line: None)
            seconds = time.perf_counter() - start
        finally:
            study.trial.StudyTrial = real  # type: ignore[misc]
        assert all(trial.status == FINISHED for trial in outcome.state.trials)
        assert not outcome.tracking_error
        return seconds, view


def bare(trials: int, trainable: Any, *, reuse: bool, callbacks: list[Any] | None = None) -> float:
    """Seconds of the same trials through Ray Tune alone."""
    with tempfile.TemporaryDirectory() as storage:
        tuner = tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space={"seed": tune.grid_search(list(range(trials)))},
            tune_config=tune.TuneConfig(reuse_actors=reuse),
            run_config=tune.RunConfig(storage_path=storage, verbose=0, callbacks=callbacks),
        )
        start = time.perf_counter()
        results = tuner.fit()
        seconds = time.perf_counter() - start
        assert results.num_errors == 0
        return seconds


def function(config: dict[str, Any]) -> None:
    tune.report({"validation/error": 0.1})


def noop(trials: int) -> None:
    report(f"{trials} no-op trials, engine", trials / run(trials, Noop, tracked=False)[0], "trials/s")
    report(f"{trials} no-op trials, Ray Tune, reused actors", trials / bare(trials, Noop, reuse=True), "trials/s")
    few = max(4, trials // 20)
    report(f"{few} no-op trials, Ray Tune, a function each", few / bare(few, function, reuse=False), "trials/s")


def tracked(trials: int) -> None:
    report(f"{trials} no-op trials, engine, every one in MLflow", trials / run(trials, Noop, tracked=True)[0], "trials/s")


def metrics(trials: int) -> None:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    report("30 trials x 10 reports x 10 metrics, engine, tracked", run(30, Metrics, tracked=True)[0], "s")
    with tempfile.TemporaryDirectory() as folder:
        callback = MLflowLoggerCallback(tracking_uri=f"sqlite:///{folder}/mlflow.db", experiment_name="bench")
        report("the same, Ray Tune with MLflowLoggerCallback", bare(30, Metrics, reuse=True, callbacks=[callback]), "s")


def gang(trials: int) -> None:
    from dataclasses import replace

    start = time.time()
    _, view = run(6, None, tracked=False, config=replace(DIGITS, workers=2))
    ended = [event["time"] for event in view.events if event["event"] == "finished"]
    steps = [b - a for a, b in pairwise(ended)]
    report("two-worker trial of 3 epochs, those after the first", statistics.median(steps), "s")
    report("two-worker trial of 3 epochs, the first, plan and start of its processes included", ended[0] - start, "s")


def memory(trials: int) -> None:
    process = psutil.Process()
    run(100, Noop, tracked=False)
    gc.collect()
    before = process.memory_info().rss
    run(1000, Noop, tracked=False)
    report("driver memory that 1,000 no-op trials add", (process.memory_info().rss - before) / 1e6, "MB")
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    report("the same, without what the allocator keeps for later", (process.memory_info().rss - before) / 1e6, "MB")


def long() -> None:
    small = run(1000, Noop, tracked=False)[0] / 1000
    large = run(10_000, Noop, tracked=False)[0] / 10_000
    report("seconds a trial at 1,000 trials", small, "s")
    report("seconds a trial at 10,000 trials", large, "s", f"{large / small:.2f} times")


def main() -> None:
    """Run and print everything asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--only", nargs="+", help="of: noop tracked metrics gang memory")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    cores = len(os.sched_getaffinity(0))
    print(f"Ray {ray.__version__}, Python {platform.python_version()}, {cores} cores")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    parts: dict[str, Callable[[int], None]] = {
        "noop": noop, "tracked": tracked, "metrics": metrics, "gang": gang, "memory": memory,
    }  # fmt: skip
    try:
        for name, part in parts.items():
            if not options.only or name in options.only:
                part(options.trials)
        if options.long:
            long()
    finally:
        ray.shutdown()
    if options.json:
        options.json.write_text(json.dumps(_RESULTS, indent=1))


if __name__ == "__main__":
    main()
