"""Equal figures that stay equal: means and ends of intervals as they are compared.

An error is a count over the size of a set. Two configurations with 126 wrong answers of 1,500 have
one mean, but ``fmean`` of five shares gives 0.084 for one and 0.08399999999999999 for the other, as
the shares were rounded before they were added. Whatever chooses by a mean, ranks by it, or holds it
against a bound, therefore takes it rounded to :data:`DIGITS` significant digits; of equals the
first one is chosen, or they share a rank.

Rounding is a map, so that being equal is transitive, which a tolerance between pairs is not. Limit:
two figures that differ by an ulp and lie on both sides of half a unit of the twelfth digit still
differ; no share of fewer than a million examples over fewer than a thousand seeds lies there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

DIGITS = 12
"""Significant digits by which figures are compared; double precision has 15."""


def compared(figure: float) -> float:
    """Return a figure as it is compared with others: rounded to :data:`DIGITS` digits."""
    return float(f"{figure:.{DIGITS}g}") if math.isfinite(figure) else figure


def plain_mean(figures: Iterable[float]) -> float:
    """Return the mean of one figure or more, also of finite ones whose sum is too large."""
    known = list(figures)
    try:
        return statistics.fmean(known)
    except OverflowError:
        return math.fsum(figure / len(known) for figure in known)


def mean_of(figures: Iterable[float]) -> float:
    """Return the mean of one figure or more, as it is compared with others."""
    return compared(plain_mean(figures))
