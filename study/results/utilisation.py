"""Utilisation of a run's resources, its speed, and the causes of idle time.

*Utilisation* is measured in the resource that binds. With ``h_r(t)`` the CPUs (or GPUs) that trials
held at a time and ``c_r(t)`` those that the run had, over a window from ``a`` to ``b``::

    share_r = integral_a^b h_r dt / integral_a^b c_r dt        utilisation = max over r of share_r

It is computed *from the command* (in older ledgers, which lack its time, *from the plan*) to the
end of the run, and from the first trial's start to the last one's end. Before the first
``capacity`` event the run is taken to have had the capacity of that event. A trial that starts, or
tests, holds its slots; the utilisation *without starts* is that from the command less those, and
the one that a run is told of if it is low.

A *start* lasts from when a trial got its slots, before its processes start and join, to its first
report, less the seconds of an epoch. These are the least of what the report says (of Ray Train all
since it was asked to start), what the trial's later epochs took, and, if it has none, those of its
row: the first epoch also compiles. Where nobody tells there is no start.

*Speed* compares epochs with those of trials that had the study's machines to themselves. It is
taken over the intervals ``i`` of trials whose kind (:func:`study.plan.identity.pace_key`) has an
epoch that was timed while no other trial ran, on average ``a_i`` seconds::

    speed = sum_i epochs_i a_i / sum_i seconds_i

So 1 is as many epochs as if every slot in use trained as fast as one alone, and starts took no
time. Without such an epoch there is no speed: nothing is invented.

:func:`what_held` divides the idle part of ``integral c_r dt`` by cause, looking back: a trial that
started later *waited* if it was known already.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from study.ledger.slots import Capacity, Interval, Run
from study.ledger.state import StudyState
from study.plan.identity import pace_key

RESOURCES = {"cpus": "CPUs", "gpus": "GPUs"}
LOW, LEAST_SECONDS = 0.5, 60.0
"""Utilisation without starts below which a run is told what held it, and the least seconds of such
a run."""
MOST_CAUSES, LEAST_SHARE = 3, 0.05
"""Largest number of causes reported, and the least share of the capacity of each."""
EPSILON = 1e-6

BEFORE, LIMIT, DRIVER, RESULTS, FEW, TAIL, STARTS = (
    "before",
    "limit",
    "driver",
    "results",
    "few",
    "tail",
    "starts",
)
CAUSES = {
    BEFORE: "before the first trial started",
    LIMIT: "while max_concurrent={most} kept trials waiting",
    **{
        name: f"while too few {shown} were free for the next trial"
        for name, shown in RESOURCES.items()
    },
    DRIVER: (
        "while trials waited that there was room for: starting them took long, or the study was"
        " paused"
    ),
    RESULTS: "while the search waited for results",
    FEW: "because there were fewer trials than slots",
    TAIL: "at the end, when no trial was left to start",
}
"""Descriptions of the causes for which capacity lay idle."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """Utilisation of a run.

    Attributes:
        resource: resource that binds, ``cpus`` or ``gpus``.
        share: its utilisation from the command to the end of the run.
        training: its utilisation from the first trial's start to the last one's end.
        trained: its utilisation from the command without starts.
        shares: utilisation of every resource of the run, from the command.
    """

    resource: str
    share: float
    training: float
    trained: float
    shares: dict[str, float]


def utilisation(run: Run, now: float | None = None) -> Use | None:
    """Return the utilisation of a run; None if the ledger has no slots or capacity of it.

    Args:
        run: the run.
        now: the time, if the run goes on.
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
    starts = _starts(run, resource) / _capacity_integral(run, resource, run.begin, end)
    return Use(
        resource=resource,
        share=shares[resource],
        training=training or 0.0,
        trained=max(0.0, shares[resource] - starts),
        shares=shares,
    )


def epochs_a_second(run: Run, now: float | None = None) -> float | None:
    """Return the reported epochs per second, from the first trial's start to the last one's end.

    Returns None before the first report.
    """
    epochs = sum(interval.epochs for interval in run.intervals)
    begin, end = _window(run, now) if run.intervals else (0.0, 0.0)
    return epochs / (end - begin) if epochs and end > begin else None


def speed(run: Run, kind: Callable[[str], str]) -> tuple[float, int] | None:
    """Return the speed of a run and the number of trials that it is computed from.

    Returns None if no epoch was timed alone. See the head of this file.

    Args:
        run: the run.
        kind: maps a trial's id to its kind; trials of one kind take equally long alone.
    """
    alone: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for interval in run.intervals:
        if interval.alone:
            sums = alone[kind(interval.trial)]
            sums[0], sums[1] = sums[0] + interval.alone, sums[1] + interval.alone_seconds
    compared = [
        (found, alone[key])
        for found in run.intervals
        if alone and (key := kind(found.trial)) in alone
    ]
    held = sum(_until(found, run.end) - found.begin for found, _ in compared)
    if not held:
        return None
    wanted = sum(found.epochs * seconds / count for found, (count, seconds) in compared)
    return wanted / held, len({found.trial for found, _ in compared})


