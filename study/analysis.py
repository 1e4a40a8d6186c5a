"""What a report says beyond its table: fronts, importance, dependence, tests, budgets, costs. Figures from a study's state, no drawing.

An :class:`Entry` is one configuration (of a searched row) or one row, with means over its seeds of what can be weighed against each other:
error, bits of the format, seconds, joules, bytes sent. Errors are validation errors, in per cent: the test set chooses nothing.

- Intervals: 95 %, Student's t over seeds.
- Importance: fANOVA (Hutter, Hoos, Leyton-Brown 2014), Optuna's evaluator, single keys and pairs; fractions of the variance of the error.
- Partial dependence (Friedman 2001): a random forest over the sampled keys (Optuna's encoding), the mean prediction as one key moves.
- Tests between categories: Kruskal and Wallis over all; Mann and Whitney of each with the best, p corrected by Holm (1979). Fewer
than three
  values in a group: no test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from study.mlflow_runs import layout_of
from study.objectives import bits_of
from study.space import Params, lookup, today
from study.state import ENDED, FAILED, FINISHED, StudyState, TrialState
from trainers.bundles import gpus_of

MEASURES = {
    "error": "validation error, %",
    "bits": "bits a value",
    "seconds": "seconds of training",
    "joules": "joules",
    "bytes": "bytes sent",
}
"""What configurations are weighed by, all of them the smaller the better, and their axis labels."""
CATEGORIES = {
    "row": "row",
    "format": "number format",
    "layout": "layout",
    "wire.name": "wire format",
    "sync.name": "synchronisation",
    "optimizer.name": "optimizer",
}
LEAST = 3
"""Values a group needs to be tested."""
TREES, DEPTH, PAIR_DEPTH, PAIRED = 16, 8, 5, 4
"""Of the forests behind importance. Optuna walks a tree once for every combination of its thresholds, in Python: its default of 64 trees
of depth 64 takes minutes on 500 configurations. Pairs are those of the most important keys."""
FOREST = 500
"""Configurations that importance and dependence are computed from, at most: the first ones."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One configuration or row.

    Attributes:
        values: mean over seeds by measure; only those that every trial has.
        categories: by name of :data:`CATEGORIES`.
    """

    row: str
    number: int | None
    params: Params
    trials: tuple[TrialState, ...]
    values: Mapping[str, float]
    categories: Mapping[str, str]

    @property
    def name(self) -> str:
        """``lns12`` or ``lns12 #7``."""
        return self.row if self.number is None else f"{self.row} #{self.number}"


def entries(state: StudyState) -> list[Entry]:
    """The configurations or rows whose trials all ended with a finite error, in the plan's order."""
    groups: dict[tuple[str, int | None], list[TrialState]] = {}
    for trial in state.trials:
        groups.setdefault((trial.row, trial.number), []).append(trial)
    found = []
    for (row, number), trials in groups.items():
        done = tuple(trial for trial in trials if trial.status in ENDED and trial.status != FAILED)
        values = {name: mean for name in MEASURES if (mean := _mean(done, name)) is not None}
        if "error" in values:
            categories = categories_of(done[0])
            found.append(
                Entry(row=row, number=number, params=today(done[0].params), trials=done, values=values, categories=categories)
            )
    return found


def _mean(trials: Sequence[TrialState], name: str) -> float | None:
    values = [measure(trial, name) for trial in trials]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def measure(trial: TrialState, name: str) -> float | None:
    """One of :data:`MEASURES` of a trial; None if it was not measured."""
    if name == "error":
        values = trial.metric("validation/error")
        return 100.0 * values[max(values)] if values else None
    if name == "bits":
        return float(bits_of(trial.config))
    if name == "seconds":
        return trial.seconds or None
    found = trial.metric({"joules": "telemetry/joules", "bytes": "bytes/sent"}[name])
    return sum(found.values()) if found else None


def categories_of(trial: TrialState) -> dict[str, str]:
    """What a trial is, by name of :data:`CATEGORIES`."""
    known = {"row": trial.row, "format": str(trial.config["precision"]["format"]), "layout": layout_of(trial.config)}
    others = {name: lookup(trial.config, name) for name in CATEGORIES if name not in known}
    return known | {name: str(value) for name, value in others.items() if value is not None}


