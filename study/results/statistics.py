"""Statistics of a report beyond its table: fronts, tests, budgets, costs. Computes, draws nothing.

An :class:`Entry` is one configuration of a searched row, or one row, with means over seeds of its
measures: the study's metric, bits of the number format and of a stored weight, seconds, joules,
modelled joules (:mod:`trainers.telemetry.energy`), bytes sent. It is included after all its trials
have finished without divergence; in a search with rounds, only in the last round. The metric is
measured on the validation split, errors in per cent; the test set is never used for a selection.

- Intervals: 95 %, Student's t over seeds.
- Importance (:mod:`study.results.importance`): fANOVA (Hutter, Hoos, Leyton-Brown 2014), Optuna's
  evaluator, single keys and pairs; fractions of the variance of the metric.
- Partial dependence (Friedman 2001): mean prediction of a random forest over the sampled keys
  (Optuna's encoding) as a function of one key.
- Tests between categories: :func:`groups`, by :mod:`study.results.contrasts`, corrected once for
  all contrasts of a report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from study.config import Metric
from study.config.keys import lookup
from study.config.space import params_at
from study.ledger.state import FAILED, StudyState, TrialState
from study.results.configurations import groups_of_seeds, undominated
from study.results.contrasts import Contrast, deviation, independent, paired
from study.results.likeness import Entry, by_likeness, likenesses, task_of
from study.results.objectives import gpu_seconds, joules, last_value, objective
from study.results.ties import mean_of, plain_mean
from study.text import layout_of

METRIC = "metric"
"""Name of the measure that is the study's metric, in its display unit."""
COSTS = {
    "bits": "bits a value",
    "weight_bits": "bits a weight, copy and compensation included",
    "seconds": "seconds of training",
    "joules": "joules",
    "modelled_joules": "modelled joules of products",
    "bytes": "bytes sent",
}
"""Axis labels of the other measures of a configuration; smaller is better in each."""
REPORTED = {
    "joules": "telemetry/joules",
    "modelled_joules": "telemetry/modelled_joules",
    "bytes": "bytes/sent",
}
"""Names of the reported metrics behind measures, where they differ from the measure's name."""
CATEGORIES = {
    "row": "row",
    "format": "number format",
    "layout": "layout",
    "wire.name": "wire format",
    "sync.name": "synchronisation",
    "optimizer.name": "optimizer",
}
CONFIGURATIONS = "configurations"
TREES, DEPTH, PAIR_DEPTH, PAIRED = 16, 8, 5, 4
"""Forest sizes for importance, and the number of most important keys whose pairs are computed.

Optuna walks a tree once for every combination of its thresholds, in Python: its default of 64 trees
of depth 64 takes minutes on 500 configurations.
"""


def entries(state: StudyState) -> list[Entry]:
    """Return the configurations and rows with a finite metric, ordered by number.

    All their trials must have finished without divergence.
    """
    found, metric = [], state.config.primary_metric
    for group in groups_of_seeds(state.trials, [], state.config.search.constraints):
        values = (
            {
                name: mean
                for name in (METRIC, *COSTS)
                if (mean := _mean([measure(trial, name, metric) for trial in group.trials]))
                is not None
            }
            if group.finished and not group.diverged
            else {}
        )
        if METRIC in values:
            found.append(
                Entry(
                    row=group.row,
                    number=group.number,
                    params=params_at(group.params),
                    trials=group.trials,
                    values=values,
                    categories=categories_of(group.trials[0]),
                    eligible=not group.broken,
                )
            )
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return mean_of(known) if known and len(known) == len(values) else None


def labels(metric: Metric) -> dict[str, str]:
    """Return the axis labels of all measures, the metric first."""
    return {METRIC: metric.heading(metric.words)} | COSTS


def measure(trial: TrialState, name: str, metric: Metric) -> float | None:
    """Return a trial's :data:`METRIC` or one of its :data:`COSTS`; None if not measured."""
    if name == METRIC:
        return last_value(trial, metric)
    if name == "seconds":
        return objective(trial, name) or None
    return objective(trial, REPORTED.get(name, name))


def categories_of(trial: TrialState) -> dict[str, str]:
    """Return a trial's value of each of :data:`CATEGORIES`, by name."""
    known = {
        "row": trial.row,
        "format": str(trial.config["precision"]["format"]),
        "layout": layout_of(trial.config),
    }
    others = {name: lookup(trial.config, name) for name in CATEGORIES if name not in known}
    return known | {name: str(value) for name, value in others.items() if value is not None}


