"""The configurations that a search may try, before any has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from study.config import RowConfig, SearchConfig, StudyConfig
from study.config.compose import override_trial
from study.config.space import Params, Space, unit_points

OF_ROUNDS = ("epochs", "changes", "data.train_size")
"""What a search in rounds sets beside the space."""


def is_history(params: Params, space: Space) -> bool:
    """Whether sampled values lie outside the space: they were proposed before it was changed."""
    return not space.holds(params) and not space.holds(
        {key: value for key, value in params.items() if key not in OF_ROUNDS}
    )


def halved(configurations: int, factor: int) -> list[int]:
    """How many configurations take part in each round of successive halving."""
    return [
        configurations,
        *(halved(configurations // factor, factor) if configurations >= factor else []),
    ]


def generation_ends(epochs: int, interval: int) -> list[int]:
    """The epochs at which a population's generations end: every ``interval``, and the last."""
    return [*range(interval, epochs, interval), epochs]


def rows_of(study: StudyConfig) -> list[RowConfig]:
    """The study's rows; one named like the study if it has none."""
    return study.rows or [RowConfig(label=study.name)]


def bind_space(study: StudyConfig) -> Space:
    """The study's space, its values converted to what the keys take.

    Raises:
        ValueError: a key that no trial has or that two domains set, or a value of the wrong type. A
            point that a trial refuses is no error: it breaks a rule.
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
    """What a trial's dict holds under ``key``; of a mapping, only the keys that ``value`` has."""
    held: Any = trial
    for part in key.split("."):
        held = held[part]
    if not isinstance(value, dict):
        return held
    return {name: _taken(held, str(name), entry) for name, entry in value.items()}


def common_keys(keys: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of ``keys`` that one of ``others`` is, holds or lies in."""
    return sorted(
        key
        for key in keys
        if any(f"{key}.".startswith(f"{a}.") or f"{a}.".startswith(f"{key}.") for a in others)
    )


CANDIDATES = 8
"""Points drawn for each one wanted; where equal ones use them up, a row has fewer configurations,
and where refused ones do, that is an error (:func:`study.plan.plan.draw`)."""


def candidates(
    study: StudyConfig, space: Space
) -> Iterator[tuple[Params | None, Iterator[Params]]]:
    """For each point of the grids the points to try, in order; for algorithm grid all at once, with
    None."""
    if study.search.algorithm == "grid" or not space.sampled:
        yield None, iter(space.all_points())
        return
    for point in space.grid_points():
        yield point, sampled_points(study.search, space, point)


def sampled_points(search: SearchConfig, space: Space, point: Params) -> Iterator[Params]:
    """Draw the points to try at one point of the grids, in order."""
    units = unit_points(
        search.algorithm, len(space.sampled), CANDIDATES * search.num_samples, search.seed
    )
    return (space.point(unit, point) for unit in units)
