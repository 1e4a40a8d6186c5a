"""What a study's loop asks of an engine, which runs its trials.

There are two: a pool of processes on this machine (:mod:`study.execution.local`), and Ray Tune on a
cluster or on a Ray of this machine's own (:mod:`study.execution.tune`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from trainers.workers.resources import WorkerResources

EPSILON = 1e-6
"""How far sums of shares may be off by rounding."""


class Slots:
    """Numbers of what runs at a time: a rank has the lowest that was free, which is its place in a
    picture of the study."""

    def __init__(self) -> None:
        self._new, self._free = itertools.count(), list[int]()

    def take(self, count: int) -> list[int]:
        """Return so many numbers that nobody has."""
        while len(self._free) < count:
            heapq.heappush(self._free, next(self._new))
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Make numbers free again."""
        for number in numbers:
            heapq.heappush(self._free, number)


class Started(Protocol):
    """A trial that an engine has taken.

    Attributes:
        slots: number of each rank, the lowest that were free: its place in a picture of the study.
        hosts: machine of each rank; empty where nobody knows yet, and a message
            (:data:`~trainers.workers.messages.PLACED`) tells it later.
    """

    @property
    def slots(self) -> list[int]: ...
    @property
    def hosts(self) -> Sequence[str]: ...


class Engine(Protocol):
    """Runs trials; what they say comes to :meth:`study.execution.loop.Loop.take_in`."""

    @property
    def running(self) -> list[str]:
        """Ids of the trials that were started and have not ended."""

    @property
    def moving(self) -> list[str]:
        """Ids of the trials on machines that are about to end."""

    @property
    def idle(self) -> bool:
        """Whether there is a CPU that nobody holds."""

    @property
    def idle_resources(self) -> tuple[float, float]:
        """CPUs and GPUs that nobody holds."""

    def could_fit(self, shape: WorkerResources) -> bool:
        """Tell whether there would be room for a trial if no other ran."""

    def capacity(self) -> tuple[float, int, int]:
        """Return the CPUs, GPUs and machines that trials may use."""

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], dict[str, Any]]
    ) -> Started | None:
        """Start a trial if there is room for it now; else return None."""

    def answer(self, trial: str, go: bool) -> None:
        """Tell a trial that waits after a report whether it goes on."""

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Have trials write a checkpoint after the epoch under way and end there."""

    def kill(self, trial: str, why: str) -> None:
        """End the processes of a trial; its death will be reported with this reason."""
