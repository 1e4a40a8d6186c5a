"""Population based training: members train side by side, and the worst take over the best one's weights with other hyperparameters.

Every ``search.perturbation_interval`` epochs the members of a row are ranked by the first objective (the mean over the study's seeds). The
worst ``quantile_fraction`` of them, and whoever diverged or failed, goes on from the weights of a random member of the best such
fraction (*exploit*), with hyperparameters that :mod:`study.explore` moves away from its: by chance (``pbt``) or by a bandit (``pb2``). The
rest goes on as it is.

A member of a generation is an ordinary trial. Its config says what its whole line did, ``changes: [{epoch: 4, optimizer.lr: 0.02}]``, so
it trains again from the start to the same bits wherever that is wanted; here it continues from the last checkpoint of the
trial that it is the continuation of (:func:`study.manage.continuations`). The next generation begins once all of this one have ended, as
with ``synch=True`` of Ray Tune's PopulationBasedTraining. Everything random comes from the search's seed, the generation and the member,
so the ledger's results alone say what comes next: a study that is continued breeds the same population.

Sources: M. Jaderberg et al. 2017, "Population Based Training of Neural Networks" (arXiv:1711.09846); J. Parker-Holder et al. 2020,
"Provably Efficient Online Hyperparameter Optimization with Population-Based Bandits" (arXiv:2002.02518).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from study.config import SearchConfig
from study.configurations import signed
from study.explore import Step, explored, propose_step
from study.objectives import mean_objective
from study.plan import CANDIDATES, Base, Excluded, PlannedTrial, generation_ends
from study.space import Domain, Params, Space, today, unit_points
from study.state import ENDED, FAILED, StudyState, TrialState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One line: what it began with, and what changed on the way."""

    params: Params
    changes: tuple[dict[str, Any], ...] = ()

    def now(self, keys: Iterable[str]) -> Params:
        """The values of ``keys`` today, as far as it has them."""
        values = today(self.params | {"changes": self.changes})
        return {key: values[key] for key in keys if key in values}


