"""A verdict on one claim, and the rule by which an interval decides it."""

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
"""Number of seeds from which figures without any spread count, and from which a row that no test
shows to be better counts as none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim beside what its study found.

    Attributes:
        claim: the claim.
        outcome: ``holds``, ``fails`` or ``undecided``.
        figure: our figure in ``unit``; None if there is none yet.
        low, high: ends of its 95 % interval; None without one.
        unit: unit of the figure: ``%``, ``points``, ``of the variance``; "" if it has none.
        runs: number of finished trials behind the figure; of a function all that it was given.
        note: reason for which the claim is undecided, or what else a reader must know.
        printed: the figure as an earlier report printed it; "" to print it from the numbers.
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
        """Our figure with its interval and unit: ``1.33 (1.12 to 1.54) points``; ``-`` for none."""
        if self.printed:
            return self.printed
        if self.figure is None or math.isnan(self.figure):
            return "-"
        ends = [value for value in (self.low, self.high) if value is not None]
        shown = [show(value, self.unit) for value in ends]
        around = f" ({' to '.join(shown)})" if len(ends) == 2 else ""
        return f"{show(self.figure, self.unit)}{around}{f' {self.unit}' if self.unit else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values; figures that are no finite numbers are None."""
        claim = self.claim
        numbers = {"figure": self.figure, "low": self.low, "high": self.high}
        return {
            "name": claim.name, "claim": claim.claim, "source": claim.source, "kind": claim.kind,
            "published": claim.published, "arguments": claim.arguments, "outcome": self.outcome,
            **{key: _finite(value) for key, value in numbers.items()}, "unit": self.unit,
            "runs": self.runs, "note": self.note, "shown": self.shown,
        }  # fmt: skip


def show(figure: float, unit: str = "") -> str:
    """Return a figure of a claim: two decimals in per cent and points and from 0.1 on, else four
    significant digits."""
    two = unit in ("%", "points") or abs(figure) >= 0.1 or figure == 0
    return f"{figure:z.2f}" if two else f"{figure:z.4g}"


def decide(bound: tuple[float, float], low: float, high: float) -> str:
    """Return the outcome that the interval ``low`` to ``high`` has beside a claim's bounds.

    An end on a bound, rounding apart, is within it.
    """
    least, most, low, high = map(compared, (*bound, low, high))
    if least <= low and high <= most:
        return HOLDS
    return FAILS if high < least or low > most else UNDECIDED


def judge_mean(claim: ClaimConfig, figures: Sequence[float], unit: str, over: str) -> Verdict:
    """Return the verdict on the mean of ``figures``, by its interval.

    Args:
        claim: a claim with a bound.
        figures: one figure per replicate.
        unit: unit of the figures.
        over: kind of the replicates, in the plural: ``seeds``.
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
    """Return the mapping that a claim's function returns, made from the mean of ``figures``.

    Args:
        figures: one figure per replicate, one or more.
        unit: unit of the figures.
        over: kind of the replicates, in the plural.
    """
    mean = math.fsum(figures) / len(figures)
    if note := _no_interval(figures, over):
        return {"figure": mean, "unit": unit, "verdict": UNDECIDED, "note": note}
    half = interval(figures) or 0.0
    return {"figure": mean, "low": mean - half, "high": mean + half, "unit": unit}


def _no_interval(figures: Sequence[float], over: str) -> str:
    """Say why the mean of ``figures`` has no interval that decides; "" if it has one.

    Figures that differ by rounding alone are equal: an error is a count over the size of a set, and
    differences of counts are often the same at a few seeds.
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
    """Say how far from the bound a mean must lie to be seen as beyond it."""
    contrast = paired(figures, over)
    if contrast is None:
        return ""
    least = f"{show(contrast.least, unit)} {unit}".strip()
    return f"{contrast.over} show a distance from the bound of {least}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
