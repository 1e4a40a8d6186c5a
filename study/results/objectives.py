"""A trial's figures: the search's objectives, their means over a configuration's seeds, and the
study's metric in its display unit.

A trial has *diverged* if a loss of its last epoch, or the requested metric, is not finite
(:func:`diverged`). Its other metrics are meaningless, for example the error of always predicting
the first class, so :func:`mean_objective` returns NaN and no selection uses them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lns_ops.formats import Logarithmic, NumberFormat, parse
from lns_ops.spec.gaussian_log import FINE_BITS
from study.config import Metric
from study.config.search import broken
from study.ledger.state import FINISHED, StudyState, TrialState
from study.results.ties import mean_of
from study.text import counted
from trainers.config.optimizer import MULTIPLICATIVE
from trainers.workers.resources import gpus_of

SPENT = ("telemetry/joules", "telemetry/modelled_joules", "bytes/sent")
"""Reported costs of an epoch; a trial's value is their sum over epochs."""


LOSSES = ("train/loss", "validation/loss")
"""A trial has diverged if one of these losses is not finite."""


def has_diverged(metrics: Mapping[str, float], *names: str) -> bool:
    """Return whether an epoch's metrics show that the trial has diverged.

    Args:
        metrics: metrics that the trial reported after the epoch.
        names: further metrics, beside :data:`LOSSES`, that must be finite if reported.
    """
    wanted = (metrics.get(name) for name in (*LOSSES, *names))
    return any(value is not None and not math.isfinite(value) for value in wanted)


def diverged(trial: TrialState, *names: str) -> bool:
    """Return whether a trial had diverged after its last epoch (:func:`has_diverged`).

    Test metrics are ignored, because the test set must not affect any selection.
    """
    return bool(trial.reports) and has_diverged(trial.reports[trial.epoch]["metrics"], *names)


def objective(trial: TrialState, metric: str) -> float | None:
    """Return a trial's value of an objective, or None.

    - ``seconds`` is the training time, and :data:`SPENT` are sums over epochs. Both include epochs
      that were taken over from another study or trial; None if an epoch lacks the value.
    - ``bits`` is the width of the number format, ``weight_bits`` is :func:`weight_bits_of`.
    - Any other objective is the value that the last epoch reported.
    """
    if metric == "bits":
        return bits_of(trial.config)
    if metric == "weight_bits":
        return weight_bits_of(trial.config)
    if metric == "seconds":
        return trial.seconds if trial.took.keys() == trial.reports.keys() else None
    values = trial.metric(metric)
    if metric in SPENT and values.keys() != trial.reports.keys():
        return None
    if not values:
        return None
    return math.fsum(values.values()) if metric in SPENT else values[max(values)]


def mean_objective(trials: Sequence[TrialState], metric: str) -> float:
    """Return the mean of an objective over a configuration's trials, rounded for comparisons
    (:func:`study.results.ties.mean_of`); NaN if a trial has no value or has diverged."""
    if any(diverged(trial, metric) for trial in trials):
        return math.nan
    values = [objective(trial, metric) for trial in trials]
    known = [value for value in values if value is not None]
    return mean_of(known) if known and len(known) == len(values) else math.nan


METRICS = "metrics."
"""Prefix of a metric's column whose name is already taken, as in MLflow's tables of runs."""


def column_of(metric: str, taken: Collection[str], *prefixes: str) -> str:
    """Return a metric's column name: its own name, prefixed by :data:`METRICS` if that is taken.

    Args:
        metric: name of the metric.
        taken: names of the other columns.
        prefixes: prefixes of further columns.
    """
    clashes = metric in taken or metric.startswith((METRICS, *prefixes))
    return f"{METRICS}{metric}" if clashes else metric


def gpu_seconds(state: StudyState) -> float:
    """Return the GPU seconds of all trials: seconds times the number or share of GPUs of each.

    Epochs taken over from another study or trial are not counted; they were spent there.
    """
    return sum(trial.spent * gpus_of(trial.config) for trial in state.trials)


