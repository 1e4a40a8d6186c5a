"""The agenda of a study: which trial runs next, planned or proposed by an adaptive search.

An :class:`Agenda` returns trials one at a time. For adaptive algorithms it has one
:class:`Proposer` per row and point of the grids, so all rows are searched with the same effort. A
proposal becomes one trial per seed, which is written to the ledger before it runs. Once all of
these have ended, the proposer gets the mean of their objectives. The ledger has all this
information, so a resumed search continues: a new Optuna study gets the earlier proposals and
results, and each proposal is sampled with a generator seeded by the search's seed and the number of
the proposal. With one trial at a time, tpe and cmaes then propose exactly the same points as
without the interruption; nsga2 continues its generations and may sample other children.

Objectives come from the last epoch; costs (seconds, joules, bytes) are sums over the epochs. A
trial that diverged or failed counts as failed. A trial that a scheduler ended early counts as
pruned (with one objective) or with its last value (with several).

Source: T. Akiba et al., "Optuna", KDD 2019.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations, product

from study.config.keys import apply
from study.config.space import canonical
from study.errors import refusals
from study.ledger.state import ENDED, FINISHED, STOPPED, StudyState, TrialState
from study.plan.candidates import bind_space, first_point, is_history
from study.plan.durations import expected_seconds, seconds_an_epoch
from study.plan.plan import Plan
from study.plan.trials import Base, Excluded, PlannedTrial, refuse_twins
from study.search.halving import Halving
from study.search.optuna_proposer import Counter, Proposer
from study.search.population import Population
from study.search.racing import make_confirmations
from study.search.rounds import Rounds
from trainers.config import TrialConfig

ESTIMATE_SECONDS = 5.0


class Agenda:
    """The trials still to run, in order, and the source of those an adaptive search will propose.

    Once no more than :attr:`tail` trials wait, the one that is expected to take longest comes
    first, so that no long trial is left to run alone at the end. Before that the plan's order
    holds, which gives every row a figure early.

    Attributes:
        tail: number of waiting trials from which the longest comes first; set once it is known how
            many trials run at a time. 0 keeps the order to the end.
        earlier: seconds per epoch in earlier studies, see :mod:`study.plan.durations`.

    Args:
        plan: plan of the study.
        state: state of the study, kept up to date by the ledger.
        added: called with every newly proposed trial before it is handed out; it must enter the
            trial in the ledger.
        only: ids of the trials to run, with nothing proposed; None for all.

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
        self.earlier: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._estimated = -math.inf
        self.tail = 0

    def peek(self) -> PlannedTrial | None:
        """Return the next trial to run, and leave it on the agenda.

        Returns None if no trial is available now, or if all are done (:attr:`exhausted`).
        """
        if not self._todo:
            self._propose()
        if not self._todo and self._all_proposed:
            self._confirm()
        if 1 < len(self._todo) <= self.tail and not self._proposers:
            seconds = self.epoch_seconds()
            return max(self._todo, key=lambda trial: expected_seconds(trial, seconds))
        return self._todo[0] if self._todo else None

    def epoch_seconds(self) -> dict[str, float]:
        """Return the seconds per epoch of this study's trials, updated every few seconds, and of
        :attr:`earlier` ones.

        See :func:`study.plan.durations.seconds_an_epoch`.
        """
        if time.monotonic() - self._estimated > ESTIMATE_SECONDS:
            self._seconds = self.earlier | seconds_an_epoch([self._state])
            self._estimated = time.monotonic()
        return self._seconds

    def behind(self, head: PlannedTrial, count: int, propose: bool) -> Iterator[PlannedTrial]:
        """Yield up to ``count`` trials that come after ``head``, with new proposals or without."""
        passed = {head.id}
        while len(passed) <= count:
            trial = next((trial for trial in self._todo if trial.id not in passed), None)
            if trial is not None:
                passed.add(trial.id)
                yield trial
                continue
            known = len(self._todo)
            if propose:
                self._propose()
            if len(self._todo) == known:
                return

    def take(self, trial: PlannedTrial) -> None:
        """Take a trial off the agenda: it runs now."""
        self._todo.remove(trial)
        self._handed_out[trial.id] = trial

    def next(self) -> PlannedTrial | None:
        """Return the next trial to run and take it off the agenda; None as for :meth:`peek`."""
        trial = self.peek()
        if trial is not None:
            self.take(trial)
        return trial

    def again(self, trial: str) -> None:
        """Put a trial that was handed out, named by its id, back at the head of the agenda."""
        self._todo.appendleft(relieved(self._handed_out[trial], self._state))

    @property
    def trials(self) -> list[PlannedTrial]:
        """Trials that wait, as far as they are known."""
        return list(self._todo)

    @property
    def exhausted(self) -> bool:
        """Whether no trial will come any more."""
        return (
            not self._todo
            and self._all_proposed
            and all(race.exhausted for race in self._confirmations)
        )

    @property
    def _all_proposed(self) -> bool:
        return all(proposer.exhausted for proposer in self._proposers)

    def _confirm(self) -> None:
        """Enter the next round of every row's race, if there is one now."""
        for race in self._confirmations:
            self._enter(race.next(self._state))

    def _propose(self) -> None:
        """Add one more configuration, from the proposer with the fewest proposals.

        So the proposers take turns, also in a resumed study.
        """
        for proposer in self._proposers:
            proposer.learn(self._state)
        for proposer in sorted(self._proposers, key=lambda each: each.proposed):
            with refusals():
                trials = proposer.propose()
            if trials:
                self._enter(trials)
                return

    def _enter(self, trials: list[PlannedTrial]) -> None:
        """Enter proposed trials on the agenda and in the ledger."""
        with refusals():
            refuse_twins(trials, self._entered)
        for trial in trials:
            self._added(trial)
        self._todo.extend(trials)


