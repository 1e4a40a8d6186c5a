"""Student's t tests of the difference of two means, and the smallest detectable difference.

The null hypothesis is that the means are equal. The replicates are seeds, each with one figure, or
configurations sampled from the same space. Figures of the same seed are paired, so variation that
both sides share does not count as noise::

    paired:       t = mean(d) / (s_d / sqrt(n)),  n - 1 degrees of freedom, d the differences
                  Student 1908
    independent:  t = (mean(a) - mean(b)) / sqrt(s_a^2 / n_a + s_b^2 / n_b),  Welch 1947, with
                  Welch's degrees of freedom

Contrasts that are reported together are each tested at ``alpha / tests`` (Dunn 1961), and their
intervals have the same level: an interval excludes 0 exactly if the corrected p is below alpha.
Holm's correction rejects more hypotheses but provides no simultaneous intervals.

The smallest detectable difference is the one that the test finds with probability :data:`POWER`,
given the observed spread: ``delta = ncp * se``, where the noncentral t with noncentrality ncp
exceeds the critical value with that probability (J. Cohen, "Statistical Power Analysis for the
Behavioral Sciences", 2nd ed. 1988, chapter 2)::

    P(|Z + ncp| > t_crit sqrt(V / df)) = POWER,  Z normal, V chi-squared with df degrees of freedom

Limits: the tests assume normally distributed differences, and they need some spread: if all
differences are equal, there is no contrast.
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
"""Figures count as equal if their relative spread is below this."""
LARGEST = 1e75
"""Maximum size of a tested figure; its fourth power must not overflow."""
POINTS = 4000
"""Number of chi-squared quantiles that power is averaged over; enough for three digits."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A difference of two means.

    Attributes:
        difference: first mean minus second, in the figures' unit.
        error: standard error of the difference.
        df: degrees of freedom.
        over: number and kind of the replicates: ``4 seeds``.
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
        """Smallest difference that the test detects with probability :data:`POWER`.

        The module docstring has the formula.
        """
        from scipy.optimize import brentq
        from scipy.special import gammaincinv, ndtr

        chi2 = 2 * gammaincinv(self.df / 2, (np.arange(POINTS) + 0.5) / POINTS)
        limit = self._critical * np.sqrt(chi2 / self.df)

        def lacking(ncp: float) -> float:
            return float(np.mean(ndtr(ncp - limit) + ndtr(-ncp - limit))) - POWER

        return float(brentq(lacking, 0.0, 10.0 * (1.0 + self._critical))) * self.error

    def over_pairs(self, number: int) -> Contrast:
        """Predict the paired contrast over ``number`` pairs, given the same mean and spread."""
        error = self.error * math.sqrt((self.df + 1) / number)
        return replace(self, error=error, df=number - 1, over=f"{number} pairs")

    @property
    def _critical(self) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.df, 1 - ALPHA / self.tests / 2))


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two values or more.

    It is NaN if a value is not finite, and infinite if it overflows.
    """
    try:
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    except OverflowError:
        return math.inf


def paired(differences: Sequence[float], of: str) -> Contrast | None:
    """Return the contrast of paired figures, from their differences.

    Returns None with fewer than two pairs, if all differences are equal, or if one is not finite or
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
    """Return the contrast of two independent samples (Welch).

    Returns None if a sample has fewer than two figures, if neither sample varies, or if a figure is
    not finite or above :data:`LARGEST`.

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
