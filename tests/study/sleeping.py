"""Trials that sleep instead of training, for tests and benchmarks of the engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainers.config import TrialConfig
from trainers.workers import resources
from trainers.workers.executors import Context, Executor
from trainers.workers.messages import Beginning

SLEEPS = "tests.study.sleeping:Sleeps"


class Sleeps(Executor):
    """An executor whose epochs last the trial's learning rate in seconds."""

    def __init__(self, context: Context) -> None:
        self._epoch = 0

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        self._config, self._seconds = config, config.optimizer.lr
        return Beginning()

    def step(self) -> dict[str, Any]:
        time.sleep(self._seconds)
        self._epoch += 1
        done = self._epoch == self._config.epochs
        test = {"test/error": 0.1, "test/loss": 0.1} if done else {}
        return {
            "epoch": self._epoch,
            "validation/error": 1 / (1 + self._config.seed),
            "done": done,
        } | test

    def save(self, folder: Path) -> bool:
        """Do nothing: nothing needs to be kept."""
        return False

    def profile(self) -> dict[str, bytes]:
        return {}

    def end(self) -> None:
        """Do nothing: nothing is held."""


FAILS_ONCE = "tests.study.sleeping:FailsOnce"


class FailsOnce(Sleeps):
    """With seed 0 the first try fails, with an error that another try may not have."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mark = Path(context.plan["checkpoints"]).parent / f"{context.trial}.tried"

    def step(self) -> dict[str, Any]:
        if self._config.seed == 0 and not self._mark.exists():
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
            time.sleep(self._config.optimizer.lr / 2)
            raise ConnectionError("the network is away")
        return super().step()


WAITS_FOR_ANOTHER = "tests.study.sleeping:WaitsForAnother"


class WaitsForAnother(Sleeps):
    """A trial of many epochs starts its second one only once a trial of few epochs, with another
    seed than 0, has started. Its later epochs take no time."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mark = Path(context.plan["checkpoints"]).parent / "another.began"

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        if config.seed > 0 and config.workers == 1 and config.epochs < 8:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        return super().begin(config, checkpoints)

    def step(self) -> dict[str, Any]:
        if self._config.epochs >= 8 and self._epoch > 0:
            until = time.monotonic() + 60
            while not self._mark.exists():
                if time.monotonic() > until:
                    raise TimeoutError("no other trial began in a minute")
                time.sleep(0.02)
            self._seconds = 0.0
        return super().step()


@contextmanager
def executor(name: str = SLEEPS) -> Iterator[None]:
    """Let the executor of that name train every trial."""
    real = resources.choose_executor
    resources.choose_executor = lambda lanes: name
    try:
        yield
    finally:
        resources.choose_executor = real


def most_at_once(events: list[dict[str, Any]]) -> int:
    """Return how many trials overlap, by a ledger's events: from their start to their end."""
    step = {"started": 1, "finished": -1, "restarted": -1}
    changes = [(event["time"], step[event["event"]]) for event in events if event["event"] in step]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
