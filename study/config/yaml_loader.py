"""A strict reader of study files: YAML's safe subset, without its common pitfalls.

YAML silently accepts duplicate keys (the last value counts), aliases that expand a few lines to
gigabytes ("billion laughs"), and anchors that contain themselves. These are mistakes, so they raise
an error with the line. OmegaConf's ``${...}`` may only refer to another key of the study: other
resolvers read the environment or compute values, and their results would be stored and sent to
MLflow. ``\\${...}`` is text, and remains text when a stored study is read again (:func:`as_text`).

Plain scalars are read by the core schema of YAML 1.2.2 (chapter 10.3) and the types of the study's
own schema, not by YAML 1.1, which reads ``1.10`` as 1.1, ``on`` as true, ``010`` as eight and
``1:30`` as ninety:

- If the schema has a text, every scalar except ``null`` is text, exactly as spelled.
- Numbers follow Python: ``1e-3``, ``.5``, ``+1``, ``1_000``, also ``0x1f``, ``.inf`` and ``.nan``.
  If the schema has an integer, ``010`` is 10 and ``1e3`` is 1000; elsewhere ``010`` is text.
- ``true`` and ``false`` are booleans; ``yes``, ``no``, ``on`` and ``off`` are booleans only if the
  schema has a boolean, and text elsewhere.
- Dates and all keys are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from study.config.kinds import ITEM, kind_at, plain_kind

MOST_VALUES = 100_000
"""Maximum number of values in a file after its aliases are expanded."""
_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]]*\}")
"""Pattern of a reference to a key: absolute, ``${trial.epochs}``, or relative, ``${..epochs}``."""
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
"""Pattern of ``${`` after an odd number of backslashes, which is text."""
_OPENED = re.compile(r"(\\*)\$\{")


Place = tuple[str, ...]
"""Keys from the outermost mapping to a value; :data:`study.config.kinds.ITEM` for a list entry."""


def parse(text: str, kind_of: Callable[[Place], Any] = lambda place: Any) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        kind_of: returns the schema's type at a place of the document.

    Raises:
        yaml.YAMLError: the text is not YAML, or a mapping has a duplicate key; the message has the
            line.
        ValueError: an anchor contains itself, or the aliases expand to more than
            :data:`MOST_VALUES` values.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _fit(node, kind_of, (), set())
            values = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        size = _size(values, {}, set())
    except RecursionError:
        raise ValueError(
            "nested too deeply, or an anchor (&) holds an alias (*) of itself; write the values out"
        ) from None
    if size > max(MOST_VALUES, len(text)):
        raise _too_many(size)
    return values


def check_references(values: Any, source: str) -> None:
    """Check that every ``${...}`` is a reference to another key.

    Args:
        values: nested dicts and lists.
        source: origin of the values, for error messages.

    Raises:
        ValueError: a ``${...}`` is something else.
    """
    if isinstance(values, dict):
        values = [*values, *values.values()]
    if isinstance(values, list | tuple):
        for value in values:
            check_references(value, source)
    elif isinstance(values, str) and "${" in _REFERENCE.sub(" ", _ESCAPED.sub(" ", values)):
        raise ValueError(
            f"{source}: {values!r}: ${{...}} may only name another key of the study, such as"
            " ${trial.epochs}, because its value is stored and sent to MLflow; write the"
            ' value itself, or let the shell put it in: key="$NAME"'
        )


def as_text(values: Any) -> Any:
    """Escape each ``${`` in nested values, so that OmegaConf reads all texts literally.

    For studies whose references are already resolved. OmegaConf halves the backslashes before
    ``${`` and keeps all others.
    """
    if isinstance(values, dict):
        return {key: as_text(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [as_text(value) for value in values]
    if isinstance(values, str):
        return _OPENED.sub(lambda found: f"{found[1] * 2}\\${{", values)
    return values


def dump(values: Any) -> str:
    """Return values as YAML, keys in their order; :func:`parse` and YAML 1.1 readers read the same
    values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Also quotes texts that are numbers only in YAML 1.2."""


class _Loader(yaml.SafeLoader):
    def construct_yaml_int(self, node: Any) -> int:
        return int(node.value, 0)

    def construct_yaml_float(self, node: Any) -> float:
        return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, key) is not key:
                first = seen[key.value].start_mark.line + 1
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


_TAG = "tag:yaml.org,2002:"
_NUMBER = r"[0-9]+(?:_[0-9]+)*"
_SCALARS = {
    "null": r"(?:~|null|Null|NULL|)",
    "bool": r"(?:true|True|TRUE|false|False|FALSE)",
    "int": rf"[-+]?(?:0|(?!0){_NUMBER}|0x[0-9a-fA-F]+|0o[0-7]+)",
    "float": rf"[-+]?(?:\.{_NUMBER}|{_NUMBER}\.(?:{_NUMBER})?|{_NUMBER}(?=[eE]))"
    r"(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
"""Patterns of plain scalars by tag."""
_Loader.yaml_implicit_resolvers = {}  # drop the rules of YAML 1.1
for _name, _pattern in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})\\Z"), None)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_yaml_float)
_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _fit(
    node: yaml.Node | None, kind_of: Callable[[Place], Any], place: Place, known: set[int]
) -> None:
    """Set the tags of plain scalars by the schema's types at their places.

    A node with several places, through aliases, is tagged by its first place.

    Args:
        node: root of the nodes to tag.
        kind_of: see :func:`parse`.
        place: place of the root.
        known: ids of nodes that have been seen.
    """
    if node is None or id(node) in known:
        return
    known.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _fit(entry, kind_of, (*place, ITEM), known)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            merged = key.tag == f"{_TAG}merge"
            if isinstance(key, yaml.ScalarNode) and not merged:
                key.tag = f"{_TAG}str"
            within = isinstance(value, yaml.SequenceNode) and merged  # <<: [*a, *b]
            for each in value.value if within else [value]:
                _fit(each, kind_of, place if merged else (*place, str(key.value)), known)
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        _fit_scalar(node, plain_kind(kind_of(place)))


def _fit_scalar(node: yaml.ScalarNode, kind: Any) -> None:
    tag, text = node.tag.removeprefix(_TAG), node.value
    if kind is str and tag in ("bool", "int", "float"):
        node.tag = f"{_TAG}str"
    elif kind is bool and text.lower() in _TRUTHS:
        node.tag, node.value = f"{_TAG}bool", _TRUTHS[text.lower()]
    elif kind is int and re.fullmatch(rf"[-+]?{_NUMBER}", text):
        node.tag, node.value = f"{_TAG}int", str(int(text))
    elif kind is int and tag == "float":
        number = float(text.replace("_", "")) if text[-1].isdigit() else math.nan
        if abs(number) < 2**53 and number == int(number):
            node.tag, node.value = f"{_TAG}int", str(int(number))


def _too_many(size: float) -> ValueError:
    return ValueError(
        f"its aliases (*) make {size:.3g} values, more than the maximum of {MOST_VALUES}; write"
        " the values out"
    )


def _size(value: Any, known: dict[int, int], open_: set[int]) -> int:
    """Count the values in ``value`` with all aliases expanded.

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
    """Return the mapping in a study's or group's file; an empty mapping for an empty file.

    Raises:
        ValueError: the file cannot be read, or does not contain a mapping.
    """
    try:
        values = parse(path.read_text(encoding="utf-8"), kind_at)
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
