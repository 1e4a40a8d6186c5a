"""Rounding of means and interval ends before they are compared, so that ties are recognised.

An error is a count divided by the size of a set. Two configurations with 126 wrong answers of 1,500
have the same mean error, but ``fmean`` of five shares gives 0.084 for one and 0.08399999999999999
for the other, because the shares were rounded before the addition. All code that selects, ranks or
checks a bound therefore uses means rounded to :data:`DIGITS` significant digits. Of equal figures
the first one is selected; in a ranking they share a rank.

Rounding makes equality transitive, unlike a tolerance between pairs. Limit: two figures that differ
by one ulp but round to different twelfth digits still compare as different. This cannot happen with
fewer than a million examples and fewer than a thousand seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

DIGITS = 12
"""Number of significant digits used in comparisons; double precision has 15."""


def compared(figure: float) -> float:
    """Round a figure to :data:`DIGITS` significant digits for comparisons."""
    return float(f"{figure:.{DIGITS}g}") if math.isfinite(figure) else figure


def plain_mean(figures: Iterable[float]) -> float:
    """Return the mean of one figure or more, even if their sum would overflow."""
    known = list(figures)
    try:
        return statistics.fmean(known)
    except OverflowError:
        return math.fsum(figure / len(known) for figure in known)


def mean_of(figures: Iterable[float]) -> float:
    """Return the mean of one figure or more, rounded for comparisons."""
    return compared(plain_mean(figures))
