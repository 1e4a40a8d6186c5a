"""The verdict on a claim, and the rule that derives it from an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from study.config import ClaimConfig
from study.results.contrasts import paired
from study.results.statistics import interval
from study.results.ties import compared

HOLDS, FAILS, UNDECIDED = "holds", "fails", "undecided"
OUTCOMES = (HOLDS, FAILS, UNDECIDED)
ENOUGH = 5
"""Minimum number of seeds for two conclusions: equal values at all seeds count as a result, and a
row that is not significantly better counts as not better."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim and the result of its study.

    Attributes:
        claim: the claim.
        outcome: ``holds``, ``fails`` or ``undecided``.
        figure: estimate, in ``unit``; None if there is none yet.
        low, high: ends of the estimate's 95 % interval; None without one.
        unit: unit of the estimate: ``%``, ``points``, ``of the variance``; "" if it has none.
        runs: number of finished trials that the estimate uses; all trials for a check function.
        note: why the claim is undecided, or another remark for readers.
        printed: the estimate as an earlier report printed it; "" to format the numbers.
    """

    claim: ClaimConfig
    outcome: str
    figure: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    runs: int = 0
    note: str = ""
    printed: str = ""

    @property
    def shown(self) -> str:
        """Estimate, interval and unit: ``1.33 (1.12 to 1.54) points``; ``-`` without one."""
        if self.printed:
            return self.printed
        if self.figure is None or math.isnan(self.figure):
            return "-"
        ends = [value for value in (self.low, self.high) if value is not None]
        shown = [show(value, self.unit) for value in ends]
        around = f" ({' to '.join(shown)})" if len(ends) == 2 else ""
        return f"{show(self.figure, self.unit)}{around}{f' {self.unit}' if self.unit else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values; numbers that are not finite become None."""
        claim = self.claim
        numbers = {"figure": self.figure, "low": self.low, "high": self.high}
        return {
            "name": claim.name, "claim": claim.claim, "source": claim.source, "kind": claim.kind,
            "published": claim.published, "arguments": claim.arguments, "outcome": self.outcome,
            **{key: _finite(value) for key, value in numbers.items()}, "unit": self.unit,
            "runs": self.runs, "note": self.note, "shown": self.shown,
        }  # fmt: skip


def show(figure: float, unit: str = "") -> str:
    """Format a number of a claim.

    It has two decimals if the unit is per cent or points or the number is at least 0.1 in size, and
    else four significant digits.
    """
    two = unit in ("%", "points") or abs(figure) >= 0.1 or figure == 0
    return f"{figure:z.2f}" if two else f"{figure:z.4g}"


def decide(bound: tuple[float, float], low: float, high: float) -> str:
    """Return the outcome of a claim by comparing an interval with the claim's bounds.

    It is ``holds`` if the interval is within the bounds, ``fails`` if it is entirely outside, else
    ``undecided``. An end that equals a bound, up to rounding, is within it.

    Args:
        bound: smallest and largest value for which the claim holds.
        low, high: ends of the interval.
    """
    least, most, low, high = map(compared, (*bound, low, high))
    if least <= low and high <= most:
        return HOLDS
    return FAILS if high < least or low > most else UNDECIDED


def judge_mean(claim: ClaimConfig, figures: Sequence[float], unit: str, over: str) -> Verdict:
    """Return the verdict on the mean of ``figures``, by its interval.

    Args:
        claim: a claim with a bound.
        figures: one value per replicate.
        unit: unit of the values.
        over: plural name of the replicates, such as ``seeds``.
    """
    found, runs = of_mean(figures, unit, over), len(figures)
    if "low" not in found:
        shown = math.isfinite(found["figure"])
        return Verdict(
            claim=claim, outcome=UNDECIDED, figure=found["figure"] if shown else None,
            unit=unit if shown else "", runs=runs, note=found["note"],
        )  # fmt: skip
    outcome = decide(claim.bound, found["low"], found["high"])
    note = _resolution(figures, unit, over) if outcome == UNDECIDED else ""
    return Verdict(claim=claim, outcome=outcome, runs=runs, note=note, **found)


def of_mean(figures: Sequence[float], unit: str, over: str = "seeds") -> dict[str, Any]:
    """Return the mean of ``figures`` and its interval, in the form that check functions return.

    Args:
        figures: one value per replicate, at least one.
        unit: unit of the values.
        over: plural name of the replicates.
    """
    mean = math.fsum(figures) / len(figures)
    if note := _no_interval(figures, over):
        return {"figure": mean, "unit": unit, "verdict": UNDECIDED, "note": note}
    half = interval(figures) or 0.0
    return {"figure": mean, "low": mean - half, "high": mean + half, "unit": unit}


def _no_interval(figures: Sequence[float], over: str) -> str:
    """Return why the mean of ``figures`` has no usable interval, or "" if it has one.

    Values that differ only by rounding count as equal. An error rate is a count divided by the size
    of a data set, so differences are often the same at a few seeds.
    """
    mean, runs = math.fsum(figures) / len(figures), len(figures)
    if not math.isfinite(mean):
        return f"the mean over {runs} {over} is {mean}: training diverged"
    if runs < 2:
        return "one seed has no interval; run at least five"
    if runs < ENOUGH and paired(figures, over) is None:
        return f"the same at all {runs} {over}, which shows no spread; run at least five"
    return ""


def _resolution(figures: Sequence[float], unit: str, over: str) -> str:
    """Return a phrase with the smallest distance from the bound that the values can detect."""
    contrast = paired(figures, over)
    if contrast is None:
        return ""
    least = f"{show(contrast.least, unit)} {unit}".strip()
    return f"{contrast.over} show a distance from the bound of {least}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
