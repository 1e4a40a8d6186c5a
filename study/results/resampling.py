"""Bootstrap intervals, over seeds or configurations, for figures other than means.

Percentile intervals are too narrow with few replicates: resampling n figures underestimates the
variance by the factor (n - 1) / n, and uses the normal distribution instead of Student's t. With
five seeds, a 95 % interval contains the true value in 75 to 85 % of simulated studies. This module
therefore widens the level so that the interval of a mean equals Student's interval::

    level = 2 Phi(sqrt(n / (n - 1)) t(n - 1, 97.5 %)) - 1        5 seeds: 99.81 %, 10: 98.29 %

(T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69, 2015,
section 4.3: the expanded percentile interval). In the same simulations it contains the true value
in 92 to 95 %, and in 84 % with exponentially distributed figures.

Limits: all resamples are between the smallest and the largest figure, so no level is wide enough
below :data:`FEWEST` replicates, and the functions return None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 5
"""Minimum number of replicates for an interval."""
RESAMPLES = 10_000


def expanded_level(count: int, level: float = 0.95) -> float:
    """Return the percentile level that makes the bootstrap interval of a mean equal Student's.

    Args:
        count: number of replicates, at least 2.
        level: desired confidence level.
    """
    from scipy.special import ndtr, stdtrit

    t = float(stdtrit(count - 1, 0.5 + level / 2))
    return 1 - 2 * float(ndtr(-math.sqrt(count / (count - 1)) * t))


def bootstrap_interval(
    figures: NDArray[np.float64], figure_of: Callable[[NDArray[np.float64]], float]
) -> tuple[float, float] | None:
    """Return the 95 % interval of a function of means over replicates, or None.

    Returns None with fewer than :data:`FEWEST` replicates or if a figure is not finite.

    Args:
        figures: ``[replicates, figures]``; the figures of a replicate are drawn together.
        figure_of: function of the means, ``[figures]``.
    """
    from scipy import stats

    if len(figures) < FEWEST or not np.isfinite(figures).all():
        return None

    def statistic(*columns: NDArray[np.float64], axis: int = -1) -> Any:
        means = np.stack([np.mean(column, axis=axis) for column in columns], axis=-1)
        return np.apply_along_axis(figure_of, -1, means)

    found = stats.bootstrap(
        tuple(figures.T), statistic, paired=True, vectorized=True, n_resamples=RESAMPLES,
        confidence_level=expanded_level(len(figures)), method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    low, high = found.confidence_interval
    return float(low), float(high)


def bootstrap_between(
    counts: Sequence[int], figure_of: Callable[..., NDArray[np.float64]], tests: int = 1
) -> tuple[float, float] | None:
    """Return the 95 % interval of a figure computed from several independent samples.

    Returns None if a sample has fewer than :data:`FEWEST` replicates.

    Args:
        counts: number of replicates of each sample, such as the configurations of a search.
        figure_of: maps the indices drawn from each sample, ``[resamples, count]`` each, to figures
            ``[resamples]``.
        tests: number of simultaneous intervals, for Bonferroni's correction.
    """
    from scipy import stats

    if min(counts) < FEWEST:
        return None

    def statistic(*drawn: NDArray[np.int_], axis: int = -1) -> NDArray[np.float64]:
        return figure_of(*(np.moveaxis(places, axis, -1) for places in drawn))

    found = stats.bootstrap(
        tuple(np.arange(count) for count in counts), statistic, vectorized=True,
        n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0),
        confidence_level=expanded_level(min(counts), 1 - 0.05 / tests),
    )  # fmt: skip
    low, high = found.confidence_interval
    return float(low), float(high)