def relieved(trial: PlannedTrial, state: StudyState) -> PlannedTrial:
    """Return the trial with the changes that it runs with since it ran out of memory, if any."""
    relief = state.known[trial.id].relief
    return (
        dataclasses.replace(
            trial, config=TrialConfig.from_dict(apply(trial.config.to_dict(), relief))
        )
        if relief
        else trial
    )


def make_proposers(plan: Plan, state: StudyState) -> list[Proposer | Rounds]:
    """Return a proposer per row, search and point of the grids, with its earlier results.

    Returns an empty list if the search is not adaptive.
    """
    study = plan.study
    if not study.search.adaptive:
        return []
    space = bind_space(study)
    proposers: list[Proposer | Rounds] = []
    budgets: dict[str, set[str]] = {}
    points, searches = space.grid_points(), study.search.by_seed(study.seeds)
    kind = Population if study.search.population else Halving
    for row in plan.rows:
        base = Base(study, row)
        numbers = Counter(
            max(
                (trial.number or 0 for trial in state.known.values() if trial.row == row.label),
                default=0,
            )
        )
        mine = [trial for trial in state.trials if trial.row == row.label]
        left_out = [
            isinstance(first_point(searches[0][0], study.seeds[0], base, space, point), Excluded)
            for point in points
        ]
        for (turn, (search, seeds)), (place, point) in product(
            enumerate(searches), enumerate(points)
        ):
            if left_out[place]:
                continue
            size = place, len(points), turn, len(searches)
            proposer: Proposer | Rounds = (
                kind(base, space, point, search, seeds, *size)
                if search.in_rounds
                else Proposer(base, space, point, search, seeds, numbers)
            )
            if isinstance(proposer, Rounds):
                budgets[row.label] = budgets.get(row.label, set()) | proposer.budgets
            alone = [each for each in mine if each.seed in seeds] if search.per_seed else mine
            proposer.recall(state, alone)
            proposers.append(proposer)
    if not state.known:  # a search that has begun may have passed them
        _refuse_shared_rounds(budgets, study.search.scheduler)
    return proposers


def _refuse_shared_rounds(budgets: Mapping[str, set[str]], scheduler: str) -> None:
    """Refuse rows of which one has rounds that the other has too: equal draws make equal trials,
    and a trial is of one row.

    Raises:
        ValueError: with two such rows.
    """
    for (one, ours), (other, theirs) in combinations(budgets.items(), 2):
        if ours & theirs:
            raise ValueError(
                f"rows {one!r} and {other!r} with search.scheduler={scheduler}: they only differ in"
                " keys that its rounds change, so the rows would share trials; search them in"
                " separate studies"
            )


def adopt(plan: Plan, before: StudyState) -> Plan:
    """Return the plan with the trials that earlier runs of the study proposed.

    The ledger has the earlier proposals of an adaptive search and the repetitions of its best
    configurations (:mod:`study.search.racing`). A trial is left out if its sampled values no longer
    give its config. Trials outside a changed space stay only if they have ended.

    Raises:
        ValueError: ``search.per_seed`` was changed.
    """
    search = plan.study.search
    if search.adaptive and before.known:
        was = bool(before.config.search.per_seed)
        if was != bool(search.per_seed):
            raise ValueError(
                f"search.per_seed={str(not was).lower()}: the search has trials, and was begun with"
                f" {str(was).lower()}; leave it, or give the study another name"
            )
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
