"""Importance of each hyperparameter: fANOVA over a random forest, by Optuna."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from study._compat import marginal_shares, search_space_transform
from study.config.distribution import distribution, quiet_optuna
from study.config.space import Domain, show
from study.ledger.state import StudyState
from study.results.statistics import DEPTH, METRIC, PAIR_DEPTH, PAIRED, TREES, Entry, entries

FOREST = 500
"""Largest number of configurations, the first ones, that enter importance and dependence."""
ROW = "row"
"""The name of the row as a key."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of the variance of the study's metric.

    Attributes:
        single: share by key, largest first.
        pairs: share that two keys explain together beyond each alone, largest first.
        curves: partial dependence by key: places on the axis and mean predicted metric as it is
            shown; places are values, or texts of choices.
        configurations: number of configurations that the shares are computed from.
    """

    single: dict[str, float]
    pairs: dict[tuple[str, str], float]
    curves: dict[str, tuple[list[Any], list[float]]]
    configurations: int


def importance(state: StudyState) -> Importance | None:
    """Compute how much the metric depends on each sampled key, all rows together.

    The row is a key too. Returns None with fewer than ten configurations.
    """
    found = [entry for entry in entries(state) if entry.number is not None][:FOREST]
    domains = {domain.key: domain for domain in state.config.parsed_space.domains}
    keys = [key for key in domains if all(key in entry.params for entry in found)]
    if len(found) < 10 or not keys:
        return None
    observed = [_observed(domains[key], [entry.params[key] for entry in found]) for key in keys]
    rows = list(dict.fromkeys(entry.row for entry in found))
    if len(rows) > 1:
        observed.append(Domain(key=ROW, kind="choice", values=tuple(rows)))
    study = _optuna_study(found, observed)
    if len({trial.value for trial in study.trials}) < 2:
        return None
    names = [domain.key for domain in observed]
    optuna = quiet_optuna()
    try:
        single = optuna.importance.FanovaImportanceEvaluator(
            n_trees=TREES, max_depth=DEPTH, seed=0
        ).evaluate(study, params=names)
    except RuntimeError:  # no variance in any tree
        return None
    pairs = _pairs(study, names, list(single)[:PAIRED])
    by_name = {domain.key: domain for domain in observed}
    curves = _dependence(study, [by_name[name] for name in single][:4])
    return Importance(single=dict(single), pairs=pairs, curves=curves, configurations=len(found))


def _observed(domain: Domain, values: Sequence[Any]) -> Domain:
    """Return the domain of what was tried, in the space or before the space was narrowed.

    Choices are texts, and ranges are of reals.
    """
    if domain.categorical:
        texts = dict.fromkeys(show(value) for value in (*domain.values, *values))
        return replace(domain, kind="choice", values=tuple(texts))
    kind = "loguniform" if domain.kind.startswith("log") else "uniform"
    return replace(domain, kind=kind, values=(float(min(values)), float(max(values))))


def _optuna_study(found: Sequence[Entry], observed: Sequence[Domain]) -> Any:
    """Return the configurations as an Optuna study."""
    optuna = quiet_optuna()
    distributions = {domain.key: distribution(domain) for domain in observed}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={domain.key: _plain(domain, entry) for domain in observed},
                distributions=distributions,
                value=entry.values[METRIC],
            )
            for entry in found
        ]
    )
    return study


def _plain(domain: Domain, entry: Entry) -> int | float:
    value = entry.row if domain.key == ROW else entry.params[domain.key]
    return domain.values.index(show(value)) if domain.categorical else float(value)


def _pairs(study: Any, names: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], float]:
    """Compute what two keys explain together beyond each alone.

    Optuna's evaluator offers single keys only, so its trees are read.
    """
    optuna = quiet_optuna()
    distributions = study.trials[0].distributions
    # in the order of the evaluator's columns
    varied = sorted(name for name in names if not distributions[name].single())
    evaluator = optuna.importance.FanovaImportanceEvaluator(
        n_trees=TREES, max_depth=PAIR_DEPTH, seed=0
    )
    single = evaluator.evaluate(study, params=list(names))
    found = {}
    for first, second in combinations([name for name in of if name in varied], 2):
        shares = marginal_shares(evaluator, [varied.index(first), varied.index(second)])
        found[first, second] = max(0.0, float(np.mean(shares)) - single[first] - single[second])
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _dependence(
    study: Any, domains: Sequence[Domain], points: int = 24
) -> dict[str, tuple[list[Any], list[float]]]:
    from sklearn.ensemble import RandomForestRegressor

    trials = study.get_trials(deepcopy=False)  # Optuna's ``trials`` copies all of them each time
    transform = search_space_transform(trials[0].distributions)
    x = np.array([transform.transform(trial.params) for trial in trials])
    forest = RandomForestRegressor(n_estimators=64, min_samples_leaf=2, random_state=0)
    forest.fit(x, [trial.value for trial in trials])
    curves: dict[str, tuple[list[Any], list[float]]] = {}
    for domain in domains:
        places = _places(domain, points)
        predicted = [_with(trials[0], transform, x, domain.key, place) for place in places]
        curves[domain.key] = (
            list(domain.values) if domain.categorical else places,
            [float(forest.predict(moved).mean()) for moved in predicted],
        )
    return curves


def _with(trial: Any, transform: Any, x: np.ndarray, name: str, place: Any) -> np.ndarray:
    """Return the encoded configurations with one key set; ``trial`` is any of them."""
    columns = transform.column_to_encoded_columns[list(trial.distributions).index(name)]
    moved = x.copy()
    moved[:, columns] = transform.transform(trial.params | {name: place})[columns]
    return moved


def _places(domain: Domain, points: int) -> list[Any]:
    if domain.categorical:
        return list(range(len(domain.values)))
    low, high = domain.values
    places = (np.geomspace if domain.kind == "loguniform" else np.linspace)(low, high, points)
    return [float(place) for place in np.clip(places, low, high)]
