"""Error messages about a config, each with the value, the rule and the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from study.config.claims import AmendmentConfig, ClaimConfig
from study.config.kinds import kind_at, split
from study.config.study import RowConfig, StudyConfig
from study.program import lns_study
from trainers.config.validation import show
from trainers.text import CLOSE

_ABSENT = object()
EXAMPLES = {
    "seeds": "[0,1]",
    "rows": "[{label: a, overrides: {epochs: 3}}]",
    "rows[].label": "my row",
    "claims": "[{name: a, claim: A is right., source: a talk, value: {row: a, at_most: 2.0}}]",
    "amendments": "[{date: '2026-11-24', change: More seeds., reason: Five were too few.}]",
    "small": "{epochs: 3}",
    "trial": "{epochs: 3}",
    "trial.model.hidden": "[512]",
    "trial.trainable": "{name: 'loop.py:train'}",
    "trial.model.args": "{activation: relu}",
    "trial.model.channels": "null",
    "trial.metrics": "{r2: {name: 'torchmetrics:R2Score'}}",
    "trial.data.args": "{}",
    "trial.data.num_workers": "null",
    "trial.loss.args": "{label_smoothing: 0.1}",
    "trial.precision.gradient_format": "null",
    "trial.precision.master_format": "null",
    "trial.precision.sum_format": "null",
    "trial.precision.sum_block": "null",
    "trial.precision.loss_scale": "null",
    "trial.layout.dp": "1",
    "trial.memory.segments": "null",
    "trial.profile.steps": "[10, 14]",
    "trial.profile.ranks": "[0]",
    "trial.trainable.name": "'loop.py:train'",
    "trial.min_workers": "1",
    "trial.gpus": "1",
    "trial.changes": "[{epoch: 2, optimizer.lr: 0.01}]",
    "space": "{optimizer.lr: {loguniform: [0.001, 1.0]}}",
    "search.objectives": "{validation/error: min}",
    "search.constraints": "{bits: '<= 12'}",
    "baseline": "null",
    "picture": "test_error",
    "tracking_uri": "none",
    "alerts": "{finished: 'echo $LNS_STUDY_OUTCOME'}",
    "digits": "{epochs: 3}",
    "comparable": "{epochs: 3}",
    "rows[].comparable": "{epochs: 3}",
}
"""Example values for error messages, for keys whose default is not a useful example."""


@cache
def schema() -> DictConfig:
    """Return a writable OmegaConf schema of a study. It is cached, so callers must copy it first.

    OmegaConf makes the nodes of frozen dataclasses read-only, so the flag is removed from each.
    """
    schema: DictConfig = OmegaConf.structured(StudyConfig)
    _thaw(schema)
    return schema


@cache
def trial_schema() -> DictConfig:
    """Return a schema with only the key ``trial`` of :func:`schema`."""
    return OmegaConf.masked_copy(schema(), ["trial"])


def _thaw(node: DictConfig) -> None:
    OmegaConf.set_readonly(node, None)
    for child in node.values():
        if isinstance(child, DictConfig):
            _thaw(child)


def explain(error: Exception, values: dict[str, Any], source: str, inside: str) -> ValueError:
    """Convert an OmegaConf error into a ``ValueError`` with value, rule and remedy."""
    key = str(getattr(error, "full_key", None) or _innermost(values))
    kinds = ((RowConfig, "rows"), (ClaimConfig, "claims"), (AmendmentConfig, "amendments"))
    for kind, place in kinds:
        if getattr(error, "object_type", None) is kind and not key.startswith(place):
            key = f"{place}[].{key}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        whole = _innermost(values)
        return unknown_key(source, whole if whole.startswith(f"{key}.") else key, inside)
    value = _lookup(values, key)
    what = first_line(error) if value is _ABSENT else f"{value!r} is not possible"
    rule = _expected(key, inside)
    if isinstance(value, dict) and kind_at(split(key)) is str:
        rule += "; text with a colon and a space stands in quotes"
    return ValueError(f"{source}: {key.removeprefix(inside)}: {what}; {rule}")


def check_lists(values: dict[str, Any], source: str, inside: str, place: str = "") -> None:
    """Check that values are not mappings where the schema has a list; OmegaConf accepts these.

    Raises:
        ValueError: there is one.
    """
    for name, value in values.items():
        key = f"{place}{name}"
        if not isinstance(value, dict):
            continue
        kind = kind_at(split(key))
        if typing.get_origin(kind) is list:
            raise ValueError(
                f"{source}: {key.removeprefix(inside)}: {value!r} is not possible;"
                f" {_expected(key, inside)}"
            )
        if dataclasses.is_dataclass(kind):
            check_lists(value, source, inside, f"{key}.")


def unknown_key(source: str, key: str, inside: str = "") -> ValueError:
    """Return the error for an unknown key, with the nearest known key."""
    known = [
        *known_keys(),
        *(f"rows[].{name}" for name in RowConfig.__dataclass_fields__),
        *(f"claims[].{name}" for name in ClaimConfig.__dataclass_fields__),
    ]
    near = _nearest_key(key, known)
    near = near.replace(f"'{inside}", "'") if inside else near
    return ValueError(
        f"{source}: {key.removeprefix(inside)}: unknown key{near};"
        f" `{lns_study('run', 'CONFIG', '--dry-run')}` prints every key"
    )


def _innermost(values: Any) -> str:
    """Return the dotted key of nested one-entry dicts; "" if the outermost has several entries."""
    path = []
    while isinstance(values, dict) and len(values) == 1:
        ((key, values),) = values.items()
        path.append(str(key))
    return ".".join(path)


def _lookup(values: Any, key: str) -> Any:
    """Return the value of nested dicts under a key such as ``seeds[0]``, or :data:`_ABSENT`."""
    for part in re.findall(r"[^.\[\]]+", key):
        try:
            values = values[int(part)] if isinstance(values, list) else values[part]
        except (LookupError, TypeError, ValueError):
            return _ABSENT
    return values


def _expected(key: str, inside: str) -> str:
    """Describe the rule for a key with an example, from the schema's types and defaults."""
    shown = key.removeprefix(inside)
    entry = re.fullmatch(r"(.*)\[\d+\]", key)
    if entry:
        return (
            f"every entry {_rule(kind_at(split(key)))}, for example"
            f" {entry[1].removeprefix(inside)}={_example(entry[1])}"
        )
    if "[]." in key:
        last = key.rpartition("[].")[2]
        return f"it {_rule(kind_at(split(key)))}, for example `{last}: {_example(key)}`"
    return f"it {_rule(kind_at(split(key)))}, for example {shown}={_example(key)}"


