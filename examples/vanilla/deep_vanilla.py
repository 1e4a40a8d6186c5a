"""The figure of ``deep_vanilla`` that no row says: the octaves of depth that a bit of fraction is
worth."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from study import Study
from study.claims.verdict import of_mean
from study.results.summary import figures_by_seed, summarise

HALF = 50.0
"""Error in per cent above which a net counts as untrained."""
Errors = dict[int, dict[int, float]]
"""Test error in per cent by bits and depth."""


def octaves_a_bit(study: Study) -> dict[str, Any]:
    """Return by how many octaves the depth that trains grows with a bit, see :func:`fit`."""
    summary = summarise(study.state)
    by_seed: dict[int, Errors] = {}
    for row in summary.rows:
        if found := re.fullmatch(r"(\d+) bits depth (\d+)", row.label):
            bits, depth = map(int, found.groups())
            for seed, error in figures_by_seed(row.trials, summary.metric).items():
                by_seed.setdefault(seed, {}).setdefault(bits, {})[depth] = error
    return fit(list(by_seed.values()))


def fit(seeds: list[Errors]) -> dict[str, Any]:
    """Return the slope of the depth's binary logarithm over the bits, by least squares.

    The depth at which the error rises through :data:`HALF` is interpolated between the depths of
    each number of bits, linear in its logarithm. Every seed has one slope, over the numbers of bits
    that have such a depth at all seeds, so that no seed is left out for what it found; the interval
    is Student's t over seeds.
    """
    ends = [_ends(errors) for errors in seeds]
    shared = set.intersection(*map(set, ends)) if ends else set()
    if len(shared) < 3:
        note = (
            "fewer than three numbers of bits have, at every seed, depths that train and depths"
            " that do not"
        )
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    whole = [{bits: each[bits] for bits in sorted(shared)} for each in ends]
    fits = [stats.linregress(list(each), np.log2(list(each.values()))) for each in whole]
    found = of_mean([float(each.slope) for each in fits], "octaves a bit")
    depths = ", ".join(f"{bits} bits {end:.0f}" for bits, end in whole[0].items())
    notes = [found.get("note", ""), f"{len(whole)} seeds; depths of the first: {depths}"]
    return found | {"note": "; ".join(filter(None, notes))}


def _ends(errors: Errors) -> dict[int, float]:
    found = {bits: _crossing(of_depth) for bits, of_depth in sorted(errors.items())}
    return {bits: end for bits, end in found.items() if end is not None}


def _crossing(errors: Mapping[int, float]) -> float | None:
    """Return the depth from which all errors are above :data:`HALF`; None if none or all are."""
    depths = sorted(errors)
    below = [index for index, depth in enumerate(depths) if errors[depth] <= HALF]
    if not below or below[-1] == len(depths) - 1:
        return None
    a, b = depths[below[-1]], depths[below[-1] + 1]
    share = (HALF - errors[a]) / (errors[b] - errors[a])
    return float(a * (b / a) ** share)
