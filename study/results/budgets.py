"""Expected result of a random search as a function of its budget: the best of k configurations.

A row with n configurations sampled at random shows what a smaller search would have found: draw k
of the n with replacement and take the best. With the values sorted from best to worst, the best one
drawn is the j-th with probability::

    ((n - j + 1) / n)^k - ((n - j) / n)^k

This makes the mean and the quantiles of the bootstrap exact, without sampling. Because draws can
repeat, the mean is slightly worse than for a real search of k configurations (R. Tang et al. 2020,
"Showing Your Work Doesn't Always Work", arXiv:2004.13705): with 20 normal values and k = 10 it is
-1.41 sd, while the true value is -1.54. For k near n the band is too narrow, because most draws
contain the best configuration. Searches that learn from earlier results have no such curve.

Sources: M. Lucic et al. 2018, "Are GANs Created Equal?" (arXiv:1711.10337); J. Dodge et al. 2019,
"Show Your Work" (arXiv:1909.03004).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from study.ledger.state import StudyState
from study.results.statistics import METRIC, entries

BAND = 0.9
"""Probability mass of the bootstrap between the two ends of a band."""
FEWEST = 4
"""Minimum number of configurations for a curve."""


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """Metric of the best of k configurations, for k from 1 to n, in its display unit.

    Attributes:
        mean: mean over the bootstrap; ``mean[k - 1]`` is for k.
        low, high: ends of the band, indexed alike.
    """

    mean: list[float]
    low: list[float]
    high: list[float]


def values_by_row(state: StudyState) -> dict[str, list[float]]:
    """Return the metric of each row's finished configurations, as means over seeds."""
    rows: dict[str, list[float]] = {}
    for entry in entries(state):
        if entry.number is not None:
            rows.setdefault(entry.row, []).append(entry.values[METRIC])
    return rows


def best_of_k(state: StudyState) -> dict[str, BestOf]:
    """Return the curve of each row; empty unless the search samples at random."""
    search = state.config.search
    if search.algorithm != "random" or search.adaptive or search.ends_early:
        return {}
    sign = state.config.primary_metric.sign
    return {
        row: _curve(values, sign)
        for row, values in values_by_row(state).items()
        if len(values) >= FEWEST
    }


def chances(count: int, k: int) -> NDArray[np.float64]:
    """Return the probability that the best of ``k`` draws is the j-th best of ``count``."""
    above: NDArray[np.float64] = (np.arange(count, -1, -1) / count) ** k
    return above[:-1] - above[1:]


def _curve(values: Sequence[float], sign: int) -> BestOf:
    ordered = np.sort(sign * np.asarray(values))
    found = BestOf(mean=[], low=[], high=[])
    for k in range(1, len(ordered) + 1):
        chance = chances(len(ordered), k)
        reached = chance.cumsum()
        ends = [
            sign * float(ordered[min(int(np.searchsorted(reached, at)), len(ordered) - 1)])
            for at in ((1 - BAND) / 2, (1 + BAND) / 2)
        ]
        found.mean.append(sign * float(chance @ ordered))
        found.low.append(min(ends))
        found.high.append(max(ends))
    return found
