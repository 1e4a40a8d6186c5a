"""What hosting a trial means: the one protocol by which a worker process trains it, and the ways
there are.

===================  =====================  ========================================================
executor             class                  hosts
===================  =====================  ========================================================
:data:`IN_PROCESS`   ``InProcess``          a trial of one worker, alone in its process; in each
                                            process of a gang, that process's rank of the trial
:data:`PACKED`       ``Packed(InProcess)``  a trial of one worker in a thread, others beside it
:data:`RAY_TRAIN`    ``RayTrainRun``        a Ray Train run, each of whose workers has an
                                            ``InProcess`` for its rank
:data:`OWN_LOOP`     ``OwnLoop``            a loop of the user's own, or one rank of it, in a thread
                                            that waits after every report
===================  =====================  ========================================================

A worker process (:mod:`trainers.workers.worker_process`) makes an executor for every trial and
makes all calls to it from one thread: :meth:`Executor.begin` once; :meth:`Executor.step` until its
metrics say ``done`` or the trial is told to stop; after a step maybe :meth:`Executor.profile` and
:meth:`Executor.save`; :meth:`Executor.end` once, whatever has happened before. Different executors
of a process may be called from different threads at the same time.

The executor owns the trial's state (weights, optimizer, device memory, Ray Train's run) from
``begin`` to ``end``. The worker process owns everything else: its rank in a gang, which checkpoints
are kept where, what is reported, and the process's settings, which it puts back between trials.

What an executor raises decides what becomes of the trial (:mod:`trainers.workers.messages`): an
error of :data:`~trainers.workers.messages.DETERMINISTIC` refuses it, one that says that memory ran
out may begin it again with less, any other ends the process, and the trial begins again elsewhere.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.config import TrialConfig
from trainers.workers.messages import Beginning
from trainers.workers.packed import Host


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an executor is made of.

    Attributes:
        trial: the trial's id.
        plan: what the study says of the trial, see :mod:`trainers.workers.worker_process`.
        rank, workers: place in the torch.distributed group that the process has joined.
        host: what packed trials of the process share; None where it has one lane.
    """

    trial: str
    plan: dict[str, Any]
    rank: int = 0
    workers: int = 1
    host: Host | None = None


class Executor(ABC):
    """Trains one trial; see the module for who calls what, and when."""

    @abstractmethod
    def __init__(self, context: Context) -> None:
        """Take nothing yet that :meth:`end` would have to give back."""

    @abstractmethod
    def begin(self, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """Build the trial, continued from the first whole checkpoint.

        The result is the same with and without checkpoints. In a gang every rank is asked; all
        continue from one checkpoint.

        Raises:
            ValueError: the trial cannot be built.
        """

    @abstractmethod
    def step(self) -> dict[str, Any]:
        """Train one epoch and return its metrics.

        They have ``epoch`` (finished ones), ``done`` (whether it was the last one) and, with the
        last one, ``test/*``, or :data:`~trainers.workers.messages.FINAL`. A trial that was
        continued after its last epoch is only tested.
        """

    @abstractmethod
    def save(self, folder: Path) -> bool:
        """Write the trial's state into ``folder``, whole or not at all.

        In a gang every rank is asked and one writes.

        Returns:
            Whether there is a checkpoint now; False where the executor keeps its own elsewhere.
        """

    @abstractmethod
    def profile(self) -> dict[str, bytes]:
        """Return the files of a profile that the last step completed, by name, once."""

    @abstractmethod
    def end(self) -> None:
        """Stop the trial where it is and let go of all that it holds.

        Raises:
            LeakError: something stays, so the process must not train another trial.
        """


def make_executor(context: Context) -> Executor:
    """Return a new executor of the class that the plan names."""
    module, _, name = str(context.plan["executor"]).partition(":")
    made: Executor = getattr(importlib.import_module(module), name)(context)
    return made
