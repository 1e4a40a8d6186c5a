"""Time the ray engine beside bare Ray Tune, both in the same run on the same Ray.

    python scripts/bench_tune.py [PART ...] [--slots N] [--trials N] [--seconds S ...] [--turns N]
                                 [--json FILE]

Run it on a machine with as many cores as slots (default: its cores): where there are fewer, what
is measured is the start of Python processes, not either engine. Trials sleep or do nothing.

    use     share of the slots in use, from the first start to the last end, by trials of 0.5, 2, 5
            and 20 s (20 s for each slot, or three trials), and the seconds from the call to the
            first start: by the engine, and by bare Tune with a class Trainable, reused actors and
            a searcher in ConcurrencyLimiter; in turns, of which the best counts
    noop    trials a second that do nothing and report once, from the first start to the last end,
            with the ledger; beside it bare Tune
    rate    cores that the driver uses while a trial a slot reports once a second; beside it bare
            Tune
    grid    a grid over formats and seeds that trains on the digits, on the GPU if there is one, by
            the local engine and by this one, in turns, of which the best counts: trials a second
            from the first start to the last end; fails if a figure or the SHA-256 of the weights
            differs
    gangs   seconds from a gang's start to each stage, by a bare TorchTrainer whose loop imports
            torch, meets the other ranks and reports once, and by the engine with ``gang=train`` and
            ``gang=forked``; as many gangs as ``--turns``, one after the other: the first loads
            files that the others find in memory

Either begins to count when its first trial begins. Ray starts once, for all parts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from bench.view import View
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.search import ConcurrencyLimiter, Searcher

from study.config import RowConfig, StudyConfig
from study.engines.ray.engine import ENVIRONMENT as TUNE
from study.engines.ray_session import ENVIRONMENT
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED
from study.lifecycle import Outcome, run_study
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, TrialConfig
from trainers.workers import resources

RESULTS: dict[str, float] = {}


class Sleep(tune.Trainable):  # type: ignore[misc]
    """Bare Tune's trial: ``reports`` steps that sleep, each noted in a file of its process."""

    def setup(self, config: dict[str, Any]) -> None:
        """Begin a trial."""
        self._at = dict(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin the next trial."""
        self._at = dict(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Sleep once."""
        began = time.time()
        time.sleep(self._at["seconds"])
        with Path(self._at["log"], str(os.getpid())).open("a") as file:
            file.write(f"{began} {time.time()}\n")
        self._at["reports"] -= 1
        return {"validation/error": 0.1, "done": self._at["reports"] == 0}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load nothing."""


class Same(Searcher):  # type: ignore[misc]
    """Hands out the same config so many times."""

    def __init__(self, trials: int, config: dict[str, Any]) -> None:
        super().__init__(metric="validation/error", mode="min")
        self._left, self._config = trials, config

    def suggest(self, trial_id: str) -> Any:
        """Return the config, or that no more come."""
        self._left -= 1
        return dict(self._config) if self._left >= 0 else Searcher.FINISHED

    def on_trial_complete(self, *arguments: Any, **keys: Any) -> None:
        """Learn nothing."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


def engine(trials: int, seconds: float, reports: int = 1) -> dict[str, float]:
    """Run trials that sleep with the ray engine, and return their :func:`_figures`."""
    with tempfile.TemporaryDirectory() as storage, _sleeping():
        config = TrialConfig(
            data=DataConfig(name="digits", validation_size=300),
            model=ModelConfig(hidden=[16]),
            optimizer=OptimizerConfig(lr=max(seconds, 1e-9)),
            epochs=reports,
        )
        study = StudyConfig(
            name="bench", trial=config, rows=[RowConfig(label="a")], seeds=list(range(trials)),
            storage=storage, tracking_uri="none", engine="ray", checkpoint_every=10**6,
        )  # fmt: skip
        view, cpu, called = View(), time.process_time(), time.time()
        outcome = run_study(study, view, lambda line: None)
        cpu = view.events[-1]["cpu"] - view.events[0]["cpu"]
        assert all(trial.status == FINISHED for trial in outcome.state.trials)
        return _figures(study.folder / "busy", called, cpu)


def bare(trials: int, seconds: float, reports: int = 1) -> dict[str, float]:
    """Run the same trials with bare Tune, and return their :func:`_figures`."""
    slots = int(ray.cluster_resources()["CPU"])
    with tempfile.TemporaryDirectory() as folder, _variables(TUNE):
        os.environ.pop("TUNE_MAX_PENDING_TRIALS_PG")
        log = Path(folder, "busy")
        log.mkdir()
        config = {"seconds": seconds, "log": str(log), "reports": reports}
        tuner = tune.Tuner(
            tune.with_resources(Sleep, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                search_alg=ConcurrencyLimiter(Same(trials, config), max_concurrent=slots),
                num_samples=-1,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        cpu, called = time.process_time(), time.time()
        assert tuner.fit().num_errors == 0
        return _figures(log, called, time.process_time() - cpu)


def _figures(log: Path, called: float, cpu: float) -> dict[str, float]:
    """Return the share of the slots in use, trials' steps a second, seconds to the first start and
    the driver's cores."""
    lines = [line.split() for file in log.iterdir() for line in file.read_text().splitlines()]
    steps = [(float(began), float(ended)) for began, ended in lines]
    first, last = min(step[0] for step in steps), max(step[1] for step in steps)
    slots = ray.cluster_resources()["CPU"]
    return {
        "use": sum(ended - began for began, ended in steps) / slots / (last - first),
        "steps a second": len(steps) / (last - first),
        "first start": first - called,
        "driver": cpu / (last - first),
    }


@contextmanager
def _sleeping() -> Iterator[None]:
    """Have trials sleep for their learning rate instead of training."""
    real = resources.choose_executor
    resources.choose_executor = lambda lanes: "bench.executors:Logs"
    try:
        yield
    finally:
        resources.choose_executor = real


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def report(name: str, value: float, unit: str = "") -> None:
    """Print a figure and keep it."""
    print(f"{name:72s} {value:9.3f} {unit}", flush=True)
    RESULTS[name] = round(value, 4)


def compare(
    name: str, keys: dict[str, str], turns: int, run: Callable[[Any], dict[str, float]]
) -> None:
    """Report the best of both in turns, and the ratio, of the figures that ``keys`` names with
    their units."""
    found: dict[str, list[dict[str, float]]] = {"engine": [], "bare Tune": []}
    for _ in range(turns):
        for who, runs in (("engine", engine), ("bare Tune", bare)):
            found[who].append(run(runs))
    for key, unit in keys.items():
        best = min if key in ("first start", "driver") else max
        ours, theirs = (best(each[key] for each in found[who]) for who in found)
        report(f"{name}: {key}, engine", ours, unit)
        report(f"{name}: {key}, bare Tune", theirs, unit)
        report(f"{name}: {key}, ratio", ours / theirs)


def use(options: argparse.Namespace) -> None:
    """Report the use of the slots, and the wait for the first trial."""
    for seconds in options.seconds:
        count = max(3, min(20, round(20 / seconds))) * options.slots
        compare(
            f"{count} trials of {seconds:g} s on {options.slots} slots",
            {"use": "", "first start": "s"},
            options.turns,
            lambda run, n=count, s=seconds: run(n, s),  # type: ignore[misc]
        )


def noop(options: argparse.Namespace) -> None:
    """Report the rate of trials that do nothing."""
    name = f"{options.trials} trials of 0 s on {options.slots} slots"
    keys = {"steps a second": "1/s"}
    compare(name, keys, options.turns, lambda run: run(options.trials, 0.0))


def rate(options: argparse.Namespace) -> None:
    """Report what reports cost the driver."""
    name = f"{options.slots} trials, 20 reports each, one a second"
    compare(name, {"driver": "cores"}, options.turns, lambda run: run(options.slots, 1.0, 20))


def grid(options: argparse.Namespace) -> None:
    """Report trainings a second by both engines, and compare what they trained."""
    rates, trained = dict[str, float](), []
    for name in ("local", "ray") * options.turns:  # kernels compile in the first turn
        with tempfile.TemporaryDirectory() as storage:
            outcome = _train_grid(name, storage)
            trials = outcome.state.trials
            assert all(trial.status == FINISHED for trial in trials)
            events = [event for event in read_ledger(Path(storage, "grid")) if "trial" in event]
            began = min(event["time"] for event in events if event["event"] == "started")
            ended = max(event["time"] for event in events if event["event"] == "finished")
            rates[name] = max(rates.get(name, 0.0), len(trials) / (ended - began))
            trained.append({trial.id: (trial.test, _weights(trial)) for trial in trials})
    assert all(found == trained[0] for found in trained), "the engines' figures or weights differ"
    for name, found in rates.items():
        report(f"{len(trained[0])} trials on the digits, {name} engine", found, "1/s")
    report("the same: ratio", rates["ray"] / rates["local"])


def _train_grid(engine: str, storage: str) -> Outcome:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    formats = ("float32", "lns16", "lns12", "lns(10,4)")
    rows = [
        RowConfig(label=name, overrides={"precision.format": name, "precision.scope": "everywhere"})
        for name in formats
    ]
    trial = TrialConfig(
        data=DataConfig(name="digits", validation_size=300),
        model=ModelConfig(hidden=[512]),
        optimizer=OptimizerConfig(lr=0.1),
        epochs=20,
        device=device,
    )
    study = StudyConfig(
        name="grid", trial=trial, rows=rows, seeds=list(range(12)), storage=storage,
        tracking_uri="none", engine=engine,
    )  # fmt: skip
    return run_study(study, View(), lambda line: None)


def _weights(trial: Any) -> str:
    (file,) = Path(trial.checkpoints_left()[0]).glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


TITLES = {"controller": "TrainController", "worker": "RayTrainWorker"}
"""Parts of the titles of Ray Train's processes."""


class Titles:
    """Notes when processes of this machine are first seen with one of :data:`TITLES`, ten times a
    second."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._seen: dict[tuple[str, str], float] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Titles:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def times(self, name: str) -> list[float]:
        """Return the times at which processes with such a title were first seen, in order."""
        return sorted(time for (kind, _), time in self._seen.items() if kind == name)

    def _look(self) -> None:
        while not self._over.wait(0.1):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    title = (folder / "cmdline").read_text(errors="replace")
                except OSError:
                    continue
                for name, part in TITLES.items():
                    if part in title:
                        self._seen.setdefault((name, folder.name), time.time())


def _bare_loop(config: dict[str, Any]) -> None:
    """Train nothing, and note the stages of a rank."""
    entered = time.time()
    import torch.distributed  # as a user's loop does

    imported = time.time()
    torch.distributed.barrier()
    met = time.time()
    ray.train.report({"validation/error": 0.1})
    stages = {"loop": entered, "imports": imported, "met": met, "report": time.time()}
    with Path(config["log"], str(os.getpid())).open("w") as file:
        json.dump(stages, file)


def gangs(options: argparse.Namespace) -> None:
    """Report the stages of a gang's start."""
    for turn in range(options.turns):
        for name, begin in (
            ("bare TorchTrainer", _bare_gang),
            ("gang=train", partial(_gang, "train")),
            ("gang=forked", partial(_gang, "forked")),
        ):
            for stage, seconds in begin(options.workers).items():
                report(f"{options.workers} workers, {name}, gang {turn}: {stage}", seconds, "s")


def _bare_gang(workers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Titles() as titles:
        Path(folder, "log").mkdir()
        called = time.time()
        TorchTrainer(
            _bare_loop,
            train_loop_config={"log": f"{folder}/log"},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, name="bare"),
        ).fit()
        returned = time.time()
        ranks = [json.loads(file.read_text()) for file in Path(folder, "log").iterdir()]
    last = {stage: max(rank[stage] for rank in ranks) for stage in ranks[0]}
    return _since(called, titles, last | {"end": returned})


def _gang(kind: str, workers: int) -> dict[str, float]:
    trial = TrialConfig(
        data=DataConfig(name="digits", validation_size=300),
        model=ModelConfig(hidden=[16]),
        workers=workers,
        epochs=2,
    )
    with tempfile.TemporaryDirectory() as storage, Titles() as titles:
        study = StudyConfig(
            name="gangs", trial=trial, rows=[RowConfig(label="a")], storage=storage,
            tracking_uri="none", engine="ray", gang=kind, seeds=[0, 1], max_concurrent=1,
        )  # fmt: skip
        outcome = run_study(study, View(), lambda line: None)
        assert all(trial.status == FINISHED for trial in outcome.state.trials)
        name = outcome.state.trials[-1].id  # hosts have started and are warm by then
        events = [event for event in read_ledger(study.folder) if event.get("trial") == name]
    times = {event["event"]: event["time"] for event in reversed(events)}
    stages = {"report": times["report"], "end": times["finished"]}
    return _since(times["started"], titles, stages)


def _since(began: float, titles: Titles, stages: dict[str, float]) -> dict[str, float]:
    """Return the seconds from ``began`` to each stage; the first are those of the processes."""
    controllers, workers = ([t for t in titles.times(kind) if t > began] for kind in TITLES)
    found = {"controller": controllers[0]} if controllers else {}
    found |= {"first worker": workers[0], "last worker": workers[-1]} if workers else {}
    return {name: when - began for name, when in (found | stages).items()}


PARTS = {"use": use, "noop": noop, "rate": rate, "grid": grid, "gangs": gangs}


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="parts to run (default: all)")
    parser.add_argument("--slots", type=int, default=os.cpu_count())
    parser.add_argument("--trials", type=int, default=1000, help="of noop")
    parser.add_argument("--workers", type=int, default=2, help="of a gang")
    parser.add_argument("--seconds", type=float, nargs="*", default=[0.5, 2.0, 5.0, 20.0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # where the processes of trials find bench.executors
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ray.init(
        address="local", num_cpus=options.slots, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,"
          f" Python {platform.python_version()}, Ray {ray.__version__}")  # fmt: skip
    for name in options.parts or PARTS:
        PARTS[name](options)
    ray.shutdown()
    if options.json:
        options.json.write_text(json.dumps(RESULTS, indent=1) + "\n")


if __name__ == "__main__":
    main()
