"""What runs next: the planned trials in order, and, where an algorithm learns from results, what it
proposes when there is room.

An :class:`Agenda` hands out trials one at a time. For adaptive algorithms it keeps one
:class:`Proposer` a row and point of the grids, so that every row is searched with the same effort.
A proposal becomes one trial a seed, entered in the ledger before it runs; once all of them have
ended the proposer learns the mean of their objectives. Everything it learns is in the ledger, so a
study that is continued proposes on from where it was: the proposals are told to a fresh Optuna
study again, and each is drawn with a generator seeded by the search's seed and its own number. With
one trial at a time tpe and cmaes then propose exactly what they would have; nsga2 goes on with its
generations, but may draw other children.

Objectives are taken from the last epoch. A trial that diverged or failed counts as failed, one that
a scheduler ended early as pruned (with one objective) or with its last value (with several).

Source: T. Akiba et al., "Optuna", KDD 2019.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection

from study.config.keys import apply
from study.config.space import canonical
from study.errors import refusals
from study.ledger.state import ENDED, FINISHED, STOPPED, StudyState, TrialState
from study.plan.candidates import bind_space, is_history
from study.plan.durations import expected_seconds, seconds_an_epoch
from study.plan.plan import Base, Excluded, Plan, PlannedTrial, first_point, refuse_twins
from study.search.halving import Halving
from study.search.optuna_proposer import Counter, Proposer
from study.search.population import Population
from study.search.racing import make_confirmations
from study.search.rounds import Rounds
from trainers.config import TrialConfig

ESTIMATE_SECONDS = 5.0


class Agenda:
    """The trials still to run, in order; with an adaptive search also those not yet thought of.

    Once no more than :attr:`tail` wait, the one that is expected to take longest comes first, so
    that no long one is left to run alone at the end. Before that the plan's order holds, which
    gives every row a figure early.

    Attributes:
        tail: set once it is known how many trials run at a time; 0 keeps the order to the end.

    Args:
        plan: the study's.
        state: what has happened; kept up to date by the ledger.
        added: told of every newly proposed trial before it is handed out; it must enter it in the
            ledger.
        only: ids of the trials to run, and nothing is proposed; None for all.

    Raises:
        UserError: from :meth:`peek` and :meth:`next`, where a proposal is a trial that the study
            has, or a rule refuses nearly all of the space; the latter also from here.
    """

    def __init__(
        self,
        plan: Plan,
        state: StudyState,
        added: Callable[[PlannedTrial], None],
        only: Collection[str] | None = None,
    ) -> None:
        self._state, self._added = state, added
        left = [
            trial
            for trial in plan.trials
            if state.known[trial.id].status not in ENDED and (only is None or trial.id in only)
        ]
        self._todo = deque(relieved(trial, state) for trial in left)
        self._entered = {trial.id: trial for trial in plan.trials}
        self._handed_out: dict[str, PlannedTrial] = {}
        with refusals():
            self._proposers = make_proposers(plan, state) if only is None else []
        self._confirmations = make_confirmations(plan) if only is None else []
        self._turn = 0
        self._seconds: dict[str, float] = {}
        self._estimated = -math.inf
        self.tail = 0

    def peek(self) -> PlannedTrial | None:
        """The next trial to run, left on the agenda; None if there is none, now or (see
        :attr:`exhausted`) at all."""
        if not self._todo:
            self._propose()
        if not self._todo and self._all_proposed:
            self._confirm()
        if 1 < len(self._todo) <= self.tail and not self._proposers:
            seconds = self.epoch_seconds()
            return max(self._todo, key=lambda trial: expected_seconds(trial, seconds))
        return self._todo[0] if self._todo else None

    def epoch_seconds(self) -> dict[str, float]:
        """:func:`study.plan.durations.seconds_an_epoch` of this study, looked up anew every few
        seconds."""
        if time.monotonic() - self._estimated > ESTIMATE_SECONDS:
            self._seconds, self._estimated = seconds_an_epoch([self._state]), time.monotonic()
        return self._seconds

    def behind(self, head: PlannedTrial, count: int) -> list[PlannedTrial]:
        """So many of the trials that come after the next one, as far as they are known: nothing is
        proposed for want of results."""
        return [trial for trial in itertools.islice(self._todo, count + 1) if trial is not head][
            :count
        ]

    def take(self, trial: PlannedTrial) -> None:
        """Take a trial off the agenda: it runs now."""
        self._todo.remove(trial)
        self._handed_out[trial.id] = trial

    def next(self) -> PlannedTrial | None:
        """The next trial to run, taken off the agenda; None as for :meth:`peek`."""
        trial = self.peek()
        if trial is not None:
            self.take(trial)
        return trial

    def again(self, trial: str) -> None:
        """Put the trial of that id, which was handed out, on the agenda once more, at its head."""
        self._todo.appendleft(relieved(self._handed_out[trial], self._state))

    @property
    def trials(self) -> list[PlannedTrial]:
        """Those that wait, as far as they are known."""
        return list(self._todo)

    @property
    def exhausted(self) -> bool:
        """Whether nothing will come any more."""
        return (
            not self._todo
            and self._all_proposed
            and all(race.exhausted for race in self._confirmations)
        )

    @property
    def _all_proposed(self) -> bool:
        return all(proposer.exhausted for proposer in self._proposers)

    def _confirm(self) -> None:
        """The next round of every row's race, as far as there is one now."""
        for race in self._confirmations:
            self._enter(race.next(self._state))

    def _propose(self) -> None:
        """One more configuration, from the proposers in turn."""
        for proposer in self._proposers:
            proposer.learn(self._state)
        for _ in self._proposers:
            proposer = self._proposers[self._turn % len(self._proposers)]
            self._turn += 1
            with refusals():
                trials = proposer.propose()
            if trials:
                self._enter(trials)
                return

    def _enter(self, trials: list[PlannedTrial]) -> None:
        """Take in what was proposed."""
        with refusals():
            refuse_twins(trials, self._entered)
        for trial in trials:
            self._added(trial)
        self._todo.extend(trials)


