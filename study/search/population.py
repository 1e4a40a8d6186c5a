"""Population based training: members train side by side, and the worst continue from the weights of
the best with other hyperparameters.

Every ``search.perturbation_interval`` epochs the members of a row are ranked by the first objective
(the mean over the study's seeds). The worst ``quantile_fraction``, and every member that diverged
or failed, continues from the weights of a random member of the equally large best fraction
(*exploit*), with hyperparameters moved away from that member's by :mod:`study.search.pb2`
(*explore*): at random (``pbt``) or by a bandit (``pb2``). The others continue unchanged.

A member of a generation is an ordinary trial. Its config describes its whole line of ancestors,
``changes: [{epoch: 4, optimizer.lr: 0.02}]``, so training it again from the start gives the same
bits; here it continues from the last checkpoint of the trial that it continues
(:func:`study.plan.extend.continuations`). The next generation begins once all trials of this one
have ended, as with ``synch=True`` of Ray Tune's PopulationBasedTraining.

Sources: M. Jaderberg et al. 2017, "Population Based Training of Neural Networks"
(arXiv:1711.09846); J. Parker-Holder et al. 2020, "Provably Efficient Online Hyperparameter
Optimization with Population-Based Bandits" (arXiv:2002.02518).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from study.config.space import Domain, Params, params_at
from study.ledger.state import StudyState
from study.plan.candidates import CANDIDATES, generation_ends
from study.results.configurations import signed
from study.search.pb2 import MemberStep, explored, propose_step
from study.search.rounds import Member, Rounds


class Population(Rounds):
    """A search by population based training, see the head of this file; rounds are generations."""

    def _prepare(self) -> int:
        epochs = self._base.values(self._point)["epochs"]
        self._ends = generation_ends(epochs, self._search.perturbation_interval)
        self._steps: list[MemberStep] = []
        return len(self._ends) - 1

    def _params(self, member: Member, number: int) -> Params:
        params = member.params | {"epochs": self._ends[number]}
        return (
            params | {"changes": [dict(change) for change in member.changes]}
            if member.changes
            else params
        )

    def _next(self, state: StudyState, errors: list[float]) -> list[Member]:
        order = sorted(range(len(errors)), key=errors.__getitem__)
        usable = [number for number in order if math.isfinite(errors[number])]
        self._note(state, errors)
        few = min(math.ceil(len(order) * self._search.quantile_fraction), len(order) // 2)
        best, worst = (
            usable[: max(1, few)],
            {*order[len(order) - few :], *(set(order) - set(usable))} - {usable[0]},
        )
        chosen: list[MemberStep] = []
        before, after = self._members, list[Member]()
        for number, member in enumerate(before):
            parent = before[best[self._generator(number).integers(len(best))]]
            after.append(
                self._offspring(parent, number, chosen, after) if number in worst else member
            )
        return after

    def _offspring(
        self, parent: Member, number: int, chosen: list[MemberStep], others: list[Member]
    ) -> Member:
        """Return a new member that continues ``parent`` with other values from now on.

        Returns ``parent`` itself if no other values are valid.
        """
        generator = self._generator(number, 1)
        epoch = self._ends[self._round]
        domains = [domain for domain in self._space.sampled if domain.key in _now(parent)]
        now = {domain.key: _now(parent)[domain.key] for domain in domains}
        for _ in range(CANDIDATES):
            if self._search.scheduler == "pb2":
                values = propose_step(self._steps, chosen, domains, now, self._round + 1, generator)
            else:
                resample = self._search.resample_probability
                values = {
                    domain.key: explored(domain, now[domain.key], resample, generator)
                    for domain in domains
                }
            new = {key: value for key, value in values.items() if value != now[key]}
            child = Member(params=parent.params, changes=(*parent.changes, {"epoch": epoch, **new}))
            if not new or child in others:
                continue
            try:
                self._base.trial(
                    self._seeds[0],
                    None,
                    child.params | {"epochs": self._ends[-1], "changes": list(child.changes)},
                )
            except ValueError as error:
                self.excluded.append(self._base.exclude(now | new, error))
            else:
                chosen.append(
                    MemberStep(
                        generation=self._round + 1, units=_units(domains, now | new), gain=math.nan
                    )
                )
                return child
        return parent

    def _note(self, state: StudyState, errors: Sequence[float]) -> None:
        """Note each member's gain in this generation, how far its error fell, for the bandit."""
        begin = self._ends[self._round - 1] if self._round else 1
        metric, mode = next(iter(self._search.objectives.items()))
        for member, trials, error in zip(self._members, self._trials, errors, strict=True):
            before = [state.known[trial.id].metric(metric).get(begin, math.nan) for trial in trials]
            gain = signed(statistics.fmean(before), mode) - error
            if math.isfinite(gain):
                values = _now(member)
                domains = [domain for domain in self._space.sampled if domain.key in values]
                self._steps.append(
                    MemberStep(generation=self._round, units=_units(domains, values), gain=gain)
                )


def _now(member: Member) -> Params:
    """Return a member's current values."""
    return params_at(member.params | {"changes": member.changes})


def _units(domains: Iterable[Domain], values: Params) -> dict[str, float]:
    """Return values as numbers in [0, 1], without values of lists."""
    return {
        domain.key: domain.unit(values[domain.key]) for domain in domains if not domain.categorical
    }
