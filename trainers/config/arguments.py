"""The arguments of our models and data sets.

The arguments of ours, ``model.args`` and ``data.args``, are frozen dataclasses of numbers: what a
config gives is checked against the fields once, so that a misspelt argument is refused before any
work starts. The arguments of the user's own go to their factory unseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

Arguments = TypeVar("Arguments")


@dataclass(frozen=True, kw_only=True)
class NoArguments:
    """The arguments of what takes none."""


def make_arguments(
    part: str, name: str, kind: type[Arguments], args: Mapping[str, Any]
) -> Arguments:
    """Return an object of the dataclass ``kind`` with the values of ``args``.

    Args:
        part: ``model`` or ``data``.
        name: of the model or data set.
        kind: dataclass whose fields are whole or real numbers.
        args: values by name.

    Raises:
        ValueError: an argument that there is not, of the wrong type, or out of range.
    """
    hints = get_type_hints(kind)
    listed = ", ".join(f"{field.name}={field.default}" for field in fields(kind))  # type: ignore[arg-type]
    for key, value in args.items():
        said = f"{part}.args.{key}={value!r} with {part}.name={name}"
        if not hints:
            raise ValueError(
                f"{said}: it takes no arguments; leave them out, or use {part}.name=file.py:factory"
                " for a factory of your own"
            )
        if key not in hints:
            raise ValueError(f"{said}: there is no such argument; there are {listed}")
        whole = hints[key] is int
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(
                f"{said}: must be a {'whole ' if whole else ''}number; use for example"
                f" {part}.args.{key}={getattr(kind, key)}"
            )
    return kind(**args)


def share_of_one(name: str, value: float) -> None:
    """Refuse a probability that does not lie in [0, 1).

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: must be at least 0 and below 1; use for example 0.1")
