"""Pictures of a report's statistics: Pareto fronts, importance, partial dependence, parallel
coordinates, box plots, budgets, heat map.

Each function takes the theme (light or dark) and returns a figure in the colours and sizes of
:mod:`study.report.figures.style`, or None if there is nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from study.config.metric import Metric, is_wide
from study.config.space import short_names
from study.report.figures.style import (
    COLOURS,
    DASHES,
    DPI,
    MARKERS,
    MOST_CURVES,
    SIZE,
    Theme,
    canvas,
    plain,
    round_ticks,
    set_title,
    short,
    style_axes,
    tag,
    value_axis,
)
from study.results.budgets import BestOf
from study.results.importance import Importance
from study.results.likeness import Entry
from study.results.statistics import METRIC, Groups, HeatMap, front, labels

MOST_NAMES = 12
"""Maximum number of points of a front that get a label."""
MOST_BOXES = 24
FEWEST_DOTS, FEWEST_IN_A_BOX = 3, 3
"""Minimum number of points for a Pareto front or a box plot; with fewer, the table is enough."""


def draw_front(
    found: Sequence[Entry], measures: Sequence[str], metric: Metric, theme: Theme
) -> Figure | None:
    """Draw the metric against every other measure, one dot per entry.

    The line joins the Pareto front. Measures whose front has fewer than :data:`FEWEST_DOTS` entries
    are left out.
    """
    seen = {
        name: [entry for entry in found if name in entry.values]
        for name in measures
        if name != METRIC and METRIC in measures
    }
    others = [
        name
        for name, mine in seen.items()
        if len(front(mine, [name, METRIC], metric)) >= FEWEST_DOTS
    ]
    if not others:
        return None
    columns = min(2, len(others))
    lines = math.ceil(len(others) / columns)
    figure = Figure(
        figsize=(SIZE[0], 0.6 + 3.3 * lines), dpi=DPI, facecolor=theme.page, layout="constrained"
    )
    rows = list(dict.fromkeys(entry.row for entry in found))
    for place, other in enumerate(others):
        axes = figure.add_subplot(lines, columns, place + 1, facecolor=theme.page)
        style_axes(axes, theme)
        _front_axes(axes, seen[other], rows, other, metric, theme)
        if place % columns == 0:
            axes.set_ylabel(plain(labels(metric)[METRIC]))
    if 1 < len(rows) <= MOST_CURVES:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            names,
            loc="outside upper left",
            ncols=4,
            frameon=False,
            labelcolor=theme.text,
            fontsize=9,
        )
    return figure


def _front_axes(
    axes: Any, found: Sequence[Entry], rows: Sequence[str], other: str, metric: Metric, theme: Theme
) -> None:
    many = len(rows) > MOST_CURVES
    for number, row in enumerate(rows):
        mine = [entry for entry in found if entry.row == row]
        colour, marker = (
            (COLOURS[0], "o")
            if many
            else (COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)])
        )
        xs, ys = [entry.values[other] for entry in mine], [entry.values[METRIC] for entry in mine]
        axes.scatter(
            xs, ys, s=20, color=colour, marker=marker, alpha=0.75, linewidths=0, label=tag(row),
            zorder=2,
        )  # fmt: skip
    best = front(found, [other, METRIC], metric)
    axes.plot(
        [e.values[other] for e in best],
        [e.values[METRIC] for e in best],
        color=theme.text,
        linewidth=1,
        zorder=1,
    )
    if many:
        for entry in best[:MOST_NAMES]:
            axes.annotate(
                tag(entry.name),
                (entry.values[other], entry.values[METRIC]),
                (3, 3),
                textcoords="offset points",
                fontsize=6.5,
                color=theme.text,
            )
    axes.set_xlabel(labels(metric)[other])
    values = [entry.values[other] for entry in found]
    if other == "bits":
        axes.set_xticks(sorted(set(values)))
    if is_wide(values):
        axes.set_xscale("log")
    value_axis(axes, metric, (entry.values[METRIC] for entry in found))


def draw_importance(found: Importance | None, metric: Metric, theme: Theme) -> Figure | None:
    """Draw bars of the keys' shares of the metric's variance, and of the largest pairs.

    The green bars below them are the keys' PED-ANOVA shares: how much each key decides whether a
    configuration is among the best tenth.
    """
    if found is None:
        return None
    names = short_names([*found.single, *found.best])
    bars = [(names[key], share, 0) for key, share in found.single.items()]
    bars += [
        (f"{names[a]} x {names[b]}", share, 1)
        for (a, b), share in list(found.pairs.items())[:5]
        if share >= 0.01
    ]
    bars += [(f"{names[key]}, best tenth", share, 3) for key, share in found.best.items()]
    figure, axes = canvas(theme, height=1.1 + 0.34 * len(bars))
    for place, (_, share, kind) in enumerate(bars):
        axes.barh(place, 100 * share, 0.7, color=COLOURS[kind], zorder=2)
        axes.annotate(
            f"{100 * share:.0f}",
            (100 * share, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=theme.text,
        )
    axes.set_yticks(range(len(bars)), [plain(name) for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(plain(f"share of the variance of the {metric.words}, %\ngreen: of its choice"))
    set_title(
        axes,
        f"fANOVA of {found.configurations} configurations; orange: pairs beyond their keys\n"
        "green: what tells the best tenth from all (PED-ANOVA)",
        theme,
    )
    return figure


def draw_dependence(found: Importance | None, metric: Metric, theme: Theme) -> Figure | None:
    """Draw the partial dependence of the metric on the most important keys.

    The metric is predicted by a random forest and averaged over configurations.
    """
    if found is None or not found.curves:
        return None
    columns = min(2, len(found.curves))
    lines = math.ceil(len(found.curves) / columns)
    figure = Figure(
        figsize=(SIZE[0], 0.4 + 2.9 * lines), dpi=DPI, facecolor=theme.page, layout="constrained"
    )
    shared = None
    for place, (key, (xs, ys)) in enumerate(found.curves.items()):
        shared = axes = figure.add_subplot(
            lines, columns, place + 1, facecolor=theme.page, sharey=shared
        )
        style_axes(axes, theme)
        if isinstance(xs[0], str):
            axes.bar(range(len(xs)), ys, 0.6, color=COLOURS[0], zorder=2)
            axes.set_xticks(range(len(xs)), [short(x) for x in xs], rotation=20, ha="right")
        else:
            axes.plot(xs, ys, color=COLOURS[0], linewidth=2)
            if is_wide((xs[0], xs[-1])):
                axes.set_xscale("log")
        axes.set_xlabel(plain(key))
        if place % columns == 0:
            axes.set_ylabel(plain(metric.heading(f"predicted {metric.short}")))
    return figure


def draw_parallel(found: Sequence[Entry], metric: Metric, theme: Theme) -> Figure | None:
    """Draw parallel coordinates, one line per configuration.

    The axes are the sampled keys and the metric; dark lines have the best values.
    """
    usable = [entry for entry in found if entry.params]
    keys = [
        key
        for key in dict.fromkeys(key for entry in usable for key in entry.params)
        if all(key in e.params for e in usable)
    ]
    if len(usable) < 2 or not keys:
        return None
    figure, axes = canvas(theme)
    columns = [_column([entry.params[key] for entry in usable]) for key in keys]
    figures = np.array([entry.values[METRIC] for entry in usable])
    columns.append(_column(list(figures)))
    ranks = np.argsort(metric.sign * figures)
    order = np.argsort(-metric.sign * figures)
    shades = np.argsort(ranks) / max(1, len(ranks) - 1)
    colours = mpl.colormaps["viridis"](0.05 + 0.9 * shades)
    for index in order:
        axes.plot(
            range(len(columns)),
            [column[0][index] for column in columns],
            color=colours[index],
            linewidth=1.1,
            alpha=0.65,
        )
    for place, (_, ticks) in enumerate(columns):
        for height, text in ticks:
            axes.annotate(
                plain(text),
                (place, height),
                (3, 0),
                textcoords="offset points",
                fontsize=8,
                color=theme.text,
                va="center",
            )
    names = [plain(name) for name in (*keys, metric.heading(metric.short))]
    axes.set_xticks(range(len(columns)), names, fontsize=9)
    axes.set_yticks([])
    axes.grid(axis="x", color=theme.text, linewidth=0.8)
    title = f"Configurations: dark lines have {metric.good_word} {metric.plural}"
    set_title(axes, plain(title), theme)
    return figure


def _column(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the values' heights, in [0, 1], and labelled ticks; logarithmic for a wide range."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        low, high = min(values), max(values)
        log = is_wide(values)
        place = math.log if log else float
        width = (place(high) - place(low)) or 1.0
        marks = [low, math.sqrt(low * high) if log else (low + high) / 2, high]
        return [(place(value) - place(low)) / width for value in values], [
            ((place(m) - place(low)) / width, f"{m:.3g}") for m in marks
        ]
    names = sorted({short(value) for value in values})
    steps = max(1, len(names) - 1)
    return [names.index(short(value)) / steps for value in values], [
        (n / steps, name) for n, name in enumerate(names)
    ]


def draw_groups(found: Sequence[Groups], metric: Metric, theme: Theme) -> Figure | None:
    """Draw box plots of the trials' metric by category."""
    shown = [
        group
        for group in found
        if len(group.figures) <= MOST_BOXES
        and max(map(len, group.figures.values())) >= FEWEST_IN_A_BOX
    ]
    if not shown:
        return None
    heights = [0.7 + 0.3 * len(group.figures) for group in shown]
    figure = Figure(
        figsize=(SIZE[0], 0.3 + sum(heights)), dpi=DPI, facecolor=theme.page, layout="constrained"
    )
    for axes, group in zip(
        np.ravel(figure.subplots(len(shown), 1, height_ratios=heights)), shown, strict=True
    ):
        axes.set_facecolor(theme.page)
        style_axes(axes, theme)
        line = {"color": theme.text}
        axes.boxplot(
            list(group.figures.values()), orientation="horizontal", widths=0.6, patch_artist=True,
            whiskerprops=line, capprops=line,
            boxprops={"facecolor": COLOURS[5], "edgecolor": theme.text},
            medianprops={"color": theme.text, "linewidth": 2},
            flierprops={"markeredgecolor": theme.text, "markersize": 4},
        )  # fmt: skip
        axes.set_yticks(
            range(1, len(group.figures) + 1),
            [f"{short(name)} ({len(v)})" for name, v in group.figures.items()],
            fontsize=9,
        )
        axes.invert_yaxis()
        if metric.logarithmic(value for values in group.figures.values() for value in values):
            axes.set_xscale("log")
            round_ticks(axes.xaxis)
        axes.set_xlabel(plain(metric.heading(metric.words)))
        set_title(axes, f"By {group.category} (trials)", theme)
    return figure


