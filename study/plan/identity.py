"""Identity of trials: keys that equivalent trials share, made from their configs.

Four equivalences, from the finest: the same trial (:func:`trial_id`), the same results
(:func:`results_key`), the same first epochs (:func:`beginning_key`), the same seconds per epoch
(:func:`pace_key`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trainers.config import TrialConfig

NAMED = ("model", "data", "loss", "trainable")
"""Parts of a trial's config that may name code of the user's; each of ``metrics`` does too."""
ID_LENGTH = 12
"""Number of hex digits of the hash that are kept: 48 bits, ample for the trials of one study."""


def trial_id(config: TrialConfig) -> str:
    """Return the id of a trial: a hash of the config's departures from the defaults.

    Keys that change no result are left out.
    """
    return digest(_departures(_deciding(config.to_dict()), TrialConfig().to_dict()))


def results_key(config: dict[str, Any]) -> str:
    """Return the key that trials share if their results have the same bits."""
    return json.dumps(_deciding(config), sort_keys=True)


def beginning_key(config: dict[str, Any], epochs: int) -> str:
    """Return the key that trials share if their first ``epochs`` epochs have the same bits."""
    changes = [change for change in config.get("changes", []) if change["epoch"] < epochs]
    return json.dumps(_deciding(config, "epochs") | {"changes": changes}, sort_keys=True)


def pace_key(config: dict[str, Any]) -> str:
    """Return the key that trials share if their epochs take equally long."""
    optimizer = config["optimizer"]
    kind = [optimizer["name"], bool(optimizer["momentum"]), bool(optimizer["weight_decay"])]
    return json.dumps(_deciding(config, "epochs", "seed") | {"optimizer": kind}, sort_keys=True)


def digest(values: Any) -> str:
    """Return :data:`ID_LENGTH` hex digits of the sha256 of ``values`` as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _deciding(config: dict[str, Any], *ignored: str) -> dict[str, Any]:
    """Return ``config`` without the keys that change no result and without the keys ``ignored``.

    The former are :data:`study.config.OUTSIDE`.
    """
    values = {key: value for key, value in config.items() if key not in ("gpus", *ignored)}
    data = {key: value for key, value in config["data"].items() if key != "root"}
    named = {part: _placeless(config[part]) for part in NAMED if part in config}
    metrics = {name: _placeless(part) for name, part in config.get("metrics", {}).items()}
    return values | named | {"data": _placeless(data), "metrics": metrics}


def factories(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a trial's config that may name code of the user's."""
    named = [config[part] for part in NAMED if part in config]
    return [*named, *config.get("metrics", {}).values()]


def _placeless(part: dict[str, Any]) -> dict[str, Any]:
    """Copy the config of a part with the file of its factory named without its folder: its code has
    a digest."""
    return part | {"name": part["name"].rpartition("/")[2]}


def _departures(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` that differ from ``defaults``, nested dicts recursively."""
    found = {}
    for key, value in values.items():
        if value != defaults[key]:
            nested = isinstance(value, dict) and defaults[key]
            found[key] = _departures(value, defaults[key]) if nested else value
    return found