def spread_measures(found: Sequence[Entry]) -> list[str]:
    """Return the measures in which entries differ; ``weight_bits`` only if it differs from
    ``bits``.

    Entries may lack a measure: a trial with one worker sends no bytes.
    """
    alike = all(entry.values.get("weight_bits") == entry.values.get("bits") for entry in found)
    return [
        name
        for name in (METRIC, *COSTS)
        if len({entry.values[name] for entry in found if name in entry.values}) > 1
        and not (alike and name == "weight_bits")
    ]


def interval(values: Sequence[float], level: float = 0.95) -> float | None:
    """Return half the width of the mean's confidence interval, by Student's t.

    Returns None with fewer than two values or if one is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    from scipy.special import stdtrit  # scipy.stats takes a second to load

    return (
        float(stdtrit(len(values) - 1, 0.5 + level / 2))
        * deviation(values)
        / math.sqrt(len(values))
    )


def front(found: Sequence[Entry], measures: Sequence[str], metric: Metric) -> list[Entry]:
    """Return the Pareto front of the entries in ``measures``, sorted by the first measure.

    Smaller is better in every measure, except for a metric whose mode is ``max``.
    """
    signs = [metric.sign if name == METRIC else 1 for name in measures]
    points = [
        [sign * entry.values[name] for sign, name in zip(signs, measures, strict=True)]
        for entry in found
    ]
    return [found[place] for place in undominated(points)]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The metric by value of a category, compared with a reference that was fixed in advance.

    Attributes:
        category: name of the category.
        reference: value that the others are compared with: the baseline's, or the plan's first.
        figures: metric of the trials in its display unit, by value of the category, the reference
            first.
        contrasts: contrast of each other value's mean minus the reference's mean, in percentage
            points for errors; None without a test.
        exploratory: reason why the tests are not confirmatory; "" if they are.
    """

    category: str
    reference: str
    figures: dict[str, list[float]]
    contrasts: dict[str, Contrast | None]
    exploratory: str = ""


def groups(state: StudyState) -> list[Groups]:
    """Return the categories in which rows and configurations differ, with figures and tests.

    Entries that match except for the category (:mod:`study.results.likeness`) are compared seed by
    seed: the difference of two values is averaged over their matching configurations, and the test
    is over seeds, or over configurations if there is one seed. If no entries match, as when a
    random search samples the category, the configurations' means are independent samples. A search
    that chooses configurations by their results allows no test. The contrasts are corrected for the
    number returned here; :func:`study.results.answer.compare` corrects the comparison of rows with
    the baseline separately.
    """
    found, seen = [], set[frozenset[frozenset[str]]]()
    usable = entries(state)
    for category in CATEGORIES:
        values: dict[str, list[Entry]] = {}
        for entry in usable:
            if category in entry.categories:
                values.setdefault(entry.categories[category], []).append(entry)
        partition = frozenset(
            frozenset(entry.trials[0].id for entry in of_value) for of_value in values.values()
        )
        if len(values) > 1 and partition not in seen:
            seen.add(partition)
            found.append(_groups(state, category, values))
    tests = sum(contrast is not None for group in found for contrast in group.contrasts.values())
    return [
        replace(
            group,
            contrasts={
                name: each and replace(each, tests=tests) for name, each in group.contrasts.items()
            },
        )
        for group in found
    ]


def _groups(state: StudyState, category: str, values: dict[str, list[Entry]]) -> Groups:
    study, metric = state.config, state.config.primary_metric
    baseline = (
        name
        for name, of_value in values.items()
        for entry in of_value
        if entry.row == study.baseline
    )
    reference = next(baseline, next(iter(values)))
    others = [name for name in values if name != reference]
    chosen, why = study.search.adaptive or study.search.ends_early, ""
    contrasts = {
        name: None if chosen else _contrast(category, values[name], values[reference], metric)
        for name in others
    }
    if chosen:
        why = "the search chose by results which configurations there are, so nothing is tested"
    elif any(
        each is not None and each.over.endswith(CONFIGURATIONS) for each in contrasts.values()
    ):
        why = "tested over configurations, which says nothing of other seeds"
    figures = {
        name: [
            value
            for entry in values[name]
            for trial in entry.trials
            if (value := last_value(trial, metric)) is not None
        ]
        for name in (reference, *others)
    }
    return Groups(
        category=category, reference=reference, figures=figures, contrasts=contrasts,
        exploratory=why,
    )  # fmt: skip