def spread_measures(found: Sequence[Entry]) -> list[str]:
    """The measures in which entries differ; not every entry need have all (one worker sends no bytes)."""
    return [name for name in MEASURES if len({entry.values[name] for entry in found if name in entry.values}) > 1]


def interval(values: Sequence[float], level: float = 0.95) -> float | None:
    """Half the width of the mean's confidence interval by Student's t; None below two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # scipy.stats takes a second to load

    return float(stdtrit(len(values) - 1, 0.5 + level / 2)) * statistics.stdev(values) / math.sqrt(len(values))


def front(found: Sequence[Entry], measures: Sequence[str]) -> list[Entry]:
    """The entries that none other equals or beats in every measure (all smaller the better), by the first."""
    points = np.array([[entry.values[name] for name in measures] for entry in found])
    kept = [
        entry
        for entry, point in zip(found, points, strict=True)
        if not (np.all(points <= point, axis=1) & np.any(points < point, axis=1)).any()
    ]
    return sorted(kept, key=lambda entry: [entry.values[name] for name in measures])


# ----------------------------------------------------------------------------------------------------------------- importance


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of the error's variance.

    Attributes:
        single: by key, largest first.
        pairs: by two keys: what they explain together beyond each alone, largest first.
        curves: partial dependence by key: places and mean predicted errors in per cent; places are values, or texts of choices.
        configurations: how many it rests on.
    """

    single: dict[str, float]
    pairs: dict[tuple[str, str], float]
    curves: dict[str, tuple[list[Any], list[float]]]
    configurations: int


def importance(state: StudyState) -> Importance | None:
    """Which sampled keys the error depends on, all rows together (the row is a key too); None with fewer than ten configurations."""
    found = [entry for entry in entries(state) if entry.number is not None][:FOREST]
    domains = {domain.key: domain for domain in state.config.parsed_space.domains}
    keys = [key for key in domains if all(key in entry.params for entry in found)]
    if len(found) < 10 or not keys:
        return None
    study, names = _optuna_study(found, keys, domains)
    if len({trial.value for trial in study.trials}) < 2:
        return None
    import optuna

    try:
        single = optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, max_depth=DEPTH, seed=0).evaluate(study, params=names)
    except RuntimeError:  # no variance in any tree
        return None
    pairs = _pairs(study, names, list(single)[:PAIRED])
    curves = _dependence(study, [name for name in single if name in names][:4])
    return Importance(single=dict(single), pairs=pairs, curves=curves, configurations=len(found))


def _optuna_study(found: Sequence[Entry], keys: Sequence[str], domains: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The configurations as an Optuna study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = list(dict.fromkeys(entry.row for entry in found))
    distributions: dict[str, Any] = {key: _distribution(domains[key], [entry.params[key] for entry in found]) for key in keys}
    if len(rows) > 1:
        distributions["row"] = optuna.distributions.CategoricalDistribution(rows)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={
                    name: entry.row if name == "row" else _plain(distributions[name], entry.params[name])
                    for name in distributions
                },
                distributions=distributions,
                value=entry.values["error"],
            )
            for entry in found
        ]
    )
    return study, list(distributions)


def _distribution(domain: Any, values: Sequence[Any]) -> Any:
    import optuna

    if domain.categorical:
        return optuna.distributions.CategoricalDistribution(list(dict.fromkeys(_text(value) for value in domain.values)))
    return optuna.distributions.FloatDistribution(float(min(values)), float(max(values)), log=domain.kind.startswith("log"))


def _plain(distribution: Any, value: Any) -> Any:
    return _text(value) if hasattr(distribution, "choices") else float(value)


def _text(value: Any) -> str:
    from study.space import show

    return show(value)


