"""Proposals by an Optuna sampler, from the results of earlier proposals."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from study.config import SearchConfig
from study.config.distribution import distribution, quiet_optuna
from study.config.search import choose_sampler, excess
from study.config.space import Domain, Params, Space, canonical
from study.ledger.state import ENDED, FAILED, STOPPED, StudyState, TrialState
from study.plan.candidates import CANDIDATES, is_history, refuse_scarcity
from study.plan.trials import Base, Excluded, PlannedTrial
from study.results.objectives import mean_objective


class Counter:
    """A counter of a row's configurations, from 1; ``last`` is the last number in use."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def next(self) -> int:
        """Return the next number."""
        self.last += 1
        return self.last


class Proposer:
    """A proposer of configurations for one row at one point of the grids, with Optuna.

    Args:
        base: base trial of the row.
        space: search space.
        point: point of the grids.
        search: options of the search.
        seeds: seeds of this search; a proposal is a trial for each.
        numbers: counter of the row's configurations.
    """

    def __init__(
        self,
        base: Base,
        space: Space,
        point: Params,
        search: SearchConfig,
        seeds: Iterable[int],
        numbers: Counter,
    ) -> None:
        optuna = quiet_optuna()
        self._base, self._space, self._point, self._search = base, space, point, search
        self._seeds, self._numbers = list(seeds), numbers
        self._algorithm, _ = choose_sampler(search, space)
        self._points = finite_points(space, point, CANDIDATES * search.num_samples)
        directions = [
            {"min": "minimize", "max": "maximize"}[mode] for mode in search.objectives.values()
        ]
        self._storage = optuna.storages.InMemoryStorage()
        self._study = optuna.create_study(storage=self._storage, directions=directions)
        self._open: dict[int, list[str]] = {}
        self._known: set[str] = set()
        self.proposed = 0
        self._refused: dict[str, Excluded] = {}
        self._tries = 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing more will be proposed.

        Either all configurations have been proposed, or many tries found no valid new one.
        """
        return (
            self.proposed >= self._search.num_samples
            or self._tries >= CANDIDATES * self._search.num_samples
        )

    def propose(self) -> list[PlannedTrial]:
        """Return the next configuration, one trial per seed; none if exhausted.

        Raises:
            ValueError: it tried long, and found little but what a rule refuses.
        """
        optuna = quiet_optuna()
        while not self.exhausted:
            if not self._redirect():
                break
            asked, params = self._ask()
            self._tries += 1
            try:
                trials = [
                    self._base.trial(seed, self._numbers.last + 1, params) for seed in self._seeds
                ]
            except ValueError as error:
                self._refused.setdefault(canonical(params), self._base.exclude(params, error))
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
                continue
            if trials[0].id in self._known:
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
                continue
            self._numbers.next()
            self._enter(asked.number, trials[0].id, [trial.id for trial in trials])
            noted = dict(self._storage.get_trial(self._id(asked.number)).system_attrs)
            return [dataclasses.replace(trial, asked=noted) for trial in trials]
        if self.proposed < self._search.num_samples:
            refuse_scarcity(
                self._base.row,
                self.proposed,
                self._search.num_samples,
                self._tries,
                list(self._refused.values()),
            )
        return []

    def recall(self, state: StudyState, trials: Iterable[TrialState]) -> None:
        """Add the earlier proposals at this point to Optuna, in order, with known results.

        Proposals outside a changed space are left out.
        """
        configurations: dict[int, list[TrialState]] = {}
        for trial in trials:
            if trial.number is not None and all(
                trial.params.get(key) == value for key, value in self._point.items()
            ):
                configurations.setdefault(trial.number, []).append(trial)
        for number in sorted(configurations):
            of_seeds = configurations[number]
            if is_history(of_seeds[0].params, self._space):
                self._known.add(of_seeds[0].id)
                continue
            self._study.add_trial(self._again(of_seeds[0]))
            told = len(self._study.get_trials(deepcopy=False)) - 1
            self._enter(told, of_seeds[0].id, [trial.id for trial in of_seeds])
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
        self._refused = {}

    def _redirect(self) -> bool:
        """Queue another point, after many tries of the sampler without a new valid point.

        A sampler that is certain of its optimum proposes the same point again and again. The point
        is any untried one if the space is small enough to list, else a random one. The choice
        depends only on earlier proposals and tries.

        Returns:
            Whether an untried point may exist; if not, the search ends.
        """
        if self._tries < CANDIDATES:
            return True
        generator = np.random.default_rng([self._search.seed, self.proposed, self._tries])
        if self._points is None:
            params = self._space.point(
                generator.random(len(self._space.sampled)).tolist(), self._point
            )
        else:
            left = [point for point in self._points if self._is_new(point)]
            if not left:
                self._tries = CANDIDATES * self._search.num_samples
                return False
            params = left[generator.integers(len(left))]
        self._study.enqueue_trial(self._places(params))
        return True

    def _is_new(self, params: Params) -> bool:
        try:
            return self._base.trial(self._seeds[0], None, params).id not in self._known
        except ValueError as error:
            self._refused.setdefault(canonical(params), self._base.exclude(params, error))
            return False

    def _id(self, number: int) -> int:
        """Return the storage's id of the Optuna trial with this number, without any copies."""
        study = self._storage.get_study_id_from_name(self._study.study_name)
        return int(self._storage.get_trial_id_from_study_id_trial_number(study, number))

    def _ask(self) -> tuple[Any, Params]:
        """Ask Optuna for a trial and its values.

        The generator depends only on how many configurations were proposed and tried before.
        """
        seed = np.random.SeedSequence(
            [self._search.seed, self.proposed, self._tries]
        ).generate_state(1)[0]
        self._study.sampler = make_sampler(self._algorithm, self._search, int(seed))
        asked = self._study.ask()
        params: Params = dict(self._point)
        for domain in self._space.sampled:
            if domain.applies(params):
                params[domain.key] = suggest(asked, domain)
        return asked, self._space.pruned(params)

    def _again(self, trial: TrialState) -> Any:
        """Return an earlier proposal as a running trial of Optuna's."""
        optuna = quiet_optuna()
        drawn = [domain for domain in self._space.sampled if domain.key in trial.params]
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=self._places(trial.params),
            distributions={domain.key: distribution(domain) for domain in drawn},
            system_attrs=trial.asked,
        )

    def _places(self, params: Params) -> Params:
        """Return sampled values as Optuna has them: choices by their index."""
        return {
            domain.key: domain.index(params[domain.key])
            if domain.categorical
            else params[domain.key]
            for domain in self._space.sampled
            if domain.key in params
        }

    def _tell(self, number: int, trials: list[TrialState]) -> None:
        state = quiet_optuna().trial.TrialState
        values = [mean_objective(trials, metric) for metric in self._search.objectives]
        over = {
            metric: excess(metric, bound, mean_objective(trials, metric))
            for metric, bound in self._search.constraints.items()
        }
        usable = all(trial.status != FAILED for trial in trials) and all(
            math.isfinite(value) for value in [*values, *over.values()]
        )
        if not usable:
            self._study.tell(number, state=state.FAIL)
            return
        known = quiet_optuna().trial.Trial(self._study, self._id(number))
        for metric, value in over.items():
            known.set_constraint(metric, value)
        if len(values) == 1 and any(trial.status == STOPPED for trial in trials):
            self._storage.set_trial_intermediate_value(
                self._id(number), min(trial.epoch for trial in trials), values[0]
            )
            self._study.tell(number, state=state.PRUNED)
        else:
            self._study.tell(number, values)


