"""The configurations of a searched row: their objectives, the best one, the ones that no other beats.

A configuration is one set of sampled values with a trial for each seed. Its objectives are means over the seeds, of the last epoch; it
counts once all its trials have finished. The best has the lowest (or highest) first objective; the test set has no part in the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from study.objectives import mean_objective
from study.space import Params
from study.state import ENDED, FINISHED, TrialState


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One set of sampled values of a row.

    Attributes:
        whole: False for one of an earlier round (:mod:`study.rounds`), whose trials had fewer epochs or examples than the row's last ones.
        objectives: mean over seeds by metric; NaN where a trial has no value. Of trials that were ended early, those of their last epoch.
    """

    row: str
    number: int
    params: Params
    trials: tuple[TrialState, ...]
    objectives: dict[str, float]
    whole: bool = True

    @property
    def finished(self) -> bool:
        """Whether every seed's trial ran to its end, and to that of the row."""
        return self.whole and all(trial.status == FINISHED for trial in self.trials)

    @property
    def ended(self) -> bool:
        """Whether no seed's trial is to run any more."""
        return all(trial.status in ENDED for trial in self.trials)


def configurations(trials: Iterable[TrialState], metrics: Iterable[str]) -> list[Configuration]:
    """The configurations among ``trials``, in order of row and number; trials of a row that is not searched are left out."""
    groups: dict[tuple[str, int], list[TrialState]] = {}
    for trial in trials:
        if trial.number is not None:
            groups.setdefault((trial.row, trial.number), []).append(trial)
    wanted = list(metrics)
    budgets: dict[str, tuple[int, float]] = {}
    for (row, _), group in groups.items():
        budgets[row] = max(budgets.get(row, (0, 0.0)), _budget(group[0]))
    return [
        Configuration(
            row=row,
            number=number,
            params=group[0].params,
            trials=tuple(group),
            objectives={metric: mean_objective(group, metric) for metric in wanted},
            whole="round" not in group[0].asked or _budget(group[0]) == budgets[row],
        )
        for (row, number), group in sorted(groups.items(), key=lambda item: item[0][1])
    ]


def _budget(trial: TrialState) -> tuple[int, float]:
    """Epochs and examples."""
    return trial.epochs, trial.config["data"]["train_size"] or math.inf


def best(found: Iterable[Configuration], objectives: dict[str, str]) -> Configuration | None:
    """The finished configuration with the best first objective, among those with most seeds; of equals the first. None if there is none.

    Who ran with fewer seeds dropped out of a race (:mod:`study.confirmation`), or was never in it.
    """
    metric, mode = next(iter(objectives.items()))
    usable = [entry for entry in found if entry.finished and math.isfinite(entry.objectives[metric])]
    return min(usable, key=lambda entry: (-len(entry.trials), signed(entry.objectives[metric], mode)), default=None)


def pareto_front(found: Iterable[Configuration], objectives: dict[str, str]) -> list[Configuration]:
    """The finished configurations that no other equals or beats in every objective, best first objective first."""
    usable = [entry for entry in found if entry.finished and all(map(math.isfinite, entry.objectives.values()))]
    points = [tuple(signed(entry.objectives[metric], mode) for metric, mode in objectives.items()) for entry in usable]
    front = [
        (point, entry)
        for point, entry in zip(points, usable, strict=True)
        if not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
    ]
    return [entry for _, entry in sorted(front, key=lambda pair: pair[0])]


def table(found: Iterable[Configuration], objectives: dict[str, str]) -> list[dict[str, Any]]:
    """One flat dict a configuration, ranked, most seeds first as in :func:`best`: row, number, sampled values, objectives, states."""
    metric, mode = next(iter(objectives.items()))

    def rank(entry: Configuration) -> tuple[bool, int, float]:
        value = entry.objectives[metric]
        usable = entry.finished and math.isfinite(value)
        return (not usable, -len(entry.trials), signed(value, mode) if math.isfinite(value) else math.inf)

    return [
        {"row": entry.row, "number": entry.number, **entry.params, **entry.objectives, "state": _state(entry)}
        for entry in sorted(found, key=rank)
    ]


def _state(entry: Configuration) -> str:
    states = {trial.status for trial in entry.trials}
    return states.pop() if len(states) == 1 else ", ".join(sorted(states))


def signed(value: float, mode: str) -> float:
    """``value`` such that lower is better."""
    return value if mode == "min" else -value