class Population:
    """The population of one row at one point of the grids; asked as a :class:`study.search.Proposer` is.

    Args:
        base: the row's base trial.
        space: what is searched.
        point: of the grids, the ``place``-th of ``places``.
        search: how.
        seeds: the study's; every member is a trial for each.

    Attributes:
        excluded: points of the space that make no valid trial.
    """

    def __init__(
        self, base: Base, space: Space, point: Params, search: SearchConfig, seeds: Iterable[int], place: int = 0, places: int = 1
    ) -> None:
        self._base, self._space, self._point, self._search = base, space, point, search
        self._seeds, self._place, self._places = list(seeds), place, places
        self._planned: set[str] = set()
        self.excluded: list[Excluded] = []
        self._steps: list[Step] = []
        self._generation = 0
        self._members = self._first()
        self._ends = generation_ends(base.trial(self._seeds[0], None, point).config.epochs, search.perturbation_interval)
        self._enter()

    @property
    def exhausted(self) -> bool:
        """Whether it will propose nothing more."""
        return not self._waiting and (self._generation == len(self._ends) - 1 or not self._members)

    def recall(self, state: StudyState, trials: Iterable[TrialState]) -> None:
        """Take in what earlier runs of the study did."""
        self._planned = {trial.id for trial in trials}
        self.learn(state)

    def learn(self, state: StudyState) -> None:
        """Breed the next generation if this one has ended; and the one after, where that is known already."""
        while self._members and self._generation < len(self._ends) - 1 and self._ended(state):
            self._breed(state)
            self._generation += 1
            self._enter()

    def propose(self) -> list[PlannedTrial]:
        """The next member of this generation, one trial a seed; none while the others of its generation train."""
        while self._waiting:
            trials = [trial for trial in self._waiting.popleft() if trial.id not in self._planned]
            self._planned |= {trial.id for trial in trials}
            if trials:
                return trials
        return []

    def _first(self) -> list[Member]:
        """As many valid points of the space as there are to be members."""
        search, members, seen = self._search, list[Member](), set[str]()
        for units in unit_points(search.algorithm, len(self._space.sampled), CANDIDATES * search.num_samples, search.seed):
            params = self._space.point(units, self._point)
            try:
                trial = self._base.trial(self._seeds[0], None, params)
            except ValueError as error:
                self.excluded.append(self._base.exclude(params, error))
                continue
            if trial.id not in seen:
                seen.add(trial.id)
                members.append(Member(params=params))
            if len(members) == search.num_samples:
                break
        return members

    def _enter(self) -> None:
        """The trials of this generation, by member."""
        first = 1 + (self._generation * self._places + self._place) * self._search.num_samples
        self._trials = [self._of(member, first + number) for number, member in enumerate(self._members)]
        self._waiting = deque(self._trials)

    def _of(self, member: Member, number: int) -> list[PlannedTrial]:
        params = member.params | {"epochs": self._ends[self._generation]}
        if member.changes:
            params |= {"changes": [dict(change) for change in member.changes]}
        asked = {"generation": self._generation}
        return [dataclasses.replace(self._base.trial(seed, number, params), asked=asked) for seed in self._seeds]

    def _ended(self, state: StudyState) -> bool:
        ids = [trial.id for trials in self._trials for trial in trials]
        return all(key in state.known and state.known[key].status in ENDED for key in ids)

    def _breed(self, state: StudyState) -> None:
        errors = [self._error(state, trials, self._ends[self._generation]) for trials in self._trials]
        order = sorted(range(len(errors)), key=errors.__getitem__)
        usable = [number for number in order if math.isfinite(errors[number])]
        if not usable:
            self._members = []
            return
        self._note(state, errors)
        few = min(math.ceil(len(order) * self._search.quantile_fraction), len(order) // 2)
        best, worst = usable[: max(1, few)], {*order[len(order) - few :], *(set(order) - set(usable))} - {usable[0]}
        chosen: list[Step] = []
        before, after = self._members, list[Member]()
        for number, member in enumerate(before):
            parent = before[best[self._generator(number).integers(len(best))]]
            after.append(self._offspring(parent, number, chosen, after) if number in worst else member)
        self._members = after

    def _error(self, state: StudyState, trials: Sequence[PlannedTrial], epoch: int) -> float:
        """The mean objective of a member, the lower the better, infinite for what is lost."""
        known = [state.known[trial.id] for trial in trials]
        if any(trial.status == FAILED or trial.epoch < epoch for trial in known):
            return math.inf
        metric, mode = next(iter(self._search.objectives.items()))
        value = signed(mean_objective(known, metric), mode)
        return value if math.isfinite(value) else math.inf

    def _offspring(self, parent: Member, number: int, chosen: list[Step], others: list[Member]) -> Member:
        """A new line that leaves ``parent``'s at the end of this generation; ``parent``'s own where no other is valid."""
        generator = self._generator(number, 1)
        epoch = self._ends[self._generation]
        domains = [domain for domain in self._space.sampled if domain.key in parent.now([domain.key])]
        now = parent.now(domain.key for domain in domains)
        for _ in range(CANDIDATES):
            if self._search.scheduler == "pb2":
                values = propose_step(self._steps, chosen, domains, now, self._generation + 1, generator)
            else:
                resample = self._search.resample_probability
                values = {domain.key: explored(domain, now[domain.key], resample, generator) for domain in domains}
            new = {key: value for key, value in values.items() if value != now[key]}
            child = Member(params=parent.params, changes=(*parent.changes, *([{"epoch": epoch, **new}] if new else [])))
            if child in others:
                continue
            try:
                self._base.trial(self._seeds[0], None, child.params | {"epochs": self._ends[-1], "changes": list(child.changes)})
            except ValueError as error:
                self.excluded.append(self._base.exclude(now | new, error))
            else:
                chosen.append(Step(generation=self._generation + 1, units=_units(domains, now | new), gain=math.nan))
                return child
        return parent

    def _note(self, state: StudyState, errors: Sequence[float]) -> None:
        """What each member's values brought in this generation: how far the error fell, for the bandit."""
        begin = self._ends[self._generation - 1] if self._generation else 1
        metric, mode = next(iter(self._search.objectives.items()))
        for member, trials, error in zip(self._members, self._trials, errors, strict=True):
            before = [state.known[trial.id].metric(metric).get(begin, math.nan) for trial in trials]
            gain = signed(statistics.fmean(before), mode) - error
            if math.isfinite(gain):
                values = member.now(domain.key for domain in self._space.sampled)
                domains = [domain for domain in self._space.sampled if domain.key in values]
                self._steps.append(Step(generation=self._generation, units=_units(domains, values), gain=gain))

    def _generator(self, number: int, purpose: int = 0) -> np.random.Generator:
        return np.random.default_rng([self._search.seed, self._place, self._generation, number, purpose])


def _units(domains: Iterable[Domain], values: Params) -> dict[str, float]:
    """Values as numbers in [0, 1], those of lists left out."""
    return {domain.key: domain.unit(values[domain.key]) for domain in domains if not domain.categorical}
