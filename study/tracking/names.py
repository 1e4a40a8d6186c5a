"""Names, values and lengths that MLflow can hold: how ours are escaped, and which are refused
before anything runs.

Names of metrics and params may have letters, digits, ``_ - . space : /`` and must be normal paths,
at most 250 characters. Any other character becomes its code point in hex between colons, ``dp=2``
is ``dp:3d:2``, and so does a colon itself; so :func:`restore` gives back exactly the original name
and no two names collide. A name that would be longer is cut, and ends with a digest of it. MLflow
stores an infinite metric as 1.8e308, which is false: such points are left out and a tag says where
they were (:func:`nonfinite_tags`). NaN is stored as NaN.

Source of the limits: ``mlflow/utils/validation.py`` of MLflow 3.17.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from study.config import Metric
from study.config.keys import flatten
from study.plan.plan import Plan

NAME_LENGTH = 250
DIGEST_LENGTH = 12
"""Hex digits of a name's sha256 at the end of one that was cut."""
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
EXPERIMENT_LENGTH = 500

SETTING = "cfg/"
"""Prefix of numeric settings that are sent as metrics too, ``cfg/optimizer.lr``.

MLflow can compare and plot metrics; params it compares only for equality.
"""
NONFINITE = "nonfinite/"
"""Prefix of tags that say where a metric was infinite."""

_ESCAPED = re.compile(r":([0-9a-f]+):")


def sanitise(name: str) -> str:
    """Return a legal metric, param or tag name that :func:`restore` turns back into ``name``.

    One of more than :data:`NAME_LENGTH` characters is cut, and cannot be turned back.
    """
    legal = escaped(name)
    if len(legal) <= NAME_LENGTH:
        return legal
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:DIGEST_LENGTH]
    return f"{legal[: NAME_LENGTH - DIGEST_LENGTH - 1]}-{digest}"


def escaped(name: str) -> str:
    """Return ``name`` with the characters that MLflow does not take escaped, however long."""
    legal = re.sub(r"[^\w\-. /]|[^\x00-\x7f]", lambda match: _escape(match[0]), name)
    if posixpath.normpath(legal) != legal or legal.startswith(("/", "..")) or legal in (".", ""):
        legal = re.sub(r"[./]", lambda match: _escape(match[0]), legal)
    return legal or "::"


def restore(name: str) -> str:
    """Return the name that :func:`sanitise` was given."""
    return "" if name == "::" else _ESCAPED.sub(lambda match: chr(int(match[1], 16)), name)


def _escape(character: str) -> str:
    return f":{ord(character):x}:"


def nonfinite_tags(history: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Return a tag for every metric with infinite points.

    An example is ``nonfinite/validation/loss = inf at 3, 4``.

    Args:
        history: metrics by epoch.
    """
    places: dict[str, list[str]] = {}
    for epoch, metrics in sorted(history.items()):
        for name, value in metrics.items():
            if math.isinf(value):
                places.setdefault(name, []).append(f"{'+' if value > 0 else '-'}inf at {epoch}")
    return {
        f"{NONFINITE}{sanitise(name)}": ", ".join(found)[:TAG_LENGTH]
        for name, found in places.items()
    }


def of_row(metric: Metric, figure: str = "_sd") -> str:
    """Return the suffix of a row's MLflow metric, of the spread or else ("") of the mean."""
    return f"/{metric.row_key}{figure}"


def settings_of(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a config by ``cfg/`` and their dotted key."""
    return {
        f"{SETTING}{name}": float(value)
        for name, value in flatten(dict(config)).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def check_loggable(plan: Plan) -> None:
    """Refuse, before anything runs, what MLflow would cut off or reject.

    Raises:
        ValueError: a name or value is too long; the message has its length, the limit and the
            remedy.
    """
    _check("name", plan.study.name, EXPERIMENT_LENGTH)
    suffix = of_row(plan.study.primary_metric)
    for row in plan.rows:
        _check(f"row {row.label[:40]!r}...: label", escaped(f"{row.label}{suffix}"), NAME_LENGTH)
    for trial in plan.trials:
        for key, value in flatten(trial.config.to_dict()).items():
            _check(f"row {trial.row!r}: {key}", str(value), PARAM_LENGTH)


def _check(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(
            f"{what}: has {len(text)} characters as MLflow stores it, which takes {limit}; shorten"
            " it, or set tracking_uri=none"
        )