def slots_over_time(run: Run) -> list[tuple[float, int]]:
    """Estimate the number of slots from each time on.

    It is the capacity divided by what a slot of the run's trials takes on average.
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
    """Return the number of slots that trials hold now, and the number of all slots."""
    used = sum(len(interval.slots) for interval in list(run.running.values()))
    return used, max(used, slots_over_time(run)[-1][1])


def what_held(run: Run) -> dict[str, float]:
    """Return the share of the run's capacity that lay idle for each of :data:`CAUSES`.

    The capacity is that of the resource that binds. The largest share comes first; with the
    utilisation, the shares add up to 1. :data:`STARTS` is listed beside them.
    """
    use = utilisation(run)
    if use is None:
        return {}
    name = use.resource
    idle: dict[str, float] = defaultdict(float)
    for seconds, moment in _moments(run):
        for cause, amount in _causes(moment, name):
            idle[cause] += amount * seconds
    idle[STARTS] = _starts(run, name)
    capacity = _capacity_integral(run, name, run.begin, run.end)
    return dict(
        sorted(
            ((cause, amount / capacity) for cause, amount in idle.items() if amount > 0),
            key=lambda item: -item[1],
        )
    )


def first_epoch(run: Run | None) -> str:
    """Describe in a line how long a run took from its command to its first epoch, by stage.

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
    """Name what a run's times count from."""
    return "command" if run.from_command else "plan"


def remark(run: Run | None) -> str:
    """Explain in a sentence why a run trained with less than half of its capacity.

    Returns "" for any other run, and for one that lasted less than a minute.
    """
    use = utilisation(run) if run is not None and run.over else None
    if run is None or use is None or use.trained >= LOW or run.end - run.begin <= LEAST_SECONDS:
        return ""
    found = {cause: share for cause, share in what_held(run).items() if share >= LEAST_SHARE}
    starts = found.pop(STARTS, 0.0)
    parts = [
        f"{_percent(share)} {CAUSES[cause].format(most=run.most)}"
        for cause, share in list(found.items())[:MOST_CAUSES]
    ]
    others = "".join(
        f" (of the {RESOURCES[name]} {_percent(share)})"
        for name, share in use.shares.items()
        if name != use.resource
    )
    idle = f"; idle: {'; '.join(parts)}" if parts else ""
    starting = f"; {_percent(starts)} went into starts" if starts else ""
    return (
        f"Slots were in use for {_percent(use.share)} of the {RESOURCES[use.resource]}'"
        f" time{others}{idle}{starting}."
    )


def line(state: StudyState, now: float | None = None) -> str:
    """Describe the last run in a line; "" if the ledger has no slots or capacity of it.

    ``3 of 4 slots in use, utilisation 91 % of the CPUs, 12.3 epochs/s``

    Args:
        state: the study's state.
        now: the time, while the study runs.
    """
    run = state.run if now is None or not state.runs else state.runs[-1]
    if run is None or (use := utilisation(run, now)) is None:
        return ""
    used, slots = slots_in_use(run)
    beginning = "last run: " if now is None else f"{used} of {slots} slots in use, "
    rate = epochs_a_second(run, now)
    return f"{beginning}utilisation {_percent(use.share)} of the {RESOURCES[use.resource]}" + (
        f", {rate:.3g} epochs/s" if rate else ""
    )


def sentences(state: StudyState) -> list[str]:
    """Return the sentences beside the picture of a study's slots.

    They have the utilisation, the epochs per second and the causes of idle time. The list is empty
    if the ledger has no slots or capacity.
    """
    run = state.run
    if run is None or (use := utilisation(run)) is None:
        return []
    name = RESOURCES[use.resource]
    began = beginning(run)
    texts = [
        f"Utilisation {_percent(use.share)} of the {name} from the {began},"
        f" {_percent(use.training)} from the first trial's start to the last one's end;"
        f" {_percent(use.trained)} from the {began} without starts."
    ]
    if rate := epochs_a_second(run):
        alone = speed(run, lambda trial: pace_key(state.known[trial].config))
        compared = (
            f"{alone[0]:.2f} of the speed of a trial alone (of {alone[1]} of"
            f" {len({i.trial for i in run.intervals})} trials: those like one that ran alone for an"
            " epoch)"
            if alone
            else "no trial ran alone for an epoch, so there is no speed to compare with"
        )
        texts.append(f"{rate:.3g} epochs a second; {compared}.")
    return [*texts, *filter(None, [remark(run)])]


def _end(run: Run, now: float | None) -> float:
    return run.end if run.over or now is None else max(now, run.end)


def _until(interval: Interval, end: float) -> float:
    return end if interval.end is None else interval.end


def _window(run: Run, now: float | None) -> tuple[float, float]:
    """Return the times of the first trial's start and the last one's end."""
    return run.intervals[0].begin, max(
        _until(interval, _end(run, now)) for interval in run.intervals
    )


def _share(run: Run, name: str, begin: float, end: float, now: float | None) -> float | None:
    """Return the utilisation of a resource; None if the run had none of it."""
    capacity = _capacity_integral(run, name, begin, end)
    held = sum(
        getattr(interval, name) * (_until(interval, _end(run, now)) - interval.begin)
        for interval in run.intervals
    )
    return min(1.0, held / capacity) if capacity > 0 else None


