"""Figures that are equal as counts but not as floating-point numbers: all choose the first of
equals, and ranks are shared."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from study.evidence.analyses import chosen, rank
from study.evidence.verdict import decide
from study.evidence.verify import Source
from study.ledger.state import StudyState, fold
from study.plan.plan import make_plan
from study.results.configurations import best, configurations, ranked
from study.results.objectives import mean_objective
from study.results.summary import summarise
from study.results.ties import compared, mean_of
from study.search.racing import contenders
from tests.study.conftest import write_ledger
from tests.study.evidence.test_verdicts import FIVE
from tests.study.search.conftest import Make, Pretend

pytestmark = pytest.mark.unit

FIRST, SECOND = (20, 20, 26, 30, 30), (25, 25, 27, 23, 26)
"""Wrong answers of 300 by seed; both sums are 126 of 1,500."""
SPACE = "space: {optimizer.lr: {loguniform: [0.01, 1.0]}}\nsearch: {num_samples: 3}\n"


def shares(counts: tuple[int, ...]) -> list[float]:
    return [count / 300 for count in counts]


def two_equal(searched: Make) -> tuple[StudyState, Path]:
    """A search of a row: two configurations with 126 of 1,500 errors, where the second mean by
    ``fmean`` is lower by an ulp, and a worse one."""
    row = "rows=[{label: float32}]"
    study = searched(FIVE, row, "tracking_uri=none", space=SPACE)
    counts = {1: FIRST, 2: SECOND, 3: (40, 40, 40, 40, 40)}
    pretend = Pretend(
        make_plan(study), lambda trial: [counts[trial.number or 0][trial.seed] / 300] * 3
    )
    pretend.run()
    return fold(pretend.events), write_ledger(study, pretend.events)


def test_the_case_is_one_of_rounding() -> None:
    first, second = (statistics.fmean(shares(counts)) for counts in (FIRST, SECOND))
    assert sum(FIRST) == sum(SECOND)
    assert first > second
    assert mean_of(shares(FIRST)) == mean_of(shares(SECOND)) == 126 / 1500


def test_report_table_claims_and_verification_take_the_first_of_equals(searched: Make) -> None:
    state, folder = two_equal(searched)
    objectives = state.config.search.objectives
    found = configurations(state.trials, objectives)
    winner = best(found, objectives)
    assert winner is not None
    assert winner.number == 1
    assert [entry.number for entry in ranked(found, objectives)] == [1, 2, 3]
    ids = {trial.id for trial in winner.trials}
    (row,) = summarise(state).rows
    assert {trial.id for trial in row.trials} == ids
    assert set(Source(folder).of_row("float32")) == ids
    (cell,) = chosen(state, "row", ["precision.format"]).values()
    assert {trial.id for trial in cell["float32"]} == ids
    assert mean_objective(winner.trials, "validation/error") == 126 / 1500


def test_ranks_of_equals_are_shared(searched: Make) -> None:
    """Of two rates with equal sums of errors, neither ranks first."""
    row = "rows=[{label: a, overrides: {hidden: [8]}}, {label: b, overrides: {hidden: [9]}}]"
    study = searched(FIVE, row.replace("hidden", "model.hidden"), "baseline=null", space="")
    counts = {"a": FIRST, "b": SECOND}
    pretend = Pretend(make_plan(study), lambda trial: [0.5] * 3)
    pretend.run()
    events: list[dict[str, Any]] = pretend.events
    trials = {trial.id: trial for trial in fold(events).trials}
    for event in events:
        if event["event"] == "finished":
            trial = trials[event["trial"]]
            event["metrics"]["test/error"] = counts[trial.row][trial.seed] / 300
    found = rank(fold(events), "row", ["data.name"])
    assert found is not None
    assert found.means == {"a": 1.5, "b": 1.5}


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(0.1 + 0.2, 0.1 + 0.2, "holds"), (0.0, 0.1 + 0.2, "holds"), (0.301, 0.4, "fails")],
)
def test_an_end_on_a_bound_is_within_it(low: float, high: float, outcome: str) -> None:
    assert 0.1 + 0.2 > 0.3
    assert decide((0.0, 0.3), low, high) == outcome


def test_a_race_is_led_by_the_first_of_equals() -> None:
    assert contenders([shares(FIRST), shares(SECOND)], 0.05) == [0, 1]
    assert compared(float("inf")) == float("inf")