def _contrast(
    category: str, first: list[Entry], second: list[Entry], metric: Metric
) -> Contrast | None:
    """Return the contrast of two values of a category, as :func:`groups` describes."""
    for like in likenesses(category):
        ours, theirs = (by_likeness(category, found, like) for found in (first, second))
        if shared := [key for key in ours if key in theirs]:
            return _matched([ours[key] for key in shared], [theirs[key] for key in shared], metric)
    if category != "row" and len({task_of(entry, ()) for entry in (*first, *second)}) > 1:
        return None
    return independent(_of_points(first), _of_points(second), CONFIGURATIONS)


def _of_points(found: Iterable[Entry]) -> list[float]:
    """Return the mean metric of every sampled point of the space.

    Rows of a random search sample the same points, so their configurations are not independent. A
    row that is not searched counts as a point.
    """
    points: dict[str, list[float]] = {}
    for entry in found:
        point = entry.row if entry.number is None else json.dumps(entry.params, sort_keys=True)
        points.setdefault(point, []).append(entry.values[METRIC])
    return [plain_mean(figures) for figures in points.values()]


def _matched(
    first: Sequence[list[Entry]], second: Sequence[list[Entry]], metric: Metric
) -> Contrast | None:
    """Return the contrast of two lists of matching groups of entries.

    The replicates are the seeds (:func:`seed_means`), or the pairs of groups if there is one seed.
    """
    by_seed = [
        [_by_seed(found, metric) for found in pair] for pair in zip(first, second, strict=True)
    ]
    gaps = [
        {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
        for ours, theirs in by_seed
    ]
    if of_seeds := seed_means(gaps):
        return paired(of_seeds, "seeds")
    shared = set.intersection(*map(set, gaps))  # one seed, or none
    return paired([of_pair[seed] for of_pair in gaps for seed in shared], CONFIGURATIONS)


def seed_means(gaps: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the mean gap by seed over ``gaps``, each of which maps seeds to gaps.

    Only seeds that all mappings have count, unless every mapping has just one
    (``search.per_seed``). The list is empty with fewer than two seeds.
    """
    seeds = set.intersection(*map(set, gaps))
    if len(seeds) < 2 and all(len(of_one) == 1 for of_one in gaps):
        seeds = set().union(*gaps)
    if len(seeds) < 2:
        return []
    return [plain_mean(of_one[seed] for of_one in gaps if seed in of_one) for seed in sorted(seeds)]


def _by_seed(found: Sequence[Entry], metric: Metric) -> dict[int, float]:
    """Return the entries' mean metric by seed, for the seeds that all entries have."""
    figures = [
        {
            trial.seed: value
            for trial in entry.trials
            if (value := last_value(trial, metric)) is not None
        }
        for entry in found
    ]
    shared = set.intersection(*map(set, figures))
    return {seed: plain_mean(of_entry[seed] for of_entry in figures) for seed in shared}


class HeatMap(NamedTuple):
    """The best metric by number format and another category.

    Attributes:
        formats: labels of the rows.
        category: what the columns are, a key of :data:`CATEGORIES`: the layout, or else the row of
            the study.
        columns: their labels.
        values: the metric ``[formats, columns]``, NaN for missing pairs.
    """

    formats: list[str]
    category: str
    columns: list[str]
    values: np.ndarray


def heat_map(found: Sequence[Entry], metric: Metric) -> HeatMap | None:
    """Return the best metric by format and layout, or by format and row if one layout was tried.

    Returns None unless formats and one of the two vary.
    """
    formats = list(dict.fromkeys(entry.categories["format"] for entry in found))
    for category in ("layout", "row"):
        columns = list(dict.fromkeys(entry.categories[category] for entry in found))
        if len(columns) > 1:
            break
    if len(formats) < 2 or len(columns) < 2:
        return None
    values = np.full((len(formats), len(columns)), np.nan)
    cells: dict[tuple[int, int], list[Entry]] = {}
    for entry in found:
        known = entry.categories
        cells.setdefault(
            (formats.index(known["format"]), columns.index(known[category])), []
        ).append(entry)
    for place, alike in cells.items():
        if (best := best_entry(alike, metric)) is not None:
            values[place] = best.values[METRIC]
    if np.isfinite(values).sum() <= max(len(formats), len(columns)):
        return None  # each row of the study has a format of its own
    return HeatMap(formats, category, columns, values)


def best_entry(found: Iterable[Entry], metric: Metric) -> Entry | None:
    """Return the best eligible entry, as :func:`study.results.configurations.best` chooses it."""
    return min((entry for entry in found if entry.eligible), key=preference(metric), default=None)


def preference(metric: Metric) -> Callable[[Entry], tuple[int, float]]:
    """Return a sort key that puts the best entry first: most seeds, then best metric."""
    return lambda entry: (-len(entry.trials), metric.sign * entry.values[METRIC])


def best_of_budget(state: StudyState) -> dict[str, tuple[list[float], list[float]]]:
    """Return each row's best metric so far as a function of training seconds.

    The seconds add up over the row's trials in the order in which they ended. A configuration
    counts, with its mean over seeds, once its last trial has ended.
    """
    found = [entry for entry in entries(state) if entry.eligible]
    planned = {trial.id for trial in state.trials}
    sign = state.config.primary_metric.sign
    last = {
        max(entry.trials, key=lambda trial: trial.ended or 0.0).id: sign * entry.values[METRIC]
        for entry in found
    }
    curves = {}
    for row, trials in state.rows().items():
        spent, best = 0.0, math.inf
        xs: list[float] = []
        ys: list[float] = []
        for trial in sorted(
            (trial for trial in trials if trial.ended), key=lambda trial: trial.ended or 0.0
        ):
            # PBT members share epochs with the trial they were copied from; count those once
            spent += trial.spent if trial.source in planned else trial.seconds
            best = min(best, last.get(trial.id, math.inf))
            if math.isfinite(best):
                xs.append(spent)
                ys.append(sign * best)
        if xs:
            curves[row] = (xs, ys)
    return curves


def rank_formats(found: Iterable[Entry], metric: Metric) -> list[dict[str, Any]]:
    """Return the best entry of every number format, with its rank in metric, bits and seconds."""
    of_format: dict[str, list[Entry]] = {}
    sign = {METRIC: metric.sign, "bits": 1, "seconds": 1}
    for entry in found:
        of_format.setdefault(entry.categories["format"], []).append(entry)
    lines: list[dict[str, Any]] = [
        {"format": name, "entry": best.name, **best.values}
        for name, alike in of_format.items()
        if (best := best_entry(alike, metric)) is not None
    ]
    for key in sign:
        order = sorted({sign[key] * float(line[key]) for line in lines if key in line})
        for line in lines:
            line[f"rank_{key}"] = (
                order.index(sign[key] * float(line[key])) + 1 if key in line else None
            )
    return sorted(lines, key=lambda line: metric.sign * float(line[METRIC]))


def failures(state: StudyState) -> list[tuple[str, int, list[str]]]:
    """Return the errors of the failed trials, the most frequent first.

    Each entry has the message, the number of trials, and up to five trial ids. Messages that differ
    only in numbers are merged.
    """
    import re

    found: dict[str, list[TrialState]] = {}
    for trial in state.trials:
        if trial.status == FAILED:
            found.setdefault(re.sub(r"\d+(\.\d+)?", "N", trial.error), []).append(trial)
    lines = [
        (trials[0].error, len(trials), [trial.id for trial in trials[:5]])
        for trials in found.values()
    ]
    return sorted(lines, key=lambda line: -line[1])


def costs(state: StudyState) -> dict[str, float]:
    """Return the study's total costs: trial seconds, GPU hours, joules, bytes; zeros are left out.

    The seconds of trials that failed or were ended early are also listed separately. Epochs taken
    over from another study or trial are not counted again.
    """
    total: dict[str, float] = {
        "trials": float(len(state.trials)),
        "epochs": float(sum(len(t.reports) for t in state.trials)),
    }
    total["trial seconds"] = sum(trial.spent for trial in state.trials)
    total["of them in failed trials"] = _sum(
        state, lambda trial: trial.spent if trial.status == FAILED else 0.0
    )
    total["of them in trials ended early"] = _sum(
        state, lambda trial: trial.spent if trial.stopped_by else 0.0
    )
    total["GPU hours"] = gpu_seconds(state) / 3600
    total["joules"] = joules(state)
    total["bytes"] = _sum(
        state, lambda trial: sum(trial.metric(REPORTED["bytes"], own=True).values())
    )
    return {name: value for name, value in total.items() if value}


def _sum(state: StudyState, value: Callable[[TrialState], float]) -> float:
    return sum(value(trial) for trial in state.trials)
