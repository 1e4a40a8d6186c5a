"""Identity of trials: keys that equivalent trials share, made from their configs.

Five equivalences, from the finest: the same trial (:func:`trial_id`), the same results
(:func:`results_key`), the same first epochs (:func:`beginning_key`), the same seconds per epoch
(:func:`pace_key`), the same task (:func:`task_key`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from study.config.keys import OUTSIDE, sha256_of, without
from trainers.config import TrialConfig
from trainers.user_code import placeless

NAMED = ("model", "data", "loss", "trainable")
"""Parts of a trial's config that may name code of the user's; each of ``metrics`` does too."""
ID_LENGTH = 12
"""Number of hex digits of the hash that are kept: 48 bits, ample for the trials of one study."""


def trial_id(config: TrialConfig) -> str:
    """Return the id of a trial: a hash of the config's departures from the defaults.

    Keys that change no result are left out.
    """
    return digest(_departures(_deciding(config.to_dict()), _defaults()))


@cache
def _defaults() -> dict[str, Any]:
    return TrialConfig().to_dict()


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


def task_key(config: dict[str, Any]) -> str:
    """Return the key that trials share if their figures say something of each other: of the same
    data, in whatever number, and loss."""
    values = without(config, "data.train_size", "data.root")
    return json.dumps([values["data"], values.get("loss")], sort_keys=True)


def digest(values: Any) -> str:
    """Return :data:`ID_LENGTH` hex digits of the sha256 of ``values`` as canonical JSON."""
    return sha256_of(values)[:ID_LENGTH]


def _deciding(config: dict[str, Any], *ignored: str) -> dict[str, Any]:
    """Return ``config`` without the keys :data:`~study.config.keys.OUTSIDE` and ``ignored``."""
    values = without(config, *OUTSIDE, *ignored)
    named = {part: placeless(values[part]) for part in NAMED if part in values}
    metrics = {name: placeless(part) for name, part in config.get("metrics", {}).items()}
    return values | named | {"metrics": metrics}


def factories(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a trial's config that may name code of the user's."""
    named = [config[part] for part in NAMED if part in config]
    return [*named, *config.get("metrics", {}).values()]


def named_code(config: dict[str, Any]) -> list[str]:
    """Return the keys of a trial's config that may name code of the user's."""
    parts = [part for part in NAMED if part in config]
    return [
        f"{part}.name" for part in (*parts, *map("metrics.{}".format, config.get("metrics", {})))
    ]


def code_digests(configs: Iterable[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the digests of the code of each factory that trials name, or of its files of data.

    Factories of one name may read several files.
    """
    found: dict[str, set[str]] = {}
    for config in configs:
        for part in factories(config):
            if part.get("code"):
                found.setdefault(part["name"], set()).add(part["code"])
    return found


def _departures(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``values`` that differ from ``defaults``, nested dicts recursively."""
    found = {}
    for key, value in values.items():
        if value != defaults[key]:
            nested = isinstance(value, dict) and defaults[key]
            found[key] = _departures(value, defaults[key]) if nested else value
    return found
