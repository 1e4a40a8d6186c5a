"""The `Executor` protocol: how a worker process runs a trial. It has four implementations.

===================  =====================  ========================================================
executor             class                  runs
===================  =====================  ========================================================
:data:`IN_PROCESS`   ``InProcess``          a trial with one worker, alone in its process; in a
                                            gang, one rank of a trial per process
:data:`PACKED`       ``Packed(InProcess)``  a trial with one worker, in a thread beside others
:data:`RAY_TRAIN`    ``RayTrainRun``        a Ray Train run, whose workers have an ``InProcess``
                                            each
:data:`OWN_LOOP`     ``OwnLoop``            a user's own training loop, or one rank of it, in a
                                            thread that waits after every report
===================  =====================  ========================================================

A worker process (:mod:`trainers.workers.worker_process`) makes an executor for every trial and
calls it from one thread only: :meth:`Executor.begin` once; :meth:`Executor.step` until its metrics
have ``done`` or the trial is stopped; after a step possibly :meth:`Executor.profile` and
:meth:`Executor.save`; :meth:`Executor.end` once, in all cases. Different executors of a process may
be called from different threads at the same time.

The executor owns the trial's state (weights, optimizer, device memory, Ray Train's run) from
``begin`` to ``end``. The worker process owns everything else: its rank in a gang, the checkpoints'
places and lifetimes, the reports, and the process's settings, which it restores between trials.

The class of an executor's error determines how the trial continues
(:mod:`trainers.workers.messages`). An error in :data:`~trainers.workers.messages.DETERMINISTIC`
rejects the trial. After an out-of-memory error it may be retried with lower memory use. Any other
error ends the process, and the trial restarts in another one.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.config import TrialConfig
from trainers.telemetry.tally import Moment
from trainers.workers.messages import Beginning, ExecutorPlan
from trainers.workers.packed import Host


@dataclass(frozen=True, kw_only=True)
class Context:
    """Arguments of an executor.

    Attributes:
        trial: the trial's id.
        plan: the study's instructions for the trial.
        rank, workers: rank and size of the torch.distributed group that the process has joined.
        host: state shared by the packed trials of the process; None with one lane.
    """

    trial: str
    plan: ExecutorPlan
    rank: int = 0
    workers: int = 1
    host: Host | None = None


class Executor(ABC):
    """Trains one trial; the module docstring has the order of calls."""

    @abstractmethod
    def __init__(self, context: Context) -> None:
        """Store the context. Must not acquire resources; :meth:`begin` does."""

    @abstractmethod
    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """Build the trial, continued from the first complete checkpoint.

        The trial's result is the same with and without checkpoints. In a gang every rank is called,
        and all continue from the same checkpoint.

        Raises:
            ValueError: the trial cannot be built.
        """

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Train one epoch and return its metrics.

        They include ``epoch`` (number of finished epochs), ``done`` (whether it was the last one)
        and, after the last one, ``test/*`` or :data:`~trainers.workers.messages.FINAL`. A trial
        that was resumed after its last epoch is only tested.
        """

    @abstractmethod
    def save(self, folder: Path) -> bool:
        """Write the trial's state into ``folder``, completely or not at all.

        In a gang every rank is called and one writes.

        Returns:
            Whether a checkpoint was written; False if the executor keeps its own elsewhere.
        """

    @abstractmethod
    def profile(self) -> dict[str, bytes]:
        """Return the files, by name, of a profile that the last step completed; only once."""

    def moment(self) -> Moment | None:
        """Return where the trial is within an epoch, or None if this is not known.

        Called from another thread while :meth:`step` runs.
        """
        return None

    @abstractmethod
    def end(self) -> None:
        """Stop the trial and release all its resources.

        Raises:
            LeakError: not all resources were released, so the process must not be reused.
        """


def make_executor(context: Context) -> Executor:
    """Return a new executor of the class named in the plan."""
    module, _, name = context.plan["executor"].partition(":")
    made: Executor = getattr(importlib.import_module(module), name)(context)
    return made
