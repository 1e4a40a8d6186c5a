"""Time the study engine beside bare Ray Tune, both in the same run on the same machine.

    python scripts/bench_study.py [NAME ...] [--trials N] [--long] [--json FILE]

Trials of :mod:`bench.executors` compute nothing, so the time is the engine's own cost: plan, ledger
(fsynced), processes, MLflow.

    slots       utilisation of 32 declared CPUs by 640 trials that sleep 2 s, from the command to
                the last end, and from when all slots are up; beside it Ray Tune with a class
                Trainable, reused actors and as many pending trials as CPUs (128 trials)
    noop        trials a second, tracking off; beside it Ray Tune with a class Trainable and reused
                actors, and with a function
    tracked     the same, every trial a run in MLflow (sqlite)
    metrics     30 trials x 10 reports x 10 metrics, tracked; beside it Ray Tune with
                MLflowLoggerCallback
    gang        seconds of a two-worker trial of scikit-learn's digits: the first, and the median of
                those after it; beside it by Ray Train
    memory      of the driver: MB that 1,000 no-op trials add
    house       (by name only) utilisation of 300 slots by 900 trials that sleep 20 s
    raylets     (by name only) utilisation of three Ray nodes of 8 declared CPUs each by 300 trials
                that sleep 20 s, from the first start to the last end
    rate        cores that the driver uses while 300 and 1,000 trials report once a second
    driver      CPU time of the driver's process for a trial that does nothing (its start, its one
                report, its end), and for a second in which 2 and 100 trials run and none reports
    config      CPU time to read the quickstart's config (its files, its small form, every check);
                beside it OmegaConf's merge of the same files into the same schema, from Python
                values; and to plan the 300 trials of ``cover``
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import psutil
import ray
from bench.view import View
from omegaconf import OmegaConf
from ray import tune

from study.config import RowConfig, StudyConfig
from study.config.compose import _layers, find_study, load
from study.engines.ray_session import ENVIRONMENT
from study.ledger.state import FINISHED
from study.lifecycle import run_study
from study.plan.plan import make_plan
from tests.study.raylets import cluster_of
from trainers.config import DataConfig, ModelConfig, TrialConfig
from trainers.workers import resources

DIGITS = TrialConfig(
    data=DataConfig(name="digits", validation_size=300),
    model=ModelConfig(hidden=[16]),
    epochs=3,
    batch_size=32,
)
_RESULTS: dict[str, float] = {}


class Sleep(tune.Trainable):  # type: ignore[misc]
    """The peer for bare Tune: it reports ``reports`` times, each time after ``seconds``."""

    reports, metrics, seconds = 1, 1, 0.0

    def setup(self, config: dict[str, Any]) -> None:
        """Begin to count."""
        self._count = 0

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start the next trial."""
        self._count = 0
        return True

    def step(self) -> dict[str, Any]:
        """Return one report."""
        began = time.time()
        time.sleep(self.seconds)
        self._count += 1
        values = {f"validation/m{index}": 1.0 / self._count for index in range(self.metrics)}
        return {
            "validation/error": 0.1,
            **values,
            "done": self._count >= self.reports,
            "began": began,
            "ended": time.time(),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: there is nothing to keep."""

    def load_checkpoint(self, checkpoint: str) -> None:
        """Do nothing: there is nothing to read."""


class SleepMetrics(Sleep):
    """Ten reports of ten metrics."""

    reports, metrics = 10, 10


class SleepTwoSeconds(Sleep):
    """One report after two seconds."""

    seconds = 2.0


def report(name: str, value: float, unit: str, note: str = "") -> None:
    print(f"{name:58s} {value:9.2f} {unit}  {note}", flush=True)
    _RESULTS[name] = value


def run(
    trials: int,
    executor: str | None,
    /,
    *,
    tracked: bool,
    config: TrialConfig = DIGITS,
    **settings: Any,
) -> tuple[float, View]:
    """Return the seconds of a whole study through the engine, from plan to report.

    Its trials are executed by a class of :mod:`bench.executors`.
    """
    with tempfile.TemporaryDirectory() as storage:
        study = StudyConfig(
            name="bench",
            trial=config,
            rows=[RowConfig(label="a")],
            seeds=list(range(trials)),
            storage=storage,
            tracking_uri=None if tracked else "none",
            checkpoint_every=10**6,
            **settings,
        )
        view = View()
        with executed_by(executor):
            start = time.perf_counter()
            outcome = run_study(study, view, lambda line: None)
            seconds = time.perf_counter() - start
        assert all(trial.status == FINISHED for trial in outcome.state.trials)
        assert not outcome.tracking_error
        return seconds, view


@contextmanager
def executed_by(executor: str | None) -> Iterator[None]:
    """Have trials executed by a class of :mod:`bench.executors`; by their own executor for None."""
    real = resources.choose_executor
    if executor is not None:
        resources.choose_executor = lambda lanes: f"bench.executors:{executor}"
    try:
        yield
    finally:
        resources.choose_executor = real


def bare(trials: int, trainable: Any, *, reuse: bool, callbacks: list[Any] | None = None) -> float:
    """Return the seconds of the same trials through Ray Tune alone."""
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


def slots(trials: int) -> None:
    began = time.time()
    _, view = run(640, "TwoSeconds", tracked=False, cpus=32)
    times = {
        name: [event["time"] for event in view.events if event["event"] == name]
        for name in ("started", "finished")
    }
    ends = sorted(times["finished"])
    report(
        "32 slots, 640 trials of 2 s: utilisation, from the call to the last end",
        640 * 2 / 32 / (ends[-1] - began),
        "",
    )
    # all have ended a trial, until then a trial waited for every slot
    up, waiting = ends[31], ends[640 - 32]
    slept = sum(max(0.0, min(end, waiting) - max(end - 2, up)) for end in ends)
    report("the same, while all slots are up and trials wait", slept / 32 / (waiting - up), "")
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = "32"
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    began = time.time()
    bare(128, SleepTwoSeconds, reuse=True)
    report(
        "Ray Tune, 128 trials of 2 s on 32 CPUs: utilisation",
        128 * 2 / 32 / (time.time() - began),
        "",
    )
    ray.shutdown()


def house(trials: int) -> None:
    _, view = run(900, "TwentySeconds", tracked=False, cpus=300)
    times = {
        name: [event["time"] for event in view.events if event["event"] == name]
        for name in ("started", "finished")
    }
    span = max(times["finished"]) - min(times["started"])
    report(
        "300 slots, 900 trials of 20 s: utilisation, from the first start to the last end",
        900 * 20 / 300 / span,
        "",
    )


@contextmanager
def three_nodes(cpus: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of a study on a Ray cluster of three nodes, of so many declared CPUs each."""
    # where nodes find the trials' executor
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with cluster_of(cpus, cpus, cpus) as cluster:
        yield {"address": cluster.address, "insecure": True}


def raylets(trials: int) -> None:
    with three_nodes(8) as keys:
        _, view = run(300, "TwentySeconds", tracked=False, **keys)
    times = {
        name: [event["time"] for event in view.events if event["event"] == name]
        for name in ("started", "finished")
    }
    assert len(times["finished"]) == 300
    span = max(times["finished"]) - min(times["started"])
    report(
        "3 nodes of 8 CPUs, 300 trials of 20 s: utilisation, from the first start to the last end",
        300 * 20 / 24 / span,
        "",
    )
    steps = sorted(
        [(moment, 1) for moment in times["started"]]
        + [(moment, -1) for moment in times["finished"]]
    )
    report("the same: trials at a time, at most", max(accumulate(step for _, step in steps)), "")


def rate(trials: int) -> None:
    for count in (300, 1000):
        _rate(count)


def _rate(count: int) -> None:
    """Run ``count`` trials that report once a second, all at a time."""
    process = psutil.Process()
    before, start = process.cpu_times(), time.time()
    _, view = run(count, "EverySecond", tracked=False, cpus=count)
    used = process.cpu_times().user + process.cpu_times().system - before.user - before.system
    began = min(event["time"] for event in view.events if event["event"] == "started")
    ended = max(event["time"] for event in view.events if event["event"] == "finished")
    report(
        f"{count} trials of 20 reports, one a second: cores that the driver used",
        used / (time.time() - start),
        "cores",
    )
    report("the same: utilisation, from the first start to the last end", 20 / (ended - began), "")


def driver(trials: int) -> None:
    _, view = run(1000, "Noop", tracked=False)
    used = view.events[-1]["cpu"] - view.events[0]["cpu"]
    report("CPU time of the driver for a no-op trial", used, "ms", "of 1,000")
    for count in (2, 100):
        _, view = run(count, "TwentySeconds", tracked=False, cpus=count)
        began, ended = view.events[count - 1], view.events[count]
        assert (began["event"], ended["event"]) == ("started", "finished")
        used = (ended["cpu"] - began["cpu"]) / (ended["time"] - began["time"])
        report(f"the same for a second in which {count} trials run", 1e3 * used, "ms")


def config(trials: int) -> None:
    def milliseconds(work: Callable[[], Any], times: int = 5) -> float:
        work()
        began = time.process_time()
        for _ in range(times):
            work()
        return 1e3 * (time.process_time() - began) / times

    layers = [values for _, values in _layers("quickstart", find_study("quickstart"), {})]

    def merge() -> Any:
        return OmegaConf.merge(OmegaConf.structured(StudyConfig), *layers)

    report("CPU time to read a study's config", milliseconds(lambda: load("quickstart")), "ms")
    report("the same: OmegaConf's merge of its files, once", milliseconds(merge), "ms")
    study = load("cover")
    report("CPU time to plan 300 trials", milliseconds(lambda: make_plan(study), 2), "ms")


def noop(trials: int) -> None:
    report(
        f"{trials} no-op trials, engine", trials / run(trials, "Noop", tracked=False)[0], "trials/s"
    )
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    report(
        f"{trials} no-op trials, Ray Tune, reused actors",
        trials / bare(trials, Sleep, reuse=True),
        "trials/s",
    )
    few = max(4, trials // 20)
    report(
        f"{few} no-op trials, Ray Tune, a function each",
        few / bare(few, function, reuse=False),
        "trials/s",
    )
    ray.shutdown()


def tracked(trials: int) -> None:
    report(
        f"{trials} no-op trials, engine, every one in MLflow",
        trials / run(trials, "Noop", tracked=True)[0],
        "trials/s",
    )


def metrics(trials: int) -> None:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    report(
        "30 trials x 10 reports x 10 metrics, engine, tracked",
        run(30, "Metrics", tracked=True)[0],
        "s",
    )
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as folder:
        callback = MLflowLoggerCallback(
            tracking_uri=f"sqlite:///{folder}/mlflow.db", experiment_name="bench"
        )
        report(
            "the same, Ray Tune with MLflowLoggerCallback",
            bare(30, SleepMetrics, reuse=True, callbacks=[callback]),
            "s",
        )
    ray.shutdown()


def gang(trials: int) -> None:
    from dataclasses import replace

    start = time.time()
    _, view = run(6, None, tracked=False, config=replace(DIGITS, workers=2))
    ended = [event["time"] for event in view.events if event["event"] == "finished"]
    steps = [b - a for a, b in pairwise(ended)]
    report("two-worker trial of 3 epochs, those after the first", statistics.median(steps), "s")
    report(
        "two-worker trial of 3 epochs, the first, plan and start of its processes included",
        ended[0] - start,
        "s",
    )
    start = time.time()
    _, view = run(3, None, tracked=False, config=replace(DIGITS, workers=2), gang="train")
    ended = [event["time"] for event in view.events if event["event"] == "finished"]
    report(
        "the same by Ray Train (gang=train), those after the first",
        statistics.median(b - a for a, b in pairwise(ended)),
        "s",
    )
    report("the same by Ray Train, the first, start of Ray included", ended[0] - start, "s")


def memory(trials: int) -> None:
    process = psutil.Process()
    run(100, "Noop", tracked=False)
    gc.collect()
    before = process.memory_info().rss
    run(1000, "Noop", tracked=False)
    report(
        "driver memory that 1,000 no-op trials add",
        (process.memory_info().rss - before) / 1e6,
        "MB",
    )
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    report(
        "the same, without what the allocator keeps for later",
        (process.memory_info().rss - before) / 1e6,
        "MB",
    )


def long() -> None:
    small = run(1000, "Noop", tracked=False)[0]
    large = run(10_000, "Noop", tracked=False)[0] / 10
    report("milliseconds a trial at 1,000 trials", small, "ms")
    report("milliseconds a trial at 10,000 trials", large, "ms", f"{large / small:.2f} times")


PARTS: dict[str, Callable[[int], None]] = {
    "slots": slots, "noop": noop, "tracked": tracked, "metrics": metrics, "gang": gang,
    "memory": memory, "rate": rate, "driver": driver, "config": config,
    "house": house, "raylets": raylets,
}  # fmt: skip
BY_NAME = ("house", "raylets")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; ``names`` are the parts to run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {' '.join(PARTS)}")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="the same")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args(arguments)
    wanted = [*options.names, *options.only]
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"{unknown[0]!r}: not one of {' '.join(PARTS)}")
    options.names = [name for name in PARTS if name in wanted or not (wanted or name in BY_NAME)]
    return options


def main() -> None:
    """Run and print everything asked for."""
    options = parse()
    os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    cores = len(os.sched_getaffinity(0))
    print(f"Ray {ray.__version__}, Python {platform.python_version()}, {cores} cores")
    for name in options.names:
        PARTS[name](options.trials)
    if options.long:
        long()
    if options.json:
        options.json.write_text(json.dumps(_RESULTS, indent=1))


if __name__ == "__main__":
    main()
