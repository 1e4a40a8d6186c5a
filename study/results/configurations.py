"""Configurations of a searched row: their objectives, the best one, the Pareto front.

A configuration is one set of sampled values with a trial per seed. Its objectives are means over
seeds: of the last epoch's value, or of the sum over epochs for costs such as seconds. It is
eligible after all its trials have finished without divergence (:mod:`study.results.objectives`). A
search in rounds (:mod:`study.search.rounds`) only considers the last round. The best configuration
has the lowest (or highest) first objective and satisfies the search's constraints; the test set is
never used for the selection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from study.config.search import broken
from study.config.space import Params
from study.ledger.state import ENDED, FINISHED, TrialState
from study.results.objectives import column_of, diverged, mean_objective

NONE: Mapping[str, str] = MappingProxyType({})
"""No constraints."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One set of sampled values of a row.

    Attributes:
        row: label of the row.
        number: number of the configuration; None in a row that is not searched.
        params: sampled values by dotted key.
        trials: its trials, one per seed.
        objectives: mean over seeds by metric; NaN if a trial has no value or has diverged. A
            trial that was stopped early has its last epoch's value.
        whole: whether it belongs to the last round (:mod:`study.search.rounds`); trials of earlier
            rounds had fewer epochs or examples.
        broken: texts of the constraints that its means over seeds violate; empty until all trials
            have ended, or if one has diverged.
        diverged: number of its diverged trials.
    """

    row: str
    number: int | None
    params: Params
    trials: tuple[TrialState, ...]
    objectives: dict[str, float]
    whole: bool = True
    broken: tuple[str, ...] = ()
    diverged: int = 0

    @property
    def finished(self) -> bool:
        """Whether every seed's trial ran to its end, in the row's last round."""
        return self.whole and all(trial.status == FINISHED for trial in self.trials)

    @property
    def eligible(self) -> bool:
        """Whether it may be chosen: finished, no constraint is broken, and no trial diverged."""
        return self.finished and not self.broken and not self.diverged

    @property
    def ended(self) -> bool:
        """Whether every seed's trial has ended, successfully or not."""
        return all(trial.status in ENDED for trial in self.trials)


def configurations(
    trials: Iterable[TrialState], metrics: Iterable[str], constraints: Mapping[str, str] = NONE
) -> list[Configuration]:
    """Return the configurations among ``trials``, in order of row and number.

    Trials of a row that is not searched are left out.

    Args:
        trials: trials of a study.
        metrics: names of the objectives to compute.
        constraints: bounds by metric, as in :class:`study.config.search.SearchConfig`.
    """
    groups = groups_of_seeds(trials, metrics, constraints)
    return [entry for entry in groups if entry.number is not None]


def groups_of_seeds(
    trials: Iterable[TrialState], metrics: Iterable[str], constraints: Mapping[str, str] = NONE
) -> list[Configuration]:
    """Group trials that differ only in their seeds; groups are ordered by number.

    A group is a configuration, or a row that is not searched. The number alone does not identify a
    configuration, because a study keeps its earlier trials when its space is changed.
    """
    groups: dict[tuple[str, int | None, str], list[TrialState]] = {}
    for trial in trials:
        groups.setdefault(
            (trial.row, trial.number, json.dumps(trial.params, sort_keys=True)), []
        ).append(trial)
    wanted = list(metrics)
    budgets: dict[str, tuple[int, float]] = {}
    for (row, *_), group in groups.items():
        budgets[row] = max(budgets.get(row, (0, 0.0)), _budget(group[0]))
    return [
        Configuration(
            row=row,
            number=number,
            params=group[0].params,
            trials=tuple(group),
            objectives={metric: mean_objective(group, metric) for metric in wanted},
            whole=_is_whole(group[0], budgets[row]),
            broken=_broken(group, constraints),
            diverged=sum(diverged(trial, *wanted) for trial in group),
        )
        for (row, number, _), group in sorted(groups.items(), key=lambda item: item[0][1] or 0)
    ]


def _broken(group: Sequence[TrialState], constraints: Mapping[str, str]) -> tuple[str, ...]:
    if not constraints or any(
        trial.status not in ENDED or diverged(trial, *constraints) for trial in group
    ):
        return ()
    return tuple(
        broken(constraints, {metric: mean_objective(group, metric) for metric in constraints})
    )


