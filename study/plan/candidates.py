"""Configurations that a search may try, as far as they are known before any trial has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from study.config import RowConfig, StudyConfig
from study.config.compose import override_trial
from study.config.space import Params, Space, unit_points

OF_ROUNDS = ("epochs", "changes", "data.train_size")
"""Trial keys that a search in rounds sets beside those of the space."""


def is_history(params: Params, space: Space) -> bool:
    """Tell whether sampled values lie outside the space: proposed before the space was changed."""
    return not space.holds(params) and not space.holds(
        {key: value for key, value in params.items() if key not in OF_ROUNDS}
    )


def halved(configurations: int, factor: int) -> list[int]:
    """Return the number of configurations in each round of successive halving."""
    return [
        configurations,
        *(halved(configurations // factor, factor) if configurations >= factor else []),
    ]


def generation_ends(epochs: int, interval: int) -> list[int]:
    """Return the last epochs of a population's generations: every ``interval``, and the last."""
    return [*range(interval, epochs, interval), epochs]


def rows_of(study: StudyConfig) -> list[RowConfig]:
    """Return the study's rows; one named like the study if it has none."""
    return study.rows or [RowConfig(label=study.name)]


def bind_space(study: StudyConfig) -> Space:
    """Return the study's space, its values converted to the types that the keys take.

    A point that a trial refuses is no error here: it breaks a rule of trials and is left out later.

    Raises:
        ValueError: no trial has a key, two domains set the same key, or a value has the wrong type.
    """
    for one, other in combinations(study.parsed_space.domains, 2):
        if not one.when and not other.when and (key := common_keys(one.sets, other.sets)):
            raise ValueError(
                f"space.{one.key} and space.{other.key}: both set {key[0]}, and only one can; take"
                " it out of one of them, or tie one to a value of another key with when"
            )
    base = study.trial.to_dict()
    domains = []
    for domain in study.parsed_space.domains:
        if domain.key == "seed" or domain.key.startswith("data"):
            raise ValueError(
                f"space.{domain.key}: a search compares configurations on the same data and the"
                " study's seeds; use rows or seeds=[...] instead"
            )
        values = domain.values if domain.categorical else (domain.at(0.0), domain.at(0.9))
        taken = [
            _taken(override_trial(base, {domain.key: value}, "space"), domain.key, value)
            for value in values
        ]
        real = not domain.categorical and isinstance(taken[0], float)
        domains.append(
            dataclasses.replace(
                domain, real=real, values=tuple(taken) if domain.categorical else domain.values
            )
        )
    return Space(domains=tuple(domains))


def _taken(trial: dict[str, Any], key: str, value: Any) -> Any:
    """Return what a trial's dict holds under ``key``; of a mapping, only the keys of ``value``."""
    held: Any = trial
    for part in key.split("."):
        held = held[part]
    if not isinstance(value, dict):
        return held
    return {name: _taken(held, str(name), entry) for name, entry in value.items()}


def common_keys(keys: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the ``keys`` that equal, contain or lie inside one of ``others``, sorted."""
    return sorted(
        key
        for key in keys
        if any(f"{key}.".startswith(f"{a}.") or f"{a}.".startswith(f"{key}.") for a in others)
    )


CANDIDATES = 8
"""Points sampled for each configuration wanted.

If invalid or equal points use them up, a row has fewer configurations.
"""


def candidates(
    study: StudyConfig, space: Space
) -> Iterator[tuple[Params | None, Iterator[Params]]]:
    """Yield each point of the grids with the points to try there, in order.

    For algorithm grid, yield None once, with all points.
    """
    search = study.search
    if search.algorithm == "grid" or not space.sampled:
        yield None, iter(space.all_points())
        return
    for point in space.grid_points():
        units = unit_points(
            search.algorithm, len(space.sampled), CANDIDATES * search.num_samples, search.seed
        )
        yield point, (space.point(unit, point) for unit in units)
