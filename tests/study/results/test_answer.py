"""The answer in words, from made-up ledgers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from study.config import StudyConfig
from study.ledger.lines import Event
from study.ledger.state import fold
from study.report.html import render_html
from study.report.pictures import Links, Parts
from study.report.tables import render_markdown
from study.results.answer import answer
from study.results.summary import summarise
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]


def said(events: list[Event]) -> str:
    state = fold(events)
    return answer(state, summarise(state))


def with_errors(study: StudyConfig, errors: dict[str, list[float]]) -> list[Event]:
    """A finished study, its test errors in per cent by row and seed."""
    events = made_up_events(study)
    trials = {trial.id: trial for trial in fold(events).trials}
    for event in events:
        if event["event"] == "finished":
            trial = trials[event["trial"]]
            event["metrics"]["test/error"] = errors[trial.row][trial.seed] / 100
    return events


def test_a_difference_is_told_with_its_interval(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]")
    events = with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [3.0, 3.2, 3.1]})
    # differences 1.0, 1.1, 0.9: mean 1, sd 0.1, t(2, 0.975) = 4.303
    assert said(events) == (
        "Test error beside float32 (2.10 ± 0.10 %, 3 seeds): higher: lns matmul by +1.00 points"
        " (95 % +0.75 to +1.25)."
    )


def test_what_the_seeds_cannot_show_is_undecided(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]")
    told = said(with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]}))
    assert "undecided: lns matmul by +0.07 points (95 % -0.31 to +0.45)" in told
    assert "With 3 seeds, a difference of 0.5 points would have shown." in told


def test_a_single_seed_is_not_tested(tiny: Tiny) -> None:
    told = said(with_errors(tiny("results", "seeds=[0]"), {"float32": [2.0], "lns matmul": [2.5]}))
    assert (
        told
        == "Test error beside float32 (2.00 %, 1 seed): not tested: lns matmul by +0.50 points."
    )


def test_without_a_baseline_the_lowest_are_named(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1]", "baseline=null")
    told = said(with_errors(study, {"float32": [2.0, 2.2], "lns matmul": [1.9, 2.1]}))
    assert told == (
        "Lowest test error: lns matmul, 2.00 ± 0.14 %, 2 seeds; next float32, 0.10 points higher"
        " (chosen by these errors)."
    )


def test_there_is_no_answer_before_a_row_has_finished(tiny: Tiny) -> None:
    events = made_up_events(tiny("results", "seeds=[0,1]"))
    first = next(n for n, event in enumerate(events) if event["event"] == "finished")
    assert said(events[: first + 1]) == "No answer yet: 1 of 4 trials have ended."


@pytest.mark.parametrize("page", ["html", "markdown"])
def test_a_report_opens_with_it(tiny: Tiny, page: str) -> None:
    state = fold(made_up_events(tiny("results", "seeds=[0]")))
    summary = summarise(state)
    made = Parts(pictures=[], tables=[], explore=None, failed=[])
    text = (
        render_html(state, summary, made, Links())
        if page == "html"
        else render_markdown(state, summary, [])
    )
    assert text.index(answer(state, summary)) < text.index("test error, %")
