"""A strict reader of study files: YAML's safe subset, without what YAML accepts silently.

YAML lets a key stand twice and keeps the last value, an alias stand for so much that a few lines
become gigabytes ("billion laughs"), and an anchor refer to itself. None of these is ever meant, so
each is refused with its place. The ``${...}`` of OmegaConf may name another key of the study and
nothing else: its resolvers read the environment or compute, and what they give would be stored and
sent to MLflow. ``\\${...}`` is text, and stays so where a stored study is read again
(:func:`as_text`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MOST_VALUES = 100_000
"""Largest number of values that a file may have once its aliases are written out."""
_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]]*\}")
"""Pattern of a reference to a key, ``${trial.epochs}``, or a relative one, ``${..epochs}``."""
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
"""Pattern of ``${`` after an odd number of backslashes, which is text."""
_OPENED = re.compile(r"(\\*)\$\{")


def parse(text: str) -> Any:
    """Return the values of one YAML document.

    Raises:
        yaml.YAMLError: the text is not YAML, or a key stands twice in a mapping; the message has
        the line.
        ValueError: an anchor refers to itself, or its aliases make more than :data:`MOST_VALUES`
            values.
    """
    try:
        values = yaml.load(text, _Loader)
        size = _size(values, {}, set())
    except RecursionError:
        raise ValueError(
            "nested too deeply, or an anchor (&) holds an alias (*) of itself; write the values out"
        ) from None
    if size > max(MOST_VALUES, len(text)):
        raise _too_many(size)
    return values


def check_references(values: Any, source: str) -> None:
    """Refuse every ``${...}`` that is not a reference to another key.

    Args:
        values: nested dicts and lists.
        source: where the values come from, for errors.

    Raises:
        ValueError: a ``${...}`` is something else; the message has the text, the rule and the
            remedy.
    """
    if isinstance(values, dict):
        values = [*values, *values.values()]
    if isinstance(values, list | tuple):
        for value in values:
            check_references(value, source)
    elif isinstance(values, str) and "${" in _REFERENCE.sub(" ", _ESCAPED.sub(" ", values)):
        raise ValueError(
            f"{source}: {values!r}: ${{...}} may only name another key of the study, such as"
            " ${trial.epochs}, as what a study reads is stored and sent to MLflow; write the"
            ' value itself, or let the shell put it in: key="$NAME"'
        )


def as_text(values: Any) -> Any:
    """Return nested dicts and lists with each ``${`` escaped, so that OmegaConf reads every text as
    it is: of a study whose references are resolved.

    OmegaConf halves the backslashes before ``${``; elsewhere it leaves them alone.
    """
    if isinstance(values, dict):
        return {key: as_text(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [as_text(value) for value in values]
    if isinstance(values, str):
        return _OPENED.sub(lambda found: f"{found[1] * 2}\\${{", values)
    return values


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, Any], yaml.Node] = {}
        for key, _ in node.value:
            if (
                isinstance(key, yaml.ScalarNode)
                and seen.setdefault((key.tag, key.value), key) is not key
            ):
                first = seen[key.tag, key.value].start_mark.line + 1
                raise yaml.composer.ComposerError(
                    None,
                    None,
                    f"key {key.value!r} stands twice, first in line {first}; keep one",
                    key.start_mark,
                )
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            raise _too_many(len(node.value))


def _too_many(size: float) -> ValueError:
    return ValueError(
        f"its aliases (*) make {size:.3g} values of it, at most {MOST_VALUES} may be; write out"
        " what is meant"
    )


def _size(value: Any, known: dict[int, int], open_: set[int]) -> int:
    """Count the values in ``value`` with every alias written out.

    Raises:
        RecursionError: ``value`` contains itself.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) in open_:
        raise RecursionError
    if id(value) not in known:
        open_.add(id(value))
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known, open_) for part in parts)
        open_.remove(id(value))
    return known[id(value)]


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; an empty one of an empty file.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: must be YAML: {' '.join(str(error).split())}; correct the file"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; check its permissions"
        ) from None
    if values is not None and not isinstance(values, dict):
        raise ValueError(
            f"{path}: must be a mapping of keys to values, not {type(values).__name__}; start with"
            " `name: my-study`"
        )
    return values or {}