def _is_whole(trial: TrialState, budget: tuple[int, float]) -> bool:
    """Return whether a trial belongs to its search's last round.

    Ledgers of earlier versions lack the number of rounds.
    """
    if "round" not in trial.asked:
        return True
    return _budget(trial) == budget and trial.asked["round"] + 1 == trial.asked.get(
        "rounds", trial.asked["round"] + 1
    )


def _budget(trial: TrialState) -> tuple[int, float]:
    """Return the epochs and the number of training examples of a trial."""
    return trial.epochs, trial.config["data"]["train_size"] or math.inf


def best(found: Iterable[Configuration], objectives: dict[str, str]) -> Configuration | None:
    """Return the best eligible configuration by the first objective, or None.

    The first of equal ones wins (:mod:`study.results.ties`). Only configurations with the largest
    number of seeds compete: the others dropped out of a race (:mod:`study.search.racing`) or did
    not enter it.
    """
    metric, mode = next(iter(objectives.items()))
    usable = [
        entry for entry in found if entry.eligible and math.isfinite(entry.objectives[metric])
    ]
    return min(
        usable,
        key=lambda entry: (-len(entry.trials), signed(entry.objectives[metric], mode)),
        default=None,
    )


def pareto_front(found: Iterable[Configuration], objectives: dict[str, str]) -> list[Configuration]:
    """Return the Pareto front of the eligible configurations, sorted by the first objective.

    A configuration dominates another if it is at least as good in every objective and better in
    one.
    """
    usable = [
        entry
        for entry in found
        if entry.eligible and all(map(math.isfinite, entry.objectives.values()))
    ]
    points = [
        [signed(entry.objectives[metric], mode) for metric, mode in objectives.items()]
        for entry in usable
    ]
    return [usable[place] for place in undominated(points)]


def undominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the non-dominated points, sorted by their coordinates.

    Lower is better: a point dominates another if no coordinate is larger and one is smaller.
    """
    values = np.array(points)
    beaten = (np.all(values <= point, axis=1) & np.any(values < point, axis=1) for point in values)
    return sorted(
        (place for place, others in enumerate(beaten) if not others.any()),
        key=lambda place: list(points[place]),
    )


def ranked(found: Iterable[Configuration], objectives: dict[str, str]) -> list[Configuration]:
    """Sort configurations as :func:`best` does, most seeds first; unusable ones come last."""
    metric, mode = next(iter(objectives.items()))

    def rank(entry: Configuration) -> tuple[bool, int, float]:
        value = entry.objectives[metric]
        usable = entry.eligible and math.isfinite(value)
        return (
            not usable,
            -len(entry.trials),
            signed(value, mode) if math.isfinite(value) else math.inf,
        )

    return sorted(found, key=rank)


def table(found: Iterable[Configuration], objectives: dict[str, str]) -> list[dict[str, Any]]:
    """Return one flat dict per configuration, best first.

    The keys are row, number, sampled values, objectives and state. An objective whose name is
    already taken gets a prefix (:func:`study.results.objectives.column_of`).
    """
    lines = ranked(found, objectives)
    taken = {"row", "number", "state"}.union(*(entry.params for entry in lines))
    return [
        {
            "row": entry.row,
            "number": entry.number,
            **entry.params,
            **{column_of(name, taken): value for name, value in entry.objectives.items()},
            "state": condition(entry),
        }
        for entry in lines
    ]


def condition(entry: Configuration) -> str:
    """Describe a configuration's state: trial states, number of diverged trials, broken
    constraints.

    For a configuration of an early round it is just ``early round``.
    """
    if not entry.whole:
        return "early round"
    states = ", ".join(sorted({trial.status for trial in entry.trials}))
    if entry.diverged:
        states += f"; {entry.diverged} of {len(entry.trials)} diverged"
    return f"{states}; infeasible: {', '.join(entry.broken)}" if entry.broken else states


def signed(value: float, mode: str) -> float:
    """Return ``value``, negated if ``mode`` is ``max``, so that lower is better."""
    return value if mode == "min" else -value
