"""The report as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from study.config import Metric
from study.config.space import describe, show
from study.config.yaml_loader import dump
from study.evidence.record import interval_of
from study.ledger.state import StudyState, TrialState, shown_study
from study.report.claims import HEADINGS as CLAIM_HEADINGS
from study.report.claims import claim_cells
from study.report.pictures import Links, Parts
from study.report.tables import cells, facts, headings, protocol, remarks, shown_columns
from study.results.answer import answer, capital
from study.results.configurations import condition, configurations, pareto_front, ranked
from study.results.objectives import diverged, test_value
from study.results.summary import Summary
from study.text import cut, printable


def render_html(
    state: StudyState,
    summary: Summary,
    made: Parts,
    where: Links,
    claims: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page with embedded pictures; ``claims`` as in :mod:`study.evidence.record`."""
    environment = Environment(
        loader=PackageLoader("study.report"), autoescape=True, undefined=StrictUndefined,
        finalize=shown,
    )  # fmt: skip
    metric = summary.metric
    return environment.get_template("report.html.j2").render(
        metric=metric, title=capital(metric.test_words), study=state.config,
        answer=answer(state, summary), headings=headings(state, summary),
        shown=shown_columns(summary), objectives=_objective_names(state), front=_front_lines(state),
        ranked=_ranked_lines(state),
        rows=[(cells(row, summary), row.verdict) for row in summary.rows],
        intervals=interval_lines(summary), remarks=[*remarks(state, summary), *made.failed],
        protocol=protocol(state), facts=facts(state), versions=state.plan["provenance"]["versions"],
        config=printable(dump(shown_study(state.plan["study"]))),
        trials=_trial_lines(state, metric), pictures=made.pictures, tables=made.tables, links=where,
        explore=made.explore, claim_headings=CLAIM_HEADINGS,
        claims=[(claim_cells(claim), claim["outcome"]) for claim in claims],
    )  # fmt: skip


def shown(value: Any) -> Any:
    """Cut a long text and escape its control characters; return any other value unchanged."""
    return printable(cut(value)) if type(value) is str else value  # Markup is the template's own


def interval_lines(summary: Summary) -> dict[str, str]:
    """Return the rows' 95 % confidence intervals by label; rows with one seed have none."""
    metric = summary.metric
    found = {row.label: interval_of(row, metric) for row in summary.rows}
    return {label: " to ".join(map(metric.figure, ends)) for label, ends in found.items() if ends}


SHOWN = 100
"""Maximum number of configurations listed in the page; the CSV file has all."""


def _objective_names(state: StudyState) -> list[str]:
    return [f"{metric} ({mode})" for metric, mode in state.config.search.objectives.items()]


def _ranked_lines(state: StudyState) -> list[list[str]]:
    """Return the table lines of the best configurations of all rows."""
    objectives = state.config.search.objectives
    every = configurations(state.trials, objectives, state.config.search.constraints)
    found = [entry for entry in every if entry.whole]
    return [
        [
            entry.row,
            str(entry.number),
            describe(entry.params),
            *map(show, entry.objectives.values()),
            condition(entry),
        ]
        for entry in ranked(found, objectives)[:SHOWN]
    ]


def _front_lines(state: StudyState) -> list[list[str]]:
    """Return the table lines of the Pareto front over all rows; empty with one objective."""
    objectives = state.config.search.objectives
    if len(objectives) < 2:
        return []
    every = configurations(state.trials, objectives, state.config.search.constraints)
    front = pareto_front(every, objectives)
    return [
        [
            entry.row,
            str(entry.number),
            describe(entry.params),
            *map(show, entry.objectives.values()),
        ]
        for entry in front
    ]


@dataclass(frozen=True)
class _TrialLine:
    """One trial in the report's list."""

    row: str
    seed: int
    status: str
    epochs: str
    test: str
    restarts: int
    id: str


def _trial_lines(state: StudyState, metric: Metric) -> list[_TrialLine]:
    return [
        _TrialLine(
            trial.row,
            trial.seed,
            trial.status + (", diverged" if diverged(trial, metric.name) else ""),
            f"{trial.epoch}/{trial.epochs}",
            _test(trial, metric),
            trial.restarts,
            trial.id,
        )
        for trial in state.trials
    ]


def _test(trial: TrialState, metric: Metric) -> str:
    value = test_value(trial, metric) if trial.test else None
    return metric.figure(value) if value is not None else "-"