def _pairs(study: Any, names: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], float]:
    """What two keys explain together beyond each alone, from the trees of an evaluator of Optuna's, which itself offers single keys."""
    import optuna

    distributions = study.trials[0].distributions
    varied = sorted(name for name in names if not distributions[name].single())  # the evaluator's columns
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, max_depth=PAIR_DEPTH, seed=0)
    single = evaluator.evaluate(study, params=list(names))
    forest: Any = evaluator._evaluator
    found = {}
    for first, second in combinations([name for name in of if name in varied], 2):
        columns = np.concatenate([forest._column_to_encoded_columns[varied.index(name)] for name in (first, second)])
        shares = [tree.get_marginal_variance(columns) / tree.variance for tree in forest._trees if tree.variance > 0]
        found[first, second] = max(0.0, float(np.mean(shares)) - single[first] - single[second])
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _dependence(study: Any, names: Sequence[str], points: int = 24) -> dict[str, tuple[list[Any], list[float]]]:
    from optuna._transform import _SearchSpaceTransform
    from sklearn.ensemble import RandomForestRegressor

    trials = study.get_trials(deepcopy=False)  # Optuna's ``trials`` copies all of them each time
    distributions = trials[0].distributions
    transform = _SearchSpaceTransform(distributions)
    x = np.array([transform.transform(trial.params) for trial in trials])
    forest = RandomForestRegressor(n_estimators=64, min_samples_leaf=2, random_state=0)
    forest.fit(x, [trial.value for trial in trials])
    curves: dict[str, tuple[list[Any], list[float]]] = {}
    for name in names:
        places = _places(distributions[name], points)
        predicted = [_with(trials[0], transform, x, name, place) for place in places]
        curves[name] = places, [float(forest.predict(moved).mean()) for moved in predicted]
    return curves


def _with(trial: Any, transform: Any, x: np.ndarray, name: str, place: Any) -> np.ndarray:
    """The configurations with one key set; ``trial`` is any of them."""
    columns = transform.column_to_encoded_columns[list(trial.distributions).index(name)]
    moved = x.copy()
    moved[:, columns] = transform.transform(trial.params | {name: place})[columns]
    return moved


def _places(distribution: Any, points: int) -> list[Any]:
    if hasattr(distribution, "choices"):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    places = space(distribution.low, distribution.high, points)
    return [float(place) for place in np.clip(places, distribution.low, distribution.high)]


