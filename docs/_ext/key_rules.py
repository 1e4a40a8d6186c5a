"""Finds the rules of config keys, which configs check when they are created
(:func:`trainers.config.validation.require`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from study.config.claims import EXAMPLES, AmendmentConfig, ClaimConfig
from study.config.search import SearchConfig
from study.config.study import RowConfig, StudyConfig
from trainers.config import LOSSES, MetricConfig, ModelConfig, ProfileConfig, TrialConfig
from trainers.config.validation import require

ASKING: dict[type, tuple[Mapping[str, Any], ...]] = {
    StudyConfig: ({"alerts": {"finished": "echo"}},),
    TrialConfig: ({"metrics": {"r2": MetricConfig(name="torchmetrics:R2Score")}},),
    ModelConfig: ({"name": "cnn", "channels": [8]},),
    ProfileConfig: ({"ranks": [0]},),
    MetricConfig: ({"name": "torchmetrics:R2Score"},),
    SearchConfig: ({"constraints": {"bits": "<= 12"}},),
    RowConfig: ({"label": "lns12"},),
    ClaimConfig: (
        {"name": "one", "claim": "-", "source": "-", "value": {"row": "lns12", "at_most": 1.0}},
    ),
    AmendmentConfig: ({"date": "2026-11-26", "change": "-", "reason": "-"},),
}
"""Values with which a config checks every key, if its defaults leave some out."""
_FUNCTION = "`file.py:function` or `package.module:function`"
_BOUND = "a finite number; with `check`, at most one bound"
_FORMAT = "a name of [formats](formats.md)"
_KEYS = "keys of a trial, with valid values"
MARKED = {
    "question": "any text",
    "space": "[domains](../howto/search.md) by trial key",
    "rows": "rows whose labels differ",
    "claims": "claims with different names, about existing rows",
    "amendments": "amendments",
    "digits": _KEYS,
    "comparable": _KEYS,
    "small": "keys of the study, with valid values",
    "storage": "a path, `file:///path`, `s3://bucket/prefix` or `gs://bucket/prefix`",
    "search.per_seed": "not with `grid`, `confirm` or a scheduler that ends trials early",
    "search.confirm_seeds": "whole numbers of at least 0, each once, not in `seeds`",
    "rows[].overrides": _KEYS,
    "rows[].comparable": _KEYS,
    "claims[].check": _FUNCTION,
    "claims[].at_most": _BOUND,
    "claims[].at_least": _BOUND,
    "claims[].within": "two finite numbers, the lower first; with `check`, at most one bound",
    "trial.data.root": "any path",
    "trial.data.args": "arguments of the data set, listed below, or of the factory",
    "trial.model.args": "arguments of the model, listed below, or of the factory",
    "trial.loss.args": "; ".join(
        f"of {loss}: {', '.join(names)}" for loss, names in LOSSES.items() if names
    ),
    "trial.metrics.NAME.args": "arguments of the factory",
    "trial.trainable.name": f"empty, {_FUNCTION}",
    "trial.trainable.args": "arguments of the function",
    "trial.precision.format": _FORMAT,
    "trial.precision.gradient_format": _FORMAT,
    "trial.precision.master_format": _FORMAT,
    "trial.precision.sum_format": "the name of a binary float with a mantissa",
    "trial.precision.loss_scale": "a power of two of at least 1; the format has its inverse",
    "trial.changes": "each with a later epoch than before, below the last, and optimizer options",
}
"""Rules of keys that :func:`asked` does not find: free keys, and keys with their own parser."""
MARKED |= {f"trial.{part}.code": "any text" for part in ("data", "model", "loss", "trainable")}
MARKED["trial.metrics.NAME.code"] = "any text"
MARKED |= {
    f"claims[].{kind}": f"as `{{{example.partition(': {')[2]}`; a claim has one check"
    for kind, example in EXAMPLES.items()
}


def asked(config: type) -> list[tuple[str, str]]:
    """Return the keys that a config checks when it is created, each with its rule."""
    found: dict[tuple[str, str], None] = {}

    def hear(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is require.__code__:
            key, _, value = frame.f_locals["given"].partition("=")
            rule = re.sub(r"^must be | \(.*\)$| of at least -inf", "", frame.f_locals["rule"])
            other = value.partition(" with ")[2]
            name = key.rpartition(": ")[2].split(" ")[0]
            found[name, f"with `{other}` {rule}" if other else rule] = None

    before = sys.getprofile()
    sys.setprofile(hear)
    try:
        for values in ASKING.get(config, ({},)):
            config(**values)
    finally:
        sys.setprofile(before)
    return list(found)


def rule_of(key: str, kind: str, heard: list[tuple[str, str]]) -> str:
    """Return the rule of a key.

    Args:
        key: its dotted name in a study.
        kind: its type.
        heard: what :func:`asked` returns of the config that has it.

    Raises:
        LookupError: the key has no known rule.
    """
    if key in MARKED:
        return MARKED[key]
    if kind == "bool":
        return "true or false"
    name = key.rpartition("[].")[2].removeprefix("trial.")
    rules = [rule for said, rule in heard if said == name or said.startswith(f"{name}.")]
    if not rules:
        raise LookupError(f"{key}: no rule is asked; mark it in {__name__}.MARKED")
    each = "each " if kind.startswith("list[int]") else ""
    return "; ".join(f"{each if rule.startswith('a ') else ''}{rule}" for rule in rules)
