"""What makes two trials the same: their config, minus what does not matter."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trainers.config import TrialConfig

ID_LENGTH = 12
"""Hex digits kept of the hash: 48 bits, ample for the trials of one study."""


def trial_id(config: TrialConfig) -> str:
    """The id of a trial: the hash of what its config has other than the defaults, the data's folder and the share of a GPU left out."""
    values = config.to_dict()
    del values["data"]["root"], values["gpus"]
    return digest(_departures(values, TrialConfig().to_dict()))


def _departures(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``values`` that differ from ``defaults``, nested dicts likewise."""
    found = {}
    for key, value in values.items():
        if value != defaults[key]:
            found[key] = _departures(value, defaults[key]) if isinstance(value, dict) else value
    return found


def digest(values: Any) -> str:
    """First :data:`ID_LENGTH` hex digits of the sha256 of ``values`` as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


IGNORED = ("epochs", "seed", "gpus")


def like(config: dict[str, Any]) -> str:
    """What of a trial's config decides how long an epoch takes, as a key."""
    values = {key: value for key, value in config.items() if key not in IGNORED}
    values["data"] = {key: value for key, value in config["data"].items() if key != "root"}
    optimizer = config["optimizer"]
    values["optimizer"] = [optimizer["name"], bool(optimizer["momentum"]), bool(optimizer["weight_decay"])]
    return json.dumps(values, sort_keys=True)
