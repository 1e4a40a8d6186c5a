"""Utilisation of a run's resources, and its speed.

*Utilisation* is measured in the bottleneck resource. ``h_r(t)`` is the number of CPUs (or GPUs)
that trials hold at time t and ``c_r(t)`` the run's total, in a window from ``a`` to ``b``::

    share_r = integral_a^b h_r dt / integral_a^b c_r dt        utilisation = max over r of share_r

There are two windows: *from the command* to the end of the run (*from the plan* in older ledgers,
which lack the command's time), and from the first trial's start to the last trial's end. Before
the first ``capacity`` event, that event's capacity is assumed. A trial holds its slots while it
starts and tests. The utilisation *without starts* excludes the starts; a low value triggers a
notice (:mod:`study.results.idle_time`).

A *start* lasts from the allocation of a trial's slots to its first report, minus the duration of
one epoch. The first epoch also compiles, so the epoch duration is the smaller of two values: the
reported time of the first epoch (with Ray Train, the time since its start was requested), and the
mean of the trial's later epochs, or of its row's if the trial has only one. A user's own loop can
have epochs of different lengths, so only its reported time is used. With neither value the start is
unknown and not counted.

*Speed* compares epoch times with trials that ran alone on the study's machines. It covers the
intervals ``i`` of all trials whose kind (:func:`study.plan.identity.pace_key`) has an epoch timed
while no other trial ran, with mean duration ``a_i`` seconds. If the run has no such epoch, an
earlier run with the same software and machines provides it::

    speed = sum_i epochs_i a_i / sum_i seconds_i

A speed of 1 means that every slot trained as fast as a trial alone, without time for starts and
tests. First and last epochs are excluded because they also compile and test; so are the epochs of
a user's own loop. Without a reference epoch the speed is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from study.ledger.slots import Capacity, Interval, Run
from study.ledger.state import StudyState

RESOURCES = {"cpus": "CPUs", "gpus": "GPUs"}
EPSILON = 1e-6
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Use:
    """Utilisation of a run.

    Attributes:
        resource: bottleneck resource, ``cpus`` or ``gpus``.
        share: its utilisation from the command to the end of the run.
        training: its utilisation from the first trial's start to the last one's end.
        shares: utilisation of every resource of the run, from the command to the end.
        trained: ``shares`` without starts.
    """

    resource: str
    share: float
    training: float
    shares: dict[str, float]
    trained: dict[str, float]


def utilisation(run: Run, now: float | None = None) -> Use | None:
    """Return a run's utilisation; None if the ledger lacks its slots or its capacity.

    Args:
        run: the run.
        now: current time if the run is still active.
    """
    end = _end(run, now)
    if not run.intervals or not run.capacity or end <= run.begin:
        return None
    shares = {
        name: share
        for name in RESOURCES
        if (share := _share(run, name, run.begin, end, now)) is not None
    }
    if not shares:
        return None
    resource = max(shares, key=lambda name: shares[name])
    training = _share(run, resource, *_window(run, now), now)
    return Use(
        resource=resource,
        share=shares[resource],
        training=training or 0.0,
        shares=shares,
        trained={
            name: max(
                0.0, share - in_starts(run, name) / capacity_integral(run, name, run.begin, end)
            )
            for name, share in shares.items()
        },
    )


def epochs_a_second(run: Run, now: float | None = None) -> float | None:
    """Return the reported epochs per second, from the first trial's start to the last one's end.

    Returns None before the first report.
    """
    epochs = sum(interval.epochs for interval in run.intervals)
    begin, end = _window(run, now) if run.intervals else (0.0, 0.0)
    return epochs / (end - begin) if epochs and end > begin else None


def speed(
    run: Run, kind: Callable[[str], str], earlier: Sequence[Run] = ()
) -> tuple[float, int] | None:
    """Return the speed of a run and the number of trials that it is computed from.

    Returns None if no epoch was timed alone. The module docstring has the formula.

    Args:
        run: the run.
        kind: maps a trial id to its kind; trials of the same kind are equally fast when alone.
        earlier: earlier runs of the study.
    """
    hosts = {host for found in run.intervals for host in found.hosts}
    before = (
        found
        for each in earlier
        if each.software == run.software
        for found in each.intervals
        if hosts.issuperset(found.hosts)
    )
    alone = _alone(before, kind) | _alone(run.intervals, kind)
    compared = [
        (found, alone[key])
        for found in run.intervals
        if alone and (key := kind(found.trial)) in alone
    ]
    held = sum(end_of(found, run.end) - found.begin for found, _ in compared)
    if not held:
        return None
    wanted = sum(found.epochs * seconds for found, seconds in compared)
    return wanted / held, len({found.trial for found, _ in compared})


def _alone(intervals: Iterable[Interval], kind: Callable[[str], str]) -> dict[str, float]:
    """Return the mean seconds of an epoch without other trials, by kind of trial."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in intervals:
        if found.alone:
            of_kind = sums[kind(found.trial)]
            of_kind[0], of_kind[1] = of_kind[0] + found.alone, of_kind[1] + found.alone_seconds
    return {key: seconds / count for key, (count, seconds) in sums.items()}