def _rule(kind: Any) -> str:
    """Describe a type as a rule: ``must be a whole number``."""
    kinds = typing.get_args(kind)
    if type(None) in kinds:
        return f"{_rule(kinds[0])} or null"
    if typing.get_origin(kind) is list:
        return "must be a list"
    if typing.get_origin(kind) is dict:
        return "must be a mapping of keys to values"
    if dataclasses.is_dataclass(kind):
        return (
            "must be a mapping with the keys"
            f" {', '.join(entry.name for entry in dataclasses.fields(kind))}"
        )
    return {
        int: "must be a whole number",
        float: "must be a number",
        bool: "must be true or false",
        str: "must be text",
    }.get(kind, "must be what the key takes")


def _example(key: str) -> str:
    """Return an example value of a key."""
    if key in EXAMPLES:
        return EXAMPLES[key]
    kind = kind_at(split(key))
    if dataclasses.is_dataclass(kind):
        parts = {entry.name: entry.default for entry in dataclasses.fields(kind)}
        set_ = (name for name, value in parts.items() if type(value) in (bool, int, float, str))
        name = next(set_, "")
        return f"{{{name}: {show(parts[name])}}}" if name else "{}"
    if typing.get_origin(kind) is dict:
        return "{name: 2}"
    default = OmegaConf.select(schema(), key) if "[" not in key else None
    if default not in (None, "") and default != []:
        return show(OmegaConf.to_container(default) if isinstance(default, ListConfig) else default)
    kinds = typing.get_args(kind)
    inner = kinds[0] if type(None) in kinds else kind
    if typing.get_origin(inner) is list:
        return "[2]"
    return {int: "2", float: "2.5", bool: "true"}.get(inner, "abc")


@cache
def known_keys() -> tuple[str, ...]:
    """Return all dotted keys of a study, including the keys of its sections."""
    return tuple(_keys_of(schema()))


def _keys_of(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key, child in zip(map(str, node), node.values(), strict=True):
        yield f"{prefix}{key}"
        if isinstance(child, DictConfig):
            yield from _keys_of(child, f"{prefix}{key}.")


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known dotted key; "" without a near one.

    The last parts of the keys weigh 3/4, the parts before them 1/4. The similarity is ``difflib``'s
    ratio 2 M / T, or at least 0.9 if one last part is the other's initials, as ``lr`` for
    ``learning_rate``.
    """
    scores = {name: _likeness(key, name) for name in known}
    best = max(scores, key=lambda name: scores[name])
    return f" (did you mean {best!r}?)" if scores[best] >= CLOSE else ""


def _likeness(key: str, name: str) -> float:
    (place, _, last), (other_place, _, other) = key.rpartition("."), name.rpartition(".")
    initials = {last, other} & {
        "".join(part[:1] for part in text.split("_")) for text in (last, other) if "_" in text
    }
    alike = max(difflib.SequenceMatcher(None, last, other).ratio(), 0.9 if initials else 0.0)
    return 0.75 * alike + 0.25 * difflib.SequenceMatcher(None, place, other_place).ratio()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def refuse_examples(config: str, roots: Iterable[Path]) -> None:
    """Check that ``config`` is not the name of a study in the folder ``examples`` of a checkout.

    Args:
        config: name given by the user.
        roots: ``conf`` folders; ``examples`` may be beside each.

    Raises:
        ValueError: it is; the message has the file.
    """
    name = re.compile(rf"^name: {re.escape(config)}$", re.MULTILINE)
    for root in roots:
        for path in sorted(root.parent.glob("examples/*/*.yaml")):
            if name.search(path.read_text()):
                file = os.path.relpath(path)
                raise ValueError(
                    f"config {config!r}: an example has no short name; {file} has it:"
                    f" {lns_study('run', file)}"
                )
