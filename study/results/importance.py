"""Importance of each hyperparameter, computed with Optuna: fANOVA and PED-ANOVA.

fANOVA (F. Hutter, H. Hoos, K. Leyton-Brown 2014) fits a random forest and estimates the share of
the metric's variance over the whole space that a key explains. It needs complete configurations, so
it covers only the keys that every configuration has.

PED-ANOVA (S. Watanabe, A. Bansal, F. Hutter 2023) compares a key's distribution among the best
tenth of the configurations with its distribution among all configurations that have the key, so it
also covers keys with a ``when``. Even on pure noise it returns a positive value for every key,
larger for keys with many values. Therefore the mean over :data:`SHUFFLES` shuffles of the metric is
subtracted from each value, and the remainders are scaled to add up to 1. If no key's value is above
all of its shuffled values, no shares are reported.

The variance is taken over the distribution that the search samples from: all values of a choice are
equally likely, and a ``loguniform`` range is uniform in its logarithm. Optuna's fANOVA (5.0) weighs
values differently, so its input is transformed (docs/decisions/0072-measure-of-importance.md):

- It treats every range as uniform, even with ``log=True``: with rates from 0.001 to 1, rates above
  0.1 would have nine tenths of the weight. It gets the logarithm instead, as a uniform range.
- It encodes a choice as one 0/1 column per value and weighs 0 and 1 equally, so one value of nine
  would have half of the weight. It also walks each tree once for every combination of the columns'
  thresholds (2^values). It gets one column instead: the value's rank by mean metric. A tree finds
  every best split of a mean in this order (W. D. Fisher 1958). A choice of three values or more is
  left out if there are fewer than :data:`REPEATS` configurations per value, because then the ranks
  mostly repeat the metric itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from study._compat import marginal_shares, search_space_transform
from study.config.distribution import distribution, quiet_optuna
from study.config.space import Domain, Params, show
from study.ledger.state import StudyState
from study.results.likeness import Entry
from study.results.statistics import DEPTH, METRIC, PAIR_DEPTH, PAIRED, TREES, entries

FOREST = 500
"""Maximum number of configurations used for importance and dependence; later ones are left out."""
REPEATS = 3
"""Minimum number of configurations per value of a choice, if it has three values or more."""
ROW = "row"
"""Key under which the row itself counts as a hyperparameter."""
PLACES = 24
"""Number of points on a range's axis at which partial dependence is computed."""
BEST = 0.1
"""Share of the configurations that PED-ANOVA counts as the best."""
SHUFFLES = 19
"""Number of shuffles of the metric. A key without effect exceeds all 19 shuffled values with
probability 1/20."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Importance of the sampled keys for the study's metric.

    Attributes:
        single: fANOVA's share of the variance by key, largest first.
        pairs: share that two keys explain together beyond each alone, largest first.
        curves: partial dependence by key: values of the key (texts for a choice), and the mean
            predicted metric at each, in its display unit.
        configurations: number of configurations that the shares are computed from.
        best: PED-ANOVA's share by key, largest first, keys with a ``when`` included; empty if it
            cannot be computed.
    """

    single: dict[str, float]
    pairs: dict[tuple[str, str], float]
    curves: dict[str, tuple[list[Any], list[float]]]
    configurations: int
    best: dict[str, float] = field(default_factory=dict)


def importance(state: StudyState) -> Importance | None:
    """Compute how much the metric depends on each sampled key, over all rows together.

    The row counts as a key. Returns None with fewer than ten configurations, or if the search ends
    trials early.
    """
    sampled = _sampled(state)
    single = _shares(sampled.ordered, sampled.observed, 0) if sampled else None
    if sampled is None or single is None:
        return None
    names = [domain.key for domain in sampled.observed]
    pairs = _pairs(sampled.ordered, names, list(single)[:PAIRED])
    by_name = {domain.key: domain for domain in sampled.observed}
    curves = _dependence(sampled.study, [by_name[name] for name in single][:4])
    return Importance(
        single=single,
        pairs=pairs,
        curves=curves,
        configurations=len(sampled.found),
        best=_of_the_best(state, sampled.found, sampled.domains),
    )


