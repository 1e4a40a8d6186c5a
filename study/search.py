"""What runs next: the planned trials in order, and, where an algorithm learns from results, what it proposes when there is room.

An :class:`Agenda` hands out trials one at a time. For adaptive algorithms it keeps one :class:`Proposer` a row and point of the grids,
so that every row is searched with the same effort. A proposal becomes one trial a seed, entered in the ledger before it runs; once all
of them have ended the proposer learns the mean of their objectives. Everything it learns is in the ledger, so a study that is continued
proposes on from where it was: the proposals are told to a fresh Optuna study again, and each is drawn with a generator seeded by the
search's seed and its own number. With one trial at a time tpe and cmaes then propose exactly what they would have; nsga2 goes on with
its generations, but may draw other children.

Objectives are taken from the last epoch. A trial that diverged or failed counts as failed, one that a scheduler ended early as pruned
(with one objective) or with its last value (with several).

Source: T. Akiba et al., "Optuna", KDD 2019.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from study.config import SearchConfig
from study.confirmation import make_confirmations
from study.durations import expected_seconds, seconds_an_epoch
from study.errors import refusals
from study.halving import Halving
from study.objectives import mean_objective
from study.plan import CANDIDATES, Base, Excluded, Plan, PlannedTrial, bind_space, is_history, refuse_twins
from study.population import Population
from study.rounds import Rounds
from study.space import Domain, Params, Space, apply
from study.state import ENDED, FAILED, FINISHED, STOPPED, StudyState, TrialState
from trainers.config import TrialConfig

ESTIMATE_SECONDS = 5.0


class Agenda:
    """The trials still to run, in order; with an adaptive search also those not yet thought of.

    Once no more than :attr:`tail` wait, the one that is expected to take longest comes first, so that no long one is left to run alone at
    the end. Before that the plan's order holds, which gives every row a figure early.

    Attributes:
        tail: set once it is known how many trials run at a time; 0 keeps the order to the end.

    Args:
        plan: the study's.
        state: what has happened; kept up to date by the ledger.
        added: told of every newly proposed trial before it is handed out; it must enter it in the ledger.
        only: ids of the trials to run, and nothing is proposed; None for all.

    Raises:
        UserError: from :meth:`peek` and :meth:`next`, where a proposal is a trial that the study has.
    """

    def __init__(
        self, plan: Plan, state: StudyState, added: Callable[[PlannedTrial], None], only: Collection[str] | None = None
    ) -> None:
        self._state, self._added = state, added
        left = [
            trial for trial in plan.trials if state.known[trial.id].status not in ENDED and (only is None or trial.id in only)
        ]
        self._todo = deque(relieved(trial, state) for trial in left)
        self._entered = {trial.id: trial for trial in plan.trials}
        self._handed_out: dict[str, PlannedTrial] = {}
        self._proposers = make_proposers(plan, state) if only is None else []
        self._confirmations = make_confirmations(plan) if only is None else []
        self._turn = 0
        self._seconds: dict[str, float] = {}
        self._estimated = -math.inf
        self.tail = 0

    def peek(self) -> PlannedTrial | None:
        """The next trial to run, left on the agenda; None if there is none, now or (see :attr:`exhausted`) at all."""
        if not self._todo:
            self._propose()
        if not self._todo and self._all_proposed:
            self._confirm()
        if 1 < len(self._todo) <= self.tail and not self._proposers:
            seconds = self.epoch_seconds()
            return max(self._todo, key=lambda trial: expected_seconds(trial, seconds))
        return self._todo[0] if self._todo else None

    def epoch_seconds(self) -> dict[str, float]:
        """:func:`study.durations.seconds_an_epoch` of this study, looked up anew every few seconds."""
        if time.monotonic() - self._estimated > ESTIMATE_SECONDS:
            self._seconds, self._estimated = seconds_an_epoch([self._state]), time.monotonic()
        return self._seconds

    def behind(self, head: PlannedTrial, count: int) -> list[PlannedTrial]:
        """So many of the trials that come after the next one, as far as they are known: nothing is proposed for want of results."""
        return [trial for trial in itertools.islice(self._todo, count + 1) if trial is not head][:count]

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
        return not self._todo and self._all_proposed and all(race.exhausted for race in self._confirmations)

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
            if trials := proposer.propose():
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
    return dataclasses.replace(trial, config=TrialConfig.from_dict(apply(trial.config.to_dict(), relief))) if relief else trial


def make_proposers(plan: Plan, state: StudyState) -> list[Proposer | Rounds]:
    """One a row and point of the grids, each knowing what ``state`` holds of its row; none where the search is not adaptive."""
    study = plan.study
    if not study.search.adaptive:
        return []
    space = bind_space(study)
    proposers: list[Proposer | Rounds] = []
    points = space.grid_points()
    kind = Population if study.search.population else Halving
    for row in plan.rows:
        base = Base(study, row)
        numbers = Numbers(max((trial.number or 0 for trial in state.known.values() if trial.row == row.label), default=0))
        for place, point in enumerate(points):
            proposer: Proposer | Rounds = (
                kind(base, space, point, study.search, study.seeds, place, len(points))
                if study.search.in_rounds
                else Proposer(base, space, point, study.search, study.seeds, numbers)
            )
            proposer.recall(state, [trial for trial in state.trials if trial.row == row.label])
            proposers.append(proposer)
    return proposers


class Numbers:
    """Numbers of a row's configurations, from 1; ``last`` was given already."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def next(self) -> int:
        """The next number."""
        self.last += 1
        return self.last


