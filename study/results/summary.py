"""Summary of a study: for each row the mean test figure, its spread, gap to the baseline, verdict.

The test figure is the study's metric (:mod:`study.config.metric`) after the last epoch. The config
fixes the recipe before a trial runs, and every seed counts, including diverged ones. A row with
diverged trials shows their number and cannot pass a requirement. Errors are in per cent; spread is
the sample standard deviation over seeds (n - 1).

A searched row shows its best configuration, chosen by the first objective on the validation split,
never by the test set. With ``search.per_seed`` it shows the best configuration of each seed.

Published figures are shown, and verdicts given, only if the study and the row use the published
recipe (``comparable`` in the config); other studies list their differences from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from study.config import Metric, RowConfig, StudyConfig
from study.config.keys import lookup
from study.config.space import Params
from study.ledger.state import FAILED, FINISHED, StudyState, TrialState
from study.results.configurations import Configuration, best, configurations
from study.results.contrasts import deviation
from study.results.objectives import diverged, test_value
from study.results.ties import plain_mean
from study.text import counted


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; errors in per cent, gaps in percentage points, None for no figure.

    Attributes:
        label: label of the row.
        mean, sd: mean and spread of the final test figure over finished seeds; sd is None with
            fewer than two.
        finished, failed, seeds: numbers of finished, failed and all trials.
        diverged: number of trials that diverged (:func:`study.results.objectives.diverged`).
        published: published test figure, or None.
        gap: mean minus the baseline row's mean; None until every seed of both has finished; NaN if
            one diverged.
        rule: text of the requirement behind the verdict.
        verdict: ``pass``, ``fail``, or "" if nothing is required or the study is not comparable.
        trials: trials behind the figures: all trials of the row, or the trials of a searched
            row's best configuration (with ``search.per_seed`` of each seed's best).
        searched: number of the row's configurations that have ended; 0 if nothing is searched.
        params: sampled values of the best configuration; empty if each seed has its own.
    """

    label: str
    mean: float | None
    sd: float | None
    finished: int
    failed: int
    seeds: int
    published: float | None
    gap: float | None
    rule: str
    verdict: str
    trials: tuple[TrialState, ...] = ()
    searched: int = 0
    params: Params = field(default_factory=dict)
    diverged: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The table of a study.

    Attributes:
        rows: rows in the config's order.
        departures: departures of the study from the published recipe, one sentence each; empty if
            the study is comparable.
        metric: metric of the figures.
        searched: whether rows were searched, each for its own best configuration.
        searches: number of searches per row; each search has its own best configuration.
    """

    rows: list[Row]
    departures: list[str]
    metric: Metric
    searched: bool
    searches: int = 1

    @property
    def comparable(self) -> bool:
        """Whether the figures may be compared with the published ones."""
        return not self.departures


def summarise(state: StudyState) -> Summary:
    """Return the table of a study, computed from its ledger state."""
    study = state.config
    departures = find_departures(study, state)
    wanted = {row.label: row for row in study.rows}
    found = configurations(state.trials, study.search.objectives, study.search.constraints)
    chosen = {label: _chosen(label, trials, found, study) for label, trials in state.rows().items()}
    metric, base = study.primary_metric, None
    if study.baseline in chosen:
        base = _mean_of_all(chosen[study.baseline].trials, metric)
    rows = [
        _row(wanted.get(label, RowConfig(label=label)), choice, base, study, not departures)
        for label, choice in chosen.items()
    ]
    return Summary(
        rows=rows, departures=departures, metric=metric, searched=bool(study.space),
        searches=len(study.seeds) if study.search.per_seed else 1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The trials that a row's figures are computed from."""

    trials: tuple[TrialState, ...]
    searched: int = 0
    params: Params = field(default_factory=dict)


