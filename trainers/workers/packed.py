"""A host: several one-worker trials at once in one process, each in a thread of its own and, on a
GPU, on a stream of its own.

Processes that share a GPU take turns on it; streams of one process run side by side, so that small
nets fill the GPU together. An epoch is a row of CUDA graphs, launched without Python's global lock.
Trials are free to differ in everything but what :func:`~trainers.workers.resources.key_of` names,
which is the process's and not a thread's. What decides a result is the trial's own, so it comes out
as in a process of its own, bit for bit.

A host is a worker process of several lanes (:mod:`trainers.workers.worker_process`), one a GPU, or
one a machine for trials on the CPU. An error that is not the trial's own (CUDA's context is lost
for all) ends the process; every trial in it begins again in a new one, at its last checkpoint.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lns_ops import cuda, set_matmul_accumulation
from trainers.config import TrialConfig
from trainers.training.device import check_device, resolve_device
from trainers.training.trainer import Training, set_threads
from trainers.workers.messages import Beginning
from trainers.workers.resources import MOST, key_of
from trainers.workers.resume import begin, step

SWITCH_SECONDS = 1e-4
"""After how long a thread that computes in Python lets another one go on, which may only want to
launch its next step."""


@dataclass
class _Trial:
    """One trial in a host; ``lock`` keeps its calls one after another."""

    stream: torch.cuda.Stream | None
    training: Training | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Host:
    """Trains several trials at once. Calls may come from any thread, those of different trials at
    the same time.

    Args:
        config: of any trial that it will train; the others have the same
            :func:`~trainers.workers.resources.key_of`.

    Raises:
        ValueError: the trials' device is not there.
    """

    def __init__(self, config: TrialConfig) -> None:
        self._key = key_of(config)
        check_device(resolve_device(config.device))
        set_matmul_accumulation(config.precision.accumulation)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._device = resolve_device(config.device)
        self._trials: dict[str, _Trial] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()

    def begin(
        self,
        name: str,
        config: TrialConfig,
        checkpoints: list[str],
        origin: dict[str, Any] | None = None,
    ) -> Beginning:
        """Build the trial ``name``, continued from the first whole checkpoint; one of that name is
        replaced. ``origin`` goes into its own.

        Raises:
            ValueError: the trial cannot be built, or differs from the host's others in what
                :func:`~trainers.workers.resources.key_of`
            names, or is one too many.
        """
        if key_of(config) != self._key:
            raise ValueError(
                f"trial of {key_of(config)} (device, threads, accumulation) in a host of"
                f" {self._key}: take another host"
            )
        trial = self._enter(name)
        with trial.lock, trial.current():
            try:
                trial.training, beginning = begin(config, checkpoints)
                trial.training.origin = origin or {}
            except Exception:
                self._leave(name)
                raise
            return beginning

    def step(self, name: str) -> dict[str, Any]:
        """One epoch of the trial ``name``; see :func:`trainers.workers.resume.step`."""
        trial = self._trials[name]
        with trial.lock, trial.current():
            assert trial.training is not None
            set_threads(trial.training.config.threads)  # torch's count is a thread's own
            return step(trial.training)

    def save(self, name: str, folder: Path) -> None:
        """Write the trial's state."""
        trial = self._trials[name]
        with trial.lock, trial.current():
            assert trial.training is not None
            trial.training.save(folder)

    def profile(self, name: str) -> dict[str, bytes]:
        """The files of a profile that the last step completed."""
        training = self._trials[name].training
        return {} if training is None else training.profiler.take()

    def end(self, name: str) -> None:
        """Forget the trial ``name``, if it is there."""
        trial = self._trials.get(name)
        if trial is not None:
            with trial.lock, trial.current():
                if trial.stream is not None:
                    trial.stream.synchronize()
                self._leave(name)

    def _enter(self, name: str) -> _Trial:
        with self._lock:
            if name not in self._trials:
                if self._device == "cuda" and len(self._trials) >= MOST:
                    raise ValueError(
                        f"{len(self._trials)} trials on one GPU: at most {MOST}; use"
                        f" gpus={1 / MOST:g} or more"
                    )
                self._trials[name] = _Trial(self._stream())
            return self._trials[name]

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device != "cuda":
            return None
        if self._streams:
            return self._streams.pop()
        stream = torch.cuda.Stream()
        cuda.count_faults_apart(stream)
        return stream

    def _leave(self, name: str) -> None:
        with self._lock:
            trial = self._trials.pop(name)
            trial.training = None
            if trial.stream is not None:
                self._streams.append(trial.stream)
