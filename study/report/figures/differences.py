"""Picture of the answer: the difference of each row from the reference row."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure

from study.ledger.state import StudyState
from study.report.figures.style import COLOURS, Theme, canvas, plain, set_title, tag
from study.results.answer import capital, compare_rows
from study.results.summary import Summary

BAND = 0.7
"""Height of a margin's band, in units of the distance between rows."""


def draw_differences(state: StudyState, summary: Summary, theme: Theme) -> Figure | None:
    """Draw each row's difference from the reference row, with its 95 % interval.

    A filled dot means that the interval excludes 0. A band shows the margin within which a row
    counts as good as the reference, if there is one. Returns None if no row is compared.
    """
    found = [
        (each.row, each.contrast, each.margin)
        for each in compare_rows(state, summary)
        if each.contrast is not None
    ]
    if not found:
        return None
    metric = summary.metric
    figure, axes = canvas(theme, height=1.3 + 0.42 * max(len(found), 3))
    axes.grid(axis="x", color=theme.grid, linewidth=0.8, zorder=0)
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=theme.text, linewidth=1, linestyle=":", zorder=1)
    for place, (_, contrast, _) in enumerate(found):
        axes.plot(contrast.interval, [place, place], color=COLOURS[0], linewidth=2, zorder=3)
        fill = COLOURS[0] if contrast.decided else theme.page
        axes.scatter(
            [contrast.difference], [place], s=52, color=fill, edgecolors=COLOURS[0], zorder=4
        )
        axes.annotate(
            metric.difference(contrast.difference), (contrast.difference, place), (0, 7),
            textcoords="offset points", ha="center", color=theme.text, fontsize=9,
        )  # fmt: skip
    _draw_margins(axes, [margin for _, _, margin in found], theme)
    axes.set_yticks(range(len(found)), [tag(row.label) for row, _, _ in found])
    axes.set_ylim(len(found) - 0.5, -0.7)
    unit = ", points" if metric.points else ""
    reference = f"{capital(metric.test_words)} minus that of {state.config.baseline}{unit}"
    axes.set_xlabel(plain(reference))
    banded = any(margin for _, _, margin in found)
    bands = "; band: counts as equal" if banded else ""
    set_title(axes, f"Differences by seed: mean and 95 % interval{bands}", theme)
    return figure


def _draw_margins(axes: Any, margins: list[tuple[float, float] | None], theme: Theme) -> None:
    """Draw the bands of the margins; an unbounded one extends to the end of the axis."""
    ends = [end for margin in margins if margin for end in margin if math.isfinite(end)]
    axes.update_datalim([(end, 0) for end in ends])
    axes.autoscale_view(scaley=False)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)
    for place, margin in enumerate(margins):
        if margin is not None:
            low, high = max(margin[0], left), min(margin[1], right)
            axes.barh(place, high - low, BAND, left=low, color=theme.grid, alpha=0.6, zorder=1.5)
