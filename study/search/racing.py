"""Racing: once a row's search has ended, its best configurations run with more seeds until the
evidence decides.

A search compares many configurations on few seeds, so its best one is partly lucky. With
``search.confirm: k`` the best ``k`` of every row run with the seeds ``search.confirm_seeds``, in
rounds. After each round the leader stays, and so does every configuration that is not significantly
worse: one-sided paired t-test over the seeds both have, at the level below. The rounds end when one
of several is left or the seeds are used up. A round is one seed, or all those between which no test
can save any: a lone candidate's seeds run at once. This is a race (O. Maron, A. Moore, "Hoeffding
races", NIPS 1993) with the t-test of F-Race (M. Birattari et al. 2002). The ledger has all data for
the decisions, so a resumed study continues the same race. Configurations outside a changed space do
not take part.

Level: a test that is repeated after every round finds a difference sooner or later where there is
none (P. Armitage, C. McPherson, B. Rowe, "Repeated significance tests on accumulating data", J. R.
Stat. Soc. A 132, 1969), and a comparison with the leader of the moment picks the pair. So each test
has the share of the whole level that Bonferroni's inequality allows it (O. J. Dunn, "Multiple
comparisons among means", JASA 56, 1961, and, over rounds as over candidates, Maron and Moore)::

    level = ALPHA / (L k (k - 1))

with the ``k`` candidates that begin the race, each of which may be tested against each other one,
and the ``L`` planned looks: one after each round but the last, with three pairs or more. Of
candidates that are equal, one or more is eliminated with a probability of at most :data:`ALPHA`,
however the looks depend on each other. The last round has no look, because it could not save any
seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from study.ledger.state import ENDED, FINISHED, StudyState
from study.plan.candidates import bind_space, is_history
from study.plan.plan import PAIRS, Plan, rounds_of_race
from study.plan.trials import Base, PlannedTrial
from study.results.configurations import Configuration, configurations, signed
from study.results.contrasts import ROUNDING
from study.results.objectives import mean_objective
from study.results.ties import mean_of

ALPHA = 0.05
"""Probability of eliminating any of several equal candidates in a whole race, at most."""


class Confirmation:
    """The race of one row.

    Args:
        base: base trial of the row, in a study with ``search.confirm``.
        row: label of the row.
    """

    def __init__(self, base: Base, row: str) -> None:
        self._base, self._row = base, row
        study = base.study
        self._metric, self._mode = next(iter(study.search.objectives.items()))
        self._constraints = study.search.constraints
        self._space = bind_space(study)
        self._seeds, self._more, self._most = (
            list(study.seeds),
            study.search.confirm_seeds,
            study.search.confirm,
        )
        self.exhausted = False
        """Whether the race is over."""

    def next(self, state: StudyState) -> list[PlannedTrial]:
        """Return the trials to add now; none while a round still runs, or once the race is over.

        Call it when no trial of the search itself is left to propose.
        """
        racing = self._candidates(state)
        if racing is None:
            return []
        candidates = len(racing)
        level = level_of_test(candidates, len(self._seeds), len(self._more))
        had = list(self._seeds)
        for seeds in rounds_of_race(candidates, len(self._seeds), self._more):
            if not racing or len(racing) < min(candidates, 2):
                break
            wanted = [
                self._base.trial(seed, entry.number, entry.params)
                for seed in seeds
                for entry in racing
            ]
            if missing := [trial for trial in wanted if trial.id not in state.known]:
                return missing
            if any(state.known[trial.id].status not in ENDED for trial in wanted):
                return []
            had += seeds
            if len(had) < len(self._seeds) + len(self._more):
                racing = self._contenders(racing, had, level)
        self.exhausted = True
        return []

    def _candidates(self, state: StudyState) -> list[Configuration] | None:
        """Return the best configurations, best first; None while the search's own trials run."""
        mine = [
            trial
            for trial in state.trials
            if trial.row == self._row and not is_history(trial.params, self._space)
        ]
        found = configurations(mine, [self._metric])
        if any(
            trial.seed in self._seeds and trial.status not in ENDED
            for entry in found
            for trial in entry.trials
        ):
            return None
        kept = configurations(
            (trial for trial in mine if trial.seed in self._seeds),
            [self._metric],
            self._constraints,
        )
        kept_numbers = {entry.number for entry in kept if not entry.broken}
        first = [
            (self._errors(entry, self._seeds), entry)
            for entry in found
            if entry.whole and entry.number in kept_numbers
        ]
        usable = [
            (mean_of(errors), entry) for errors, entry in first if len(errors) == len(self._seeds)
        ]
        return [entry for _, entry in sorted(usable, key=lambda pair: pair[0])[: self._most]]

    def _errors(self, entry: Configuration, seeds: Sequence[int]) -> list[float]:
        """Return the objective of the trials that finished with ``seeds``, in the seeds' order.

        Its sign is such that lower is better.
        """
        of_seed = {
            trial.seed: mean_objective([trial], self._metric)
            for trial in entry.trials
            if trial.status == FINISHED
        }
        values = [of_seed.get(seed) for seed in seeds]
        return [
            signed(value, self._mode)
            for value in values
            if value is not None and math.isfinite(value)  # not diverged
        ]

    def _contenders(
        self, racing: list[Configuration], seeds: list[int], level: float
    ) -> list[Configuration]:
        """Return the leader of ``racing`` over ``seeds``, and those not significantly worse.

        A configuration that lost a trial drops out.
        """
        of_all = [(self._errors(entry, seeds), entry) for entry in racing]
        whole = [(errors, entry) for errors, entry in of_all if len(errors) == len(seeds)]
        left = contenders([errors for errors, _ in whole], level)
        return [whole[place][1] for place in left]


