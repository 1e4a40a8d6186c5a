"""Functions on nested dicts with dotted keys, such as ``optimizer.lr``, and their digests."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.user_code import without_folder

OUTSIDE = ("data.root", "gpus")
"""Trial keys that do not affect results.

They are not part of a trial's identity (:func:`study.plan.identity.trial_id`) or of a study's
statement (:func:`study.config.claims.statement`).
"""
_FILE = re.compile(r"[^:]+\.py:[A-Za-z_]\w*")


def locate(values: Any, folder: Path, key: str = "") -> Any:
    """Make the file names in a study's references to code absolute: ``file.py:name``.

    Args:
        values: nested values as read.
        folder: folder that the files are relative to.
        key: dotted key of ``values``.
    """
    if isinstance(values, dict):
        return {name: locate(value, folder, f"{key}.{name}") for name, value in values.items()}
    if isinstance(values, list):
        return [locate(value, folder, key) for value in values]
    if not isinstance(values, str):
        return values
    if "args" in key.split("."):
        return values
    name, equals, value = values.rpartition("=")  # of overrides as a list: model.name=net.py:make
    named = {"name", "trainable", "check"} & set((f"{key}.{name}" if equals else key).split("."))
    if not named or not _FILE.fullmatch(value):
        return values
    return f"{name}{equals}{folder.resolve() / value}"


def without_folders(values: Any) -> Any:
    """Undo :func:`locate`: remove the folders from ``/folder/file.py:name`` in nested values."""
    if isinstance(values, Mapping):
        return {name: without_folders(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_folders(value) for value in values]
    if isinstance(values, str) and values.startswith("/") and _FILE.fullmatch(values):
        return without_folder(values)
    return values


def spell_out(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the short form ``trainable: file.py:function``, in a study or its trial, by the key
    ``trial.trainable.name``."""
    trial = values.get("trial", {})
    short = [part.get("trainable") for part in (trial, values) if isinstance(part, Mapping)]
    names = [name for name in short if isinstance(name, str)]
    if not names:
        return values
    given = trial.get("trainable")
    loop = {**(given if isinstance(given, Mapping) else {}), "name": names[-1]}
    kept = {key: value for key, value in values.items() if key != "trainable"}
    return kept | {"trial": trial | {"trainable": loop}}


def leaves(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the dotted keys of all values in a nested mapping that are not mappings themselves."""
    found: set[str] = set()
    for key, value in values.items():
        found |= (
            leaves(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{key}"}
        )
    return found


def apply(values: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's nested dict with ``params`` set.

    Neither ``values`` nor any dict that the result shares with it is changed.
    """
    for key, value in params.items():
        values = _with(values, key.split("."), value)
    return values


def _with(values: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    if rest:
        return values | {head: _with(values[head], rest, value)}
    if isinstance(value, Mapping):
        inner = values[head]
        for key, entry in value.items():
            inner = _with(inner, str(key).split("."), entry)
        return values | {head: inner}
    return values | {head: value}


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Copy a nested mapping without the dotted ``keys``; missing keys are ignored."""
    found = dict(values)
    for key in keys:
        head, _, rest = key.partition(".")
        if not rest:
            found.pop(head, None)
        elif isinstance(found.get(head), Mapping):
            found[head] = without(found[head], rest)
    return found


def sha256_of(values: Any) -> str:
    """Return the SHA-256 of ``values`` as canonical JSON, 64 hex digits.

    Ledgers contain these digests and trial ids are derived from them, so the JSON's form must not
    change.
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def lookup(value: Any, key: str) -> Any:
    """Return the value of a nested mapping under a dotted key; None if the key is missing."""
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as a flat one with dotted keys, lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def is_number(value: Any) -> bool:
    """Return whether a config value is a finite number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
