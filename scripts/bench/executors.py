"""Trials for benchmarks of the engine, loaded by worker processes: they compute nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainers.workers.executors import Executor
from trainers.workers.messages import Beginning


class Noop(Executor):
    """Reports ``reports`` times ``metrics`` values and ends."""

    reports, metrics, seconds = 1, 1, 0.0

    def __init__(self, context: Any) -> None:
        self._count = 0

    def begin(self, config: Any, checkpoints: list[str]) -> Beginning:
        return Beginning()

    def step(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        self._count += 1
        values = {f"validation/m{index}": 1.0 / self._count for index in range(self.metrics)}
        done = self._count >= self.reports
        return {"epoch": self._count, "validation/error": 0.1, **values, "done": done} | (
            {"test/error": 0.1, "test/loss": 0.1} if done else {}
        )

    def save(self, folder: Path) -> bool:
        """Write nothing, but have a checkpoint noted: that is a part of the engine's cost."""
        return True

    def profile(self) -> dict[str, bytes]:
        return {}

    def end(self) -> None:
        """Let go of nothing."""


class Metrics(Noop):
    """Ten reports of ten metrics."""

    reports, metrics = 10, 10


class Twenty(Noop):
    """Twenty reports of ten metrics."""

    reports, metrics = 20, 10


class TwoSeconds(Noop):
    """One epoch of two seconds."""

    seconds = 2.0


class TwentySeconds(Noop):
    """One epoch of twenty seconds."""

    seconds = 20.0


class Minute(Noop):
    """Sixty epochs of a second."""

    reports, seconds = 60, 1.0


class EverySecond(Noop):
    """Twenty epochs of a second."""

    reports, seconds = 20, 1.0


class Logs(Noop):
    """As many epochs as the trial has, of its learning rate in seconds, each noted in a file of its
    process in the study's folder ``busy``."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._log = Path(context.plan["checkpoints"]).parents[1] / "busy" / str(os.getpid())
        self._log.parent.mkdir(exist_ok=True)

    def begin(self, config: Any, checkpoints: list[str]) -> Beginning:
        self.reports, self.seconds = config.epochs, config.optimizer.lr
        return Beginning()

    def step(self) -> dict[str, Any]:
        began = time.time()
        metrics = super().step()
        with self._log.open("a") as file:
            file.write(f"{began} {time.time()}\n")
        return metrics

    def save(self, folder: Path) -> bool:
        """Write nothing: bare Tune writes nothing either."""
        return False