def slots_over_time(run: Run) -> list[tuple[float, int]]:
    """Estimate the number of slots at each change of capacity, as ``(time, slots)``.

    It is the capacity divided by the mean resources per slot of the run's trials.
    """
    count = sum(len(interval.slots) for interval in run.intervals)
    taken = {name: sum(getattr(interval, name) for interval in run.intervals) for name in RESOURCES}

    def fit(step: Capacity) -> int:
        return math.floor(
            min(
                (getattr(step, name) * count / held for name, held in taken.items() if held),
                default=0.0,
            )
            + EPSILON
        )

    return [(step.time, fit(step)) for step in run.capacity]


def slots_in_use(run: Run) -> tuple[int, int]:
    """Return the number of slots that trials hold now, and the total number of slots."""
    used = sum(len(interval.slots) for interval in list(run.running.values()))
    return used, max(used, slots_over_time(run)[-1][1])


def first_epoch(run: Run | None) -> str:
    """Describe in one line how long a run took from its command to its first epoch, by stage.

    Returns "" before a trial of the run has reported.
    """
    if run is None or not run.capacity or not run.intervals:
        return ""
    firsts = [found.first for found in run.intervals if found.first is not None]
    if not firsts:
        return ""
    times = (run.begin, run.planned, run.capacity[0].time, run.intervals[0].begin, min(firsts))
    planned, ready, started, trained = (
        f"{after - before:.1f} s" for before, after in pairwise(times)
    )
    prepared = f"{planned} until it was planned, " if run.from_command else ""
    return (
        f"first epoch {times[-1] - times[0]:.1f} s after the {beginning(run)}: {prepared}{ready}"
        f" until the machines were up, {started} until a trial started, {trained} until one"
        " reported"
    )


def beginning(run: Run) -> str:
    """Return the event from which a run's times count: ``command`` or ``plan``."""
    return "command" if run.from_command else "plan"


def line(state: StudyState, now: float | None = None) -> str:
    """Describe the last run in one line; "" if the ledger lacks its slots or capacity.

    ``3 of 4 slots in use, utilisation 91 % of the CPUs, 12.3 epochs/s``

    Args:
        state: the study's state.
        now: current time if the study is running.
    """
    run = _shown(state, now)
    if run is None or (use := utilisation(run, now)) is None:
        return ""
    used, slots = slots_in_use(run)
    beginning = "last run: " if now is None else f"{used} of {slots} slots in use, "
    rate = epochs_a_second(run, now)
    return f"{beginning}utilisation {percent(use.share)} of the {RESOURCES[use.resource]}" + (
        f", {rate:.3g} epochs/s" if rate else ""
    )


