"""The metric of a study: the figure in its tables, pictures, tests and answers.

:class:`Metric` has the figure's name, unit, wording and direction (whether lower is better).
Fractions of wrong answers (``.../error``) are displayed in per cent with two decimals, on
logarithmic axes, and their differences in percentage points. All other figures are displayed as
reported, with four digits. *Shown* values are in this display unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from study.text import percent
from trainers.config import TrialConfig

MODES = ("min", "max")
DERIVED = ("bits", "weight_bits", "seconds")
"""Objectives that are not reported, but computed from a trial's config and events."""
VALIDATION, TEST = "validation/", "test/"
WIDE = 20
"""An axis of positive values is logarithmic if the largest exceeds the smallest by this factor."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A reported figure, and whether lower or higher values are better.

    Attributes:
        name: name in the trials' reports: ``validation/error``, ``validation/r2``, ``loss``.
        mode: ``min`` if lower is better, ``max`` if higher is.
    """

    name: str
    mode: str = "min"

    @property
    def test_name(self) -> str:
        """Name of the figure on the test set; for a metric without a split, its own name."""
        if not self.name.startswith(VALIDATION):
            return self.name
        return f"{TEST}{self.name.removeprefix(VALIDATION)}"

    @property
    def percent(self) -> bool:
        """Whether it is a fraction that is shown in per cent."""
        return self.name.endswith("/error")

    @property
    def scale(self) -> float:
        """Factor from reported to shown values."""
        return 100.0 if self.percent else 1.0

    @property
    def sign(self) -> int:
        """1 or -1; multiplied by it, lower values are better."""
        return 1 if self.mode == "min" else -1

    # ---------------------------------------------------------------------------------------------

    @property
    def words(self) -> str:
        """Name of the figure in a sentence: ``validation error``."""
        return self.name.replace("/", " ")

    @property
    def test_words(self) -> str:
        """Name of the test figure in a sentence: ``test error``."""
        return self.test_name.replace("/", " ")

    @property
    def final_words(self) -> str:
        """Name of the figure at a trial's end: ``test error``, ``final accuracy``."""
        return self.test_words if self.test_name != self.name else f"final {self.words}"

    @property
    def short(self) -> str:
        """Name without the split: ``error``."""
        return self.name.rpartition("/")[2]

    @property
    def plural(self) -> str:
        """Plural of the figure's name: ``errors``, ``values of r2``."""
        return f"{self.short}s" if self.percent else f"values of {self.short}"

    @property
    def row_key(self) -> str:
        """Suffix of the names of a row's MLflow metrics: ``test_error_percent``."""
        return self.test_name.replace("/", "_") + ("_percent" if self.percent else "")

    @property
    def best_word(self) -> str:
        """``lowest`` or ``highest``."""
        return "lowest" if self.mode == "min" else "highest"

    @property
    def good_word(self) -> str:
        """``low`` or ``high``."""
        return "low" if self.mode == "min" else "high"

    @property
    def points(self) -> str:
        """Unit of differences in a sentence, with a leading space; "" without a unit."""
        return " points" if self.percent else ""

    def heading(self, words: str) -> str:
        """Return ``words`` as the heading of a column or axis of shown values: ``test error,
        %``."""
        return f"{words}, %" if self.percent else words

    # ---------------------------------------------------------------------------------------------

    def figure(self, shown: float) -> str:
        """Format a shown value for a table, without unit."""
        return f"{shown:z.2f}" if self.percent else f"{shown:z.4g}"

    def difference(self, shown: float, *, decimals: int = 2) -> str:
        """Format a difference of shown values, with sign."""
        return f"{shown:+z.{decimals}f}" if self.percent else f"{shown:+z.4g}"

    def rounded(self, shown: float) -> float:
        """Round a shown value to the digits that a plot needs."""
        return round(shown, 4) if self.percent else float(f"{shown:.6g}")

    def mean(self, shown: float, sd: float | None) -> str:
        """Format a mean of shown values, with their standard deviation unless it is None."""
        return self.figure(shown) + (f" ± {self.spread(sd)}" if sd is not None else "")

    def spread(self, shown: float, *, decimals: int = 2) -> str:
        """Format a standard deviation, or half an interval, of shown values."""
        return f"{shown:.{decimals}f}" if self.percent else f"{shown:.2g}"

    def said(self, reported: float) -> str:
        """Format a reported value with its unit: ``2.14 %``."""
        return percent(reported) if self.percent else f"{reported:.4g}"

    @property
    def unit(self) -> str:
        """Unit of a shown value in a sentence, with a leading space; "" without a unit."""
        return " %" if self.percent else ""

    def logarithmic(self, shown: Iterable[float]) -> bool:
        """Return whether an axis of shown values is logarithmic.

        An axis in per cent is logarithmic if a value is positive. Any other axis is logarithmic if
        lower is better, and all values are positive and differ by more than :data:`WIDE` times.
        """
        if self.percent:
            return any(value > 0 for value in shown)
        return self.mode == "min" and is_wide(shown)


def check_reported(given: str, name: str, trial: TrialConfig) -> None:
    """Check that a trial reports a figure, if it is one of the validation or training examples.

    Args:
        given: key and value that name the figure, for the error message.
        name: name of the figure.
        trial: the trial.

    Raises:
        ValueError: it does not; the message lists the reported figures.
    """
    reported = ["loss", *(["error"] if trial.loss.counts_errors else [])]
    split, _, figure = name.rpartition("/")
    if f"{split}/" == VALIDATION:
        reported += trial.metrics
    if name == "samples_per_second" or split not in ("", "train", VALIDATION[:-1]):
        return
    if not split or figure not in reported:
        other = (
            "a loss of classes"
            if figure == "error"
            else f"add trial.metrics.{figure}, for example {{name: 'torchmetrics:R2Score'}}"
        )
        raise ValueError(
            f"{given} with trial.loss.name={trial.loss.name}: of the {split or 'validation'}"
            f" examples a trial reports {', '.join(reported)}; use for example"
            f" {VALIDATION}{reported[-1]}, or {other}"
        )


def is_wide(values: Iterable[float]) -> bool:
    """Return whether all values are positive and differ by more than :data:`WIDE` times.

    Values that are not finite are ignored.
    """
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE * min(known)