def resampled_shares(state: StudyState, samples: int) -> list[dict[str, float]]:
    """Return the fANOVA shares by key, followed by those from ``samples`` bootstrap resamples of
    the configurations; empty if :func:`importance` returns None."""
    sampled = _sampled(state)
    first = _shares(sampled.ordered, sampled.observed, 0) if sampled else None
    if sampled is None or first is None:
        return []
    found, random, mode = [first], np.random.default_rng(0), state.config.primary_metric.mode
    while len(found) <= samples:
        drawn = [
            sampled.found[at] for at in random.integers(len(sampled.found), size=len(sampled.found))
        ]
        study = _optuna_study(*_ordered(drawn, sampled.observed), mode)
        found.append(_shares(study, sampled.observed, len(found)) or {})
    return found


def fanova(
    params: Sequence[Params], figures: Sequence[float], domains: Sequence[Domain], seed: int = 0
) -> dict[str, float] | None:
    """Return the share of the figures' variance by key, largest first; used to check claims.

    Args:
        params: sampled values by dotted key, one mapping per configuration.
        figures: one figure per configuration.
        domains: domains of the keys.
        seed: seed of the forest.

    Returns:
        None if the figures do not vary.
    """
    found = [
        Entry(row="", number=number, params=each, trials=(), values={METRIC: value}, categories={})
        for number, (each, value) in enumerate(zip(params, figures, strict=True))
    ]
    observed = [_observed(domain, _values(found, domain.key)) for domain in domains]
    return _shares(_optuna_study(*_ordered(found, observed), "min"), observed, seed)


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """The configurations of a search.

    Attributes:
        study: the configurations as an Optuna study.
        ordered: the same for fANOVA, with choices as ranks.
    """

    found: list[Entry]
    domains: dict[str, Domain]
    observed: list[Domain]
    study: Any
    ordered: Any


def _sampled(state: StudyState) -> _Sampled | None:
    """Return the configurations; None with fewer than ten, or if their metrics are all equal.

    Also None if the search ends trials early, because the trials that finish are then a biased
    sample of the space.
    """
    if state.config.search.ends_early:
        return None
    found = [entry for entry in entries(state) if entry.number is not None][:FOREST]
    domains = {domain.key: domain for domain in state.config.parsed_space.domains}
    keys = [key for key in domains if all(key in entry.params for entry in found)]
    if len(found) < 10 or not keys:
        return None
    observed = _all_observed(found, domains, keys)
    mode = state.config.primary_metric.mode
    study = _optuna_study(found, observed, mode)
    if len({trial.value for trial in study.trials}) < 2:
        return None
    ordered = _optuna_study(*_ordered(found, observed), mode)
    return _Sampled(found=found, domains=domains, observed=observed, study=study, ordered=ordered)


def _ordered(
    found: Sequence[Entry], observed: Sequence[Domain]
) -> tuple[Sequence[Entry], Sequence[Domain]]:
    """Replace the values of choices by ranks, and drop choices with too few configurations.

    The module docstring explains why.
    """
    for domain in observed:
        if not domain.categorical:
            continue
        metric: dict[str, list[float]] = {}
        for entry in found:
            metric.setdefault(_text(domain, entry), []).append(entry.values[METRIC])
        if len(metric) > 2 and len(found) < REPEATS * len(metric):
            observed = [each for each in observed if each is not domain]
            continue
        order = sorted(metric, key=lambda text: (np.mean(metric[text]), text))
        found = [
            replace(entry, params={**entry.params, domain.key: order.index(_text(domain, entry))})
            for entry in found
        ]
        ends = (-0.5, len(order) - 0.5) if len(order) > 1 else (0.0, 0.0)
        place = replace(domain, kind="uniform", values=ends)
        observed = [place if each is domain else each for each in observed]
    return found, observed


def _shares(study: Any, observed: Sequence[Domain], seed: int) -> dict[str, float] | None:
    optuna, known = quiet_optuna(), study.trials[0].distributions
    keys = [domain.key for domain in observed if domain.key in known]
    if not keys:
        return None
    try:
        single = optuna.importance.FanovaImportanceEvaluator(
            n_trees=TREES, max_depth=DEPTH, seed=seed
        ).evaluate(study, params=keys)
    except RuntimeError:  # no variance in any tree
        return None
    return dict(single)


