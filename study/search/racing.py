"""Racing: once a row's search has ended, its best configurations run with more seeds until the
evidence decides.

A search compares many configurations on few seeds, so its best one owes its place partly to luck.
With ``search.confirm: k`` the best ``k`` of every row run with the seeds ``search.confirm_seeds``,
one seed per round. After each round the leader stays, and so does every configuration that is not
significantly worse: one-sided paired t-test over the seeds both have, p above :data:`ALPHA`. The
rounds end when one is left (with ``k`` above 1) or the seeds are used up. This is a race (O. Maron,
A. Moore, "Hoeffding races", NIPS 1993) with the t-test of F-Race (M. Birattari et al. 2002).
Everything that decides is in the ledger, so a study that is continued goes on with the same race.
Configurations outside a space that was changed since take no part in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from study.ledger.state import ENDED, FINISHED, StudyState
from study.plan.candidates import bind_space, is_history
from study.plan.plan import Base, Plan, PlannedTrial
from study.results.configurations import Configuration, configurations, signed
from study.results.objectives import objective

ALPHA = 0.05


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
        trials = (
            trial
            for trial in state.trials
            if trial.row == self._row and not is_history(trial.params, self._space)
        )
        found = configurations(trials, [self._metric])
        if any(
            trial.seed in self._seeds and trial.status not in ENDED
            for entry in found
            for trial in entry.trials
        ):
            return []
        first = [(self._errors(entry, self._seeds), entry) for entry in found if entry.whole]
        usable = [
            (statistics.fmean(errors), entry)
            for errors, entry in first
            if len(errors) == len(self._seeds)
        ]
        racing = [entry for _, entry in sorted(usable, key=lambda pair: pair[0])[: self._most]]
        for round_, seed in enumerate(self._more):
            if not racing or (self._most > 1 and len(racing) == 1):
                break
            wanted = [self._base.trial(seed, entry.number, entry.params) for entry in racing]
            if missing := [trial for trial in wanted if trial.id not in state.known]:
                return missing
            if any(state.known[trial.id].status not in ENDED for trial in wanted):
                return []
            racing = self._contenders(racing, [*self._seeds, *self._more[: round_ + 1]])
        self.exhausted = True
        return []

    def _errors(self, entry: Configuration, seeds: Sequence[int]) -> list[float]:
        """Return the objective of the trials that finished with ``seeds``, in the seeds' order.

        Its sign is such that lower is better.
        """
        of_seed = {
            trial.seed: objective(trial, self._metric)
            for trial in entry.trials
            if trial.status == FINISHED
        }
        values = [of_seed.get(seed) for seed in seeds]
        return [
            signed(value, self._mode)
            for value in values
            if value is not None and math.isfinite(value)
        ]

    def _contenders(self, racing: list[Configuration], seeds: list[int]) -> list[Configuration]:
        """Return the leader of ``racing`` over ``seeds``, and those not significantly worse.

        A configuration that lost a trial drops out.
        """
        of_all = [(self._errors(entry, seeds), entry) for entry in racing]
        whole = [(errors, entry) for errors, entry in of_all if len(errors) == len(seeds)]
        if not whole:
            return []
        best, leader = min(whole, key=lambda pair: statistics.fmean(pair[0]))
        return [entry for errors, entry in whole if entry is leader or not worse(errors, best)]


def worse(errors: Sequence[float], others: Sequence[float]) -> bool:
    """Tell whether ``errors`` are significantly higher than ``others``, pair by pair.

    They never are with fewer than three pairs.
    """
    if len(errors) < 3:
        return False
    differences = [a - b for a, b in zip(errors, others, strict=True)]
    if not any(value != differences[0] for value in differences):
        return differences[0] > 0
    from scipy.stats import ttest_rel

    return bool(ttest_rel(errors, others, alternative="greater").pvalue < ALPHA)


def make_confirmations(plan: Plan) -> list[Confirmation]:
    """Return a race for each row; none if the study has no ``search.confirm``."""
    return (
        [Confirmation(Base(plan.study, row), row.label) for row in plan.rows]
        if plan.study.search.confirm
        else []
    )