def _chosen(
    label: str, trials: list[TrialState], found: list[Configuration], study: StudyConfig
) -> _Choice:
    """Return all trials of a row; for a searched row, only its best configuration's trials.

    With ``search.per_seed`` each seed has its own best configuration. A searched row, or one of its
    seeds, may not have a best configuration yet.
    """
    mine = [entry for entry in found if entry.row == label]
    if not mine:
        return _Choice(trials=tuple(trials))
    ended = sum(entry.ended and entry.whole for entry in mine)
    searches: dict[int, list[Configuration]] = {}
    for entry in mine:
        searches.setdefault(entry.trials[0].seed if study.search.per_seed else 0, []).append(entry)
    wanted = study.seeds if study.search.per_seed else [0]
    winners = [best(searches.get(seed, []), study.search.objectives) for seed in wanted]
    chosen = [winner for winner in winners if winner is not None]
    if len(chosen) < len(winners):
        return _Choice(trials=(), searched=ended)
    of_all = tuple(trial for winner in chosen for trial in winner.trials)
    return _Choice(
        trials=of_all, searched=ended, params={} if len(chosen) > 1 else chosen[0].params
    )


def find_departures(study: StudyConfig, state: StudyState) -> list[str]:
    """Describe how trials differ from the ``comparable`` values; each difference is listed once."""
    found: dict[str, None] = {}
    by_row = {row.label: row.comparable for row in study.rows}
    for trial in state.trials:
        for key, wanted in (study.comparable | by_row.get(trial.row, {})).items():
            value = lookup(trial.config, key)
            if value != wanted:
                found[f"{key} is {_show(value)}, not {_show(wanted)}"] = None
    if study.comparable and len(study.seeds) < study.comparable_seeds:
        found[f"{counted(len(study.seeds), 'seed')} a row, not {study.comparable_seeds}"] = None
    return list(found)


def test_figures(trials: Iterable[TrialState], metric: Metric) -> list[float]:
    """Return the final test figures of the finished trials, in the display unit."""
    return list(figures_by_seed(trials, metric).values())


def figures_by_seed(trials: Iterable[TrialState], metric: Metric) -> dict[int, float]:
    """Return the final test figures of a row's finished trials by seed, in the display unit."""
    return {
        trial.seed: value
        for trial in trials
        if trial.status == FINISHED and (value := test_value(trial, metric)) is not None
    }


def _mean_of_all(trials: Sequence[TrialState], metric: Metric) -> float | None:
    """Return the mean test figure once every seed has finished, else None; NaN if one diverged.

    A mean without the worst seed would make the row look better than it is.
    """
    figures = test_figures(trials, metric)
    if any(diverged(trial, metric.name) for trial in trials):
        figures = [math.nan for _ in figures]
    return plain_mean(figures) if figures and len(figures) == len(trials) else None


def _row(
    wanted: RowConfig, choice: _Choice, base: float | None, study: StudyConfig, comparable: bool
) -> Row:
    trials = list(choice.trials)
    metric = study.primary_metric
    figures = test_figures(trials, metric)
    whole = _mean_of_all(trials, metric)
    gap = None if whole is None or base is None or wanted.label == study.baseline else whole - base
    return Row(
        label=wanted.label, mean=plain_mean(figures) if figures else None,
        sd=deviation(figures) if len(figures) > 1 else None, finished=len(figures),
        failed=sum(trial.status == FAILED for trial in trials), seeds=len(trials),
        published=wanted.published, gap=gap, rule=describe_rule(wanted, study.baseline, metric),
        verdict=judge(wanted, gap, metric) if comparable else "", trials=choice.trials,
        searched=choice.searched, params=choice.params,
        diverged=sum(diverged(trial, metric.name) for trial in trials),
    )  # fmt: skip


def describe_rule(row: RowConfig, baseline: str | None, metric: Metric) -> str:
    """Describe the requirement on a row's gap; "" without a requirement or a baseline."""
    if baseline is None:
        return ""
    rules = []
    if row.within is not None:
        rules.append(f"within {metric.figure(row.within)} of {baseline}")
    if row.worse_by is not None:
        rules.append(f"worse than {baseline} by at least {metric.figure(row.worse_by)}")
    return " and ".join(rules)


def judge(row: RowConfig, gap: float | None, metric: Metric) -> str:
    """Return ``pass`` or ``fail`` for a row with a rule and a gap; "" otherwise.

    A gap that is not a number fails.
    """
    if gap is None or (row.within is None and row.worse_by is None):
        return ""
    near = row.within is None or abs(gap) <= row.within
    far = row.worse_by is None or metric.sign * gap >= row.worse_by
    return "pass" if near and far and not math.isnan(gap) else "fail"


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)
