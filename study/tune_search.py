"""The study's policies as Ray Tune wants them: a Searcher that hands out the agenda, a Stopper, schedulers that a resumed study can feed.

Ray Tune keeps a trial or two waiting for CPUs. A trial that waits can no longer be held back by a pause, and one proposed before there is
room knows less than it could, so the searcher hands a trial out only where its resources are free. Pausing answers "not now", stopping
"no more".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher

from study.config import SearchConfig
from study.control import Control, Wish
from study.plan import PlannedTrial
from study.search import Agenda
from study.state import ENDED, StudyState

CAPACITY_SECONDS = 5.0
UNTOUCHABLE = "untouchable"
"""In a trial's Tune config: no scheduler ends it early."""
BRACKETS = 3
"""Of hyperband: how many ways of trading the number of trials for their length it mixes, as far as the epochs allow."""


class AgendaSearcher(Searcher):  # type: ignore[misc]
    """Hands out an agenda's trials while ``control`` lets it.

    Args:
        agenda: what runs next.
        control: asked before each trial.
        to_config: a trial's Tune config.
        room: whether a trial's resources are free beside those of the trials that run.
    """

    def __init__(self, agenda: Agenda, control: Control, to_config: Callable[[PlannedTrial], dict[str, Any]], room: Room) -> None:
        super().__init__()
        self._agenda, self._control, self._to_config, self._room = agenda, control, to_config, room

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its searcher into a snapshot that we never read."""
        return {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Nothing to set: the agenda knows its objectives."""
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial's config; None for "not now", ``Searcher.FINISHED`` for "no more"."""
        decision = self._control.decide()
        if decision.wish >= Wish.STOP or self._control.full:
            return str(Searcher.FINISHED)
        if decision.wish == Wish.PAUSE:
            return None
        if not self._room.any:
            return None
        trial = self._agenda.peek()
        if trial is None:
            # One that still runs may run out of memory and come again.
            return str(Searcher.FINISHED) if self._agenda.exhausted and not self._room.taken else None
        if not self._room.take(trial_id, trial):
            return None
        self._agenda.next()
        self._control.begun(trial.id)
        return self._to_config(trial)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Its resources are free; the rest the ledger has."""
        self._room.free(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the ledger has it."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class Room:
    """Which resources the trials that run leave free.

    Args:
        capacity: CPUs and GPUs there are, asked again every few seconds, since clusters grow.
        needs: of a trial.
        ahead: trials that may wait beyond that, so that a cluster which grows on demand sees the demand.
    """

    def __init__(
        self, capacity: Callable[[], dict[str, float]], needs: Callable[[PlannedTrial], dict[str, float]], ahead: int = 0
    ) -> None:
        self._capacity, self._needs, self._ahead = capacity, needs, ahead
        self._taken: dict[str, dict[str, float]] = {}
        self._known: dict[str, float] = {}
        self._asked = -math.inf

    @property
    def taken(self) -> bool:
        """Whether any trial has resources."""
        return bool(self._taken)

    @property
    def any(self) -> bool:
        """Whether a CPU is free at all."""
        return self._fits({"CPU": 1.0})

    def take(self, key: str, trial: PlannedTrial) -> bool:
        """Take a trial's resources under ``key``; False, and nothing taken, if they are not free."""
        needs = self._needs(trial)
        if not self._fits(needs):
            return False
        self._taken[key] = needs
        return True

    def free(self, key: str) -> None:
        """Give back what ``key`` took."""
        self._taken.pop(key, None)

    def _fits(self, needs: dict[str, float]) -> bool:
        if not self._taken:
            return True
        if time.monotonic() - self._asked > CAPACITY_SECONDS:
            self._known, self._asked = self._capacity(), time.monotonic()
        waiting = 0
        for name, amount in needs.items():
            taken = sum(entry.get(name, 0.0) for entry in self._taken.values())
            waiting = max(waiting, math.ceil((taken + amount - self._known.get(name, 0.0) - 1e-6) / amount))
        return waiting <= self._ahead


class StopWhenCancelled(tune.Stopper):  # type: ignore[misc]
    """Ends every trial once ``control`` says cancel."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __getstate__(self) -> dict[str, Any]:
        """Pickled by Tune, never read."""
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No single trial is stopped here."""
        return False

    def stop_all(self) -> bool:
        """Whether the study is cancelled."""
        return self._control.decide().wish == Wish.CANCEL


class _EndsDiverged:
    """A scheduler that ends a trial whose metric is no longer a finite number; ahead of a Ray Tune scheduler among the bases."""

    _metric: str

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Stop a diverged trial, else what the scheduler says; it has no say where a configuration is confirmed."""
        if getattr(trial, "config", {}).get(UNTOUCHABLE):
            return str(TrialScheduler.CONTINUE)
        value = result.get(self._metric)
        if isinstance(value, float) and not math.isfinite(value):
            return str(TrialScheduler.STOP)
        return str(super().on_trial_result(controller, trial, result))  # type: ignore[misc]


class _Asha(_EndsDiverged, ASHAScheduler):  # type: ignore[misc]
    pass


class _Median(_EndsDiverged, MedianStoppingRule):  # type: ignore[misc]
    pass


def make_scheduler(search: SearchConfig, state: StudyState) -> Any:
    """Tune's scheduler for ``search.scheduler``, fed with what ``state`` holds."""
    if not search.ends_early:
        return FIFOScheduler()
    metric, mode = next(iter(search.objectives.items()))
    epochs = max((int(trial["config"]["epochs"]) for trial in state.plan["trials"]), default=state.config.trial.epochs)
    common = {"time_attr": "epoch", "metric": metric, "mode": mode}
    grace = min(search.grace_period, epochs)
    if search.scheduler == "median":
        scheduler: Any = _Median(**common, grace_period=grace, min_samples_required=3)
    else:
        eta = search.reduction_factor
        brackets = max(1, min(BRACKETS, 1 + int(math.log(epochs / grace, eta)))) if search.scheduler == "hyperband" else 1
        scheduler = _Asha(
            **common, max_t=epochs, grace_period=grace, reduction_factor=eta, brackets=brackets, stop_last_trials=False
        )
    replay(scheduler, state, metric)
    return scheduler


def replay(scheduler: Any, state: StudyState, metric: str) -> None:
    """Tell ``scheduler`` of every epoch that trials which have ended reported in earlier runs; the rest report again or go on."""
    for trial in state.trials:
        values = trial.metric(metric)
        if trial.status not in ENDED or not values:
            continue
        stub = SimpleNamespace(trial_id=trial.id, last_result={}, status="TERMINATED")
        scheduler.on_trial_add(None, stub)
        results = [{"epoch": epoch, metric: value, "time_total_s": float(epoch)} for epoch, value in values.items()]
        for result in results[:-1]:
            scheduler.on_trial_result(None, stub, result)
        scheduler.on_trial_complete(None, stub, results[-1])
