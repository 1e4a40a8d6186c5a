"""Configurations that a search may try, as far as they are known before any trial has run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from study.config import RowConfig, SearchConfig, StudyConfig
from study.config.compose import override_trial
from study.config.space import Params, Space, canonical, describe, unit_points
from study.plan.trials import Base, Excluded, PlannedTrial

OF_ROUNDS = ("epochs", "changes", "data.train_size")
"""Trial keys that a search in rounds sets, in addition to the keys of the space."""


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

    Points that make no valid trial raise no error here; they are left out later.

    Raises:
        ValueError: no trial has a key, two domains set the same key, or a value has the wrong type.
    """
    for one, other in combinations(study.parsed_space.domains, 2):
        if not one.when and not other.when and (key := common_keys(one.sets, other.sets)):
            raise ValueError(
                f"space.{one.key} and space.{other.key}: both set {key[0]}, and only one can; take"
                " it out of one, or tie one to a value of another key with when"
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

If equal points use them up, a row has fewer configurations; if refused ones do, that is an error
(:func:`draw`).
"""


def candidates(
    search: SearchConfig, space: Space
) -> Iterator[tuple[Params | None, Iterator[Params]]]:
    """Yield each point of the grids with the points to try there, in order.

    For algorithm grid, yield None once, with all points.
    """
    if search.algorithm == "grid" or not space.sampled:
        yield None, iter(space.all_points())
        return
    for point in space.grid_points():
        yield point, sampled_points(search, space, point)


def sampled_points(search: SearchConfig, space: Space, point: Params) -> Iterator[Params]:
    """Draw the points to try at one point of the grids, in order."""
    units = unit_points(
        search.algorithm, len(space.sampled), CANDIDATES * search.num_samples, search.seed
    )
    return (space.point(unit, point) for unit in units)


def first_point(
    search: SearchConfig, seed: int, base: Base, space: Space, point: Params
) -> PlannedTrial | Excluded:
    """Return the first valid trial of a row, a seed and a point of the grids.

    If no point that a search would try is valid, return the point of the grids with the rule that
    the first one breaks.
    """

    def make(params: Params, number: int) -> list[PlannedTrial]:
        return [base.trial(seed, None, params)]

    found, excluded = draw(base, make, sampled_points(search, space, point), set(), wanted=1)
    return found[0][0] if found else dataclasses.replace(excluded[0], params=point)


def draw(
    base: Base,
    make: Callable[[Params, int], list[PlannedTrial]],
    points: Iterable[Params],
    seen: set[str],
    *,
    wanted: int | None = None,
    before: int = 0,
) -> tuple[list[list[PlannedTrial]], list[Excluded]]:
    """Make the trials of the first ``wanted`` points that are valid and new, or of all.

    A point that is refused or known already is replaced by the next.

    Args:
        base: common part of the row's trials.
        make: gives a configuration's trials, of its sampled values and its number.
        points: points to try, in order.
        seen: ids of the first trials of configurations that are known; takes those found.
        wanted: configurations; None for as many as there are.
        before: configurations of the row that have numbers already.

    Returns:
        The trials by configuration, and the points that were refused, each once.

    Raises:
        ValueError: some points are valid, but too few, and it is refused ones that used them up.
    """
    found: list[list[PlannedTrial]] = []
    refused: dict[str, Excluded] = {}
    tried = 0
    for params in points:
        if len(found) == wanted:
            break
        tried += 1
        try:
            trials = make(params, before + len(found) + 1)
        except ValueError as error:
            refused.setdefault(canonical(params), base.exclude(params, error))
            continue
        if trials[0].id not in seen:
            seen.add(trials[0].id)
            found.append(trials)
    if wanted is not None and 0 < len(found) < wanted:
        refuse_scarcity(base.row, len(found), wanted, tried, list(refused.values()))
    return found, list(refused.values())


def refuse_scarcity(
    row: RowConfig, found: int, wanted: int, tried: int, refused: Sequence[Excluded]
) -> None:
    """Refuse a search that finds hardly any valid point.

    A search whose few points have all been tried has ended instead.

    Args:
        row: searched.
        found: configurations.
        wanted: configurations.
        tried: points that it took.
        refused: tried points that make no valid trial, without repetitions.

    Raises:
        ValueError: more of the tries were refused than were repetitions.
    """
    if len(refused) > tried - found - len(refused):
        count, entry = by_rule(refused)[0]
        raise ValueError(
            f"row {row.label!r}: search.num_samples={wanted}, but {tried} points of the space gave"
            f" {found} valid trials; {count} were refused as this one was, {describe(entry.params)}"
            f": {entry.reason}; narrow the space or tie its keys by when, or use fewer samples"
        )


def by_rule(excluded: Iterable[Excluded]) -> list[tuple[int, Excluded]]:
    """Group configurations left out by rule: their number and the first of each, most first."""
    groups: dict[str, list[Excluded]] = {}
    for entry in excluded:
        groups.setdefault(entry.rule, []).append(entry)
    return sorted(((len(group), group[0]) for group in groups.values()), key=lambda of: -of[0])
