"""The figure of ``deep_vanilla`` that no row says: the octaves of depth that a bit of fraction is
worth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from study import Study
from study.results.summary import figures_by_seed, summarise

HALF = 50.0
"""Error in per cent at which a net counts as untrained."""


def octaves_a_bit(study: Study) -> dict[str, Any]:
    """Return the slope of the depth's binary logarithm over the bits, by least squares.

    The depth at which the error rises through :data:`HALF` is interpolated between the depths of
    each number of bits, linear in its logarithm; numbers of bits without such a depth are left out.
    The interval is Student's t over the seeds, or over the residues where there is one seed.
    """
    summary = summarise(study.state)
    figures: dict[int, dict[int, Mapping[int, float]]] = {}
    for row in summary.rows:
        if found := re.fullmatch(r"(\d+) bits depth (\d+)", row.label):
            bits, depth = map(int, found.groups())
            figures.setdefault(bits, {})[depth] = figures_by_seed(row.trials, summary.metric)
    seeds = sorted({seed for by in figures.values() for each in by.values() for seed in each})
    slopes, shown = [], {}
    for seed in seeds:
        ends = {
            bits: _crossing({depth: each[seed] for depth, each in by.items()})
            for bits, by in figures.items()
        }
        shown = {bits: end for bits, end in ends.items() if end is not None}
        if len(shown) > 2:
            slopes.append(stats.linregress(list(shown), list(np.log2(list(shown.values())))))
    if not slopes:
        note = "fewer than three numbers of bits have depths that train and depths that do not"
        return {"figure": 0.0, "verdict": "undecided", "note": note}
    figure = float(np.mean([each.slope for each in slopes]))
    if len(slopes) > 1:
        error, freedom = stats.sem([each.slope for each in slopes]), len(slopes) - 1
    else:
        error, freedom = slopes[0].stderr, len(shown) - 2
    half = float(stats.t.ppf(0.975, freedom) * error)
    depths = ", ".join(f"{bits} bits {end:.0f}" for bits, end in shown.items())
    return {
        "figure": figure,
        "low": figure - half,
        "high": figure + half,
        "unit": "octaves a bit",
        "note": f"depths of the last seed: {depths}",
    }


def _crossing(errors: Mapping[int, float]) -> float | None:
    """Return the depth from which all errors are above :data:`HALF`; None if none or all are."""
    depths = sorted(errors)
    below = [index for index, depth in enumerate(depths) if errors[depth] <= HALF]
    if not below or below[-1] == len(depths) - 1:
        return None
    a, b = depths[below[-1]], depths[below[-1] + 1]
    share = (HALF - errors[a]) / (errors[b] - errors[a])
    return float(2 ** (np.log2(a) + share * np.log2(b / a)))
