"""What the best of k configurations is worth: results against the budget of a random search.

A row whose n configurations were drawn at random says what a smaller search would have found: draw
k of the n with replacement and take the best. With the values sorted, the best first, the best one
drawn is the j-th with probability::

    ((n - j + 1) / n)^k - ((n - j) / n)^k

so mean and quantiles of the bootstrap are exact, and nothing is drawn. What is drawn twice makes
the mean a little worse than that of a search of k (R. Tang et al. 2020, "Showing Your Work Doesn't
Always Work", arXiv:2004.13705): of 20 normal values -1.41 sd for k = 10, where -1.54 is true. For k
near n the band is too sure: the best of all is in most draws. Rows whose search learned from its
results have no such figure.

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
"""Share of the bootstrap between the lower and the upper end of a band."""
FEWEST = 4
"""Configurations below which a row has no curve."""


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """The best of k configurations, k from 1 to their number, in the unit that is shown.

    Attributes:
        mean: mean over the bootstrap, by k.
        low, high: ends of the band, by k.
    """

    mean: list[float]
    low: list[float]
    high: list[float]


def values_by_row(state: StudyState) -> dict[str, list[float]]:
    """Return the shown metric of each row's finished configurations, means over their seeds."""
    rows: dict[str, list[float]] = {}
    for entry in entries(state):
        if entry.number is not None:
            rows.setdefault(entry.row, []).append(entry.values[METRIC])
    return rows


def best_of_k(state: StudyState) -> dict[str, BestOf]:
    """Return the curve of each row; empty where the search is no random one."""
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
