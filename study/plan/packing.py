"""Discrete-event packing of a plan's trials into CPUs and GPUs, to estimate their total time.

It follows the loop of a study (:mod:`study.engines.loop`). The next trial of the plan starts when
its CPUs and its GPUs, or its share of a GPU, are free. While it waits, later trials start if they
fit and do not delay it (EASY backfilling, D. Lifka 1995). The last trials run longest first. `plan`
packs trials with known durations; `plan --slots` also lets a scheduler end trials early. The rounds
of a race (:mod:`study.search.racing`) follow each other.

Limits: one machine; the overhead of a trial is ``start_seconds``.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from study.plan.trials import PlannedTrial
from trainers.workers.resources import cpus_of, gpus_of

TAIL = 3
"""Number of last trials per slot that run longest first.

The makespan is within 1 to 6 % of sorting all trials, in simulations of 2 to 128 slots.
"""
LOOK_AHEAD = 8
"""Number of trials behind a waiting one that may be started before it."""
EPSILON = 1e-6
Ends = Callable[[PlannedTrial, int, float], bool]
"""Function that says whether a trial ends early after an epoch at a time; it is called after the
last epoch, too."""


class Need(NamedTuple):
    """CPUs and GPUs, or the share of one, that a trial takes."""

    cpus: float
    gpus: float


@dataclass(kw_only=True)
class Schedule:
    """What became of trials.

    Attributes:
        makespan: seconds until the last one's end.
        most: largest number of trials at a time.
        held: seconds in which they trained, times what they held, by resource.
        epochs, saved, early: epochs computed, epochs saved because trials ended early, and the
            number of these.
        unfit: number of trials for which the machine is too small, and which are left out.
    """

    makespan: float = 0.0
    most: int = 0
    held: dict[str, float] = field(default_factory=lambda: {"cpus": 0.0, "gpus": 0.0})
    epochs: int = 0
    saved: int = 0
    early: int = 0
    unfit: int = 0

    def append(self, later: Schedule) -> None:
        """Add one that begins when this one ends."""
        self.makespan += later.makespan
        self.most = max(self.most, later.most)
        for name, held in later.held.items():
            self.held[name] += held
        self.epochs, self.saved = self.epochs + later.epochs, self.saved + later.saved
        self.early, self.unfit = self.early + later.early, self.unfit + later.unfit


def need_of(trial: PlannedTrial) -> Need:
    """Return what a trial takes of a machine."""
    values = trial.config.to_dict()
    return Need(cpus_of(values), gpus_of(values))


def pack(
    trials: Sequence[PlannedTrial],
    cpus: float,
    gpus: int,
    seconds: Callable[[PlannedTrial], float],
    *,
    most: int | None = None,
    needs: Callable[[PlannedTrial], Need] = need_of,
    ends: Ends | None = None,
    start_seconds: float = 0.0,
    rounds: Sequence[Sequence[PlannedTrial]] = (),
) -> Schedule:
    """Pack trials, in their order, into the CPUs and GPUs of a machine.

    Args:
        trials: the trials.
        cpus, gpus: CPUs and GPUs of the machine.
        seconds: returns the seconds of an epoch of a trial.
        most: largest number of trials at a time; None for as many as fit.
        needs: returns the resources of a trial.
        ends: decides which trials end early; None to end none.
        start_seconds: seconds before the first epoch of each trial.
        rounds: trials of each later round, which starts when the earlier ones have ended; they do
            not end early.
    """
    packed = Schedule()
    for entry in (trials, *rounds):
        early = ends if entry is trials else None
        packing = _Packing(cpus, gpus, seconds, most or len(entry), early, start_seconds)
        packing.wait([(trial, needs(trial)) for trial in entry])
        packed.append(packing.run())
    return packed


class _Room:
    """The free resources of a machine."""

    def __init__(self, cpus: float, gpus: int) -> None:
        self.cpus, self.gpus = cpus, [1.0] * gpus

    def take(self, need: Need) -> list[int] | None:
        """Take what a trial needs and return the numbers of its GPUs; None if it does not fit."""
        if need.cpus > self.cpus + EPSILON:
            return None
        share = min(1.0, need.gpus)
        count = math.ceil(need.gpus - EPSILON)
        free = [place for place, left in enumerate(self.gpus) if left + EPSILON >= share]
        if count > len(free):
            return None
        # the emptiest first, as the pool does
        places = sorted(free, key=lambda place: -self.gpus[place])[:count]
        self._add(need, places, -1.0)
        return places

    def give_back(self, need: Need, places: list[int]) -> None:
        self._add(need, places, 1.0)

    def _add(self, need: Need, places: list[int], sign: float) -> None:
        self.cpus += sign * need.cpus
        for place in places:
            self.gpus[place] += sign * min(1.0, need.gpus)


class _Packing:
    """The state of :func:`pack`, which has its arguments."""

    def __init__(
        self,
        cpus: float,
        gpus: int,
        seconds: Callable[[PlannedTrial], float],
        most: int,
        ends: Ends | None,
        start_seconds: float,
    ) -> None:
        self._have, self._room = Need(cpus, gpus), _Room(cpus, gpus)
        self._seconds, self._most, self._ends, self._start = seconds, most, ends, start_seconds
        self._waiting: deque[tuple[PlannedTrial, Need]] = deque()
        self._running: dict[int, tuple[Need, list[int], float]] = {}
        """Need, GPUs and expected end by the number of the start."""
        self._events: list[tuple[float, int, int, PlannedTrial]] = []
        self._numbers = itertools.count()
        self._packed = Schedule()

    def wait(self, trials: Sequence[tuple[PlannedTrial, Need]]) -> None:
        """Queue trials; the last ones are ordered by duration, longest first."""
        tail = TAIL * self._slots([need for _, need in trials])
        head = max(0, len(trials) - tail)
        last = sorted(trials[head:], key=lambda entry: -self._whole(entry[0]))
        self._waiting.extend([*trials[:head], *last])

    def run(self) -> Schedule:
        """Run until no trial is left."""
        packed = self._packed
        self._hand_out(0.0)
        while self._events:
            now, number, epoch, trial = heapq.heappop(self._events)
            need = self._running[number][0]
            done = self._epochs_a_step(trial)
            for name, held in need._asdict().items():
                packed.held[name] += held * done * self._seconds(trial)
            packed.epochs, packed.makespan = packed.epochs + done, now
            early = self._ends is not None and self._ends(trial, epoch, now)
            if early or epoch == trial.config.epochs:
                packed.early += early and epoch < trial.config.epochs
                packed.saved += trial.config.epochs - epoch
                self._room.give_back(need, self._running.pop(number)[1])
                self._hand_out(now)
            else:
                event = (now + self._seconds(trial), number, epoch + 1, trial)
                heapq.heappush(self._events, event)
        return packed

    def _slots(self, needs: Sequence[Need]) -> int:
        """Estimate how many of these run at a time."""
        if not needs:
            return 0
        fits = [
            have / mean
            for have, held in zip(self._have, zip(*needs, strict=True), strict=True)
            if (mean := statistics.fmean(held))
        ]
        return min(math.ceil(min(fits)), self._most)

    def _epochs_a_step(self, trial: PlannedTrial) -> int:
        """Return the epochs from event to event: all at once where nothing ends trials early."""
        return trial.config.epochs if self._ends is None else 1

    def _whole(self, trial: PlannedTrial) -> float:
        """Return the seconds of a trial that nothing ends early."""
        return self._start + trial.config.epochs * self._seconds(trial)

    def _hand_out(self, now: float) -> None:
        """Start the trials that there is room for."""
        while self._waiting:
            head = self._waiting[0]
            if self._starts(*head, now):
                self._waiting.popleft()
            elif not self._running:
                self._waiting.popleft()
                self._packed.unfit += 1
            else:
                for entry in self._behind(head[1], now):
                    if self._starts(*entry, now):
                        self._waiting.remove(entry)
                return

    def _starts(self, trial: PlannedTrial, need: Need, now: float) -> bool:
        """Start a trial if there is room for it; tell whether there was."""
        if len(self._running) >= self._most or (places := self._room.take(need)) is None:
            return False
        number, epochs = next(self._numbers), self._epochs_a_step(trial)
        first = now + self._start + epochs * self._seconds(trial)
        self._running[number] = need, places, now + self._whole(trial)
        heapq.heappush(self._events, (first, number, epochs, trial))
        self._packed.most = max(self._packed.most, len(self._running))
        return True

    def _behind(self, need: Need, now: float) -> Iterator[tuple[PlannedTrial, Need]]:
        """Yield the next trials that end before one could begin that needs this, or take CPUs alone
        while it waits for a GPU, and leave its CPUs."""
        if self._room.cpus < 1.0 - EPSILON or len(self._running) >= self._most:
            return
        cpus, gpus, until = self._room.cpus, sum(self._room.gpus), now
        for held, _, end in sorted(self._running.values(), key=lambda entry: entry[2]):
            cpus, gpus, until = cpus + held.cpus, gpus + held.gpus, end
            if cpus + EPSILON >= need.cpus and gpus + EPSILON >= need.gpus:
                break
        for entry in list(itertools.islice(self._waiting, 1, 1 + LOOK_AHEAD)):
            spare = self._room.cpus + EPSILON - entry[1].cpus >= need.cpus
            keeps_nothing = spare and entry[1].gpus == 0 < need.gpus
            if keeps_nothing or now + self._whole(entry[0]) <= until + EPSILON:
                yield entry