def _of_the_best(
    state: StudyState, found: Sequence[Entry], domains: Mapping[str, Domain]
) -> dict[str, float]:
    """Return each key's PED-ANOVA share, corrected for noise as in the module docstring."""
    observed = _all_observed(found, domains, [key for key in domains if _values(found, key)])
    mode = state.config.primary_metric.mode
    told = _tells_the_best(_optuna_study(found, observed, mode), observed)
    random, metric = np.random.default_rng(0), [entry.values[METRIC] for entry in found]
    by_chance: dict[str, list[float]] = {key: [] for key in told}
    for _ in range(SHUFFLES):
        shuffled = [
            replace(entry, values={METRIC: value})
            for entry, value in zip(found, random.permutation(metric), strict=True)
        ]
        study = _optuna_study(shuffled, observed, mode)
        for key, value in _tells_the_best(study, observed).items():
            by_chance[key].append(value)
    if not any(value > max(by_chance[key]) for key, value in told.items()):
        return {}
    beyond = {key: max(0.0, value - fmean(by_chance[key])) for key, value in told.items()}
    total = sum(beyond.values())
    return {key: beyond[key] / total for key in sorted(beyond, key=lambda key: -beyond[key])}


def _tells_the_best(study: Any, observed: Sequence[Domain]) -> dict[str, float]:
    """Return the importance of each key that varies, by Optuna's PED-ANOVA."""
    trials = study.get_trials(deepcopy=False)
    varied = [
        domain.key
        for domain in observed
        if any(
            domain.key in trial.distributions and not trial.distributions[domain.key].single()
            for trial in trials
        )
    ]
    evaluator = quiet_optuna().importance.PedAnovaImportanceEvaluator(target_quantile=BEST)
    return {key: float(value) for key, value in evaluator.evaluate(study, params=varied).items()}


def _values(found: Sequence[Entry], key: str) -> list[Any]:
    return [entry.params[key] for entry in found if key in entry.params]


def _all_observed(
    found: Sequence[Entry], domains: Mapping[str, Domain], keys: Sequence[str]
) -> list[Domain]:
    """Return the domains of the sampled values, plus one for the row if there are several rows."""
    observed = [_observed(domains[key], _values(found, key)) for key in keys]
    rows = list(dict.fromkeys(entry.row for entry in found))
    if len(rows) > 1:
        observed.append(Domain(key=ROW, kind="choice", values=tuple(rows)))
    return observed


def _observed(domain: Domain, values: Sequence[Any]) -> Domain:
    """Return the domain that covers the sampled values, even if the space was narrowed since.

    Choices become texts. A range of integers or steps is extended by half a step at both ends, so
    that all values have equal weight; in a ``lograndint`` range n has weight log(1 + 1 / n).
    """
    if domain.categorical:
        texts = dict.fromkeys(show(value) for value in (*domain.values, *values))
        return replace(domain, kind="choice", values=tuple(texts))
    low, high = float(min(values)), float(max(values))
    if domain.kind == "lograndint":
        return replace(domain, values=(low, high + 1))
    cell = 1.0 if domain.kind == "randint" else domain.values[2] if len(domain.values) > 2 else 0.0
    half = cell / 2 if low < high else 0.0
    kind = "loguniform" if domain.kind == "loguniform" else "uniform"
    return replace(domain, kind=kind, values=(low - half, high + half))


def _optuna_study(found: Sequence[Entry], observed: Sequence[Domain], mode: str) -> Any:
    """Return the configurations as an Optuna study; each trial has only its own keys."""
    optuna = quiet_optuna()
    distributions = {domain.key: _distribution(domain) for domain in observed}
    direction = {"min": "minimize", "max": "maximize"}[mode]
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.RandomSampler(seed=0))
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={
                    domain.key: _plain(domain, entry) for domain in observed if _has(entry, domain)
                },
                distributions={
                    domain.key: distributions[domain.key]
                    for domain in observed
                    if _has(entry, domain)
                },
                value=entry.values[METRIC],
            )
            for entry in found
        ]
    )
    return study


