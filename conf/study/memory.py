"""The figures of ``memory``: how peaks of memory grow with the depth, and what a layer takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from study import Study

PEAK = "telemetry/peak_memory_bytes"
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
    ours, theirs = _peaks(study, LNS), _peaks(study, FLOAT32)
    ratios = [
        (ours[seed][-1] - ours[seed][0]) / (theirs[seed][-1] - theirs[seed][0])
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    return _mean(ratios, "")


def _peaks(study: Study, row: str) -> dict[int, list[float]]:
    """Return the largest peak of each trial of a row in bytes, by seed, by rising depth."""
    found: dict[int, dict[int, float]] = {}
    for trial in study.state.trials:
        peaks = [report["metrics"][PEAK] for report in trial.reports.values()]
        if trial.row == row and peaks:
            depth = trial.config["model"]["args"]["depth"]
            found.setdefault(trial.seed, {})[depth] = max(peaks)
    most = max((len(each) for each in found.values()), default=0)
    return {
        seed: [peak for _, peak in sorted(each.items())]
        for seed, each in found.items()
        if len(each) == most
    }


def _exponent(study: Study, row: str) -> dict[str, Any]:
    """Return p where peaks grow as ``a + b depth^p`` over three depths of one ratio r:
    ``p = log_r((peak 3 - peak 2) / (peak 2 - peak 1))``."""
    depths = sorted({trial.config["model"]["args"]["depth"] for trial in study.state.trials})
    peaks = _peaks(study, row)
    exponents = [
        math.log((three - two) / (two - one), depths[1] / depths[0])
        for one, two, three in peaks.values()
    ]
    mean = np.mean(list(peaks.values()), axis=0) / 1e6
    shown = ", ".join(
        f"{peak:,.0f} MB at {depth}" for peak, depth in zip(mean, depths, strict=True)
    )
    return _mean(exponents, shown)


def _mean(figures: list[float], note: str) -> dict[str, Any]:
    """Return the mean over seeds with Student's 95 % interval."""
    half = float(stats.sem(figures) * stats.t.ppf(0.975, len(figures) - 1))
    figure = float(np.mean(figures))
    return {"figure": figure, "low": figure - half, "high": figure + half, "note": note}
