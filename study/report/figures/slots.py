"""Picture of a run's slots over time: which trial held which slot, and which slots were idle.

All bars are one collection of rectangles, so that thousands of trials are drawn quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from study.ledger.slots import AGAIN, Run
from study.report.figures.style import COLOURS, MOST_CURVES, Theme, canvas, set_title, tag
from study.results.utilisation import beginning, slots_over_time, start_seconds

PALE = 0.4
"""Opacity of a bar's colour while its trial starts."""
UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Units of the time axis: minimum duration of a run (seconds), seconds per unit, name."""
MARKS = {
    ("stopped",): ("|", 2.0, "ended early"),
    ("failed",): ("x", 5.0, "failed"),
    AGAIN: ("3", 5.0, "started again"),
}
"""Marker, minimum size and label, by how an interval ended.

The minimum size keeps rare marks visible among many.
"""
HEIGHTS, SLOT = (2.4, 4.8), 0.25
"""Minimum and maximum height of the picture, and height of one slot, in inches."""
MARGINS = 1.5
"""Total height above and below the slots, in inches."""


def _draw_capacity(axes: Any, run: Run, divisor: float, theme: Theme) -> Line2D:
    """Draw the number of slots over time; return the line's legend handle."""
    line: dict[str, Any] = {"color": theme.text, "linewidth": 1.2, "linestyle": "--"}
    total = slots_over_time(run)
    times = [run.begin, *(time for time, _ in total[1:]), run.end]
    axes.step(
        [(time - run.begin) / divisor for time in times],
        [*(slots for _, slots in total), total[-1][1]],
        where="post",
        **line,
    )
    return Line2D([], [], label="slots in all", **line)


def draw_slots(run: Run | None, rows: Sequence[str], theme: Theme) -> Figure | None:
    """Draw a bar for every trial in every slot that it held; None without known slots.

    Bars have the colour of their row (``rows`` are labels in the order of their colours) and are
    pale while the trial starts. The dashed line is the number of slots.
    """
    if run is None or not run.intervals or not run.capacity or run.end <= run.begin:
        return None
    count = max(
        1 + max(slot for interval in run.intervals for slot in interval.slots),
        *(slots for _, slots in slots_over_time(run)),
    )
    height = min(HEIGHTS[1], max(HEIGHTS[0], MARGINS + SLOT * count))
    points = 72 * (height - MARGINS) / count
    divisor, unit = next(
        (divisor, unit) for least, divisor, unit in UNITS if run.end - run.begin >= least
    )
    figure, axes = canvas(theme, height=height)
    axes.add_collection(
        _bars(run, rows, divisor, 0.86 if points > 4 else 1.0, theme), autolim=False
    )
    capacity = _draw_capacity(axes, run, divisor, theme)
    handles = [
        *_row_handles(rows),
        Patch(color=_pale(theme.text, theme), label="start, until its first epoch"),
        *_marks(axes, run, divisor, min(7.0, 0.8 * points), theme),
        capacity,
    ]
    axes.set_xlim(0, (run.end - run.begin) / divisor)
    axes.set_ylim(0, count * 1.02)
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel(f"{unit} since the {beginning(run)}")
    axes.set_ylabel("slot")
    set_title(axes, "Trials by slot; gaps are idle time", theme)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=4,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
    )
    return figure


def _bars(
    run: Run, rows: Sequence[str], divisor: float, thickness: float, theme: Theme
) -> PolyCollection:
    """Return two rectangles for every slot of a trial: a pale one for its start, and the rest."""
    colours = {row: COLOURS[number % len(COLOURS)] for number, row in enumerate(rows)}
    shades = {row: (_pale(colour, theme), to_rgb(colour)) for row, colour in colours.items()}
    other = (_pale(theme.grid, theme), to_rgb(theme.grid))  # a row that the study no longer has
    boxes, filled = [], []
    for interval, start in zip(run.intervals, start_seconds(run), strict=True):
        end = run.end if interval.end is None else interval.end
        first = end if interval.first is None else interval.first
        trains = first if start is None or interval.first is None else interval.begin + start
        times = [time - run.begin for time in (interval.begin, trains, end)]
        parts = list(zip(pairwise(times), shades.get(interval.row, other), strict=True))
        for slot in interval.slots:
            low, high = slot + (1 - thickness) / 2, slot + (1 + thickness) / 2
            boxes += [(left, low, right, high) for (left, right), _ in parts]
            filled += [(*shade, 1.0) for _, shade in parts]
    left, low, right, high = np.array(boxes).T
    corners: Any = np.stack(
        [left / divisor, low, left / divisor, high, right / divisor, high, right / divisor, low],
        axis=1,
    )
    return PolyCollection(
        corners.reshape(-1, 4, 2),
        facecolors=np.array(filled),
        linewidths=0,
        zorder=2,
        in_layout=False,
    )


def _pale(colour: Any, theme: Theme) -> Any:
    return tuple(
        PALE * own + (1 - PALE) * page
        for own, page in zip(to_rgb(colour), to_rgb(theme.page), strict=True)
    )


def _row_handles(rows: Sequence[str]) -> list[Any]:
    """Return the rows' legend handles; empty if there are more rows than colours."""
    few = rows if len(rows) <= MOST_CURVES else ()
    return [Patch(color=COLOURS[number], label=tag(row)) for number, row in enumerate(few)]


def _marks(axes: Any, run: Run, divisor: float, size: float, theme: Theme) -> list[Any]:
    """Mark the ends of bars; return the legend handles of the markers in use."""
    handles = []
    for ends, (marker, least, label) in MARKS.items():
        found = [
            interval
            for interval in run.intervals
            if interval.how in ends and interval.end is not None
        ]
        if found:
            xs = [((interval.end or 0.0) - run.begin) / divisor for interval in found]
            style: dict[str, Any] = {
                "color": theme.text,
                "marker": marker,
                "linestyle": "",
                "markeredgewidth": 1.1,
                "label": label,
            }
            axes.plot(
                xs,
                [interval.slots[0] + 0.5 for interval in found],
                markersize=max(least, size),
                clip_on=False,
                zorder=4,
                **style,
            )
            handles.append(Line2D([], [], markersize=7, **style))
    return handles
