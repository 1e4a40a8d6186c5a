"""Searches without training: the real agenda, made-up results, no Ray."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.ledger.state import fold
from study.plan.plan import Plan
from study.plan.trials import PlannedTrial
from study.search.agenda import Agenda, adopt
from tests.study.conftest import TINY

Make = Callable[..., StudyConfig]
Curve: TypeAlias = Callable[[PlannedTrial], list[float]]
"""A trial's error by epoch."""
SPACE = """
space:
  optimizer.lr: {loguniform: [0.001, 1.0]}
  optimizer.name: {choice: [sgd, adam]}
  optimizer.momentum: {uniform: [0.0, 0.9], when: {optimizer.name: sgd}}
search: {num_samples: 6}
"""


@pytest.fixture
def searched(tmp_path: Path) -> Make:
    """The tiny study with a space: ``searched("search.algorithm=tpe")``."""

    def make(*overrides: str, space: str = SPACE) -> StudyConfig:
        path = tmp_path / "searched.yaml"
        path.write_text(TINY + space)
        return load(str(path), [f"storage={tmp_path}", *overrides])

    return make


class Pretend:
    """Runs an agenda without training.

    Args:
        plan: the study's.
        curve: the errors that a trial reports.
        history: the ledger of an earlier run, which this run continues.
        slots: number of trials that run at a time, taking turns.
        fails: tells which trials fail.
    """

    def __init__(
        self,
        plan: Plan,
        curve: Curve,
        history: Sequence[dict[str, Any]] = (),
        *,
        slots: int = 1,
        fails: Callable[[PlannedTrial], bool] = lambda trial: False,
    ) -> None:
        self.events = list(history)
        self.state = fold(self.events)
        self.plan = adopt(plan, self.state) if history else plan
        self._curve, self._slots, self._fails = curve, slots, fails
        self._append({"event": "planned", **self.plan.to_event(), "data": []})
        self.agenda = Agenda(
            self.plan,
            self.state,
            lambda trial: self._append({"event": "added", "planned": trial.to_dict()}),
        )

    def run(self, at_most: int = 10**6) -> list[PlannedTrial]:
        """The trials that ran, in order."""
        done: list[PlannedTrial] = []
        running: list[PlannedTrial] = []
        while len(done) < at_most:
            while len(running) < self._slots and (trial := self.agenda.next()) is not None:
                running.append(trial)
                self._append({"event": "started", "trial": trial.id})
            if not running:
                break
            done.append(running.pop(0))
            self._train(done[-1])
        return done

    def _train(self, trial: PlannedTrial) -> None:
        if self._fails(trial):
            self._append({"event": "failed", "trial": trial.id, "error": "made up"})
            return
        for epoch, error in enumerate(self._curve(trial), 1):
            metrics = {"validation/error": error}
            self._append({"event": "report", "trial": trial.id, "epoch": epoch, "metrics": metrics})
        self._append({"event": "finished", "trial": trial.id, "metrics": {"test/error": 0.5}})

    def _append(self, event: dict[str, Any]) -> None:
        self.events.append(event | {"time": float(len(self.events))})
        self.state.apply(self.events[-1])


def steady(error: Callable[[dict[str, Any]], float]) -> Curve:
    """The same error in every epoch, a function of the sampled values."""
    return lambda trial: [error(trial.params)] * trial.config.epochs


def bowl(params: dict[str, Any]) -> float:
    """Lowest at lr = 0.03 with adam."""
    distance = math.log10(params["optimizer.lr"] / 0.03)
    return distance**2 + (params["optimizer.name"] == "sgd")


def rates(trial: PlannedTrial) -> list[float]:
    """The learning rate of each epoch."""
    found = [trial.params["optimizer.lr"]] * trial.config.epochs
    for change in trial.config.changes:
        found[change["epoch"] :] = [change.get("optimizer.lr", found[-1])] * (
            trial.config.epochs - change["epoch"]
        )
    return found


def errors_of(trial: PlannedTrial) -> list[float]:
    """Made-up errors by epoch: they fall faster the nearer the rate is to 0.03."""
    steps = [1 / (1 + math.log10(rate / 0.03) ** 2) for rate in rates(trial)]
    return [math.exp(-0.3 * total) for total in itertools.accumulate(steps)]