def _capacity_integral(run: Run, name: str, begin: float, end: float) -> float:
    """Integrate the capacity of a resource over time."""
    steps = [
        (begin, run.capacity[0]),
        *((step.time, step) for step in run.capacity if begin < step.time < end),
    ]
    steps[0] = (begin, _capacity_at(run.capacity, begin))
    times = [*(time for time, _ in steps), end]
    return float(
        sum(
            getattr(step, name) * (b - a)
            for (_, step), (a, b) in zip(steps, pairwise(times), strict=True)
        )
    )


def _capacity_at(capacity: Sequence[Capacity], time: float) -> Capacity:
    return next((step for step in reversed(capacity) if step.time <= time), capacity[0])


@dataclass(kw_only=True)
class _Moment:
    """A span of time in which nothing changes.

    Attributes:
        have, held: amount of every resource that the run had, and that trials held.
        needed: amount of every resource that all trials of the run take together.
        next: the waiting trial that started first; None if none waited.
        full: whether as many trials ran as the config allows.
        begun, more: whether a trial had started, and whether one was still to start, known or not.
    """

    have: dict[str, float]
    held: dict[str, float]
    needed: dict[str, float]
    next: Interval | None
    full: bool
    begun: bool
    more: bool


def _causes(moment: _Moment, name: str) -> Iterator[tuple[str, float]]:
    """Yield the causes for which a resource is idle, each with the idle amount."""
    idle = max(0.0, moment.have[name] - moment.held[name])
    if not moment.begun:
        yield BEFORE, idle
    elif moment.next is not None and moment.full:
        yield LIMIT, idle
    elif moment.next is not None:
        free = {each: moment.have[each] - moment.held[each] + EPSILON for each in RESOURCES}
        yield (
            next((each for each in RESOURCES if getattr(moment.next, each) > free[each]), DRIVER),
            idle,
        )
    elif moment.more:
        yield RESULTS, idle
    else:
        few = min(idle, max(0.0, moment.have[name] - moment.needed[name]))
        yield FEW, few
        yield TAIL, idle - few


def _moments(run: Run) -> Iterator[tuple[float, _Moment]]:
    """Yield the spans of a run in which nothing changes, in order, each with its seconds."""
    trials = {interval.trial: interval for interval in run.intervals}.values()
    needed = {
        name: float(sum(getattr(interval, name) for interval in trials)) for name in RESOURCES
    }
    changes: list[tuple[float, int, Interval | None]] = [
        (time, 0, None) for time in (run.begin, run.end)
    ]
    changes += [(step.time, 0, None) for step in run.capacity]
    for interval in run.intervals:
        changes += [
            (interval.waited, 1, interval),
            (interval.begin, 2, interval),
            (_until(interval, run.end), 3, interval),
        ]
    held, running, waiting, started = dict.fromkeys(RESOURCES, 0.0), 0, 0, 0
    for (time, what, change), (until, _, _) in pairwise(
        sorted(changes, key=lambda change: change[:2])
    ):
        if change is not None:
            waiting += (0, 1, -1, 0)[what]
            sign = (0, 0, 1, -1)[what]
            running, started = running + sign, started + (what == 2)
            held = {name: amount + sign * getattr(change, name) for name, amount in held.items()}
        if until <= time:
            continue
        step, later = (
            _capacity_at(run.capacity, time),
            (run.intervals[place] for place in range(started, len(run.intervals))),
        )
        yield (
            until - time,
            _Moment(
                have={name: getattr(step, name) for name in RESOURCES},
                held=held,
                needed=needed,
                next=(
                    next((interval for interval in later if interval.waited <= time), None)
                    if waiting
                    else None
                ),
                full=run.most is not None and running >= run.most,
                begun=started > 0,
                more=started < len(run.intervals),
            ),
        )


def start_seconds(run: Run) -> list[float | None]:
    """Return the seconds of the start of each of a run's intervals; None where nobody knows."""
    gaps: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in run.intervals:
        if found.epochs > 1:
            of_row = gaps[found.row]
            of_row[0], of_row[1] = (
                of_row[0] + (found.last or 0.0) - (found.first or 0.0),
                of_row[1] + found.epochs - 1,
            )
    starts: list[float | None] = []
    for found in run.intervals:
        own = (found.last or 0.0) - (found.first or 0.0), found.epochs - 1
        later = own if found.epochs > 1 else gaps.get(found.row)
        epoch = [later[0] / later[1]] if later else []
        if found.first_seconds is not None:
            epoch.append(found.first_seconds)
        first = _until(found, run.end) if found.first is None else found.first
        starts.append(max(0.0, first - found.begin - min(epoch)) if epoch else None)
    return starts


def _starts(run: Run, name: str) -> float:
    """Return the amount of a resource, times seconds, that trials held while they started."""
    return float(
        sum(
            getattr(found, name) * (seconds or 0.0)
            for found, seconds in zip(run.intervals, start_seconds(run), strict=True)
        )
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
