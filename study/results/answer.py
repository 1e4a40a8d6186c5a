"""A study's answer as text: the rows' differences from the baseline, and their confidence.

Every finished row is compared with the baseline seed by seed, using the paired contrast of
:mod:`study.results.contrasts`, corrected for the number of comparisons. "Undecided" means that the
95 % interval of the difference contains 0. Without a baseline the answer names the two best rows
without a test, because a test would use the same figures that selected them. A row with a diverged
trial is named but not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from study.config import Metric
from study.ledger.state import ENDED, StudyState
from study.results.configurations import configurations
from study.results.contrasts import Contrast, paired
from study.results.objectives import diverged, lacking
from study.results.summary import Row, Summary, figures_by_seed
from study.results.ties import compared
from study.text import counted

MOST_ROWS = 6
"""Rows of one outcome that are named; the table has all."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row beside the baseline.

    Attributes:
        row: the row.
        contrast: row minus baseline over the seeds that both have, of errors in percentage points;
            None with a single common seed, or if all seeds have the same difference.
    """

    row: Row
    contrast: Contrast | None


def answer(state: StudyState, summary: Summary) -> str:
    """Return what the study found, in one to three sentences."""
    metric = summary.metric
    ended = [row for row in summary.rows if row.mean is not None and row.finished == row.seeds]
    whole = [row for row in ended if not row.diverged]
    lost = [f"{row.label} ({row.diverged} of {row.seeds})" for row in ended if row.diverged]
    aside = f" Diverged: {_enumerate(lost)}." if lost else ""
    if not whole:
        return " ".join([_none(state), *lacking(state)]) + aside
    base = next((row for row in whole if row.label == state.config.baseline), None)
    others = [row for row in whole if row is not base]
    if base is None or not others:
        return _best(whole, metric) + aside
    found = compare(base, others, metric)
    parts = [
        _sentence(found, "higher", metric, lambda each: each.decided and each.difference > 0),
        _sentence(found, "lower", metric, lambda each: each.decided and each.difference < 0),
        _sentence(found, "undecided", metric, lambda each: not each.decided),
        _untested([each.row for each in found if each.contrast is None], metric),
    ]
    said = "; ".join(part for part in parts if part)
    return (
        f"{capital(metric.test_words)} beside {base.label} ({_mean(base, metric)}):"
        f" {said}.{_resolution(found, metric)}{aside}"
    )


def _none(state: StudyState) -> str:
    """Explain a missing answer: unfinished trials, divergence, or violated constraints."""
    search, trials = state.config.search, state.trials
    constraints = search.constraints
    ended = sum(trial.status in ENDED for trial in trials)
    lost = sum(diverged(trial, state.config.primary_metric.name) for trial in trials)
    done = configurations(trials, search.objectives, constraints)
    found = [each for each in done if each.finished and not each.diverged]
    if ended == len(trials) and lost and not found:
        return f"No answer: {lost} of {counted(len(trials), 'trial')} diverged."
    if ended < len(trials) or not found or any(each.eligible for each in found):
        return f"No answer yet: {ended} of {len(trials)} trials have ended."
    bounds = ", ".join(f"{metric} {bound}" for metric, bound in constraints.items())
    return f"No answer: all {len(found)} finished configurations violate {bounds}."


def capital(text: str) -> str:
    """Return ``text`` with a capital as its first letter."""
    return text[:1].upper() + text[1:]


def compare(base: Row, others: list[Row], metric: Metric) -> list[Comparison]:
    """Return each row's contrast with the baseline, corrected for how many there are."""
    reference = figures_by_seed(base.trials, metric)
    found = []
    for row in others:
        figures = figures_by_seed(row.trials, metric)
        shared = sorted(reference.keys() & figures.keys())
        differences = [figures[seed] - reference[seed] for seed in shared]
        found.append(Comparison(row=row, contrast=paired(differences, "seeds")))
    tests = sum(each.contrast is not None for each in found)
    return [
        replace(each, contrast=each.contrast and replace(each.contrast, tests=tests))
        for each in found
    ]


def _best(rows: list[Row], metric: Metric) -> str:
    """Name the rows with the best means, untested."""
    figures = {row.label: metric.sign * compared(row.mean or 0.0) for row in rows}
    first, *rest = sorted(
        rows, key=lambda row: (math.isnan(figures[row.label]), figures[row.label])
    )
    best = f"{capital(metric.best_word)} {metric.test_words}: {first.label}, {_mean(first, metric)}"
    if not rest:
        return f"{best}."
    gap = metric.figure(abs((rest[0].mean or 0.0) - (first.mean or 0.0)))
    beside = f"{gap}{metric.points} {'higher' if metric.sign > 0 else 'lower'}"
    return f"{best}; next {rest[0].label}, {beside} (chosen by these {metric.plural})."


def _sentence(
    found: list[Comparison], outcome: str, metric: Metric, belongs: Callable[[Contrast], bool]
) -> str:
    """List the rows with one outcome, each with its difference and 95 % interval."""
    listed = [
        f"{each.row.label} {_difference(each.contrast, metric)}"
        for each in found
        if each.contrast is not None and belongs(each.contrast)
    ]
    return f"{outcome}: {_enumerate(listed)}" if listed else ""


def _difference(contrast: Contrast, metric: Metric) -> str:
    centre, low, high = (
        metric.difference(contrast.difference + sign * contrast.half) for sign in (0, -1, 1)
    )
    return f"by {centre}{metric.points} (95 % {low} to {high})"


def _untested(rows: list[Row], metric: Metric) -> str:
    """List the rows that have one seed, or the same difference at every seed."""
    listed = [
        f"{row.label} by {metric.difference(row.gap)}{metric.points}"
        for row in rows
        if row.gap is not None
    ]
    return f"not tested: {_enumerate(listed)}" if listed else ""


def _resolution(found: list[Comparison], metric: Metric) -> str:
    """Say which difference the seeds could have shown, where any row is undecided."""
    undecided = [each.contrast for each in found if each.contrast and not each.contrast.decided]
    if not undecided:
        return ""
    worst = max(undecided, key=lambda contrast: contrast.least)
    shown = f"{worst.least:.2g}{metric.points}"
    return f" With {worst.over}, a difference of {shown} would have shown."


def _enumerate(listed: list[str]) -> str:
    more = len(listed) - MOST_ROWS
    return ", ".join(listed[:MOST_ROWS]) + (f" and {more} more" if more > 0 else "")


def _mean(row: Row, metric: Metric) -> str:
    assert row.mean is not None, "only whole rows are compared"
    seeds = counted(row.seeds, "seed")
    return f"{metric.mean(row.mean, row.sd)}{metric.unit}, {seeds}"