def level_of_test(candidates: int, seeds: int, more: int) -> float:
    """Return the level of one test of a race; see the module.

    Args:
        candidates: number of candidates that begin the race.
        seeds: number of seeds that every candidate has before the race.
        more: number of seeds that a candidate may get in it.
    """
    looks = len(rounds_of_race(candidates, seeds, range(more))) - 1
    return ALPHA / max(1, looks * candidates * (candidates - 1))


def contenders(errors: Sequence[Sequence[float]], level: float) -> list[int]:
    """Return the indices of the candidates that stay in a race: the one with the lowest mean, and
    all that are not significantly worse.

    Args:
        errors: errors of each candidate, over the same seeds.
        level: significance level of each test.
    """
    if not errors:
        return []
    leader = min(range(len(errors)), key=lambda place: mean_of(errors[place]))
    return [
        place
        for place, entry in enumerate(errors)
        if place == leader or not worse(entry, errors[leader], level)
    ]


def worse(errors: Sequence[float], others: Sequence[float], level: float) -> bool:
    """Return whether ``errors`` are significantly higher than ``others``, in a paired test.

    Always False with fewer than :data:`PAIRS` pairs. Differences that are all equal have no spread
    for a t-test (common with few examples); the sign test is used for them.
    """
    if len(errors) < PAIRS:
        return False
    differences = [a - b for a, b in zip(errors, others, strict=True)]
    if not all(map(math.isfinite, differences)):  # one of the two has diverged
        return all(map(math.isfinite, others))
    if max(differences) - min(differences) <= ROUNDING * max(map(abs, differences)):
        return differences[0] > 0 and 0.5 ** len(differences) < level
    from scipy.special import stdtr

    pairs = len(differences)
    statistic = statistics.fmean(differences) / statistics.stdev(differences) * math.sqrt(pairs)
    return bool(stdtr(pairs - 1, -statistic) < level)


def make_confirmations(plan: Plan) -> list[Confirmation]:
    """Return a race for each row; none if the study has no ``search.confirm``."""
    return (
        [Confirmation(Base(plan.study, row), row.label) for row in plan.rows]
        if plan.study.search.confirm
        else []
    )
