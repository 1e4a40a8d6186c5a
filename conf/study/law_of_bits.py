"""The figure of ``law_of_bits`` that no row says: the bits from which compensation is free."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from study import Study
from study.results.resampling import FEWEST, bootstrap_interval
from study.results.summary import figures_by_seed, summarise

BITS = range(4, 11)
FREE = 0.3
"""Advantage of Kahan summation, in points, below which it counts as none."""


def free_from(study: Study) -> dict[str, Any]:
    """Return the bits of fraction at which Kahan's advantage over nearest falls below
    :data:`FREE`.

    The advantage is interpolated between bits, linear in its logarithm; the interval is the
    bootstrap's over seeds (:mod:`study.results.resampling`). Where the advantage is above
    :data:`FREE` at all bits, or at none, the figure is the last or the first number of bits.
    """
    summary = summarise(study.state)
    rows = {row.label: figures_by_seed(row.trials, summary.metric) for row in summary.rows}
    there = [bits for bits in BITS if f"kahan {bits} bits" in rows]
    lost, won = ([rows[f"{rule} {bits} bits"] for bits in there] for rule in ("nearest", "kahan"))
    seeds = sorted(set.intersection(*(set(figures) for figures in (*lost, *won))))
    gains = np.array(
        [[a[seed] - b[seed] for a, b in zip(lost, won, strict=True)] for seed in seeds]
    )
    return crossing(gains, there)


def crossing(gains: np.ndarray, bits: list[int]) -> dict[str, Any]:
    """Return the bits from which the mean gains are below :data:`FREE`, with their interval.

    Args:
        gains: Kahan's advantage, ``[seeds, bits]``.
        bits: numbers of bits, rising.
    """
    if not gains.size or not np.isfinite(gains).all():
        note = "a trial diverged, or the rows share no seed"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    figure = _cross(gains.mean(axis=0), bits)
    ends = bootstrap_interval(gains, lambda means: _cross(means, bits))
    if ends is None:
        note = f"{len(gains)} seeds have no interval by the bootstrap; run at least {FEWEST}"
        return {"figure": figure, "unit": "bits", "verdict": "undecided", "note": note}
    return {"figure": figure, "low": ends[0], "high": ends[1], "unit": "bits"}


def _cross(gains: np.ndarray, bits: list[int]) -> float:
    """Return the bits from which the gains are below :data:`FREE` for good."""
    above = np.flatnonzero(gains > FREE)
    last = int(above[-1]) if len(above) else -1
    if last in (-1, len(gains) - 1):
        return float(bits[last + 1 if last < 0 else last])
    logs = np.log(np.maximum(gains[last : last + 2], 1e-3))
    share = (logs[0] - np.log(FREE)) / (logs[0] - logs[1])
    return float(bits[last] + share * (bits[last + 1] - bits[last]))
