"""Early stopping by Ray Tune's schedulers.

They are asked after every epoch. When a study is resumed, they first get the earlier reports from
the ledger. They see stubs of the trials and only decide; their callers
(:mod:`study.engines.loop`, :mod:`study.engines.simulate`) act. Trials with the same data and
loss are ranked together, across rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from study.config import SearchConfig
from study.ledger.state import ENDED, StudyState
from study.plan.identity import task_key
from study.results.objectives import has_diverged

BRACKETS = 3
"""Maximum number of HyperBand's brackets; fewer for trials with few epochs."""


class Scheduler:
    """A policy that ends trials early, by the study's first objective.

    Args:
        search: options of the search.
        epochs: epochs of the longest trial.
        task_of: returns a key of a trial id; trials with the same key are ranked together.
    """

    def __init__(
        self, search: SearchConfig, epochs: int, task_of: Callable[[str], str] = lambda trial: ""
    ) -> None:
        self._metric, mode = next(iter(search.objectives.items()))
        self._worst = math.inf if mode == "min" else -math.inf
        self._make = partial(_make, search, self._metric, mode, epochs)
        self._task_of = task_of
        self._policies: dict[str, Any] = {}
        self._stubs: dict[str, _Stub] = {}

    def ends(self, trial: str, epoch: int, metrics: dict[str, float], seconds: float = 0.0) -> bool:
        """Return whether a trial ends after this epoch; a diverged trial does.

        Args:
            trial: id of the trial.
            epoch: the epoch.
            metrics: metrics of the epoch.
            seconds: seconds that the trial has trained.
        """
        value = metrics.get(self._metric)
        if value is None:
            return False
        if has_diverged(metrics, self._metric):
            return True
        result = {"epoch": epoch, self._metric: value, "time_total_s": seconds}
        stub = self._stub(trial)
        with np.errstate(invalid="ignore"):
            return str(stub.policy.on_trial_result(_ALONE, stub, result)) == "STOP"

    def note_end(
        self, trial: str, epoch: int, metrics: dict[str, float], seconds: float = 0.0
    ) -> None:
        """Note that a trial has ended with this epoch, early or not.

        One that has diverged counts as worse than all others, whatever its figure. NaN counts as
        nothing: a policy would only warn of it where it takes a quantile.
        """
        value = metrics.get(self._metric)
        if value is not None and not math.isnan(value):
            if has_diverged(metrics, self._metric):
                value = self._worst
            result = {"epoch": epoch, self._metric: value, "time_total_s": seconds}
            stub = self._stub(trial)
            with np.errstate(invalid="ignore"):  # quantiles between infinite values
                stub.policy.on_trial_complete(_ALONE, stub, result)
        self._stubs.pop(trial, None)

    def replay(self, state: StudyState) -> None:
        """Replay every epoch of the trials that ended in earlier runs.

        The other trials report again, or continue.
        """
        for trial in state.trials:
            known = trial.metric(self._metric)
            if trial.status not in ENDED or not known:
                continue
            last = max(known)
            for epoch in known:
                metrics = trial.reports[epoch]["metrics"]
                if epoch < last:
                    self.ends(trial.id, epoch, metrics, float(epoch))
                else:
                    self.note_end(trial.id, epoch, metrics, float(epoch))

    def _stub(self, trial: str) -> _Stub:
        if trial not in self._stubs:
            task = self._task_of(trial)
            if task not in self._policies:
                self._policies[task] = self._make()
            stub = self._stubs[trial] = _Stub(trial, self._policies[task])
            with _drawing(trial):
                stub.policy.on_trial_add(_ALONE, stub)
        return self._stubs[trial]


@contextmanager
def _drawing(trial: str) -> Iterator[None]:
    """Seed NumPy's global generator with a trial's id, and restore it afterwards.

    HyperBand draws the trial's bracket from it, so a resumed study draws the same bracket.
    """
    before = np.random.get_state()
    np.random.seed(int(hashlib.sha256(trial.encode()).hexdigest()[:8], 16))
    try:
        yield
    finally:
        np.random.set_state(before)


@dataclass(eq=False)
class _Stub:
    """A trial as Tune's schedulers see it, the same object every time, and its scheduler."""

    trial_id: str
    policy: Any
    status: str = "RUNNING"
    last_result: dict[str, Any] = field(default_factory=dict)


_ALONE = SimpleNamespace(get_live_trials=list)
"""Stand-in for Tune's controller: it has no waiting trial for which another should be paused."""


def make_scheduler(search: SearchConfig, state: StudyState) -> Scheduler | None:
    """Return a search's scheduler, told what ``state`` holds; None if nothing ends trials early."""
    if not search.ends_early:
        return None
    epochs = max(
        (int(trial["config"]["epochs"]) for trial in state.plan["trials"]),
        default=state.config.trial.epochs,
    )
    scheduler = Scheduler(search, epochs, lambda trial: task_key(state.known[trial].config))
    scheduler.replay(state)
    return scheduler


def _make(search: SearchConfig, metric: str, mode: str, epochs: int) -> Any:
    from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

    common = {"time_attr": "epoch", "metric": metric, "mode": mode}
    grace = min(search.grace_period, epochs)
    if search.scheduler == "median":
        return MedianStoppingRule(**common, grace_period=grace, min_samples_required=3)
    eta = search.reduction_factor
    brackets = (
        max(1, min(BRACKETS, 1 + int(math.log(epochs / grace, eta))))
        if search.scheduler == "hyperband"
        else 1
    )
    return ASHAScheduler(
        **common,
        max_t=epochs,
        grace_period=grace,
        reduction_factor=eta,
        brackets=brackets,
        stop_last_trials=False,
    )
