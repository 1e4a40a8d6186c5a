"""Several one-worker trials at once in one process, each in a thread of its own and, on a GPU, on a
stream of its own.

Processes that share a GPU take turns on it; streams of one process run side by side, so that small
nets fill the GPU together. An epoch is a row of CUDA graphs, launched without Python's global lock.
Trials are free to differ in everything but what :func:`~trainers.workers.resources.key_of` names,
which is the process's and not a thread's. What decides a result is the trial's own, so it comes out
as in a process of its own, bit for bit.

They share a worker process of several lanes (:mod:`trainers.workers.worker_process`), one a GPU, or
one a machine for trials on the CPU. An error that is not the trial's own (CUDA's context is lost
for all) ends the process; every trial in it begins again in a new one, at its last checkpoint.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from trainers.config import TrialConfig
from trainers.workers.executors import Context
from trainers.workers.in_process import InProcess
from trainers.workers.messages import Beginning


class Packed(InProcess):
    """Trains a trial beside others of the same process."""

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