class Proposer:
    """Proposes configurations of one row at one point of the grids, with Optuna.

    Args:
        base: the row's base trial.
        space: what is searched.
        point: of the grids.
        search: how.
        seeds: the study's; a proposal is a trial for each.
        numbers: of the row's configurations.
    """

    def __init__(
        self, base: Base, space: Space, point: Params, search: SearchConfig, seeds: Iterable[int], numbers: Numbers
    ) -> None:
        optuna = _optuna()
        self._base, self._space, self._point, self._search = base, space, point, search
        self._seeds, self._numbers = list(seeds), numbers
        directions = [{"min": "minimize", "max": "maximize"}[mode] for mode in search.objectives.values()]
        self._study = optuna.create_study(directions=directions)
        self._open: dict[int, list[str]] = {}
        self._known: set[str] = set()
        self.proposed = 0
        self.excluded: list[Excluded] = []
        self._tries = 0

    @property
    def exhausted(self) -> bool:
        """Whether it will propose nothing more: it has proposed all it may, or tried long to find what is valid and new."""
        return self.proposed >= self._search.num_samples or self._tries >= CANDIDATES * self._search.num_samples

    def propose(self) -> list[PlannedTrial]:
        """The next configuration, one trial a seed; none if exhausted."""
        optuna = _optuna()
        while not self.exhausted:
            asked, params = self._ask()
            self._tries += 1
            try:
                trials = [self._base.trial(seed, self._numbers.last + 1, params) for seed in self._seeds]
            except ValueError as error:
                self.excluded.append(self._base.exclude(params, error))
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
                continue
            if trials[0].id in self._known:
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
                continue
            self._numbers.next()
            self._enter(asked.number, trials[0].id, [trial.id for trial in trials])
            noted = dict(self._study.trials[asked.number].system_attrs)
            return [dataclasses.replace(trial, asked=noted) for trial in trials]
        return []

    def recall(self, state: StudyState, trials: Iterable[TrialState]) -> None:
        """Take in what was proposed at this point before, in its order, each with its result if it has one.

        What lies outside the space, which has been changed since, is history: Optuna does not hear of it.
        """
        configurations: dict[int, list[TrialState]] = {}
        for trial in trials:
            if trial.number is not None and all(trial.params.get(key) == value for key, value in self._point.items()):
                configurations.setdefault(trial.number, []).append(trial)
        for number in sorted(configurations):
            of_seeds = configurations[number]
            if is_history(of_seeds[0].params, self._space):
                self._known.add(of_seeds[0].id)
                continue
            self._study.add_trial(self._again(of_seeds[0]))
            self._enter(self._study.trials[-1].number, of_seeds[0].id, [trial.id for trial in of_seeds])
            self.learn(state)

    def learn(self, state: StudyState) -> None:
        """Tell Optuna of the configurations whose trials have all ended."""
        for number, ids in list(self._open.items()):
            trials = [state.known[trial] for trial in ids]
            if all(trial.status in ENDED for trial in trials):
                self._tell(number, trials)
                del self._open[number]

    def _enter(self, number: int, first: str, ids: list[str]) -> None:
        self._open[number] = ids
        self._known.add(first)
        self.proposed += 1
        self._tries = 0

    def _ask(self) -> tuple[Any, Params]:
        """A trial of Optuna's and its values; the generator depends on how many were proposed before, and on nothing else."""
        seed = np.random.SeedSequence([self._search.seed, self.proposed, self._tries]).generate_state(1)[0]
        self._study.sampler = make_sampler(self._search, int(seed))
        asked = self._study.ask()
        params: Params = dict(self._point)
        for domain in self._space.sampled:
            if domain.applies(params):
                params[domain.key] = suggest(asked, domain)
        return asked, self._space.pruned(params)

    def _again(self, trial: TrialState) -> Any:
        """An earlier proposal as a running trial of Optuna's."""
        optuna = _optuna()
        drawn = [domain for domain in self._space.sampled if domain.key in trial.params]
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params={
                domain.key: _place(domain, trial.params[domain.key]) if domain.categorical else trial.params[domain.key]
                for domain in drawn
            },
            distributions={domain.key: distribution(domain) for domain in drawn},
            system_attrs=trial.asked,
        )

    def _tell(self, number: int, trials: list[TrialState]) -> None:
        state = _optuna().trial.TrialState
        values = [mean_objective(trials, metric) for metric in self._search.objectives]
        usable = all(trial.status != FAILED for trial in trials) and all(math.isfinite(value) for value in values)
        if not usable:
            self._study.tell(number, state=state.FAIL)
        elif len(values) == 1 and any(trial.status == STOPPED for trial in trials):
            frozen = self._study.trials[number]
            self._study._storage.set_trial_intermediate_value(frozen._trial_id, min(trial.epoch for trial in trials), values[0])
            self._study.tell(number, state=state.PRUNED)
        else:
            self._study.tell(number, values)


