"""The figures of ``memory``: how a step's bytes grow with the depth, and what a layer takes."""

from __future__ import annotations

import math
from typing import Any

from study import Study

FLOAT32, LNS, WITH = "float32", "lns16", " with checkpoints"


def exponent_without(study: Study) -> dict[str, Any]:
    """Return the exponent of float32's growth without checkpoints."""
    return _exponent(study, FLOAT32)


def exponent_with(study: Study) -> dict[str, Any]:
    """Return the exponent of float32's growth with checkpoints."""
    return _exponent(study, FLOAT32 + WITH)


def exponent_with_lns(study: Study) -> dict[str, Any]:
    """Return the exponent of the growth with checkpoints in LNS."""
    return _exponent(study, LNS + WITH)


def lns_over_float32(study: Study) -> dict[str, Any]:
    """Return the bytes of a layer in LNS over those in float32, without checkpoints."""
    ours, theirs = _bytes(study, LNS), _bytes(study, FLOAT32)
    return _exactly((ours[-1] - ours[0]) / (theirs[-1] - theirs[0]), "")


def of_replicas(study: Study) -> dict[str, Any]:
    """Return the bytes of a layer in a worker of two replicas over those of one worker."""
    return _share(study, " in 2 replicas")


def of_shards(study: Study) -> dict[str, Any]:
    """Return the same of two replicas whose parameters are sharded."""
    return _share(study, " in 2 shards")


def of_stages(study: Study) -> dict[str, Any]:
    """Return the same of two stages with four micro-batches, over all layers of the net."""
    return _share(study, " in 2 stages")


def of_stages_in_lns(study: Study) -> dict[str, Any]:
    """Return the same in LNS."""
    return _share(study, " in 2 stages", LNS)


def _share(study: Study, layout: str, fmt: str = FLOAT32) -> dict[str, Any]:
    """Return what a layer more takes in the worker that holds most, over what it takes alone."""
    ours, alone = _bytes(study, fmt + layout), _bytes(study, fmt)
    held = ", ".join(f"{each / 1e6:,.0f} MB" for each in ours)
    return _exactly((ours[-1] - ours[0]) / (alone[-1] - alone[0]), held)


def _bytes(study: Study, row: str) -> list[float]:
    """Return the bytes that the trials of a row hold, by rising depth."""
    found = {
        _depth(trial): trial.reports[1]["metrics"]["telemetry/tensor_bytes"]
        for trial in study.state.trials
        if trial.row == row
    }
    return [found[depth] for depth in sorted(found)]


def _depth(trial: Any) -> int:
    return int(trial.config["model"]["args"]["depth"])


def _exponent(study: Study, row: str) -> dict[str, Any]:
    """Return p where bytes grow as ``a + b depth^p`` over three depths of one ratio r:
    ``p = log_r((bytes 3 - bytes 2) / (bytes 2 - bytes 1))``."""
    depths, held = sorted({_depth(trial) for trial in study.state.trials}), _bytes(study, row)
    one, two, three = held
    shown = ", ".join(f"{each / 1e6:,.0f} MB at {d}" for each, d in zip(held, depths, strict=True))
    return _exactly(math.log((three - two) / (two - one), depths[1] / depths[0]), shown)


def _exactly(figure: float, note: str) -> dict[str, Any]:
    """Return a figure that is counted, so without an interval."""
    return {"figure": figure, "low": figure, "high": figure, "note": note}
