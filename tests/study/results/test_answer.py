"""The answer in sentences, from made-up ledgers."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from study.config import StudyConfig
from study.ledger.events import Event
from study.ledger.state import fold
from study.plan.extend import extended
from study.report.html import render_html
from study.report.pictures import Links, Parts
from study.report.tables import render_markdown
from study.results.answer import answer, compare_rows
from study.results.summary import summarise
from tests.study.conftest import made_up_events, with_errors

Tiny = Callable[..., StudyConfig]


def said(events: list[Event]) -> str:
    state = fold(events)
    return answer(state, summarise(state))


def within(margin: str) -> str:
    """The override that requires a margin of the second row, or none with ``null``."""
    row = f"{{label: lns matmul, overrides: {{precision.format: lns12}}, within: {margin}}}"
    return f"rows=[{{label: float32}}, {row}]"


def test_a_row_whose_interval_excludes_0_is_worse_or_better(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]")
    low, high = [2.0, 2.1, 2.2], [3.0, 3.2, 3.1]
    # differences 1.0, 1.1, 0.9: mean 1, sd 0.1, t(2, 0.975) = 4.303
    assert said(with_errors(study, {"float32": low, "lns matmul": high})) == (
        "lns matmul is worse than float32 by 1.00 points (0.75 to 1.25)."
        " (Test error; 95 %, 3 seeds, 5 test examples.)"
    )
    assert said(with_errors(study, {"float32": high, "lns matmul": low})).startswith(
        "lns matmul is better than float32 by 1.00 points (0.75 to 1.25)."
    )


def test_a_row_without_a_margin_has_the_largest_loss_that_its_interval_allows(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("null"))
    told = said(with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]}))
    assert told.startswith("No loss shows for lns matmul (at most 0.45 points).")


def test_a_row_whose_interval_lies_inside_its_margin_is_as_good(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("0.5"))
    errors = {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]}
    assert said(with_errors(study, errors)).startswith(
        "lns matmul is as good as float32 within 0.50 points (-0.31 to +0.45)."
    )
    shifted = {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.22, 2.3]}
    assert "is worse than float32 by 0.11 points (0.08 to 0.14, inside the margin of 0.50)" in said(
        with_errors(study, shifted)
    )


def test_an_open_row_comes_with_the_command_that_decides_it(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("0.2"))
    events = with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]})
    told = said(events)
    assert told.startswith(
        "Open: lns matmul (-0.31 to +0.45 points, wider than the margin of 0.20)."
    )
    (change,) = re.findall(r"run --extend results '(seeds=\[[\d,]+\])'", told)
    state = fold(events)
    more = extended(state, [change])
    added = len(more.seeds) - 3
    assert f"({2 * added} more trials, about " in told
    contrast = compare_rows(state, summarise(state))[0].contrast
    assert contrast is not None
    assert contrast.over_pairs(len(more.seeds)).least <= 0.2
    assert contrast.over_pairs(len(more.seeds) - 1).least > 0.2


def test_a_search_that_confirms_is_given_more_seeds_to_confirm_with(tiny: Tiny) -> None:
    study = tiny(
        "confirmed", within("0.2"), "space={optimizer.lr: {loguniform: [0.01, 1.0]}}",
        "search={num_samples: 3, confirm: 2, confirm_seeds: [101, 102]}",
    )  # fmt: skip
    told = said(made_up_events(study))
    assert "run --extend confirmed 'search.confirm_seeds=[101,102,103,104]'" in told
    assert "(8 more trials, about " in told


def test_a_margin_that_no_number_of_seeds_reaches_has_no_command(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("0.001"))
    told = said(with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]}))
    assert "More than 100 seeds would be needed for these margins." in told
    assert "extend" not in told


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        ("difference: {rows: [lns matmul, float32], at_most: 0.5}", "within 0.50 points"),
        ("difference: {rows: [float32, lns matmul], at_least: -0.5}", "within 0.50 points"),
        ("no_row_beats: {row: lns matmul, by: 0.5}", "within 0.50 points"),
        ("difference: {rows: [lns matmul, float32], at_least: 0.5}", "at most 0.45 points"),
        ("value: {row: lns matmul, at_most: 0.5}", "at most 0.45 points"),
    ],
)
def test_a_claim_that_compares_a_row_with_the_reference_states_its_margin(
    tiny: Tiny, claim: str, told: str
) -> None:
    study = tiny(
        "results", "seeds=[0,1,2]", within("null"),
        f"claims=[{{name: near, claim: It is near., source: nowhere, {claim}}}]",
    )  # fmt: skip
    events = with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]})
    assert told in said(events)


def test_a_requirement_is_no_margin_where_nothing_is_comparable(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("0.5"), "comparable={epochs: 20}")
    told = said(with_errors(study, {"float32": [2.0, 2.1, 2.2], "lns matmul": [2.1, 2.0, 2.4]}))
    assert "at most 0.45 points" in told


def test_one_test_example_is_named_where_it_is_a_sizeable_part_of_the_differences(
    tiny: Tiny,
) -> None:
    study = tiny("results", "seeds=[0,1,2]", within("null"))
    errors = {"float32": [10.0, 11.0, 12.0], "lns matmul": [11.0, 10.0, 14.0]}
    for size, end in (
        (100, "100 test examples; one example is 1.00 points.)"),
        (10_000, "10,000 test examples.)"),
    ):
        events = with_errors(study, errors)
        events[0]["data"][0]["test"] = size
        assert said(events).endswith(end)
    events = with_errors(study, {**errors, "float32": [10.25, 11.0, 12.0]})
    events[0]["data"][0]["test"] = 100  # several answers per example: fractions are wrong
    assert "one example" not in said(events)


def test_rows_that_differ_alike_at_every_seed_are_not_tested(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1,2]")
    errors = [2.0, 2.1, 2.2]
    assert said(with_errors(study, {"float32": errors, "lns matmul": errors})) == (
        "Equal to float32 at every seed: lns matmul."
    )
    told = said(with_errors(study, {"float32": errors, "lns matmul": [2.5, 2.6, 2.7]}))
    assert told == ("Not tested, because the seeds show no spread: lns matmul by +0.50 points.")


def test_with_one_seed_nothing_is_compared(tiny: Tiny) -> None:
    told = said(with_errors(tiny("results", "seeds=[0]"), {"float32": [2.0], "lns matmul": [2.5]}))
    assert told.startswith("Nothing is compared: one seed has no interval. To compare the rows,")
    assert "run --extend results 'seeds=[0,1,2]'" in told
    assert "(4 more trials, about " in told


def test_without_a_reference_row_nothing_is_compared(tiny: Tiny) -> None:
    study = tiny("results", "seeds=[0,1]", "baseline=null")
    told = said(with_errors(study, {"float32": [2.0, 2.2], "lns matmul": [1.9, 2.1]}))
    assert told == (
        "Lowest test error: lns matmul, 2.00 ± 0.14 %, 2 seeds; next float32, 0.10 points higher"
        " (chosen by these errors). Nothing is compared, because no row is the reference;"
        " `baseline=float32` makes one."
    )


def test_a_reference_row_that_lacks_a_seed_is_compared_with_nothing(tiny: Tiny) -> None:
    events = made_up_events(tiny("results", "seeds=[0,1]"))
    last = next(event for event in events if event["event"] == "finished")
    assert said([event for event in events if event is not last]) == (
        "Nothing is compared: float32, the reference row, has no mean of every seed."
    )


ERRORS = st.lists(st.integers(1, 400), min_size=3, max_size=3)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=ERRORS, other=ERRORS, margin=st.none() | st.floats(0.01, 5.0))
def test_each_row_has_one_of_the_words_and_the_words_follow_its_interval(
    tiny: Tiny, base: list[int], other: list[int], margin: float | None
) -> None:
    given_margin = "null" if margin is None else f"{margin:.2f}"
    study = tiny("results", "seeds=[0,1,2]", within(given_margin))
    figures = {"float32": [n / 10 for n in base], "lns matmul": [n / 10 for n in other]}
    state = fold(with_errors(study, figures))
    told = answer(state, summarise(state))
    (found,) = compare_rows(state, summarise(state))
    words = ["is worse than", "is better than", "is as good as", "Open: ", "No loss shows", "Equal",
             "Not tested"]  # fmt: skip
    assert sum(word in told for word in words) == 1
    if found.contrast is None:
        assert found.outcome == "none"
        return
    low, high = found.contrast.interval
    assert ("is worse than" in told) == (low > 0)
    assert ("is better than" in told) == (high < 0)
    undecided = low <= 0 <= high
    assert ("No loss shows" in told) == (undecided and margin is None)
    if margin is not None and undecided:
        assert ("is as good as" in told) == (max(-low, high) <= float(given_margin) + 1e-9)


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
        html.unescape(render_html(state, summary, made, Links()))
        if page == "html"
        else render_markdown(state, summary, [])
    )
    assert text.index(answer(state, summary)) < text.index("test error, %")