def relieved(trial: PlannedTrial, state: StudyState) -> PlannedTrial:
    """The trial as it is to run since it ran out of memory, if it did."""
    relief = state.known[trial.id].relief
    return (
        dataclasses.replace(
            trial, config=TrialConfig.from_dict(apply(trial.config.to_dict(), relief))
        )
        if relief
        else trial
    )


def make_proposers(plan: Plan, state: StudyState) -> list[Proposer | Rounds]:
    """One a row and point of the grids, each knowing what ``state`` holds of its row; none where
    the search is not adaptive."""
    study = plan.study
    if not study.search.adaptive:
        return []
    space = bind_space(study)
    proposers: list[Proposer | Rounds] = []
    points = space.grid_points()
    kind = Population if study.search.population else Halving
    for row in plan.rows:
        base = Base(study, row)
        numbers = Counter(
            max(
                (trial.number or 0 for trial in state.known.values() if trial.row == row.label),
                default=0,
            )
        )
        for place, point in enumerate(points):
            if isinstance(first_point(study, base, space, point), Excluded):
                continue
            proposer: Proposer | Rounds = (
                kind(base, space, point, study.search, study.seeds, place, len(points))
                if study.search.in_rounds
                else Proposer(base, space, point, study.search, study.seeds, numbers)
            )
            proposer.recall(state, [trial for trial in state.trials if trial.row == row.label])
            proposers.append(proposer)
    return proposers


def adopt(plan: Plan, before: StudyState) -> Plan:
    """A plan with the trials that earlier runs of the study proposed, as far as they are still what
    their sampled values say.

    An adaptive search has no trials of its own until it runs; what it proposed before is in the
    ledger, and so are the repetitions of the best configurations (:mod:`study.search.racing`). Of
    what lies outside a space that was changed since, only what has ended stays.
    """
    search = plan.study.search
    proposed = {*(plan.study.seeds if search.adaptive else []), *search.confirm_seeds}
    if not proposed:
        return plan
    bases = {row.label: Base(plan.study, row) for row in plan.rows}
    space = bind_space(plan.study)
    numbers = {(trial.row, canonical(trial.params)): trial.number for trial in plan.trials}
    kept = []
    for known in before.known.values():
        number = (
            known.number if search.adaptive else numbers.get((known.row, canonical(known.params)))
        )
        if number is None or known.row not in bases or known.seed not in proposed:
            continue
        over = known.status in (FINISHED, STOPPED)
        trial = (
            _again(bases[known.row], known, number)
            if over or not is_history(known.params, space)
            else None
        )
        kept += [trial] if trial else []
    return dataclasses.replace(plan, trials=(*(() if search.adaptive else plan.trials), *kept))


def _again(base: Base, known: TrialState, number: int) -> PlannedTrial | None:
    try:
        trial = base.trial(known.seed, number, known.params)
    except (ValueError, KeyError):
        return None
    return dataclasses.replace(trial, asked=known.asked) if trial.id == known.id else None
