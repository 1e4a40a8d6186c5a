"""Escaping of names for MLflow, and checks of lengths that MLflow would reject.

MLflow's names of metrics and params may contain letters, digits and ``_ - . space : /``, must be
normal paths, and have at most 250 characters. Any other character, and the colon itself, is written
as its code point in hex between colons: ``dp=2`` becomes ``dp:3d:2``. :func:`restore` returns the
original name, and names cannot collide. A longer name is cut and ends with its digest.

MLflow stores an infinite metric as 1.8e308, which is wrong. Such points are therefore left out, and
a tag lists them (:func:`nonfinite_tags`). NaN is stored as NaN.

Source of the limits: ``mlflow/utils/validation.py`` of MLflow 3.17.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping

from study.config import Metric
from study.config.keys import flatten
from study.plan.plan import Plan

NAME_LENGTH = 250
DIGEST_LENGTH = 12
"""Number of hex digits of the SHA-256 at the end of a cut name."""
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
EXPERIMENT_LENGTH = 500

SECONDS = "seconds"
"""Metric with the training time of a trial."""
BITS = "bits"
"""Param with the width of the number format, which the config does not have."""
OLD_SETTING = "cfg/"
"""Prefix of metrics that earlier versions sent, a metric for each numeric setting.

They also sent :data:`BITS` as a metric. Neither is sent, compared or restored any more.
"""
NONFINITE = "nonfinite/"
"""Prefix of tags that list the epochs at which a metric was infinite."""

_ESCAPED = re.compile(r":([0-9a-f]+):")


def sanitise(name: str) -> str:
    """Return a legal metric, param or tag name that :func:`restore` converts back into ``name``.

    A name of more than :data:`NAME_LENGTH` characters is cut, and cannot be restored.
    """
    legal = escaped(name)
    if len(legal) <= NAME_LENGTH:
        return legal
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:DIGEST_LENGTH]
    return f"{legal[: NAME_LENGTH - DIGEST_LENGTH - 1]}-{digest}"


def escaped(name: str) -> str:
    """Return ``name`` with illegal characters escaped, without a limit on its length."""
    legal = re.sub(r"[^\w\-. /]|[^\x00-\x7f]", lambda match: _escape(match[0]), name)
    if posixpath.normpath(legal) != legal or legal.startswith(("/", "..")) or legal in (".", ""):
        legal = re.sub(r"[./]", lambda match: _escape(match[0]), legal)
    return legal or "::"


def restore(name: str) -> str:
    """Return the original name of one returned by :func:`sanitise`."""
    return "" if name == "::" else _ESCAPED.sub(lambda match: chr(int(match[1], 16)), name)


def _escape(character: str) -> str:
    return f":{ord(character):x}:"


def nonfinite_tags(history: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Return a tag for every metric with infinite points, such as
    ``nonfinite/validation/loss = +inf at 3, +inf at 4``.

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
    """Return the suffix of a row's MLflow metric: for the spread, or with ``""`` for the mean."""
    return f"/{metric.row_key}{figure}"


def is_old_setting(name: str) -> bool:
    """Return whether an earlier version sent a setting as the metric ``name``."""
    return name == BITS or name.startswith(OLD_SETTING)


def check_loggable(plan: Plan) -> None:
    """Check, before a study runs, that MLflow would not cut off or reject a name or value.

    Raises:
        ValueError: a name or value is too long.
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
