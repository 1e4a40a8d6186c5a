"""Searches in rounds: the results of one round decide which trials the next one has.

All randomness comes from the search's seed, so the results in the ledger determine the next round,
and a resumed study repeats the same rounds. Rounds are synchronous: each starts when all trials of
the previous round have ended.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from study.config import SearchConfig
from study.config.space import Params, Space
from study.ledger.state import ENDED, FAILED, StudyState, TrialState
from study.plan.candidates import draw, refuse_scarcity, sampled_points
from study.plan.trials import Base, PlannedTrial
from study.results.configurations import signed
from study.results.objectives import mean_objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One participant over the rounds: its first values, and their changes during training."""

    params: Params
    changes: tuple[dict[str, Any], ...] = ()


class Rounds(ABC):
    """The search of one row at one point of the grids, in rounds.

    It has the interface of :class:`study.search.optuna_proposer.Proposer`.

    Args:
        base: base trial of the row.
        space: search space.
        point: point of the grids.
        search: options of the search; ``num_samples`` configurations take part in the first round.
        seeds: seeds of this search; every configuration is a trial for each.
        place, places: index and number of the points of the grids.
        turn, turns: index and number of the row's searches of seeds, which its numbers depend on,
            and its draws do not.

    Attributes:
        excluded: points of the space that make no valid trial.
    """

    def __init__(
        self,
        base: Base,
        space: Space,
        point: Params,
        search: SearchConfig,
        seeds: Iterable[int],
        place: int = 0,
        places: int = 1,
        turn: int = 0,
        turns: int = 1,
    ) -> None:
        self._base, self._space, self._point, self._search = base, space, point, search
        self._seeds, self._place, self._places = list(seeds), place, places
        self._turn, self._turns = turn, turns
        self._planned: set[str] = set()
        self._round = 0
        self._last = self._prepare()
        self._members = self._first()
        self._enter()

    @abstractmethod
    def _prepare(self) -> int:
        """Prepare what the rounds need; return the index of the last round."""

    @abstractmethod
    def _params(self, member: Member, number: int) -> Params:
        """Return the sampled values of a member's trials in the round of that number."""

    @abstractmethod
    def _next(self, state: StudyState, errors: list[float]) -> list[Member]:
        """Return the members of the next round.

        Args:
            state: state of the study.
            errors: error of every member in this round; infinity for members that are lost. At
                least one is finite.
        """

    @property
    def exhausted(self) -> bool:
        """Whether nothing more will be proposed."""
        return not self._waiting and (self._round == self._last or not self._members)

    @property
    def proposed(self) -> int:
        """Number of trials that were proposed, in earlier runs of the study too."""
        return len(self._planned)

    @property
    def budgets(self) -> set[str]:
        """Ids of the first member's trial in every round, should it be promoted unchanged; asked
        before the search recalls anything."""
        rounds = (self._params(self._members[0], number) for number in range(self._last + 1))
        return {self._base.trial(self._seeds[0], None, params).id for params in rounds}

    def recall(self, state: StudyState, trials: Iterable[TrialState]) -> None:
        """Learn what earlier runs of the study did."""
        self._planned = {trial.id for trial in trials}
        self.learn(state)

    def learn(self, state: StudyState) -> None:
        """Enter the next round if this one has ended, and further ones whose results are known."""
        while self._members and self._round < self._last and self._ended(state):
            errors = [self._error(state, trials) for trials in self._trials]
            self._members = self._next(state, errors) if any(map(math.isfinite, errors)) else []
            self._round += 1
            self._enter()

    def propose(self) -> list[PlannedTrial]:
        """Return the next member of this round, one trial per seed; none while the others train."""
        while self._waiting:
            trials = [trial for trial in self._waiting.popleft() if trial.id not in self._planned]
            self._planned |= {trial.id for trial in trials}
            if trials:
                return trials
        return []

    def _first(self) -> list[Member]:
        """Return the members of the first round.

        Each is a point of the space that is valid at full length and in the first round.
        """

        def make(params: Params, number: int) -> list[PlannedTrial]:
            self._base.trial(self._seeds[0], None, self._params(Member(params=params), self._round))
            return [self._base.trial(self._seeds[0], None, params)]

        found, self.excluded = draw(
            self._base,
            make,
            sampled_points(self._search, self._space, self._point),
            set(),
            wanted=self._search.num_samples,
        )
        if not found:
            refuse_scarcity(
                self._base.row, 0, self._search.num_samples, len(self.excluded), self.excluded
            )
        return [Member(params=trial.params) for (trial,) in found]

    def _enter(self) -> None:
        """Plan the trials of this round, by member."""
        turn = self._round * self._turns + self._turn
        first = 1 + (turn * self._places + self._place) * self._search.num_samples
        asked = {"round": self._round, "rounds": self._last + 1}
        self._trials = [
            [
                dataclasses.replace(
                    self._base.trial(seed, first + number, self._params(member, self._round)),
                    asked=asked,
                )
                for seed in self._seeds
            ]
            for number, member in enumerate(self._members)
        ]
        self._waiting = deque(self._trials)

    def _ended(self, state: StudyState) -> bool:
        ids = [trial.id for trials in self._trials for trial in trials]
        return all(key in state.known and state.known[key].status in ENDED for key in ids)

    def _error(self, state: StudyState, trials: Sequence[PlannedTrial]) -> float:
        """Return the mean objective of a member, lower is better; infinity if a trial is lost."""
        known = [state.known[trial.id] for trial in trials]
        if any(trial.status == FAILED or trial.epoch < trial.epochs for trial in known):
            return math.inf
        metric, mode = next(iter(self._search.objectives.items()))
        value = signed(mean_objective(known, metric), mode)
        return value if math.isfinite(value) else math.inf

    def _generator(self, number: int, purpose: int = 0) -> np.random.Generator:
        """Return the random generator of a member in this round."""
        return np.random.default_rng([self._search.seed, self._place, self._round, number, purpose])
