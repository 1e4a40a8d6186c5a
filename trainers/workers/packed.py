"""State shared by concurrent one-worker trials in one process, each with its own thread and, on a
GPU, its own CUDA stream.

Processes that share a GPU take turns on it, while the streams of one process run concurrently, so
small nets can fill the GPU together. An epoch is a sequence of CUDA graphs, which are launched
without Python's global lock. The trials may differ in all settings except process-wide ones
(:func:`~trainers.workers.resources.key_of`). No state that affects results is shared, so a trial
gives the same bits as in a process of its own.

The trials share a worker process with several lanes (:mod:`trainers.workers.worker_process`): one
process per GPU, or one per machine for trials on the CPU. An error that affects all trials, such as
the loss of the CUDA context, ends the process, and every trial restarts in a new one from its last
checkpoint.
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
"""Python's thread switch interval in seconds; short, because other threads often only need to
launch their next step."""


class Host:
    """State shared by the packed trials of a process; thread-safe."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._device = ""
        self._trials = 0
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()

    @contextmanager
    def place(self, config: TrialConfig) -> Iterator[torch.cuda.Stream | None]:
        """Reserve a place for a trial: a stream on a GPU, None on a CPU.

        The first trial determines the process-wide settings, which the others must share.

        Raises:
            ValueError: the trial's device is missing, its settings
                (:func:`~trainers.workers.resources.key_of`) differ from the process's, or the
                process is full.
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
        """Check that a trial fits into the process; the first trial sets the process's settings."""
        if self._key is None:
            self._device = resolve_device(config.device)
            check_device(self._device)
            set_matmul_accumulation(config.precision.sums_of_codes)
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
        """Return an unused stream."""
        if self._streams:
            return self._streams.pop()
        stream = torch.cuda.Stream()
        cuda.count_faults_apart(stream)
        return stream
