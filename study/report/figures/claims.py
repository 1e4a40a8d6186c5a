"""Pictures of claims: the error against a format's fraction bits, mean ranks with the critical
difference (J. Demsar 2006, figure 1), and the bytes held during a step against the depth."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from operator import itemgetter

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lns_ops.formats.logarithmic import Logarithmic
from study.config.keys import lookup
from study.evidence.analyses import Ranks
from study.ledger.state import StudyState
from study.report.figures.style import (
    COLOURS,
    MARKERS,
    Theme,
    canvas,
    plain,
    set_title,
    style_axes,
    tag,
    value_axis,
)
from study.results.answer import capital
from study.results.objectives import format_of
from study.results.statistics import interval
from study.results.summary import Row, Summary, test_figures

BITS = re.compile(r"\s*\b\d+ bits?\b\s*")
"""Matches the part of a row's label that gives the bits; the rest is the name of its line."""
FEWEST = 3
"""Minimum number of points (fraction widths or depths) for a line."""
BYTES = "telemetry/tensor_bytes"
"""Reported metric: bytes that the tensors of a step occupy at once."""


def draw_bits(summary: Summary, theme: Theme) -> Figure | None:
    """Draw each rule's final test figure against the fraction bits of its LNS format.

    Rows whose labels differ only in ``N bits`` form a line; bars are 95 % intervals over seeds. A
    row with another format than LNS is a horizontal line. Returns None if no line has enough
    points.
    """
    lines: dict[str, list[tuple[int, Row]]] = {}
    levels = []
    for row in (row for row in summary.rows if row.trials and row.mean is not None):
        bits = _fraction_bits(row)
        if bits is None:
            levels.append(row)
        else:
            lines.setdefault(BITS.sub(" ", row.label).strip(" ,"), []).append((bits, row))
    long = {
        name: sorted(rows, key=itemgetter(0)) for name, rows in lines.items() if len(rows) >= FEWEST
    }
    if not long:
        return None
    figure, axes = canvas(theme)
    metric = summary.metric
    for number, (name, rows) in enumerate(long.items()):
        figures = [test_figures(row.trials, metric) for _, row in rows]
        axes.errorbar(
            [bits + 0.04 * (number - len(long) / 2) for bits, _ in rows],
            [statistics.fmean(values) for values in figures],
            yerr=[interval(values) or 0.0 for values in figures],
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
            linestyle="-" if number < len(COLOURS) else "--", capsize=2, label=tag(name),
        )  # fmt: skip
    for row in levels:
        axes.axhline(row.mean, color=theme.text, linewidth=1, linestyle=":", label=tag(row.label))
    axes.set_xlabel("bits of the fraction")
    axes.set_ylabel(plain(metric.heading(metric.test_words)))
    set_title(axes, plain(f"{capital(metric.test_words)} by rule of the update, 95 %"), theme)
    value_axis(axes, metric, (row.mean or 0.0 for row in summary.rows))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, labelcolor=theme.text, ncols=2)
    return figure


def _fraction_bits(row: Row) -> int | None:
    """Return the fraction bits of a row's LNS format (one without a scale); None for others."""
    found = format_of(row.trials[0].config["precision"]["format"])
    return found.lns.fraction_bits if isinstance(found, Logarithmic) else None


def draw_ranks(found: Sequence[Ranks], theme: Theme) -> Figure | None:
    """Draw mean ranks on an axis, with bars that join ranks closer than the critical difference.

    Draws the first entry of ``found``; returns None if it is empty.
    """
    if not found:
        return None
    ranks = found[0]
    names, places = list(ranks.means), list(ranks.means.values())
    figure, axes = canvas(theme, 1.6 + 0.3 * len(names))
    style_axes(axes, theme)
    axes.set_xlim(0.8, len(names) + 0.2)
    axes.set_ylim(-len(names) - 0.5, 1.5)
    axes.grid(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.plot([1, len(names)], [1, 1], color=theme.text, linewidth=1)
    for number, (name, place) in enumerate(ranks.means.items()):
        height = -number - 0.2
        axes.plot([place, place], [1, height], color=theme.grid, linewidth=1, zorder=1)
        axes.scatter([place], [1], color=COLOURS[number % len(COLOURS)], zorder=3)
        axes.annotate(
            f"{tag(name)}  {place:.2f}", (place, height), color=theme.text, fontsize=10,
            ha="left" if place < (1 + len(names)) / 2 else "right", va="center",
            bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    for number, (low, high) in enumerate(_alike(places, ranks.critical)):
        axes.plot([low, high], [0.7 - 0.25 * number] * 2, color=COLOURS[2], linewidth=4)
    title = f"Mean ranks over {len(ranks.blocks)} blocks, critical difference {ranks.critical:.2f}"
    set_title(axes, title, theme)
    return figure


def draw_memory(state: StudyState, theme: Theme) -> Figure | None:
    """Draw the bytes that the tensors of a step occupy against the depth, one line per row.

    Returns None unless a row's trials report them at three depths or more.
    """
    lines: dict[str, dict[int, float]] = {}
    for trial in state.trials:
        held = trial.metric(BYTES)
        depth = lookup(trial.config, "model.args").get("depth")
        if held and depth:
            lines.setdefault(trial.row, {})[int(depth)] = held[max(held)] / 1e6
    long = {row: dict(sorted(of.items())) for row, of in lines.items() if len(of) >= FEWEST}
    if not long:
        return None
    figure, axes = canvas(theme)
    style_axes(axes, theme)
    for number, (row, of_depth) in enumerate(long.items()):
        axes.plot(
            list(of_depth), list(of_depth.values()), color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)], label=tag(row),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("depth, layers")
    axes.set_ylabel("MB")
    set_title(axes, "Bytes that the tensors of a step hold", theme)
    axes.legend(frameon=False, labelcolor=theme.text)
    return figure


def _alike(places: Sequence[float], critical: float) -> list[tuple[float, float]]:
    """Return the ends of the widest groups of ranks that are less than ``critical`` apart.

    ``places`` are ascending.
    """
    groups: list[tuple[float, float]] = []
    for low in places:
        high = max(place for place in places if place - low < critical)
        if high > low and not (groups and high <= groups[-1][1]):
            groups.append((low, high))
    return groups
