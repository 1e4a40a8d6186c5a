"""Entries of a comparison, and which are alike but for one category: those that it pairs.

The closest likeness that two values have anything in common by is taken: the same row; the same
recipe, all that decides results; the same task. Entries of different tasks, which train on other
data or for another loss, are never taken for alike, except where rows themselves are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from study.config.keys import without
from study.config.space import Params
from study.ledger.state import TrialState
from study.plan.identity import results_key, task_key

KEYS = {"format": ("precision.format",), "layout": ("layout", "workers")}
"""Trial keys of a category whose name is not the key itself."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One configuration, or one row that is not searched.

    Attributes:
        row: label of the row.
        number: number of the configuration; None for a row.
        params: sampled values by dotted key, at the end of training.
        trials: its trials, one per seed.
        values: mean over seeds by measure, for the measures that every trial has.
        categories: its value of each of :data:`study.results.statistics.CATEGORIES`, by name.
        eligible: whether it may be called the best: it keeps the search's constraints.
    """

    row: str
    number: int | None
    params: Params
    trials: tuple[TrialState, ...]
    values: Mapping[str, float]
    categories: Mapping[str, str]
    eligible: bool = True

    @property
    def name(self) -> str:
        """Name for people: ``lns12`` or ``lns12 #7``."""
        return self.row if self.number is None else f"{self.row} #{self.number}"


Likeness: TypeAlias = Callable[[Entry, Sequence[str]], str]


def likenesses(category: str) -> tuple[Likeness, ...]:
    """Return what entries are compared by for a category, the closest likeness first."""
    return (_anything,) if category == "row" else (_row_of, _recipe_of, task_of)


def by_likeness(category: str, found: Iterable[Entry], like: Likeness) -> dict[str, list[Entry]]:
    """Group entries by what they have beside the category: other sampled values, and ``like``."""
    keys = KEYS.get(category, (category,))
    groups: dict[str, list[Entry]] = {}
    for entry in found:
        others = {
            name: value
            for name, value in entry.params.items()
            if not any(_overlap(name, key) for key in keys)
        }
        key = json.dumps([others, like(entry, keys)], sort_keys=True)
        groups.setdefault(key, []).append(entry)
    return groups


def task_of(entry: Entry, keys: Sequence[str]) -> str:
    """Return what an entry's figure is of."""
    return task_key(entry.trials[0].config)


def _anything(entry: Entry, keys: Sequence[str]) -> str:
    return ""


def _row_of(entry: Entry, keys: Sequence[str]) -> str:
    return entry.row


def _recipe_of(entry: Entry, keys: Sequence[str]) -> str:
    """Return all that decides an entry's results but ``keys``, its sampled values and its seeds."""
    return results_key(without(entry.trials[0].config, "seed", *keys, *entry.params))


def _overlap(name: str, key: str) -> bool:
    return f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
