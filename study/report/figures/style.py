"""Style of every picture: size, colours for colour-blind readers, the two themes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from study.config import Metric
from study.config.space import show
from study.text import CELL, cut, one_line, printable

COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DPI = 160
NARROW = 3.0
"""A logarithmic axis gets linear ticks if the ratio of its ends is below this."""
FAR = 100.0
"""A logarithmic axis gets :data:`COARSE` ticks if the ratio of its ends is at least this."""
FINE, COARSE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), (1.0, 3.0)
"""Ticks within a decade."""
COLOURS_KEPT = 128
MOST_CURVES = 7
"""Maximum number of rows with a colour of their own; the others are thin and grey."""
LABEL = 60
"""Maximum number of characters of a row's label in a picture."""
SIZE = (8.0, 4.4)
"""Width and height in inches; 11-point text stays legible at a width of 700 pixels."""


@dataclass(frozen=True)
class Theme:
    """Colours of page, text and grid."""

    page: str
    text: str
    grid: str


LIGHT = Theme("#ffffff", "#1b1f24", "#d5d9de")
DARK = Theme("#15191e", "#e6e9ec", "#3a4149")


def short(value: Any) -> str:
    """Return a value as text of at most 24 characters, with formulas disabled."""
    text = show(value)
    return plain(text if len(text) <= 24 else text[:21] + "...")


def plain(text: str) -> str:
    """Cut a long text, and escape it so that matplotlib does not parse it as a formula.

    Control characters are escaped too: one of them reverses the text that follows.
    """
    return printable(cut(text, CELL)).replace("$", r"\$")


def tag(label: str) -> str:
    """Return the label of a row, which a stranger may have written, as one short line."""
    return plain(one_line(label, LABEL))


def canvas(theme: Theme, height: float = SIZE[1]) -> tuple[Figure, Any]:
    """Return an empty picture with axes; ``height`` in inches."""
    figure = Figure(figsize=(SIZE[0], height), dpi=DPI, facecolor=theme.page, layout="constrained")
    axes = figure.add_subplot(facecolor=theme.page)
    style_axes(axes, theme)
    return figure, axes


def style_axes(axes: Any, theme: Theme) -> None:
    """Set the colours of grid, spines and text to the theme's."""
    axes.grid(axis="y", color=theme.grid, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, which="both", labelsize=11)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.text)
        label.set_fontsize(11)


def set_title(axes: Any, text: str, theme: Theme) -> None:
    """Set the axes' title."""
    axes.set_title(text, loc="left", fontsize=11, color=theme.text)


class RoundTicks(LogLocator):
    """Ticks of a logarithmic axis at round numbers; fewer per decade if it spans more decades."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Return the ticks between two values."""
        if 0 < vmin < vmax < NARROW * vmin:
            return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(vmin, vmax)
        self.set_params(subs=FINE if vmax < FAR * vmin else COARSE)
        return super().tick_values(vmin, vmax)


def round_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    axis.set_major_locator(RoundTicks(subs=FINE))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def value_axis(axes: Any, metric: Metric, values: Iterable[float]) -> None:
    """Set the scale of a y axis for ``values`` of a metric in its display unit.

    The axis is logarithmic for errors, so that rows near 2 % stay distinguishable beside a row near
    90 %.
    """
    if metric.logarithmic(values):
        axes.set_yscale("log")
        if metric.percent:
            round_ticks(axes.yaxis)


def wrap_label(label: str) -> str:
    """Return a label with a line break before every plus."""
    return label.replace(" + ", "\n+ ")


def png(figure: Figure) -> bytes:
    """Return the picture as a PNG with at most 128 colours, which takes a third of the bytes."""
    drawn: Any = FigureCanvasAgg(figure)
    drawn.draw()
    image = Image.fromarray(np.asarray(drawn.buffer_rgba())).convert("RGB")
    small = io.BytesIO()
    few = image.quantize(COLOURS_KEPT, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, format="png", compress_level=8)
    return small.getvalue()