def joules(state: StudyState) -> float:
    """Return the GPU energy that all trials reported, in joules, scaled by each trial's GPU share.

    Epochs taken over from another study or trial are not counted; they were spent there.
    """
    total = 0.0
    for trial in state.trials:
        energy = trial.metric("telemetry/joules", own=True).values()
        total += min(1.0, gpus_of(trial.config)) * sum(filter(math.isfinite, energy))
    return total


def infeasible(trial: TrialState, constraints: Mapping[str, str]) -> bool:
    """Return whether a trial violates a constraint of the search; False if it has diverged,
    because its metrics are meaningless."""
    return bool(
        constraints
        and not diverged(trial, *constraints)
        and broken(constraints, {metric: mean_objective([trial], metric) for metric in constraints})
    )


def format_of(name: str) -> NumberFormat | None:
    """Return a number format, or None if this machine lacks it, such as the file of a table."""
    with suppress(ValueError):
        return parse(name)
    return None


def bits_of(config: dict[str, Any]) -> float | None:
    """Return the bits of a value in a trial's number format; None if they are not known here."""
    found = format_of(config["precision"]["format"])
    return None if found is None else found.bits


def weight_bits_of(config: dict[str, Any]) -> float | None:
    """Return the number of bits stored per weight during training: the weight's number format
    (float32 with scope ``matmul``), its master copy, and the update's Kahan compensation; None if
    they are not known here."""
    precision = config["precision"]
    of_float32 = precision["scope"] == "matmul"
    weight = format_of("float32" if of_float32 else precision["format"])
    master = precision.get("master_format")
    updated = format_of(master) if master else weight
    if weight is None or updated is None:
        return None
    bits = weight.bits + (updated.bits if master else 0)
    if precision["kahan_sum"]:
        moved = isinstance(weight, Logarithmic) and config["optimizer"]["name"] in MULTIPLICATIVE
        bits += FINE_BITS if moved else updated.compensation.bits
    return bits


def last_value(trial: TrialState, metric: Metric) -> float | None:
    """Return a metric after a trial's last epoch, in its display unit; None if not reported."""
    value = objective(trial, metric.name)
    return None if value is None else metric.scale * value


def test_value(trial: TrialState, metric: Metric) -> float | None:
    """Return a trial's metric on the test set, in its display unit; None if not reported.

    For a metric without a split, the value reported at the end counts, else the last epoch's.
    """
    if metric.test_name in trial.test:
        return metric.scale * trial.test[metric.test_name]
    return last_value(trial, metric) if metric.test_name == metric.name else None


def curve(trial: TrialState, metric: Metric) -> dict[int, float]:
    """Return the values of a metric by epoch, in its display unit."""
    return {epoch: metric.scale * value for epoch, value in trial.metric(metric.name).items()}


def lacking(state: StudyState) -> list[str]:
    """Describe how many trials lack the study's metric, and which metrics they reported."""
    metric = state.config.primary_metric
    reports = [
        {name for event in trial.reports.values() for name in event["metrics"]}
        for trial in state.trials
        if trial.reports
    ]
    tests = [
        set(trial.test)
        for trial in state.trials
        if trial.status == FINISHED and test_value(trial, metric) is None
    ]
    if without := [names for names in reports if metric.name not in names]:
        return [_told(without, "reported", metric.name, "name one of them by metric=NAME")]
    remedy = "return it from the loop or pass it to tell(), or choose metric=NAME without a split"
    return [_told(tests, "ended with", metric.test_name, remedy)] if tests else []


def _told(found: list[set[str]], verb: str, name: str, remedy: str) -> str:
    """Return a sentence about trials that lack a metric.

    ``found`` has the names of the reported metrics, one set per trial.
    """
    others = ", ".join(sorted(set().union(*found)))
    instead = f" they {verb}: {others};" if others else ""
    return f"{counted(len(found), 'trial')} {verb} no {name};{instead} {remedy}."
