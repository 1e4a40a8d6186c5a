"""Two studies side by side: the configurations that both ran, their errors paired by seed, and a test of the difference.

A trial is matched by its whole config, what changes no result left out; where no trial is the same in both, by row, number and seed. The
test is Wilcoxon's signed-rank test over all matched pairs (1945), beside the paired t interval of the mean difference; below
:data:`LEAST` pairs there is no test.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from study.analysis import interval, measure
from study.figures import COLOURS, LIGHT, MOST_CURVES, Theme, canvas, percent_axis, plain, png, set_title
from study.state import FINISHED, StudyState, TrialState

LEAST = 6
"""Pairs below which a signed-rank test cannot reach p = 0.05."""
IGNORED = ("seed", "gpus")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One matched trial of each study; errors in per cent."""

    name: str
    seed: int
    first: float
    second: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What came of comparing two studies.

    Attributes:
        matched_by: ``config`` or ``row``.
        measured: ``test error`` or ``validation error``.
        difference: mean of second minus first in percentage points; ``half`` the half width of its 95 % interval, None below two pairs.
        p: of the signed-rank test; None with too few pairs, or none that differ.
    """

    names: tuple[str, str]
    pairs: list[Pair]
    matched_by: str
    measured: str
    difference: float
    half: float | None
    p: float | None


def compare(first: StudyState, second: StudyState) -> Comparison:
    """Match the finished trials of two studies.

    Raises:
        ValueError: none match.
    """
    ours, theirs, matched_by = _matched(first, second)
    shared = [name for name in ours if name in theirs]
    tested = all("test/error" in trial.test for name in shared for trial in (ours[name], theirs[name]))
    pairs = [
        Pair(name=ours[name].row, seed=ours[name].seed, first=a, second=b)
        for name in shared
        if (a := _error(ours[name], tested)) is not None and (b := _error(theirs[name], tested)) is not None
    ]
    if not pairs:
        raise ValueError(f"{first.config.name} and {second.config.name}: the matched trials have no finite errors to compare")
    gaps = [pair.second - pair.first for pair in pairs]
    return Comparison(
        names=_names(first, second), pairs=pairs, matched_by=matched_by, measured="test error" if tested else "validation error",
        difference=statistics.fmean(gaps), half=interval(gaps), p=_signed_rank(gaps),
    )  # fmt: skip


def _matched(first: StudyState, second: StudyState) -> tuple[dict[str, TrialState], dict[str, TrialState], str]:
    """The finished trials of both by what matches them, and what that is."""
    for matched_by, key in (("config", _config_key), ("row", _row_key)):
        ours, theirs = ({key(trial): trial for trial in state.trials if trial.status == FINISHED} for state in (first, second))
        if ours.keys() & theirs.keys():
            return ours, theirs, matched_by
    raise ValueError(
        f"{first.config.name} and {second.config.name}: no finished trial of one matches one of the other, neither by config nor by "
        "row and seed; give rows that mean the same the same label"
    )


def _names(first: StudyState, second: StudyState) -> tuple[str, str]:
    a, b = first.config.name, second.config.name
    return (a, b) if a != b else (f"{a} (first)", f"{b} (second)")


def _config_key(trial: TrialState) -> str:
    values: dict[str, Any] = {key: value for key, value in trial.config.items() if key not in IGNORED}
    values["data"] = {key: value for key, value in trial.config["data"].items() if key != "root"}
    return json.dumps([values, trial.seed], sort_keys=True)


def _row_key(trial: TrialState) -> str:
    return json.dumps([trial.row, trial.number, trial.seed])


def _error(trial: TrialState, tested: bool) -> float | None:
    value = 100 * trial.test["test/error"] if tested else measure(trial, "error")
    return value if value is not None and math.isfinite(value) else None


def _signed_rank(gaps: list[float]) -> float | None:
    if len(gaps) < LEAST or not any(gaps):
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(gaps).pvalue)


def lines(found: Comparison) -> list[list[str]]:
    """One line a row: label, pairs, mean error in each study, mean difference in percentage points."""
    groups: dict[str, list[Pair]] = {}
    for pair in found.pairs:
        groups.setdefault(pair.name, []).append(pair)
    table = []
    for name, pairs in groups.items():
        gaps = [pair.second - pair.first for pair in pairs]
        half = interval(gaps)
        spread = f" ± {half:.2f}" if half is not None else ""
        means = (f"{statistics.fmean(values):.2f}" for values in ([p.first for p in pairs], [p.second for p in pairs]))
        table.append([name, str(len(pairs)), *means, f"{statistics.fmean(gaps):+.2f}{spread}"])
    return table


def verdict(found: Comparison) -> str:
    """The overall difference in one sentence."""
    half = f" ± {found.half:.3f} (95 %)" if found.half is not None else ""
    test = f"; Wilcoxon signed-rank p = {found.p:.2g}" if found.p is not None else f"; too few pairs to test ({len(found.pairs)})"
    equal = sum(pair.first == pair.second for pair in found.pairs)
    same = f"; {equal} pairs are equal to the last bit" if equal else ""
    return (
        f"{found.names[1]} minus {found.names[0]}: {found.difference:+.3f}{half} points of {found.measured} over {len(found.pairs)} pairs "
        f"matched by {found.matched_by}{test}{same}"
    )


def draw(found: Comparison, theme: Theme = LIGHT) -> bytes:
    """PNG: each pair as a dot, both studies on the same axes; on the line they are equal."""
    figure, axes = canvas(theme, height=6.4)
    rows = list(dict.fromkeys(pair.name for pair in found.pairs))
    for number, row in enumerate(rows):
        mine = [pair for pair in found.pairs if pair.name == row]
        colour = COLOURS[number % len(COLOURS)] if len(rows) <= MOST_CURVES else COLOURS[0]
        axes.scatter(
            [p.first for p in mine], [p.second for p in mine], s=26, color=colour, alpha=0.8, linewidths=0, label=plain(row)
        )
    values = np.array([[pair.first, pair.second] for pair in found.pairs])
    ends = [values.min() * 0.9, values.max() * 1.1]
    axes.plot(ends, ends, color=theme.text, linewidth=1, zorder=1)
    percent_axis(axes)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(axes.yaxis.get_major_locator().__class__(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.xaxis.set_major_formatter(axes.yaxis.get_major_formatter())
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel(plain(f"{found.names[0]}: {found.measured}, %"))
    axes.set_ylabel(plain(f"{found.names[1]}: {found.measured}, %"))
    set_title(axes, f"{len(found.pairs)} matched trials; on the line both are equal", theme)
    if len(rows) <= MOST_CURVES:
        axes.legend(frameon=False, labelcolor=theme.text, fontsize=9)
    return png(figure)
