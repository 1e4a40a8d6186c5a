"""A strict reader of study files: YAML's safe subset, without what YAML accepts silently.

YAML lets a key stand twice and keeps the last value, an alias stand for so much that a few lines
become gigabytes ("billion laughs"), and an anchor refer to itself. None of these is ever meant, so
each is refused with its place. The ``${...}`` of OmegaConf may name another key of the study and
nothing else: its resolvers read the environment or compute, and what they give would be stored and
sent to MLflow. ``\\${...}`` is text, and stays so where a stored study is read again
(:func:`as_text`).

Plain scalars are read by the core schema of YAML 1.2.2 (chapter 10.3) and the types of the study's
own schema, not by YAML 1.1, to which ``1.10`` is 1.1, ``on`` true, ``010`` eight and ``1:30``
ninety:

- where the schema has a text, every scalar but ``null`` is that text, as it is spelled;
- a number is what Python reads as one: ``1e-3``, ``.5``, ``+1``, ``1_000``, also ``0x1f``, ``.inf``
  and ``.nan``; with leading zeros, as ``010``, it is text, which is 10 where the schema has a whole
  number. ``1e3`` is whole where the schema has a whole number;
- ``true`` and ``false`` are truth values; ``yes``, ``no``, ``on`` and ``off`` are where the schema
  has a truth value, and text elsewhere;
- dates are text, and so are all keys.
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
"""Largest number of values that a file may have once its aliases are written out."""
_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]]*\}")
"""Pattern of a reference to a key, ``${trial.epochs}``, or a relative one, ``${..epochs}``."""
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
"""Pattern of ``${`` after an odd number of backslashes, which is text."""
_OPENED = re.compile(r"(\\*)\$\{")


Place = tuple[str, ...]
"""Keys from the outermost mapping to a value; :data:`study.config.kinds.ITEM` for an entry."""


def parse(text: str, kind_of: Callable[[Place], Any] = lambda place: Any) -> Any:
    """Return the values of one YAML document.

    Args:
        text: the document.
        kind_of: returns the type that the schema has at a place of the document.

    Raises:
        yaml.YAMLError: the text is not YAML, or a key stands twice in a mapping; the message has
        the line.
        ValueError: an anchor refers to itself, or its aliases make more than :data:`MOST_VALUES`
            values.
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


def dump(values: Any) -> str:
    """Return values as YAML, keys in their order, from which :func:`parse` and readers of YAML 1.1
    read the same."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes also what YAML 1.1 takes for text, and YAML 1.2 for a number."""


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
"""Patterns of plain scalars by their tag."""
_Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1
for _name, _pattern in _SCALARS.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})\\Z"), None)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(f"{_TAG}float", _Loader.construct_yaml_float)
_TRUTHS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _fit(
    node: yaml.Node | None, kind_of: Callable[[Place], Any], place: Place, known: set[int]
) -> None:
    """Give each plain scalar the tag of the type that the schema has at its place; of a node that
    stands in several places, at the first.

    Args:
        node: node below which they are.
        kind_of: see :func:`parse`.
        place: place of the node.
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
    """Return the mapping that a study's file or a group's holds; an empty one of an empty file.

    Raises:
        ValueError: it cannot be read, or holds something else.
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
