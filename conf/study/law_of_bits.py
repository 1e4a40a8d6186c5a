"""The figure of ``law_of_bits`` that no row says: the bits from which compensation is free."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from study import Study
from study.results.summary import figures_by_seed, summarise

BITS = range(4, 11)
FREE = 0.3
"""Advantage of Kahan summation, in points, below which it counts as none."""


def free_from(study: Study) -> dict[str, Any]:
    """Return the bits of fraction at which Kahan's advantage over nearest falls below
    :data:`FREE`.

    The advantage is interpolated between bits, linear in its logarithm; the interval is the
    bootstrap's over seeds (B. Efron, R. Tibshirani 1993, percentiles).
    """
    summary = summarise(study.state)
    rows = {row.label: figures_by_seed(row.trials, summary.metric) for row in summary.rows}
    there = [bits for bits in BITS if f"kahan {bits} bits" in rows]
    lost, won = ([rows[f"{rule} {bits} bits"] for bits in there] for rule in ("nearest", "kahan"))
    seeds = sorted(set.intersection(*(set(figures) for figures in (*lost, *won))))
    gains = np.array(
        [[a[seed] - b[seed] for a, b in zip(lost, won, strict=True)] for seed in seeds]
    )

    def crossing(*of_bits: np.ndarray, axis: int = -1) -> Any:
        means = np.stack([np.mean(values, axis=axis) for values in of_bits], axis=-1)
        return np.apply_along_axis(_cross, -1, means, there)

    found = stats.bootstrap(
        tuple(gains.T), crossing, paired=True, vectorized=True, n_resamples=2000,
        method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    low, high = found.confidence_interval
    return {
        "figure": _cross(gains.mean(axis=0), there),
        "low": float(low),
        "high": float(high),
        "unit": "bits",
    }


def _cross(gains: np.ndarray, bits: list[int]) -> float:
    """Return the bits from which the gains are below :data:`FREE` for good."""
    above = np.flatnonzero(gains > FREE)
    last = int(above[-1]) if len(above) else -1
    if last in (-1, len(gains) - 1):
        return float(bits[last + 1 if last < 0 else last])
    logs = np.log(np.maximum(gains[last : last + 2], 1e-3))
    share = (logs[0] - np.log(FREE)) / (logs[0] - logs[1])
    return float(bits[last] + share * (bits[last + 1] - bits[last]))