# ---------------------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Errors by category, with tests.

    Attributes:
        errors: per cent, by value of the category, lowest median first.
        overall: p of Kruskal and Wallis; None where a group is too small.
        against_best: corrected p of each value's difference from the best one.
    """

    category: str
    errors: dict[str, list[float]]
    overall: float | None
    against_best: dict[str, float] = field(default_factory=dict)


def groups(state: StudyState) -> list[Groups]:
    """The categories that trials differ in, each with its errors and tests."""
    done = [(categories_of(trial), error) for trial in state.trials if trial.status == FINISHED
            and (error := measure(trial, "error")) is not None and math.isfinite(error)]  # fmt: skip
    found = []
    seen: set[str] = set()
    for category in CATEGORIES:
        errors: dict[str, list[float]] = {}
        for known, error in done:
            if category in known:
                errors.setdefault(known[category], []).append(error)
        partition = str(sorted(map(sorted, errors.values())))
        if len(errors) > 1 and partition not in seen:
            seen.add(partition)
            ordered = dict(sorted(errors.items(), key=lambda item: statistics.median(item[1])))
            found.append(Groups(category=category, errors=ordered, **_tests(ordered)))
    return found


def _tests(errors: Mapping[str, list[float]]) -> dict[str, Any]:
    from scipy.stats import kruskal, mannwhitneyu

    if min(map(len, errors.values())) < LEAST or len({value for values in errors.values() for value in values}) < 2:
        return {"overall": None}
    best, *others = errors
    raw = {name: float(mannwhitneyu(errors[best], errors[name]).pvalue) for name in others}
    return {"overall": float(kruskal(*errors.values()).pvalue), "against_best": holm(raw)}


def holm(raw: Mapping[str, float]) -> dict[str, float]:
    """p values corrected for their number, as Holm (1979): the k-th smallest times (n - k + 1), never falling, at most 1."""
    corrected, worst = {}, 0.0
    for place, (name, value) in enumerate(sorted(raw.items(), key=lambda item: item[1])):
        worst = max(worst, min(1.0, value * (len(raw) - place)))
        corrected[name] = worst
    return {name: corrected[name] for name in raw}


def heat_map(found: Sequence[Entry]) -> tuple[list[str], list[str], np.ndarray] | None:
    """Lowest error by format and layout (NaN where there is none): names down, names across, per cent. None unless both vary."""
    formats = list(dict.fromkeys(entry.categories["format"] for entry in found))
    layouts = list(dict.fromkeys(entry.categories["layout"] for entry in found))
    if len(formats) < 2 or len(layouts) < 2:
        return None
    table = np.full((len(formats), len(layouts)), np.nan)
    for entry in found:
        place = formats.index(entry.categories["format"]), layouts.index(entry.categories["layout"])
        table[place] = np.nanmin([table[place], entry.values["error"]])
    return formats, layouts, table


# ------------------------------------------------------------------------------------------------------------ budgets and costs


def best_of_budget(state: StudyState) -> dict[str, tuple[list[float], list[float]]]:
    """Of each row, the lowest validation error so far (per cent) over the seconds its trials have taken, in the order they ended."""
    curves = {}
    for row, trials in state.rows().items():
        spent, best = 0.0, math.inf
        xs: list[float] = []
        ys: list[float] = []
        for trial in sorted((trial for trial in trials if trial.ended), key=lambda trial: trial.ended or 0.0):
            spent += trial.seconds
            error = measure(trial, "error")
            if trial.status != FAILED and error is not None and error < best:
                best = error
            if math.isfinite(best):
                xs.append(spent)
                ys.append(best)
        if xs:
            curves[row] = (xs, ys)
    return curves


def rank_formats(found: Iterable[Entry]) -> list[dict[str, Any]]:
    """The best entry of every number format: format, bits, error, seconds, and its rank in each."""
    best: dict[str, Entry] = {}
    for entry in found:
        name = entry.categories["format"]
        if name not in best or entry.values["error"] < best[name].values["error"]:
            best[name] = entry
    lines: list[dict[str, Any]] = [{"format": name, "entry": entry.name, **entry.values} for name, entry in best.items()]
    for key in ("error", "bits", "seconds"):
        order = sorted({float(line[key]) for line in lines if key in line})
        for line in lines:
            line[f"rank_{key}"] = order.index(float(line[key])) + 1 if key in line else None
    return sorted(lines, key=lambda line: float(line["error"]))


def failures(state: StudyState) -> list[tuple[str, int, list[str]]]:
    """What ended trials for good: the message (numbers aside, alike ones together), how many trials, some of their ids."""
    import re

    found: dict[str, list[TrialState]] = {}
    for trial in state.trials:
        if trial.status == FAILED:
            found.setdefault(re.sub(r"\d+(\.\d+)?", "N", trial.error), []).append(trial)
    lines = [(trials[0].error, len(trials), [trial.id for trial in trials[:5]]) for trials in found.values()]
    return sorted(lines, key=lambda line: -line[1])


def costs(state: StudyState) -> dict[str, float]:
    """What the study has taken: trial seconds, seconds of trials that failed or were ended early, GPU hours, joules, bytes."""
    total: dict[str, float] = {"trials": float(len(state.trials)), "epochs": float(sum(len(t.reports) for t in state.trials))}
    total["trial seconds"] = sum(trial.seconds for trial in state.trials)
    total["of them in failed trials"] = _sum(state, lambda trial: trial.seconds if trial.status == FAILED else 0.0)
    total["of them in trials ended early"] = _sum(state, lambda trial: trial.seconds if trial.stopped_by else 0.0)
    total["GPU hours"] = _sum(state, _gpu_hours)
    for name in ("joules", "bytes"):
        total[name] = _sum(state, lambda trial, name=name: measure(trial, name) or 0.0)  # type: ignore[misc]
    return {name: value for name, value in total.items() if value}


def _sum(state: StudyState, value: Callable[[TrialState], float]) -> float:
    return sum(value(trial) for trial in state.trials)


def _gpu_hours(trial: TrialState) -> float:
    return trial.seconds / 3600 * gpus_of(trial.config)
