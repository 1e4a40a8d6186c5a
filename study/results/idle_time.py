"""Causes of a run's idle time, and the notices about low utilisation.

:func:`what_held` splits the idle part of ``integral c_r dt`` (:mod:`study.results.utilisation`) by
cause. It analyses the recorded timeline: a trial counts as *waiting* from its addition to the plan
(or the end of an attempt that is to be repeated) until its start.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from study.ledger.slots import Interval, Run, Waiting
from study.ledger.state import StudyState
from study.plan.identity import pace_key
from study.results.utilisation import (
    EPSILON,
    RESOURCES,
    beginning,
    capacity_at,
    capacity_integral,
    end_of,
    epochs_a_second,
    in_starts,
    percent,
    speed,
    utilisation,
)
from study.text import duration

LOW, LEAST_SECONDS = 0.5, 60.0
"""Print a notice if the utilisation without starts is below this share and the run took at least
this many seconds."""
LOOK_SECONDS = 600.0
"""Time between the first trial's start and the first notice during the run (seconds)."""
MOST_CAUSES, LEAST_SHARE = 3, 0.05
"""Maximum number of reported causes, and the minimum share of the capacity of each."""

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
"""Descriptions of the causes of idle capacity."""


def what_held(run: Run) -> dict[str, float]:
    """Return the idle share of the run's capacity for each of :data:`CAUSES`, largest first.

    The capacity is that of the bottleneck resource. These shares and the utilisation add up to 1.
    The result also has :data:`STARTS`, which is part of the utilisation.
    """
    use = utilisation(run)
    if use is None:
        return {}
    name = use.resource
    idle: dict[str, float] = defaultdict(float)
    for seconds, moment in _moments(run):
        for cause, amount in _causes(moment, name):
            idle[cause] += amount * seconds
    idle[STARTS] = in_starts(run, name)
    capacity = capacity_integral(run, name, run.begin, run.end)
    return dict(
        sorted(
            ((cause, amount / capacity) for cause, amount in idle.items() if amount > 0),
            key=lambda item: -item[1],
        )
    )


def remark(run: Run | None) -> str:
    """Explain in a sentence why a run used less than half of its capacity for training.

    Returns "" if it used more, or lasted less than a minute.
    """
    use = utilisation(run) if run is not None and run.over else None
    if run is None or use is None or run.end - run.begin <= LEAST_SECONDS:
        return ""
    if (trained := use.trained[use.resource]) >= LOW:
        return ""
    found = {cause: share for cause, share in what_held(run).items() if share >= LEAST_SHARE}
    starts = found.pop(STARTS, 0.0)
    parts = [
        f"{percent(share)} {CAUSES[cause].format(most=run.most)}"
        for cause, share in list(found.items())[:MOST_CAUSES]
    ]
    others = "".join(
        f" (of the {RESOURCES[name]} {percent(share)})"
        for name, share in use.trained.items()
        if name != use.resource
    )
    idle = f"; idle: {'; '.join(parts)}" if parts else ""
    starting = f"; {percent(starts)} went into starts" if starts else ""
    return (
        f"Trials trained for {percent(trained)} of the {RESOURCES[use.resource]}'"
        f" time{others}{idle}{starting}."
    )


class UseWatch:
    """Reports once, during a run, that less than half of its capacity is training.

    Checks :data:`LOOK_SECONDS` after the first trial's start, and again whenever the elapsed time
    has doubled, because a check takes longer with more trials.
    """

    def __init__(self) -> None:
        self._since = time.time() - time.monotonic()  # converts to the ledger's wall-clock time
        self._next = LOOK_SECONDS

    def _seconds(self, run: Run) -> float:
        return self._since + time.monotonic() - run.intervals[0].begin if run.intervals else 0.0

    def is_due(self, run: Run) -> bool:
        """Return whether a check is due."""
        return self._seconds(run) >= self._next

    def look(self, run: Run, waiting: Waiting | None) -> str:
        """Return a sentence that explains a low utilisation; "" if it is high enough.

        Args:
            run: the run; at least one trial has started.
            waiting: the next trial to start, or None.
        """
        seconds = self._seconds(run)
        self._next = 2 * seconds
        low = remark(run.so_far(run.intervals[0].begin + seconds, waiting))
        if not low:
            return ""
        self._next = math.inf
        return f"In the {duration(seconds)} since the first start: {low[0].lower()}{low[1:]}"