def make_sampler(search: SearchConfig, seed: int) -> Any:
    """Optuna's sampler for ``search.algorithm``."""
    optuna = _optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if search.algorithm == "tpe":
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        if search.algorithm == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed)
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=min(50, max(4, search.num_samples // 4)))


def distribution(domain: Domain) -> Any:
    """Optuna's distribution of a domain; choices are categories by their place in the list."""
    optuna = _optuna()
    if domain.categorical:
        return optuna.distributions.CategoricalDistribution(list(range(len(domain.values))))
    low, high, *step = domain.values
    if domain.kind.endswith("randint"):
        return optuna.distributions.IntDistribution(low, high - 1, log=domain.kind == "lograndint")
    if step:
        return optuna.distributions.FloatDistribution(low, high, step=step[0])
    return optuna.distributions.FloatDistribution(low, high, log=domain.kind == "loguniform")


def suggest(asked: Any, domain: Domain) -> Any:
    """A value for ``domain`` from an Optuna trial."""
    shape = distribution(domain)
    if domain.categorical:
        return domain.values[asked.suggest_categorical(domain.key, shape.choices)]
    if domain.kind.endswith("randint"):
        value = asked.suggest_int(domain.key, shape.low, shape.high, log=shape.log)
        return float(value) if domain.real else value
    return asked.suggest_float(domain.key, shape.low, shape.high, step=shape.step, log=shape.log)


def adopt(plan: Plan, before: StudyState) -> Plan:
    """A plan with the trials that earlier runs of the study proposed, as far as they are still what their sampled values say.

    An adaptive search has no trials of its own until it runs; what it proposed before is in the ledger, and so are the repetitions of the
    best configurations (:mod:`study.confirmation`). Of what lies outside a space that was changed since, only what has ended stays.
    """
    search = plan.study.search
    proposed = {*(plan.study.seeds if search.adaptive else []), *search.confirm_seeds}
    if not proposed:
        return plan
    bases = {row.label: Base(plan.study, row) for row in plan.rows}
    space = bind_space(plan.study)
    numbers = {(trial.row, _canonical(trial.params)): trial.number for trial in plan.trials}
    kept = []
    for known in before.known.values():
        number = known.number if search.adaptive else numbers.get((known.row, _canonical(known.params)))
        if number is None or known.row not in bases or known.seed not in proposed:
            continue
        over = known.status in (FINISHED, STOPPED)
        trial = _again(bases[known.row], known, number) if over or not is_history(known.params, space) else None
        kept += [trial] if trial else []
    return dataclasses.replace(plan, trials=(*(() if search.adaptive else plan.trials), *kept))


def _again(base: Base, known: TrialState, number: int) -> PlannedTrial | None:
    try:
        trial = base.trial(known.seed, number, known.params)
    except (ValueError, KeyError):
        return None
    return dataclasses.replace(trial, asked=known.asked) if trial.id == known.id else None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _place(domain: Domain, value: Any) -> int:
    return [_canonical(entry) for entry in domain.values].index(_canonical(value))


def _optuna() -> Any:
    """Optuna, quiet; loaded where an adaptive search needs it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("optuna").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna
