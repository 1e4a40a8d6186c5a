"""Objectives of a search: a trial's values, and their means over a configuration's seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from study.config.search import broken
from study.ledger.state import TrialState


def objective(trial: TrialState, metric: str) -> float | None:
    """Return a trial's value of an objective; None if it has none.

    ``seconds`` is the time spent in training, also before the trial was taken over from elsewhere
    (None if that is not known). ``bits`` is the width of the number format. All others are the last
    epoch's report.
    """
    if metric == "bits":
        return float(bits_of(trial.config))
    if metric == "seconds":
        return trial.seconds if trial.took.keys() == trial.reports.keys() else None
    values = trial.metric(metric)
    return values[max(values)] if values else None


def mean_objective(trials: Sequence[TrialState], metric: str) -> float:
    """Return the mean of an objective over a configuration's trials; NaN if one has no value."""
    values = [objective(trial, metric) for trial in trials]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else math.nan


def infeasible(trial: TrialState, constraints: Mapping[str, str]) -> bool:
    """Tell whether a trial's own values break a constraint of the search."""
    return bool(
        constraints
        and broken(constraints, {metric: mean_objective([trial], metric) for metric in constraints})
    )


def bits_of(config: dict[str, Any]) -> float:
    """Return the bits of a value in a trial's number format."""
    from lns_ops.formats import parse

    return parse(config["precision"]["format"]).bits
