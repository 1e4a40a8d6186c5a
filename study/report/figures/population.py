"""Picture of a population-based search: its members' hyperparameters by epoch."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from study.config.space import params_at
from study.ledger.state import StudyState
from study.report.figures.style import COLOURS, DPI, SIZE, Theme, plain, set_title, style_axes, tag
from study.results.configurations import configurations
from study.results.summary import summarise

MOST = 6
"""Maximum number of keys shown."""


def draw_population(state: StudyState, theme: Theme) -> Figure | None:
    """Draw a panel for each key that changes during training; None without a population.

    Each member that trained to the end has a line. The thick line is the best member of each row
    (with ``search.per_seed``, of each seed).
    """
    study = state.config
    if not study.search.population:
        return None
    found = [
        entry for entry in configurations(state.trials, study.search.objectives) if entry.finished
    ]
    domains = [domain for domain in study.parsed_space.sampled if not domain.categorical][:MOST]
    if not found or not domains:
        return None
    rows = list(state.rows())
    winners = {trial.id for row in summarise(state).rows for trial in row.trials}
    shown = set[str]()
    columns = min(3, len(domains))
    lines = math.ceil(len(domains) / columns)
    figure = Figure(
        figsize=(SIZE[0], 0.6 + 2.9 * lines), dpi=DPI, facecolor=theme.page, layout="constrained"
    )
    for place, domain in enumerate(domains):
        axes = figure.add_subplot(lines, columns, place + 1, facecolor=theme.page)
        style_axes(axes, theme)
        for entry in found:
            epochs = entry.trials[0].epochs
            values = [
                params_at(entry.params, epoch).get(domain.key, math.nan) for epoch in range(epochs)
            ]
            wins, row = entry.trials[0].id in winners, rows.index(entry.row)
            named = wins and entry.row not in shown
            shown |= {entry.row} if named else set()
            axes.step(
                range(epochs + 1), [*values, values[-1]], where="post",
                color=COLOURS[row % len(COLOURS)], linewidth=2.4 if wins else 0.9,
                alpha=1.0 if wins else 0.45, label=tag(entry.row) if named else None,
            )  # fmt: skip
        if domain.kind.startswith("log"):
            axes.set_yscale("log")
        axes.set_xlabel("epoch")
        set_title(axes, plain(domain.key), theme)
        if place == 0 and len(rows) > 1:
            axes.legend(
                fontsize=8, labelcolor=theme.text, facecolor=theme.page, edgecolor=theme.grid
            )
    return figure
