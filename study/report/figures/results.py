"""Pictures of a study's results: metric per epoch, final figures beside the published ones, and the
objective against each sampled key.

Each function takes the theme, light or dark. The colours are Okabe and Ito's (2008), which readers
with any common colour blindness can distinguish; lines also differ in dash and marker, and bars of
published figures are hatched. Errors are in per cent. Bands span the lowest and highest seed, error
bars are one sample standard deviation.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from study.config import Metric
from study.config.space import Domain, params_at
from study.ledger.state import StudyState, TrialState
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
    set_title,
    short,
    style_axes,
    tag,
    value_axis,
    wrap_label,
)
from study.results.answer import capital
from study.results.configurations import Configuration, configurations
from study.results.objectives import curve
from study.results.summary import Row, Summary, test_figures

MOST_BARS = 6
"""Maximum number of rows drawn as vertical bars; more rows are drawn as horizontal bars."""
mpl.use("Agg")


def draw_epochs(state: StudyState, summary: Summary, theme: Theme) -> Figure | None:
    """Draw the metric by epoch, one line per row with a band over its seeds.

    The line is the mean over seeds, the band spans the lowest and highest. A searched row shows its
    best configuration; it is left out as long as it has none.
    """
    figure, axes = canvas(theme)
    chosen, metric = _most_telling(summary), summary.metric
    for row in summary.rows:
        if row not in chosen:
            _draw_faint(axes, list(row.trials), metric, theme)
    for number, row in enumerate(chosen):
        _draw_row(axes, number, tag(row.label), list(row.trials), metric)
    axes.set_xlabel("epoch")
    axes.set_ylabel(plain(metric.heading(metric.words)))
    title = f"{capital(metric.words)} per epoch: mean over seeds, band from lowest to highest"
    set_title(axes, plain(title), theme)
    value_axis(axes, metric, (value for line in axes.lines for value in line.get_ydata()))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.lines:
        axes.legend(frameon=False, labelcolor=theme.text, ncols=2 if len(axes.lines) > 3 else 1)
    return figure


def _most_telling(summary: Summary) -> list[Row]:
    """Return all rows if there are at most :data:`MOST_CURVES`, else the best on the test set."""
    if len(summary.rows) <= MOST_CURVES:
        return list(summary.rows)
    sign = summary.metric.sign
    return sorted(summary.rows, key=lambda row: math.inf if row.mean is None else sign * row.mean)[
        :MOST_CURVES
    ]


def _draw_faint(axes: Any, trials: list[TrialState], metric: Metric, theme: Theme) -> None:
    for trial in trials:
        values = {
            epoch: value for epoch, value in curve(trial, metric).items() if not math.isnan(value)
        }
        axes.plot(list(values), list(values.values()), color=theme.grid, linewidth=0.8, zorder=1)


def draw_bars(state: StudyState, summary: Summary, theme: Theme) -> Figure | None:
    """Draw each row's final test figure beside the published one (hatched).

    The bar is the mean, the whisker the standard deviation, the dots are seeds. Published figures
    are drawn only if the study is comparable with them.
    """
    if len(summary.rows) > MOST_BARS:
        return _draw_lying_bars(summary, theme)
    figure, axes = canvas(theme)
    metric = summary.metric
    published = summary.comparable and any(row.published is not None for row in summary.rows)
    width = 0.38 if published else 0.6
    for number, row in enumerate(summary.rows):
        x = number - (0.2 if published else 0)
        if row.mean is not None:
            figures = test_figures(row.trials, metric)
            _bar(axes, x, row, width, number, theme)
            top = max([row.mean + (row.sd or 0.0), *filter(math.isfinite, figures)])
            _value(axes, x, top, metric.figure(row.mean), theme)
            axes.scatter(
                [x] * len(figures),
                figures,
                s=14,
                color=theme.text,
                zorder=4,
                alpha=0.7,
                linewidths=0,
            )
        if published and row.published is not None:
            hatched: dict[str, Any] = {
                "facecolor": "none",
                "edgecolor": COLOURS[number % len(COLOURS)],
                "hatch": "///",
                "linewidth": 1.2,
            }
            axes.bar(number + 0.2, row.published, width, **hatched, zorder=2)
            _value(axes, number + 0.2, row.published, metric.figure(row.published), theme)
    axes.set_xticks(range(len(summary.rows)), [wrap_label(tag(row.label)) for row in summary.rows])
    axes.set_ylabel(plain(metric.heading(metric.test_words)))
    set_title(axes, _bars_title(summary, published), theme)
    axes.margins(y=0.14)
    return figure


def _draw_lying_bars(summary: Summary, theme: Theme) -> Figure | None:
    metric = summary.metric
    rows = [(row, row.mean) for row in summary.rows if row.mean is not None]
    figure, axes = canvas(theme, height=1.2 + 0.24 * max(len(rows), 4))
    axes.grid(axis="x", color=theme.grid, linewidth=0.8, zorder=0)
    axes.grid(axis="y", visible=False)
    for place, (row, mean) in enumerate(rows):
        figures = test_figures(row.trials, metric)
        axes.barh(place, mean, 0.7, color=COLOURS[0], zorder=2)
        axes.scatter(
            figures,
            [place] * len(figures),
            s=9,
            color=theme.text,
            zorder=4,
            alpha=0.7,
            linewidths=0,
        )
        axes.annotate(
            metric.figure(mean),
            (max([mean, *filter(math.isfinite, figures)]), place),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=theme.text,
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [tag(row.label) for row, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(plain(metric.heading(metric.test_words)))
    title = f"{capital(metric.test_words)} after the last epoch: mean, seeds (dots)"
    set_title(axes, plain(title), theme)
    return figure


def draw_slices(state: StudyState, theme: Theme) -> Figure | None:
    """Draw the first objective against each sampled key; None if nothing was searched.

    Each configuration is a dot; rows differ in colour and marker. Filled dots are configurations
    that ran to their end; hollow dots were ended early or belong to earlier generations of a
    population. The values of a choice are spread over the axis in their order.
    """
    metric = state.config.search.first
    found = [
        entry
        for entry in configurations(state.trials, [metric.name])
        if math.isfinite(entry.objectives[metric.name])
    ]
    domains = [_with_history(domain, found) for domain in state.config.parsed_space.domains]
    if not found or not domains:
        return None
    columns = min(3, len(domains))
    lines = math.ceil(len(domains) / columns)
    figure = Figure(
        figsize=(SIZE[0], 0.6 + 2.9 * lines), dpi=DPI, facecolor=theme.page, layout="constrained"
    )
    first = None
    for place, domain in enumerate(domains):
        axes = figure.add_subplot(lines, columns, place + 1, facecolor=theme.page, sharey=first)
        first = first or axes
        style_axes(axes, theme)
        _slice(axes, domain, found, list(state.rows()), metric)
        axes.set_xlabel(domain.key)
        if place % columns == 0:
            axes.set_ylabel(plain(metric.heading(metric.name)))
    _slice_legend(figure, list(state.rows()), theme)
    return figure


def _with_history(domain: Domain, found: list[Configuration]) -> Domain:
    """Return the domain; a choice also gets values that were tried before it was shortened."""
    if not domain.categorical:
        return domain
    values = list(domain.values)
    for entry in found:
        if domain.key in entry.params and entry.params[domain.key] not in values:
            values.append(entry.params[domain.key])
    return dataclasses.replace(domain, values=tuple(values))


def _slice(
    axes: Any, domain: Domain, found: list[Configuration], rows: list[str], metric: Metric
) -> None:
    for number, row in enumerate(rows):
        mine = [
            (entry, params_at(entry.params))
            for entry in found
            if entry.row == row and domain.key in entry.params
        ]
        colour = COLOURS[number % len(COLOURS)]
        for finished in (False, True):
            points = [
                (
                    _place(domain, values[domain.key], number, len(rows)),
                    metric.scale * entry.objectives[metric.name],
                )
                for entry, values in mine
                if entry.finished == finished
            ]
            style: dict[str, Any] = {
                "marker": MARKERS[number % len(MARKERS)],
                "alpha": 0.8,
                "linewidths": 1,
                "edgecolors": colour,
            }
            axes.scatter(
                *zip(*points, strict=True) if points else ((), ()),
                s=22,
                facecolors=colour if finished else "none",
                **style,
            )
    if domain.categorical:
        axes.set_xticks(
            range(len(domain.values)),
            [short(value) for value in domain.values],
            rotation=20,
            ha="right",
        )
    elif domain.kind.startswith("log"):
        axes.set_xscale("log")
    values = (metric.scale * entry.objectives[metric.name] for entry in found)
    value_axis(axes, metric, values)


def _place(domain: Domain, value: Any, row: int, rows: int) -> float:
    if not domain.categorical:
        return float(value)
    return domain.index(value) + 0.5 * (row - (rows - 1) / 2) / max(rows, 1)


def _slice_legend(figure: Figure, rows: list[str], theme: Theme) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[n % len(COLOURS)],
            marker=MARKERS[n % len(MARKERS)],
            linestyle="",
            label=tag(row),
        )
        for n, row in enumerate(rows)
    ]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=4,
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
    )


def _draw_row(axes: Any, number: int, label: str, trials: list[TrialState], metric: Metric) -> None:
    curves = [curve(trial, metric) for trial in trials]
    by_epoch = {
        epoch: [c[epoch] for c in curves if epoch in c and not math.isnan(c[epoch])]
        for epoch in sorted(set().union(*curves))
    }
    by_epoch = {epoch: values for epoch, values in by_epoch.items() if values}
    if not by_epoch:
        return
    epochs, colour = list(by_epoch), COLOURS[number % len(COLOURS)]
    means = [statistics.fmean(values) for values in by_epoch.values()]
    style: dict[str, Any] = {
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
    }
    axes.plot(epochs, means, color=colour, linewidth=2, label=label, zorder=3, **style)
    axes.fill_between(
        epochs,
        [min(v) for v in by_epoch.values()],
        [max(v) for v in by_epoch.values()],
        color=colour,
        alpha=0.18,
        linewidth=0,
    )


def _bar(axes: Any, x: float, row: Row, width: float, number: int, theme: Theme) -> None:
    assert row.mean is not None, "a bar is drawn of rows with figures"
    whisker: dict[str, Any] = (
        {"yerr": row.sd, "error_kw": {"ecolor": theme.text, "capsize": 4, "linewidth": 1.4}}
        if row.sd is not None
        else {}
    )
    axes.bar(x, row.mean, width, color=COLOURS[number % len(COLOURS)], zorder=2, **whisker)


def _value(axes: Any, x: float, top: float, text: str, theme: Theme) -> None:
    axes.annotate(
        text,
        (x, top),
        (0, 5),
        textcoords="offset points",
        ha="center",
        color=theme.text,
        fontsize=10.5,
    )


def _bars_title(summary: Summary, published: bool) -> str:
    figure = f"{plain(capital(summary.metric.test_words))} after the last epoch:"
    if not published:
        return f"{figure} mean, sd, seeds (dots)"
    return f"{figure} this study (solid), published (hatched)"
