"""Executors that run a trial in this process, alone or beside others."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainers.config import TrialConfig
from trainers.telemetry.tally import Moment
from trainers.training.trainer import Training
from trainers.workers.executors import Context, Executor
from trainers.workers.messages import Beginning
from trainers.workers.resume import resume


class InProcess(Executor):
    """Trains a trial, or one of its ranks, in this process.

    The plan's ``origin`` is stored in the trial's checkpoints.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started: Training | None = None

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        with self._on_device():
            self._started, beginning = resume(
                config, checkpoints, self._context.rank, self._context.workers
            )
        self._started.origin = self._context.plan.get("origin", {})
        return beginning

    def step(self) -> dict[str, Any]:
        training, epochs = self._training, self._training.config.epochs
        with self._on_device():
            metrics: dict[str, Any] = (
                training.train_epoch() if training.epoch < epochs else {"epoch": float(epochs)}
            )
            done = training.epoch >= epochs
            return {**metrics, **(training.test() if done else {}), "done": done}

    def save(self, folder: Path) -> bool:
        with self._on_device():
            self._training.save(folder, parents=False)
        return True

    def profile(self) -> dict[str, bytes]:
        return self._training.profiler.take()

    def moment(self) -> Moment | None:
        return None if self._started is None else self._started.moment()

    def end(self) -> None:
        self._started = None

    @property
    def _training(self) -> Training:
        assert self._started is not None, "begin comes first"
        return self._started

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return a context that selects the trial's CUDA stream, if it has one."""
        return nullcontext()


class Packed(InProcess):
    """Trains a trial beside others in the same process (:mod:`trainers.workers.packed`)."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stay = ExitStack()
        self._stream: torch.cuda.Stream | None = None

    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        assert self._context.host is not None, "a process of several lanes has a host"
        self._stream = self._stay.enter_context(self._context.host.place(config))
        return super().begin(config, checkpoints)

    def end(self) -> None:
        with self._on_device():
            if self._stream is not None:
                self._stream.synchronize()
            super().end()
        self._stay.close()

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
