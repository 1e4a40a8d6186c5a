"""Discrete-event simulation of a study with any number of slots.

A trial takes one slot per worker (:mod:`study.plan.packing`) and its recorded seconds per epoch.
The study's own scheduler (Ray Tune's) gets its reports and ends trials early. Rounds of
confirmation follow. Nothing trains: a trial's errors come from a recorded trial with the same id,
or from a synthetic curve ``a + b epoch^-c`` with a, b and c from a hash of the id. Reports at the
same time are processed in the order in which their trials started.

The results are the makespan, the idle share of the slots, the number of trials ended early, the
epochs computed and saved, and the load on the tracking store (:data:`REQUESTS_A_TRIAL`). Not
modelled: the start of Ray, failures, adaptive proposals (trials are sampled at random instead).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from study.engines.early_stopping import Scheduler, make_scheduler
from study.ledger.state import FINISHED, StudyState
from study.plan.identity import pace_key
from study.plan.packing import Need, pack
from study.plan.plan import Plan, confirmation_rounds
from study.plan.trials import PlannedTrial

REQUESTS_A_TRIAL = 5
"""Requests to the tracking store that one trial makes (:mod:`study.tracking.mlflow_runs`)."""
NEXT_SECONDS = 0.0015
"""Seconds from a trial's end to the next one's start in its slot, measured
(docs/benchmarks/studies.md); what a start takes of its process is in the seconds of its epochs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """Result of a simulation with one number of slots.

    Attributes:
        slots: number of slots, the places of a process each.
        makespan: seconds from the first trial's start to the last one's end.
        idle: share of the slots' time in which none trained.
        epochs, saved: epochs computed, and epochs saved because trials were ended early.
        early: number of trials ended early.
        requests: requests per second to the tracking store, on average.
        unfit: number of trials that need more slots, and are left out.
    """

    slots: int
    makespan: float
    idle: float
    epochs: int
    saved: int
    early: int
    requests: float
    unfit: int = 0


def _scheduler_of(plan: Plan) -> Scheduler | None:
    state = StudyState()
    state.apply(plan.to_event() | {"time": 0.0, "data": []})
    return make_scheduler(plan.study.search, state)


def simulate(
    plan: Plan,
    slots: int,
    seconds: Callable[[PlannedTrial], float],
    error: Callable[[PlannedTrial, int], float],
    start_seconds: float = NEXT_SECONDS,
) -> SimulatedRun:
    """Simulate a plan's trials on ``slots`` slots, ``max_concurrent`` at a time.

    Args:
        seconds: returns the seconds of an epoch of a trial.
        error: returns a trial's error after an epoch, the scheduler's metric.
        start_seconds: seconds from one trial to the next in a slot.
    """
    scheduler = _scheduler_of(plan)
    metric = next(iter(plan.study.search.objectives))

    def ends(trial: PlannedTrial, epoch: int, now: float) -> bool:
        metrics, last = {metric: error(trial, epoch)}, epoch == trial.config.epochs
        if scheduler is None:
            return False
        early = not last and scheduler.ends(trial.id, epoch, metrics, now)
        if early or last:
            scheduler.note_end(trial.id, epoch, metrics, now)
        return early

    rounds = confirmation_rounds(plan)
    found = pack(
        plan.trials, slots, 0, seconds, most=plan.study.max_concurrent, needs=_places, ends=ends,
        start_seconds=start_seconds, rounds=rounds,
    )  # fmt: skip
    ran = len(plan.trials) + sum(map(len, rounds)) - found.unfit
    return SimulatedRun(
        slots=slots,
        makespan=found.makespan,
        idle=1 - found.held["cpus"] / (slots * found.makespan) if found.makespan else 0.0,
        epochs=found.epochs,
        saved=found.saved,
        early=found.early,
        requests=REQUESTS_A_TRIAL * ran / found.makespan if found.makespan else 0.0,
        unfit=found.unfit,
    )


def _places(trial: PlannedTrial) -> Need:
    """Return the slots that a trial takes, one a worker."""
    return Need(trial.config.workers, 0)


def recorded_seconds(
    plan: Plan, states: Sequence[StudyState], default: float
) -> Callable[[PlannedTrial], float]:
    """Return a function for the seconds per epoch, from finished trials that computed alike.

    A trial unlike any of them gets the mean of the plan's others, or ``default``.
    """
    found: dict[str, list[float]] = {}
    for state in states:
        for trial in state.known.values():
            if trial.status == FINISHED and trial.took:
                found.setdefault(pace_key(trial.config), []).append(trial.seconds / len(trial.took))
    trials = itertools.chain(plan.trials, *confirmation_rounds(plan))
    of_plan = {trial.id: found.get(pace_key(trial.config.to_dict()), []) for trial in trials}
    known = {key: statistics.median(values) for key, values in of_plan.items() if values}
    mean = statistics.fmean(known.values()) if known else default
    return lambda trial: known.get(trial.id, mean)


def recorded_errors(
    states: Sequence[StudyState], metric: str
) -> Callable[[PlannedTrial, int], float]:
    """Return a function for a trial's metric: the recorded one, or else a synthetic curve."""
    known = {trial.id: trial.metric(metric) for state in states for trial in state.known.values()}

    def error(trial: PlannedTrial, epoch: int) -> float:
        curve = known.get(trial.id, {})
        return curve[epoch] if epoch in curve else synthetic(trial.id, epoch)

    return error


def synthetic(key: str, epoch: int) -> float:
    """Return ``a + b epoch^-c`` with a, b, c from the hash of ``key``.

    a is in 0.02 .. 0.2, b in 0.1 .. 0.8, c in 0.3 .. 1.5.
    """
    digest = hashlib.sha256(key.encode()).digest()
    a, b, c = (int.from_bytes(digest[4 * i : 4 * i + 4]) / 2**32 for i in range(3))
    return 0.02 + 0.18 * a + (0.1 + 0.7 * b) * math.pow(epoch, -(0.3 + 1.2 * c))
