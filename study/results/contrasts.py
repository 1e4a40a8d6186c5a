"""Tests whether two means differ, by Student's t, and the difference that the replicates could
show.

A contrast is tested against no difference over replicates: seeds, each with one figure, or
configurations sampled alike. Figures that belong together (the same seed) are paired, so that what
they share does not count as noise::

    paired:       t = mean(d) / (s_d / sqrt(n)),  n - 1 degrees of freedom, d the differences
                  Student 1908
    independent:  t = (mean(a) - mean(b)) / sqrt(s_a^2 / n_a + s_b^2 / n_b),  Welch 1947, his
                  degrees of freedom

Where several contrasts are reported together, each is tested at ``alpha / tests`` (Dunn 1961), and
its interval has that level too, so that the interval contains 0 exactly if the corrected p is not
below alpha; Holm's correction rejects more, but no intervals go with it.

The smallest difference that could have been shown is the one that such a test finds with
probability :data:`POWER` if the spread is the observed one: ``delta = ncp * se``, where the
noncentral t with noncentrality ncp exceeds the critical value with that probability (J. Cohen,
"Statistical Power Analysis for the Behavioral Sciences", 2nd ed. 1988, chapter 2)::

    P(|Z + ncp| > t_crit sqrt(V / df)) = POWER,  Z normal, V chi-squared with df degrees of freedom

Limits: normal differences are assumed, as everywhere with few seeds; without any spread there is
nothing to measure against and no test.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from study.results.ties import plain_mean

ALPHA, POWER = 0.05, 0.8
ROUNDING = 1e-12
"""Relative spread below which figures count as equal."""
LARGEST = 1e75
"""Largest figure that is tested: a test takes its fourth power."""
POINTS = 4000
"""Number of chi-squared quantiles over which power is averaged; enough for three digits."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A difference of two means.

    Attributes:
        difference: first mean minus second, in the figures' unit.
        error: standard error of the difference.
        df: degrees of freedom.
        over: kind and number of the replicates: ``4 seeds``.
        tests: number of contrasts reported together, this one included.
    """

    difference: float
    error: float
    df: float
    over: str
    tests: int = 1

    @property
    def p(self) -> float:
        """Two-sided p, corrected for the number of tests."""
        from scipy.special import stdtr  # scipy.stats takes a second to load

        return min(1.0, self.tests * 2 * float(stdtr(self.df, -abs(self.difference) / self.error)))

    @property
    def half(self) -> float:
        """Half the width of the simultaneous 95 % interval."""
        return self._critical * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the simultaneous 95 % interval of the difference."""
        return self.difference - self.half, self.difference + self.half

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.difference) > self.half

    @property
    def least(self) -> float:
        """Smallest difference that such a test shows with probability :data:`POWER`.

        See the head of this file.
        """
        from scipy.optimize import brentq
        from scipy.special import gammaincinv, ndtr

        chi2 = 2 * gammaincinv(self.df / 2, (np.arange(POINTS) + 0.5) / POINTS)
        limit = self._critical * np.sqrt(chi2 / self.df)

        def lacking(ncp: float) -> float:
            return float(np.mean(ndtr(ncp - limit) + ndtr(-ncp - limit))) - POWER

        return float(brentq(lacking, 0.0, 10.0 * (1.0 + self._critical))) * self.error

    def over_pairs(self, number: int) -> Contrast:
        """Return the paired contrast over ``number`` pairs with the same mean and spread.

        It predicts what more pairs would show.
        """
        error = self.error * math.sqrt((self.df + 1) / number)
        return replace(self, error=error, df=number - 1, over=f"{number} pairs")

    @property
    def _critical(self) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.df, 1 - ALPHA / self.tests / 2))


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of two values or more.

    It is NaN where one of them is not finite, and infinite where it is too large for a number.
    """
    try:
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    except OverflowError:
        return math.inf


def paired(differences: Sequence[float], of: str) -> Contrast | None:
    """Return the contrast of figures that belong together pair by pair.

    Returns None below two pairs, or if all differences are equal or one of them is not finite or
    above :data:`LARGEST`.

    Args:
        differences: difference of each pair.
        of: kind of the replicates, in the plural: ``seeds``.
    """
    n = len(differences)
    if max(map(abs, differences), default=0.0) > LARGEST:
        return None
    error = deviation(differences) / math.sqrt(n) if n > 1 else 0.0
    if not error > ROUNDING * max(map(abs, differences), default=0.0):
        return None
    return Contrast(difference=plain_mean(differences), error=error, df=n - 1, over=f"{n} {of}")


def independent(first: Sequence[float], second: Sequence[float], of: str) -> Contrast | None:
    """Return the contrast of figures that do not belong together.

    Returns None below two figures on either side, or if all are equal or one of them is not finite
    or above :data:`LARGEST`.

    Args:
        first: figures of the first mean.
        second: figures of the second mean.
        of: kind of the replicates, in the plural: ``seeds``.
    """
    if min(len(first), len(second)) < 2:
        return None
    if not all(abs(value) <= LARGEST for value in (*first, *second)):
        return None
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    if math.sqrt(sum(parts)) <= ROUNDING * max(map(abs, (*first, *second))):
        return None
    df = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
    )
    difference = plain_mean(first) - plain_mean(second)
    return Contrast(
        difference=difference,
        error=math.sqrt(sum(parts)),
        df=df,
        over=f"{len(first)} and {len(second)} {of}",
    )
