"""Figures and verdicts from made-up ledgers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from study.config import Metric, RowConfig, StudyConfig
from study.config.compose import load
from study.ledger.state import fold
from study.results.summary import judge, summarise
from tests.study.conftest import made_up_events

pytestmark = pytest.mark.unit

Tiny = Callable[..., StudyConfig]
PUBLISHED = {
    "float32": 2.14,
    "lns matmul": 2.12,
    "lns everywhere": 3.62,
    "lns everywhere + kahan": 2.29,
}


def full_table(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> StudyConfig:
    """The table's config without looking for MNIST."""
    monkeypatch.setattr(
        "study.plan.plan.resolve",
        lambda config, download: dataclasses.replace(config, root="/nowhere"),
    )
    return load("table", overrides)


def test_the_published_figures_pass_their_own_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(fold(made_up_events(full_table(monkeypatch), PUBLISHED)))
    assert summary.comparable
    assert [row.verdict for row in summary.rows] == ["", "pass", "pass", "pass"]
    gaps = [row.gap for row in summary.rows]
    assert gaps == [None, pytest.approx(-0.02), pytest.approx(1.48), pytest.approx(0.15)]
    assert all(row.sd == pytest.approx(0.01) for row in summary.rows)


def test_a_row_that_misses_its_requirement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = PUBLISHED | {"lns matmul": 2.35, "lns everywhere": 2.5, "lns everywhere + kahan": 2.4}
    summary = summarise(fold(made_up_events(full_table(monkeypatch), errors)))
    assert [row.verdict for row in summary.rows] == ["", "fail", "fail", "fail"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trial.epochs=2", "epochs is 2, not 20"),
        ("seeds=[0]", "1 seed a row, not 3"),
        ("precision=lns16", "precision.format is lns16, not lns12"),
    ],
)
def test_a_small_budget_gets_no_verdict_and_says_why(
    monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    summary = summarise(fold(made_up_events(full_table(monkeypatch, override), PUBLISHED)))
    assert said in summary.departures
    assert [row.verdict for row in summary.rows] == ["", "", "", ""]


def test_an_unfinished_row_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    events = made_up_events(full_table(monkeypatch), PUBLISHED)
    last = max(index for index, event in enumerate(events) if event["event"] == "finished")
    summary = summarise(fold(events[:last] + events[last + 1 :]))
    assert [row.verdict for row in summary.rows] == ["", "pass", "pass", ""]
    assert summary.rows[-1].finished == 2


def test_only_the_last_plan_counts(tiny: Tiny) -> None:
    first, second = (
        made_up_events(tiny("results", "trial.epochs=1")),
        made_up_events(tiny("results")),
    )
    state = fold([*first, *second])
    assert len(state.trials) == 2
    assert len(state.known) == 4
    assert all(trial.epochs == 3 for trial in state.trials)


@pytest.mark.parametrize(
    ("gap", "verdict"),
    [
        (0.15, "pass"),
        (-0.15, "pass"),
        (0.16, "fail"),
        (-0.16, "fail"),
        (float("nan"), "fail"),
        (None, ""),
    ],
)
def test_within_counts_both_ways(gap: float | None, verdict: str) -> None:
    assert judge(RowConfig(label="x", within=0.15), gap, Metric(name="validation/error")) == verdict
