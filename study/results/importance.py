"""Importance of each hyperparameter, by Optuna: fANOVA over a random forest, and PED-ANOVA.

fANOVA (F. Hutter, H. Hoos, K. Leyton-Brown 2014) says how much of the error's variance over the
whole space a key explains; it takes complete configurations, so only keys that all of them have.
PED-ANOVA (S. Watanabe, A. Bansal, F. Hutter 2023) says how much a key decides whether a
configuration is among the best tenth: how far its distribution there is from that of all that have
the key. It counts keys with a ``when`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from study._compat import marginal_shares, search_space_transform
from study.config.space import show
from study.ledger.state import StudyState
from study.results.statistics import DEPTH, PAIR_DEPTH, PAIRED, TREES, Entry, entries

FOREST = 500
"""Largest number of configurations, the first ones, that enter importance and dependence."""
BEST = 0.1
"""Share of the configurations that PED-ANOVA tells from the others."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of the error's variance.

    Attributes:
        single: share by key, largest first.
        pairs: share that two keys explain together beyond each alone, largest first.
        curves: partial dependence by key: places on the axis and mean predicted errors in per cent;
            places are values, or texts of choices.
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
    """Compute how much the error depends on each sampled key, all rows together.

    The row is a key too. Returns None with fewer than ten configurations.
    """
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
        single = optuna.importance.FanovaImportanceEvaluator(
            n_trees=TREES, max_depth=DEPTH, seed=0
        ).evaluate(study, params=names)
    except RuntimeError:  # no variance in any tree
        return None
    pairs = _pairs(study, names, list(single)[:PAIRED])
    curves = _dependence(study, [name for name in single if name in names][:4])
    return Importance(
        single=dict(single),
        pairs=pairs,
        curves=curves,
        configurations=len(found),
        best=_of_the_best(found, domains),
    )


def _of_the_best(found: Sequence[Entry], domains: Mapping[str, Any]) -> dict[str, float]:
    """Return each key's share by PED-ANOVA; see the head of this file."""
    import optuna

    present = [key for key in domains if any(key in entry.params for entry in found)]
    study, names = _optuna_study(found, present, domains)
    varied = [
        name
        for name in names
        if any(
            name in trial.distributions and not trial.distributions[name].single()
            for trial in study.get_trials(deepcopy=False)
        )
    ]
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BEST)
    values = {key: float(value) for key, value in evaluator.evaluate(study, params=varied).items()}
    total = sum(values.values())
    if not total > 0:
        return {}
    return {key: value / total for key, value in sorted(values.items(), key=lambda of: -of[1])}


def _optuna_study(
    found: Sequence[Entry], keys: Sequence[str], domains: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return the configurations as an Optuna study, and the names of its parameters."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = list(dict.fromkeys(entry.row for entry in found))
    distributions: dict[str, Any] = {
        key: _distribution(
            domains[key], [entry.params[key] for entry in found if key in entry.params]
        )
        for key in keys
    }
    if len(rows) > 1:
        distributions["row"] = optuna.distributions.CategoricalDistribution(rows)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={
                    name: entry.row
                    if name == "row"
                    else _plain(distributions[name], entry.params[name])
                    for name in distributions
                    if name == "row" or name in entry.params
                },
                distributions={
                    name: shape
                    for name, shape in distributions.items()
                    if name == "row" or name in entry.params
                },
                value=entry.values["error"],
            )
            for entry in found
        ]
    )
    return study, list(distributions)


def _distribution(domain: Any, values: Sequence[Any]) -> Any:
    import optuna

    if domain.categorical:
        # values tried before the space was narrowed count too
        return optuna.distributions.CategoricalDistribution(
            list(dict.fromkeys(show(value) for value in (*domain.values, *values)))
        )
    return optuna.distributions.FloatDistribution(
        float(min(values)), float(max(values)), log=domain.kind.startswith("log")
    )


def _plain(distribution: Any, value: Any) -> Any:
    return show(value) if hasattr(distribution, "choices") else float(value)


def _pairs(study: Any, names: Sequence[str], of: Sequence[str]) -> dict[tuple[str, str], float]:
    """Compute what two keys explain together beyond each alone.

    Optuna's evaluator offers single keys only, so its trees are read.
    """
    import optuna

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
    study: Any, names: Sequence[str], points: int = 24
) -> dict[str, tuple[list[Any], list[float]]]:
    from sklearn.ensemble import RandomForestRegressor

    trials = study.get_trials(deepcopy=False)  # Optuna's ``trials`` copies all of them each time
    distributions = trials[0].distributions
    transform = search_space_transform(distributions)
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
    """Return the encoded configurations with one key set; ``trial`` is any of them."""
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
