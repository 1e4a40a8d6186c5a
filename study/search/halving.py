"""Successive halving over the training data: all configurations train on a small part of it, the
best on more, the last ones on all.

With ``search.reduction_factor`` r and n configurations there are ``1 + floor(log_r n)`` rounds; in
round k a trial trains on ``r^(k - last)`` of the examples, from scratch, with the same number of
epochs in every round, and one configuration in r is promoted. So every round costs about the same.
Rounds with less than one batch of examples are left out.

Sources: K. Jamieson, A. Talwalkar 2016 (arXiv:1502.07943); A. Klein et al. 2017, "Fast Bayesian
Optimization of Machine Learning Hyperparameters on Large Datasets" (arXiv:1605.07079), for the data
as the budget.
"""

from __future__ import annotations

import math

from study.config.space import Params
from study.ledger.state import StudyState
from study.plan.candidates import halved
from study.search.rounds import Member, Rounds
from trainers.data import prepare


class Halving(Rounds):
    """A search by successive halving, see the head of this file."""

    def _prepare(self) -> int:
        self._sizes = sizes(
            prepare(self._base.data).train,
            self._search.num_samples,
            self._search.reduction_factor,
            self._base.values(self._point)["batch_size"],
        )
        return len(self._sizes) - 1

    def _params(self, member: Member, number: int) -> Params:
        return (
            member.params
            if number == self._last
            else member.params | {"data.train_size": self._sizes[number]}
        )

    def _next(self, state: StudyState, errors: list[float]) -> list[Member]:
        order = sorted(
            (number for number, error in enumerate(errors) if math.isfinite(error)),
            key=errors.__getitem__,
        )
        kept = order[: max(1, len(errors) // self._search.reduction_factor)]
        return [self._members[number] for number in sorted(kept)]


def sizes(examples: int, configurations: int, factor: int, batch_size: int) -> list[int]:
    """Return the number of training examples of each round, from few to all."""
    rounds = len(halved(configurations, factor))
    found = [examples // factor ** (rounds - 1 - k) for k in range(rounds)]
    return [size for size in found if size >= batch_size] or [examples]
