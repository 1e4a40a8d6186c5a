"""The types of a study's keys, by their place among nested mappings and lists.

Rows, ``digits``, ``comparable``, ``small`` and the space contain nested or dotted trial keys, whose
type is ``Any`` in the schema. For these, this module returns the type of the trial key.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any

from study.config.claims import ClaimConfig
from study.config.space import CATEGORICAL, RANGES
from study.config.study import RowConfig, StudyConfig
from trainers.config import TrialConfig
from trainers.config.validation import field_types

ITEM = "[]"
"""Part of a place that denotes an entry of a list."""
_TRIAL_KEYS: dict[type, tuple[str, ...]] = {
    StudyConfig: ("digits", "comparable"),
    RowConfig: ("overrides", "comparable"),
}
"""Fields that contain trial keys."""
_LABELS = {"row": str, "rows": list[str]}
"""Keys of a claim's check that contain row labels."""


def split(key: str) -> tuple[str, ...]:
    """Return the place of a dotted key such as ``rows[0].label`` or ``rows[].label``."""
    parts: list[str] = []
    for name in key.split("."):
        head, *indices = name.split("[")
        parts += [head, *(ITEM for _ in indices)]
    return tuple(parts)


@cache
def kind_at(place: tuple[str, ...], kind: Any = StudyConfig) -> Any:
    """Return the type of the value at a place; ``Any`` if it has none.

    Args:
        place: keys from the outermost inwards, which may be dotted, and :data:`ITEM` for an entry
            of a list.
        kind: dataclass of the outermost mapping.
    """
    if not place:
        return kind
    kind = plain_kind(kind)
    args = typing.get_args(kind)
    first, rest = place[0], place[1:]
    origin = typing.get_origin(kind)
    if origin is list or origin is dict:
        return kind_at(rest, args[-1]) if (first == ITEM) == (origin is list) else Any
    if not dataclasses.is_dataclass(kind):
        return Any
    name, dot, more = first.partition(".")
    return _of_field(typing.cast(type, kind), name, (more, *rest) if dot else rest)


def _of_field(kind: type, name: str, rest: tuple[str, ...]) -> Any:
    if kind is StudyConfig and name not in StudyConfig.__dataclass_fields__:
        return kind_at((name, *rest), TrialConfig)  # the short form, as on the command line
    if rest and name in _TRIAL_KEYS.get(kind, ()):
        return kind_at(rest, TrialConfig)
    if rest and kind is StudyConfig and name == "small":
        return kind_at(rest)
    if rest and kind is StudyConfig and name == "space":
        return _in_space(rest)
    if rest and kind is ClaimConfig and rest[0] in _LABELS:
        return kind_at(rest[1:], _LABELS[rest[0]])
    return kind_at(rest, field_types(kind).get(name, Any))


def _in_space(place: Sequence[str]) -> Any:
    """Return the type at a place of the space, which is the type of the trial key."""
    words = (*CATEGORICAL, *RANGES, "when")
    at = next((at for at, part in enumerate(place) if part in words), None)
    if at is None:
        return Any
    rest = tuple(place[at + 1 :])
    if place[at] == "when":
        return kind_at(rest[: -1 if rest[-1:] == (ITEM,) else None], TrialConfig) if rest else Any
    return kind_at((*place[:at], *rest[1:]), TrialConfig) if rest[:1] == (ITEM,) else Any


def plain_kind(kind: Any) -> Any:
    """Return a type without its ``None`` alternative."""
    args = [each for each in typing.get_args(kind) if each is not NoneType]
    union = typing.get_origin(kind) in (typing.Union, UnionType)
    return args[0] if union and len(args) == 1 else kind
