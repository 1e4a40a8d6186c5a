"""Importance of each hyperparameter, by Optuna: fANOVA over a random forest, and PED-ANOVA.

fANOVA (F. Hutter, H. Hoos, K. Leyton-Brown 2014) says how much of the error's variance over the
whole space a key explains; it takes complete configurations, so only keys that all of them have.
PED-ANOVA (S. Watanabe, A. Bansal, F. Hutter 2023) says how much a key decides whether a
configuration is among the best tenth: how far its distribution there is from that of all that have
the key. It counts keys with a ``when`` too. Of noise it tells something of every key, of those with
many values most: a share is of what it tells beyond the mean of :data:`SHUFFLES` shuffles of the
metric, and there is none where no key tells more than each of them.

A share is of the variance over the space as it is searched, where every value of a choice is as
likely as the others and the logarithm of a ``loguniform`` range is uniform. Optuna's fANOVA (5.0)
weighs otherwise, so it is given other columns (docs/decisions/0072-measure-of-importance.md):

- It takes a range as uniform, one with ``log=True`` too: of rates from 0.001 to 1 nine tenths of
  its mean would be rates above 0.1. It gets the logarithm, as a uniform range.
- It gives a choice one column per value, each 0 or 1 with equal weight, so that one value of nine
  would have half of it; and it walks each tree once for every combination of the columns'
  thresholds, 2^values of them. It gets one column of places, in the order of the values' mean
  metric: the order in which a tree finds every best split of a mean (W. D. Fisher 1958). With fewer
  than :data:`REPEATS` configurations a value the order of three or more would be the metric itself,
  and such a choice is left out.
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
"""Largest number of configurations, the first ones, that enter importance and dependence."""
REPEATS = 3
"""Least number of configurations a value of a choice of three values or more."""
ROW = "row"
"""The name of the row as a key."""
PLACES = 24
"""Number of places on the axis of a range."""
BEST = 0.1
"""Share of the configurations that PED-ANOVA tells from the others."""
SHUFFLES = 19
"""Shuffles of the metric: one key in twenty without effect tells more than each of them."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of the variance of the study's metric.

    Attributes:
        single: share by key, largest first.
        pairs: share that two keys explain together beyond each alone, largest first.
        curves: partial dependence by key: places on the axis and mean predicted metric as it is
            shown; places are values, or texts of choices.
        configurations: number of configurations that the shares are computed from.
        best: share by key in what tells the best tenth of the configurations from the others,
            largest first, keys with a ``when`` included; empty if it cannot be computed.
    """

    single: dict[str, float]
    pairs: dict[tuple[str, str], float]
    curves: dict[str, tuple[list[Any], list[float]]]
    configurations: int
    best: dict[str, float] = field(default_factory=dict)


def importance(state: StudyState) -> Importance | None:
    """Compute how much the metric depends on each sampled key, all rows together.

    The row is a key too. Returns None with fewer than ten configurations, or if a scheduler ends
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
    """Return the share of the metric's variance by key of the configurations, and of ``samples``
    draws of as many of them with replacement; empty as for :func:`importance`."""
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
    """Return the share of the figures' variance by key, largest first, for a check of a claim.

    Args:
        params: sampled values by dotted key, one mapping a configuration.
        figures: figure of each configuration.
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
        study: the same configurations as a study of Optuna's.
        ordered: the same for fANOVA, with choices as places.
    """

    found: list[Entry]
    domains: dict[str, Domain]
    observed: list[Domain]
    study: Any
    ordered: Any


def _sampled(state: StudyState) -> _Sampled | None:
    """Return the configurations; None if there are fewer than ten, all have one figure, or those
    that were ended early have none: the others are no sample of the space."""
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
    """Return both with choices as places, without those of which too little is known; see the head
    of this file."""
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
    """Return each key's share by PED-ANOVA; see the head of this file."""
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
    """Return the domains of what was tried, and of the row where there are several."""
    observed = [_observed(domains[key], _values(found, key)) for key in keys]
    rows = list(dict.fromkeys(entry.row for entry in found))
    if len(rows) > 1:
        observed.append(Domain(key=ROW, kind="choice", values=tuple(rows)))
    return observed


def _observed(domain: Domain, values: Sequence[Any]) -> Domain:
    """Return the domain of what was tried, in the space or before the space was narrowed.

    Choices are texts. A range of whole numbers or steps ends half a step outside of them, so that
    each weighs alike; one of whole numbers drawn by their logarithm weighs n by log(1 + 1 / n).
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
    """Return the configurations as an Optuna study; keys that one lacks are left out of it."""
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
    """Return Optuna's distribution of :func:`_plain` values."""
    if domain.categorical:
        return distribution(domain)
    return quiet_optuna().distributions.FloatDistribution(*_ends(domain))


def _plain(domain: Domain, entry: Entry) -> int | float:
    """Return a value as Optuna gets it: the index of a choice, or the place on the axis."""
    if domain.categorical:
        return domain.values.index(_text(domain, entry))
    return _place(domain, entry.params[domain.key])


def _place(domain: Domain, value: float) -> float:
    """Return the place of a value on the axis on which its range is uniform."""
    if domain.kind == "lograndint":
        return math.log10(value + 0.5)
    return math.log10(value) if domain.kind == "loguniform" else float(value)


def _ends(domain: Domain) -> tuple[float, float]:
    """Return the ends of a range on that axis."""
    low, high = domain.values
    return (math.log10(low), math.log10(high)) if domain.kind.startswith("log") else (low, high)


def _text(domain: Domain, entry: Entry) -> str:
    return show(entry.row if domain.key == ROW else entry.params[domain.key])


def _pairs(study: Any, names: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], float]:
    """Compute what two keys explain together beyond each alone.

    Optuna's evaluator offers single keys only, so its trees are read.
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
    """Return the encoded configurations with one key set; ``trial`` is any of them."""
    columns = transform.column_to_encoded_columns[list(trial.distributions).index(name)]
    moved = x.copy()
    moved[:, columns] = transform.transform(trial.params | {name: place})[columns]
    return moved


def _places(domain: Domain) -> list[Any]:
    """Return the indices of a choice, or places along the axis of a range."""
    if domain.categorical:
        return list(range(len(domain.values)))
    return [float(place) for place in np.linspace(*_ends(domain), PLACES)]


def _values_at(domain: Domain, places: Sequence[Any]) -> list[Any]:
    """Return what :func:`_places` stand for: texts of a choice, values of a range."""
    if domain.categorical:
        return list(domain.values)
    values = np.power(10.0, places) if domain.kind.startswith("log") else places
    return [float(value) for value in np.clip(values, *domain.values)]
