"""Parsing of overrides, ``key=value`` of the command line and of rows, by the schema's types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from study.config.explain import first_line
from study.config.keys import locate, spell_out
from study.config.kinds import kind_at, plain_kind, split
from study.config.study import StudyConfig
from study.config.yaml_loader import as_text, parse
from trainers.config import TrialConfig


def is_trial_key(name: str) -> bool:
    """Return whether a command-line key is a trial key without ``trial.``: ``precision.format``."""
    first = name.partition(".")[0]
    return (
        first in TrialConfig.__dataclass_fields__ and first not in StudyConfig.__dataclass_fields__
    )


def refuse_numbers(key: str, value: Any) -> None:
    """Check that values are not numbers or booleans where the schema has a text.

    Raises:
        ValueError: there is one.
    """
    if isinstance(value, Mapping):
        for name, entry in value.items():
            refuse_numbers(f"{key}.{name}", entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            refuse_numbers(f"{key}[]", entry)
    elif isinstance(value, bool | int | float) and plain_kind(kind_at(split(key))) is str:
        last = key.rpartition(".")[2]
        raise ValueError(f"{key}={value!r}: must be text; write {last}='{value}'")


def parse_override(override: str) -> dict[str, Any]:
    """Parse ``key=value`` of the command line into nested dicts.

    Raises:
        ValueError: the value is not YAML.
    """
    return spell_out(locate(_nested(*_parse_pair(override, "override")), Path.cwd()))


def undotted(overrides: Any, name: str) -> list[dict[str, Any]]:
    """Convert a study's overrides, a mapping or a list, to nested dicts to merge in order.

    References must be resolved already; ``name`` is the overrides' key in error messages.

    Raises:
        ValueError: they are neither.
    """
    if isinstance(overrides, list) and all("=" in str(item) for item in overrides):
        pairs = [_parse_pair(str(item), name, TrialConfig) for item in overrides]
    elif isinstance(overrides, dict):
        pairs = [(str(key), value) for key, value in overrides.items()]
    else:
        raise ValueError(
            f"{name}={overrides!r}: must be a mapping or a list of key=value; use for example"
            " {precision.scope: matmul} or [precision.scope=matmul]"
        )
    return [_nested(key, as_text(value)) for key, value in pairs]


def _parse_pair(pair: str, source: str, kind: type = StudyConfig) -> tuple[str, Any]:
    """Parse ``key=value`` by the field types of the dataclass ``kind``.

    Raises:
        ValueError: the value is not YAML; the message begins with ``source``.
    """
    key, _, value = pair.partition("=")
    try:
        return key, parse(value, lambda inner: kind_at((*split(key), *inner), kind))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{source} {pair!r}: the value is not YAML ({first_line(error)}); quote it, for"
            " example 'name=\"a: b\"'"
        ) from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value under a dotted key as nested dicts."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]
