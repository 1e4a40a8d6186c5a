"""The metric of a study: the figure that its tables, pictures, tests and answers are about.

Whatever shows or ranks that figure asks :class:`Metric` for its name, its unit, its words, and
which of two values is better. Fractions of wrong answers (``.../error``) are shown in per cent,
with two decimals, on logarithmic axes, their differences in percentage points; all other figures as
they are reported, with four digits. *Shown* values are in that unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from study.text import percent
from trainers.config import TrialConfig

MODES = ("min", "max")
DERIVED = ("bits", "weight_bits", "seconds")
"""Objectives that no trial reports: they follow from its config and its events."""
VALIDATION, TEST = "validation/", "test/"
WIDE = 20
"""Ratio of the largest to the smallest of positive values above which an axis is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A reported figure, and whether lower or higher values of it are better.

    Attributes:
        name: name under which trials report it: ``validation/error``, ``validation/r2``, ``loss``.
        mode: ``min`` if lower is better, ``max`` if higher is.
    """

    name: str
    mode: str = "min"

    @property
    def test_name(self) -> str:
        """Name of the figure on the test set; the same name where the figure is of no split."""
        if not self.name.startswith(VALIDATION):
            return self.name
        return f"{TEST}{self.name.removeprefix(VALIDATION)}"

    @property
    def percent(self) -> bool:
        """Whether it is a fraction, shown in per cent."""
        return self.name.endswith("/error")

    @property
    def scale(self) -> float:
        """Factor from reported to shown values."""
        return 100.0 if self.percent else 1.0

    @property
    def sign(self) -> int:
        """Factor with which lower values are better."""
        return 1 if self.mode == "min" else -1

    # ---------------------------------------------------------------------------------------------

    @property
    def words(self) -> str:
        """The figure in words: ``validation error``."""
        return self.name.replace("/", " ")

    @property
    def test_words(self) -> str:
        """The figure on the test set in words: ``test error``."""
        return self.test_name.replace("/", " ")

    @property
    def final_words(self) -> str:
        """What a trial that was ended early does not have: ``test error``, ``final accuracy``."""
        return self.test_words if self.test_name != self.name else f"final {self.words}"

    @property
    def short(self) -> str:
        """The figure without its split: ``error``."""
        return self.name.rpartition("/")[2]

    @property
    def plural(self) -> str:
        """Several of the figure, in words: ``errors``, ``values of r2``."""
        return f"{self.short}s" if self.percent else f"values of {self.short}"

    @property
    def row_key(self) -> str:
        """End of the names of MLflow metrics about a row: ``test_error_percent``."""
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
        """Unit of differences in a sentence, after a blank; "" if they have none."""
        return " points" if self.percent else ""

    def heading(self, words: str) -> str:
        """Return ``words`` as the head of a column or axis of shown values: ``test error, %``."""
        return f"{words}, %" if self.percent else words

    # ---------------------------------------------------------------------------------------------

    def figure(self, shown: float) -> str:
        """Return a shown value as a figure of a table, without its unit."""
        return f"{shown:z.2f}" if self.percent else f"{shown:z.4g}"

    def difference(self, shown: float, *, decimals: int = 2) -> str:
        """Return a difference of shown values with its sign."""
        return f"{shown:+z.{decimals}f}" if self.percent else f"{shown:+z.4g}"

    def rounded(self, shown: float) -> float:
        """Return a shown value with the digits that a plot needs."""
        return round(shown, 4) if self.percent else float(f"{shown:.6g}")

    def mean(self, shown: float, sd: float | None) -> str:
        """Return a mean of shown values with their standard deviation, if there is one."""
        return self.figure(shown) + (f" ± {self.spread(sd)}" if sd is not None else "")

    def spread(self, shown: float, *, decimals: int = 2) -> str:
        """Return a standard deviation or half an interval of shown values."""
        return f"{shown:.{decimals}f}" if self.percent else f"{shown:.2g}"

    def said(self, reported: float) -> str:
        """Return a reported value as people read it: ``2.14 %``."""
        return percent(reported) if self.percent else f"{reported:.4g}"

    @property
    def unit(self) -> str:
        """Unit after a shown value in a sentence, after a blank; "" if it has none."""
        return " %" if self.percent else ""

    def logarithmic(self, shown: Iterable[float]) -> bool:
        """Tell whether an axis of shown values is logarithmic.

        Axes in per cent are if a value is positive, and those of positive values that are better
        the lower and are :data:`WIDE` apart.
        """
        if self.percent:
            return any(value > 0 for value in shown)
        return self.mode == "min" and is_wide(shown)


def check_reported(given: str, name: str, trial: TrialConfig) -> None:
    """Refuse a figure of the validation or training examples that a trial does not report.

    Args:
        given: key and value that name it, for the error.
        name: name of the figure.
        trial: the trial.

    Raises:
        ValueError: with what it reports.
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
            f" examples a trial reports {', '.join(reported)}; use one of them, for example"
            f" {VALIDATION}{reported[-1]}, or {other}"
        )


def is_wide(values: Iterable[float]) -> bool:
    """Tell whether values are positive and the largest is more than :data:`WIDE` times the least.

    Those that are no finite numbers do not count.
    """
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE * min(known)
