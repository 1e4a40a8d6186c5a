"""Utilisation of a run's resources, its speed, and the causes of idle time.

*Utilisation* is measured in the resource that binds. With ``h_r(t)`` the CPUs (or GPUs) that trials
held at a time and ``c_r(t)`` those that the run had, over a window from ``a`` to ``b``::

    share_r = integral_a^b h_r dt / integral_a^b c_r dt        utilisation = max over r of share_r

It is computed *from the command*, from the ``planned`` event to the end of the run, and from the
first trial's start to the last one's end. Before the first ``capacity`` event the run is taken to
have had the capacity of that event. A trial that starts, or tests, holds its slots.

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

import itertools
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
"""Utilisation below which causes of idle time are reported, and the least seconds of such a run."""
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
        shares: utilisation of every resource of the run, from the command.
    """

    resource: str
    share: float
    training: float
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
    return Use(resource=resource, share=shares[resource], training=training or 0.0, shares=shares)


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
    utilisation, the shares add up to 1. :data:`STARTS` is listed beside them: the share that trials
    held from their start to their first report, beyond the seconds of an epoch.
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
    """Describe in a line how long a run took from its plan to its first epoch, by stage.

    Returns "" before a trial of the run has reported.
    """
    if run is None or not run.capacity or not run.intervals:
        return ""
    firsts = [found.first for found in run.intervals if found.first is not None]
    if not firsts:
        return ""
    times = (run.begin, run.capacity[0].time, run.intervals[0].begin, min(firsts))
    ready, started, trained = (
        f"{after - before:.1f} s" for before, after in itertools.pairwise(times)
    )
    return (
        f"first epoch {times[-1] - times[0]:.1f} s after the plan: {ready} until the machines were"
        f" up, {started} until a trial started, {trained} until one reported"
    )


def launch_stages(run: Run | None) -> str:
    """Describe in a line how long a launched run took to its plan, by stage; "" of any other run.

    The submission is timed by the machine that launched, the rest by that of the job.
    """
    if run is None or not run.launch:
        return ""
    times, joint = run.launch, ", "
    if "submitted" not in times:
        began, joint = "the job was started again", "; "
    else:
        waited = times["started"] - times["submitted"]
        began = f"packed in {times['packing']:.1f} s, submitted; " + (
            f"{waited:.1f} s until the job started"
            if waited >= 0
            else "the job started (the two machines' clocks disagree)"
        )
    return (
        f"{began}{joint}{times['loaded'] - times['started']:.1f} s until its code was loaded,"
        f" {run.begin - times['loaded']:.1f} s until the study was planned"
    )


def remark(run: Run | None) -> str:
    """Explain in a sentence why a run used less than half of its capacity.

    Returns "" for any other run, and for one that lasted less than a minute.
    """
    use = utilisation(run) if run is not None and run.over else None
    if run is None or use is None or use.share >= LOW or run.end - run.begin <= LEAST_SECONDS:
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
    starting = f"; {_percent(starts)} went into starting trials" if starts else ""
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
    texts = [
        f"Utilisation {_percent(use.share)} of the {name} from the command,"
        f" {_percent(use.training)} from the first trial's start to the last one's end."
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


def _starts(run: Run, name: str) -> float:
    """Return the amount of a resource, times seconds, that trials held while they started.

    A start lasts until the first report, less the seconds of an epoch. An epoch takes as long as
    from report to report in the same trial, or on average in its row; rows in which no trial
    reported twice are left out.
    """
    gaps: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for found in run.intervals:
        if found.epochs > 1:
            of_row = gaps[found.row]
            of_row[0], of_row[1] = (
                of_row[0] + (found.last or 0.0) - (found.first or 0.0),
                of_row[1] + found.epochs - 1,
            )
    total = 0.0
    for found in run.intervals:
        if found.row in gaps:
            first = _until(found, run.end) if found.first is None else found.first
            own = (found.last or 0.0) - (found.first or 0.0), found.epochs - 1
            seconds, epochs = own if found.epochs > 1 else gaps[found.row]
            total += getattr(found, name) * max(0.0, first - found.begin - seconds / epochs)
    return total


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
