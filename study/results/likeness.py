"""Matching of entries that differ only in one category, so that a comparison can pair them.

Three criteria are tried in this order, and the first that matches any entries of both values is
used: the same row; the same recipe (all settings that affect results); the same task. Entries of
different tasks (other data or another loss) never match, except in a comparison of rows.
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
"""Trial keys of the categories whose name is not itself a key."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One configuration, or one row that is not searched.

    Attributes:
        row: label of the row.
        number: number of the configuration; None for a row.
        params: sampled values by dotted key, at the end of training.
        trials: its trials, one per seed.
        values: mean over seeds by measure, for the measures that all its trials have.
        categories: its value of each of :data:`study.results.statistics.CATEGORIES`, by name.
        eligible: whether it satisfies the search's constraints and so can be the best entry.
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
        """Display name: ``lns12`` or ``lns12 #7``."""
        return self.row if self.number is None else f"{self.row} #{self.number}"


Likeness: TypeAlias = Callable[[Entry, Sequence[str]], str]


def likenesses(category: str) -> tuple[Likeness, ...]:
    """Return the criteria by which entries match in a category, the strictest first."""
    return (_anything,) if category == "row" else (_row_of, _recipe_of, task_of)


def by_likeness(category: str, found: Iterable[Entry], like: Likeness) -> dict[str, list[Entry]]:
    """Group entries that match by ``like`` and have equal sampled values outside the category."""
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
    """Return the key of the task (data and loss) that an entry was trained on."""
    return task_key(entry.trials[0].config)


def _anything(entry: Entry, keys: Sequence[str]) -> str:
    return ""


def _row_of(entry: Entry, keys: Sequence[str]) -> str:
    return entry.row


def _recipe_of(entry: Entry, keys: Sequence[str]) -> str:
    """Return the settings that affect results, except ``keys``, sampled values and seed."""
    return results_key(without(entry.trials[0].config, "seed", *keys, *entry.params))


def _overlap(name: str, key: str) -> bool:
    return f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