def _has(entry: Entry, domain: Domain) -> bool:
    return domain.key == ROW or domain.key in entry.params


def _distribution(domain: Domain) -> Any:
    """Return the Optuna distribution of :func:`_plain` values."""
    if domain.categorical:
        return distribution(domain)
    return quiet_optuna().distributions.FloatDistribution(*_ends(domain))


def _plain(domain: Domain, entry: Entry) -> int | float:
    """Encode a value for Optuna: the index of a choice, or the place on the axis of a range."""
    if domain.categorical:
        return domain.values.index(_text(domain, entry))
    return _place(domain, entry.params[domain.key])


def _place(domain: Domain, value: float) -> float:
    """Return the place of a value on the axis on which its range is uniform."""
    if domain.kind == "lograndint":
        return math.log10(value + 0.5)
    return math.log10(value) if domain.kind == "loguniform" else float(value)


def _ends(domain: Domain) -> tuple[float, float]:
    """Return the ends of a range on the axis of :func:`_place`."""
    low, high = domain.values
    return (math.log10(low), math.log10(high)) if domain.kind.startswith("log") else (low, high)


def _text(domain: Domain, entry: Entry) -> str:
    return show(entry.row if domain.key == ROW else entry.params[domain.key])


def _pairs(study: Any, names: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], float]:
    """Compute the share of the variance that two keys explain together beyond each alone.

    Optuna's evaluator only returns single keys, so this reads its trees directly.
    """
    optuna = quiet_optuna()
    distributions = study.trials[0].distributions
    # in the order of the evaluator's columns
    names = [name for name in names if name in distributions]
    varied = sorted(name for name in names if not distributions[name].single())
    evaluator = optuna.importance.FanovaImportanceEvaluator(
        n_trees=TREES, max_depth=PAIR_DEPTH, seed=0
    )
    if not varied:
        return {}
    single = evaluator.evaluate(study, params=names)
    found = {}
    for first, second in combinations([name for name in of if name in varied], 2):
        shares = marginal_shares(evaluator, [varied.index(first), varied.index(second)])
        found[first, second] = max(0.0, float(np.mean(shares)) - single[first] - single[second])
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _dependence(study: Any, domains: Sequence[Domain]) -> dict[str, tuple[list[Any], list[float]]]:
    from sklearn.ensemble import RandomForestRegressor

    trials = study.get_trials(deepcopy=False)  # Optuna's ``trials`` copies all of them each time
    transform = search_space_transform(trials[0].distributions)
    x = np.array([transform.transform(trial.params) for trial in trials])
    forest = RandomForestRegressor(n_estimators=64, min_samples_leaf=2, random_state=0)
    forest.fit(x, [trial.value for trial in trials])
    curves: dict[str, tuple[list[Any], list[float]]] = {}
    for domain in domains:
        places = _places(domain)
        predicted = [_with(trials[0], transform, x, domain.key, place) for place in places]
        curves[domain.key] = (
            _values_at(domain, places),
            [float(forest.predict(moved).mean()) for moved in predicted],
        )
    return curves


def _with(trial: Any, transform: Any, x: np.ndarray, name: str, place: Any) -> np.ndarray:
    """Return the encoded configurations with key ``name`` set to ``place`` in all rows.

    ``trial`` can be any trial of the study.
    """
    columns = transform.column_to_encoded_columns[list(trial.distributions).index(name)]
    moved = x.copy()
    moved[:, columns] = transform.transform(trial.params | {name: place})[columns]
    return moved


def _places(domain: Domain) -> list[Any]:
    """Return all indices of a choice, or :data:`PLACES` points along the axis of a range."""
    if domain.categorical:
        return list(range(len(domain.values)))
    return [float(place) for place in np.linspace(*_ends(domain), PLACES)]


def _values_at(domain: Domain, places: Sequence[Any]) -> list[Any]:
    """Convert :func:`_places` back: texts of a choice, values of a range."""
    if domain.categorical:
        return list(domain.values)
    values = np.power(10.0, places) if domain.kind.startswith("log") else places
    return [float(value) for value in np.clip(values, *domain.values)]