def finite_points(space: Space, point: Params, most: int) -> list[Params] | None:
    """Return the points of a space at one point of its grids, if all other keys are choices.

    Returns None if a key is a range, or if the product of all lists is longer than ``most``.
    """
    sampled = space.sampled
    if not all(domain.categorical for domain in sampled):
        return None
    if math.prod(len(domain.values) for domain in space.domains) > most:
        return None
    return [
        params
        for params in space.all_points()
        if all(canonical(params.get(key)) == canonical(value) for key, value in point.items())
    ]


def make_sampler(algorithm: str, search: SearchConfig, seed: int) -> Any:
    """Return Optuna's sampler for an algorithm; ``search`` has the size of its populations."""
    optuna = quiet_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if algorithm == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True
            )
        if algorithm == "gp":
            return optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False)
        if algorithm == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed)
        return optuna.samplers.NSGAIISampler(
            seed=seed, population_size=min(50, max(4, search.num_samples // 4))
        )


def suggest(asked: Any, domain: Domain) -> Any:
    """Sample a value for ``domain`` from an Optuna trial."""
    shape = distribution(domain)
    if domain.categorical:
        return domain.values[asked.suggest_categorical(domain.key, shape.choices)]
    if domain.kind.endswith("randint"):
        value = asked.suggest_int(domain.key, shape.low, shape.high, log=shape.log)
        return float(value) if domain.real else value
    return asked.suggest_float(domain.key, shape.low, shape.high, step=shape.step, log=shape.log)