def draw_budget(
    curves: Mapping[str, tuple[list[float], list[float]]], metric: Metric, theme: Theme
) -> Figure | None:
    """Draw the best metric so far against the training time spent."""
    if not any(len(xs) > 1 for xs, _ in curves.values()):
        return None
    figure, axes = canvas(theme)
    chosen = sorted(curves, key=lambda row: metric.sign * curves[row][1][-1])[:MOST_CURVES]
    for number, row in enumerate(row for row in curves if row in chosen):
        xs, ys = curves[row]
        axes.step(
            xs,
            ys,
            where="post",
            color=COLOURS[number],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=2,
            label=tag(row),
        )
        axes.plot(xs[-1:], ys[-1:], color=COLOURS[number], marker=MARKERS[number])
    axes.set_xlabel("seconds of trials, as they ended")
    axes.set_ylabel(plain(metric.heading(f"{metric.best_word} {metric.words} so far")))
    value_axis(axes, metric, (value for _, ys in curves.values() for value in ys))
    axes.legend(frameon=False, labelcolor=theme.text)
    return figure


def draw_best_of_k(curves: Mapping[str, BestOf], metric: Metric, theme: Theme) -> Figure | None:
    """Draw the best metric of k random configurations against k, with bootstrap bands."""
    if not curves:
        return None
    figure, axes = canvas(theme)
    chosen = sorted(curves, key=lambda row: metric.sign * curves[row].mean[-1])[:MOST_CURVES]
    for number, row in enumerate(row for row in curves if row in chosen):
        curve, colour = curves[row], COLOURS[number]
        budgets = range(1, len(curve.mean) + 1)
        dash = DASHES[number % len(DASHES)]
        axes.plot(budgets, curve.mean, color=colour, linestyle=dash, linewidth=2, label=tag(row))
        axes.fill_between(budgets, curve.low, curve.high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("configurations tried")
    axes.set_ylabel(plain(metric.heading(f"{metric.best_word} {metric.words}")))
    value_axis(axes, metric, (value for curve in curves.values() for value in curve.mean))
    axes.legend(frameon=False, labelcolor=theme.text)
    return figure


def draw_heat_map(table: HeatMap | None, metric: Metric, theme: Theme) -> Figure | None:
    """Draw a heat map of the best metric by format and layout or row; dark cells are worse.

    Rows of a study may have different data, so their shades compare the formats of each row alone.
    """
    if table is None:
        return None
    formats, category, columns, values = table
    figure, axes = canvas(theme, height=1.6 + 0.42 * len(formats))
    log = metric.logarithmic(values.ravel())
    shades = metric.sign * np.ma.masked_invalid(np.log(values) if log else values)
    if category == "row":
        shades = (shades - shades.min(axis=0)) / np.maximum(np.ma.ptp(shades, axis=0), 1e-12)
    axes.imshow(shades, cmap="viridis_r", aspect="auto")
    middle = (shades.min() + shades.max()) / 2
    for (down, across), value in np.ndenumerate(values):
        if not math.isnan(value):
            ink = "#ffffff" if shades[down, across] > middle else "#000000"
            text = metric.figure(value)
            axes.text(across, down, text, ha="center", va="center", color=ink, fontsize=10)
    axes.set_xticks(range(len(columns)), [short(name) for name in columns], rotation=20, ha="right")
    axes.set_yticks(range(len(formats)), [short(name) for name in formats])
    axes.grid(visible=False)
    shown = metric.heading(f"{metric.best_word.capitalize()} {metric.words}")
    comma = "," if metric.percent else ""
    set_title(axes, plain(f"{shown}{comma} by number format and {category}"), theme)
    return figure