def sentences(state: StudyState) -> list[str]:
    """Return the sentences beside the picture of a study's slots, about its last run.

    They give utilisation, epochs per second and the causes of idle time. The list is empty if the
    ledger has no slots or capacity.
    """
    run = state.run
    if run is None or (use := utilisation(run)) is None:
        return []
    name, began = RESOURCES[use.resource], beginning(run)
    runs = [each for each in state.runs if each.intervals]
    texts = [
        f"{f'Last of {len(runs)} runs: utilisation' if len(runs) > 1 else 'Utilisation'}"
        f" {percent(use.share)} of the {name} from the {began},"
        f" {percent(use.training)} from the first trial's start to the last one's end;"
        f" {percent(use.trained[use.resource])} from the {began} without starts."
    ]
    if rate := epochs_a_second(run):
        earlier = state.runs[: state.runs.index(run)]
        alone = speed(run, lambda trial: pace_key(state.known[trial].config), earlier)
        compared = (
            f"{alone[0]:.2f} of the speed of a trial alone (of {alone[1]} of"
            f" {len({i.trial for i in run.intervals})} trials: those like one that ran alone for an"
            " epoch; starts and tests count as time lost)"
            if alone
            else "no trial ran alone for an epoch between its first and last: no speed to compare"
        )
        texts.append(f"{rate:.3g} epochs a second; {compared}.")
    return [*texts, *filter(None, [remark(run)])]


@dataclass(kw_only=True)
class _Moment:
    """A period during which no trial starts or ends and the capacity stays the same.

    Attributes:
        have, held: capacity and amount in use, by resource.
        needed: amount that all trials of the run would take together, by resource.
        next: the waiting trial that started first; None if no trial waited.
        full: whether the number of running trials had reached ``max_concurrent``.
        begun: whether a trial had started.
        more: whether a trial started later, even one not yet proposed at this time.
    """

    have: dict[str, float]
    held: dict[str, float]
    needed: dict[str, float]
    next: Interval | None
    full: bool
    begun: bool
    more: bool


def _causes(moment: _Moment, name: str) -> Iterator[tuple[str, float]]:
    """Yield the causes of a resource's idleness, each with the idle amount."""
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
    """Yield the periods of a run between two changes, in order, each with its seconds."""
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
            (end_of(interval, run.end), 3, interval),
        ]
    held, running, waiting, started = dict.fromkeys(RESOURCES, 0.0), 0, 0, 0
    for (at, what, change), (until, _, _) in pairwise(
        sorted(changes, key=lambda change: change[:2])
    ):
        if change is not None:
            waiting += (0, 1, -1, 0)[what]
            sign = (0, 0, 1, -1)[what]
            running, started = running + sign, started + (what == 2)
            held = {name: amount + sign * getattr(change, name) for name, amount in held.items()}
        if until <= max(at, run.begin):  # trials may have waited since before ``run.begin``
            continue
        step, later = (
            capacity_at(run.capacity, at),
            (run.intervals[place] for place in range(started, len(run.intervals))),
        )
        yield (
            until - max(at, run.begin),
            _Moment(
                have={name: getattr(step, name) for name in RESOURCES},
                held=held,
                needed=needed,
                next=(
                    next((interval for interval in later if interval.waited <= at), None)
                    if waiting
                    else None
                ),
                full=run.most is not None and running >= run.most,
                begun=started > 0,
                more=started < len(run.intervals),
            ),
        )
