"""What a study's loop asks of an engine, which runs its trials.

There are two: a pool of processes on this machine (:mod:`study.engines.local`), and Ray Tune on a
cluster or on a Ray of this machine's own (:mod:`study.engines.ray`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from trainers.workers.messages import WorkerPlan
from trainers.workers.resources import WorkerResources

EPSILON = 1e-6
"""Tolerance for rounding errors in sums of GPU shares."""


class Slots:
    """Slot numbers of running ranks. A rank gets the lowest free number, which is its line in the
    picture of the study's slots."""

    def __init__(self) -> None:
        self._new, self._free = itertools.count(), list[int]()

    def take(self, count: int) -> list[int]:
        """Return the ``count`` lowest free numbers."""
        while len(self._free) < count:
            heapq.heappush(self._free, next(self._new))
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Release numbers."""
        for number in numbers:
            heapq.heappush(self._free, number)


class Started(Protocol):
    """A trial that an engine has taken.

    Attributes:
        slots: slot number of each rank.
        hosts: machine of each rank; empty if a later message
            (:data:`~trainers.workers.messages.PLACED`) names the machines.
    """

    @property
    def slots(self) -> list[int]: ...
    @property
    def hosts(self) -> Sequence[str]: ...


class Engine(Protocol):
    """Runs trials; :meth:`study.engines.loop.Loop.take_in` gets their messages."""

    @property
    def running(self) -> list[str]:
        """Ids of the running trials."""

    @property
    def moving(self) -> list[str]:
        """Ids of the trials on machines that are being drained."""

    @property
    def idle(self) -> bool:
        """Whether at least one CPU is free."""

    @property
    def idle_resources(self) -> tuple[float, float]:
        """Free CPUs and GPUs."""

    def could_fit(self, shape: WorkerResources) -> bool:
        """Return whether a trial would fit if no other trial ran."""

    def capacity(self) -> tuple[float, int, int]:
        """Return the CPUs, GPUs and machines that trials may use."""

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], WorkerPlan]
    ) -> Started | None:
        """Start a trial if its resources are free; else return None."""

    def answer(self, trial: str, go: bool) -> None:
        """Answer a trial that waits after a report: whether it continues."""

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Ask trials to write a checkpoint after their current epoch and to end."""

    def kill(self, trial: str, why: str) -> None:
        """Kill the processes of a trial; ``why`` becomes the reason of its death."""
