"""Several one-worker trials at once in one process, each in a thread of its own and, on a GPU, on a
stream of its own; what they share.

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

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lns_ops import cuda, set_matmul_accumulation
from trainers.config import TrialConfig
from trainers.training.device import check_device, resolve_device
from trainers.workers.resources import MOST_TRIALS, key_of

SWITCH_SECONDS = 1e-4
"""Seconds after which a thread that computes in Python lets another one go on, which may only
want to launch its next step."""


class Host:
    """What the packed trials of a process share; calls may come from any thread."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._device = ""
        self._trials = 0
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()

    @contextmanager
    def place(self, config: TrialConfig) -> Iterator[torch.cuda.Stream | None]:
        """Hold a place for a trial: a stream on a GPU, None on a CPU.

        The first trial decides the settings of the process, which the others must share.

        Raises:
            ValueError: the trial's device is not there, the trial differs from others in what
                :func:`~trainers.workers.resources.key_of` names, or is one too many.
        """
        with self._lock:
            self._admit(config)
            stream = self._stream() if self._device == "cuda" else None
            self._trials += 1
        try:
            yield stream
        finally:
            with self._lock:
                self._trials -= 1
                self._streams += [stream] if stream is not None else []

    def _admit(self, config: TrialConfig) -> None:
        """Check that there is room for a trial, and take over the settings of the first one."""
        if self._key is None:
            self._device = resolve_device(config.device)
            check_device(self._device)
            set_matmul_accumulation(config.precision.accumulation)
            sys.setswitchinterval(SWITCH_SECONDS)
            self._key = key_of(config)
        if key_of(config) != self._key:
            raise ValueError(
                f"trial of {key_of(config)} (device, threads, accumulation) in a process of"
                f" {self._key}: trials of one process share them; use another process"
            )
        if self._device == "cuda" and self._trials >= MOST_TRIALS:
            raise ValueError(
                f"{self._trials} trials on one GPU: at most {MOST_TRIALS}; use"
                f" gpus={1 / MOST_TRIALS:g} or more"
            )

    def _stream(self) -> torch.cuda.Stream:
        """Return a stream that no trial uses."""
        if self._streams:
            return self._streams.pop()
        stream = torch.cuda.Stream()
        cuda.count_faults_apart(stream)
        return stream