def bars(state: StudyState, now: float | None = None, columns: int = 60) -> str:
    """Return the slots in use over a run as a sparkline; "" if the ledger has no slots.

    Each character covers an equal time: blank means that no slot was in use, ``█`` that the run's
    maximum number of slots was.

    Args:
        state: the study's state.
        now: current time if the study is running.
        columns: number of characters.
    """
    run = _shown(state, now)
    if run is None or not run.intervals or (end := _end(run, now)) <= run.begin:
        return ""
    held, each = [0.0] * columns, (end - run.begin) / columns
    for interval in run.intervals:
        first = max(0.0, (interval.begin - run.begin) / each)
        last = min(float(columns), (end_of(interval, end) - run.begin) / each)
        for column in range(int(first), math.ceil(last)):
            share = min(last, column + 1.0) - max(first, float(column))
            held[column] += share * len(interval.slots)
    most = max(*(slots for _, slots in slots_over_time(run)), *held)
    return "".join(BARS[math.ceil(h / most * (len(BARS) - 1) - EPSILON)] for h in held)


def _shown(state: StudyState, now: float | None) -> Run | None:
    """Return the latest run if ``now`` is given, else the latest one with known capacity."""
    return state.run if now is None or not state.runs else state.runs[-1]


def _end(run: Run, now: float | None) -> float:
    return run.end if run.over or now is None else max(now, run.end)


def end_of(interval: Interval, end: float) -> float:
    return end if interval.end is None else interval.end


def _window(run: Run, now: float | None) -> tuple[float, float]:
    """Return the times of the first trial's start and the last trial's end."""
    return run.intervals[0].begin, max(
        end_of(interval, _end(run, now)) for interval in run.intervals
    )


def _share(run: Run, name: str, begin: float, end: float, now: float | None) -> float | None:
    """Return the utilisation of a resource; None if the run's capacity lacks it."""
    capacity = capacity_integral(run, name, begin, end)
    held = sum(
        getattr(interval, name) * (end_of(interval, _end(run, now)) - interval.begin)
        for interval in run.intervals
    )
    return min(1.0, held / capacity) if capacity > 0 else None


def capacity_integral(run: Run, name: str, begin: float, end: float) -> float:
    """Integrate the capacity of a resource over time."""
    steps = [
        (begin, run.capacity[0]),
        *((step.time, step) for step in run.capacity if begin < step.time < end),
    ]
    steps[0] = (begin, capacity_at(run.capacity, begin))
    times = [*(time for time, _ in steps), end]
    return float(
        sum(
            getattr(step, name) * (b - a)
            for (_, step), (a, b) in zip(steps, pairwise(times), strict=True)
        )
    )


def capacity_at(capacity: Sequence[Capacity], time: float) -> Capacity:
    return next((step for step in reversed(capacity) if step.time <= time), capacity[0])


def start_seconds(run: Run) -> list[float | None]:
    """Return the start duration of each interval of a run in seconds; None where unknown."""
    gaps: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in run.intervals:
        if found.epochs > 1 and not found.own_loop:
            of_row = gaps[found.row]
            of_row[0], of_row[1] = (
                of_row[0] + (found.last or 0.0) - (found.first or 0.0),
                of_row[1] + found.epochs - 1,
            )
    starts: list[float | None] = []
    for found in run.intervals:
        own = (found.last or 0.0) - (found.first or 0.0), found.epochs - 1
        later = own if found.epochs > 1 else gaps.get(found.row)
        later = None if found.own_loop else later
        epoch = [later[0] / later[1]] if later else []
        if found.first_seconds is not None:
            epoch.append(found.first_seconds)
        first = end_of(found, run.end) if found.first is None else found.first
        starts.append(max(0.0, first - found.begin - min(epoch)) if epoch else None)
    return starts


def in_starts(run: Run, name: str) -> float:
    """Return the resource-seconds that trials held while they started."""
    return float(
        sum(
            getattr(found, name) * (seconds or 0.0)
            for found, seconds in zip(run.intervals, start_seconds(run), strict=True)
        )
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
