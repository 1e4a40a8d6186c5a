"""The answer of a study in words: how the rows' test errors differ from the baseline's, and how
sure that is.

Every row that has finished is compared with the baseline seed by seed, by the paired contrast of
:mod:`study.results.contrasts`, corrected for the number of rows compared. "Undecided" means that
the 95 % interval of the difference holds 0. Without a baseline the two lowest rows are named, and
nothing is tested, since they were chosen by the errors that a test would use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from study.ledger.state import ENDED, StudyState
from study.results.contrasts import Contrast, paired
from study.results.summary import Row, Summary, test_errors

MOST_ROWS = 6
"""Rows of one outcome that are named; the table has all."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row beside the baseline.

    Attributes:
        row: the row.
        contrast: row minus baseline over the seeds that both have, in percentage points; None
            where there is one such seed, or where the difference is the same at all of them.
    """

    row: Row
    contrast: Contrast | None


def answer(state: StudyState, summary: Summary) -> str:
    """Return what the study found, in one to three sentences."""
    whole = [row for row in summary.rows if row.mean is not None and row.finished == row.seeds]
    if not whole:
        ended = sum(trial.status in ENDED for trial in state.trials)
        return f"No answer yet: {ended} of {len(state.trials)} trials have ended."
    base = next((row for row in whole if row.label == state.config.baseline), None)
    others = [row for row in whole if row is not base]
    if base is None or not others:
        return _lowest(whole)
    found = compare(base, others)
    parts = [
        _sentence(found, "higher", lambda each: each.decided and each.difference > 0),
        _sentence(found, "lower", lambda each: each.decided and each.difference < 0),
        _sentence(found, "undecided", lambda each: not each.decided),
        _untested([each.row for each in found if each.contrast is None]),
    ]
    said = "; ".join(part for part in parts if part)
    return f"Test error beside {base.label} ({_mean(base)}): {said}.{_resolution(found)}"


def compare(base: Row, others: list[Row]) -> list[Comparison]:
    """Return each row's contrast with the baseline, corrected for how many there are."""
    reference = _by_seed(base)
    found = []
    for row in others:
        errors = _by_seed(row)
        shared = sorted(reference.keys() & errors.keys())
        differences = [errors[seed] - reference[seed] for seed in shared]
        found.append(Comparison(row=row, contrast=paired(differences, "seeds")))
    tests = sum(each.contrast is not None for each in found)
    return [
        replace(each, contrast=each.contrast and replace(each.contrast, tests=tests))
        for each in found
    ]


def _by_seed(row: Row) -> dict[int, float]:
    """Return a row's test errors in per cent, by seed."""
    return dict(zip((trial.seed for trial in row.trials), test_errors(row.trials), strict=True))


def _lowest(rows: list[Row]) -> str:
    """Name the rows with the lowest means, untested."""
    first, *rest = sorted(rows, key=lambda row: row.mean or 0.0)
    lowest = f"Lowest test error: {first.label}, {_mean(first)}"
    if not rest:
        return f"{lowest}."
    gap = (rest[0].mean or 0.0) - (first.mean or 0.0)
    return f"{lowest}; next {rest[0].label}, {gap:.2f} points higher (chosen by these errors)."


def _sentence(found: list[Comparison], outcome: str, belongs: Callable[[Contrast], bool]) -> str:
    """List the rows with one outcome, each with its difference and 95 % interval."""
    listed = [
        f"{each.row.label} {_difference(each.contrast)}"
        for each in found
        if each.contrast is not None and belongs(each.contrast)
    ]
    return f"{outcome}: {_enumerate(listed)}" if listed else ""


def _difference(contrast: Contrast) -> str:
    low, high = contrast.difference - contrast.half, contrast.difference + contrast.half
    return f"by {contrast.difference:+.2f} points (95 % {low:+.2f} to {high:+.2f})"


def _untested(rows: list[Row]) -> str:
    """List the rows that have one seed, or the same difference at every seed."""
    listed = [f"{row.label} by {row.gap:+.2f} points" for row in rows if row.gap is not None]
    return f"not tested: {_enumerate(listed)}" if listed else ""


def _resolution(found: list[Comparison]) -> str:
    """Say which difference the seeds could have shown, where any row is undecided."""
    undecided = [each.contrast for each in found if each.contrast and not each.contrast.decided]
    if not undecided:
        return ""
    least = max(contrast.least for contrast in undecided)
    return f" With {undecided[0].over}, a difference of {least:.2g} points would have shown."


def _enumerate(listed: list[str]) -> str:
    more = len(listed) - MOST_ROWS
    return ", ".join(listed[:MOST_ROWS]) + (f" and {more} more" if more > 0 else "")


def _mean(row: Row) -> str:
    spread = f" ± {row.sd:.2f}" if row.sd is not None else ""
    return f"{row.mean:.2f}{spread} %, {row.seeds} {'seed' if row.seeds == 1 else 'seeds'}"
