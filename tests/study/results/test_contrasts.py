"""Tests of differences: their arithmetic equals SciPy's; and how often they find a difference where
none exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom, ttest_ind, ttest_rel

from study.config import StudyConfig
from study.ledger.state import StudyState, fold
from study.plan.plan import make_plan
from study.report.pictures import tables
from study.results.contrasts import ALPHA, POWER, Contrast, independent, paired
from study.results.statistics import groups
from tests.study.conftest import made_up_events
from tests.study.search.conftest import Pretend, bowl, steady

Tiny = Callable[..., StudyConfig]
REPETITIONS = 400
CERTAIN = 0.9999
"""Probability with which a correct test's rejections are within the bounds; the random numbers are
always the same."""
FOUR_ROWS = (
    "rows=[{label: a}, {label: b, overrides: {precision.format: lns16}}, {label: c, overrides:"
    " {precision.format: lns12}}, {label: d, overrides: {batch_size: 16}}]"
)
SPACE = "space={optimizer.lr: {loguniform: [0.001, 1.0]}"


def bounds(probability: float, repetitions: int = REPETITIONS) -> tuple[float, float]:
    """Bounds of a rate with this probability."""
    low, high = binom.interval(CERTAIN, repetitions, probability)
    return low / repetitions, high / repetitions


def test_contrasts_equal_scipys() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(0.0, 1.0, 5), generator.normal(0.4, 3.0, 5)
    one, other = paired(list(a - b), "seeds"), independent(list(a), list(b[:4]), "configurations")
    assert one is not None
    assert other is not None
    assert one.p == pytest.approx(ttest_rel(a, b).pvalue)
    assert (one.difference - one.half, one.difference + one.half) == pytest.approx(
        ttest_rel(a, b).confidence_interval()
    )
    assert other.p == pytest.approx(ttest_ind(a, b[:4], equal_var=False).pvalue)
    assert (one.over, other.over) == ("5 seeds", "5 and 4 configurations")
    corrected = dataclasses.replace(one, tests=7)
    assert corrected.p == pytest.approx(min(1.0, 7 * one.p))
    assert corrected.half > one.half


@pytest.mark.parametrize(("p", "decided"), [(0.0049, True), (0.0051, False)])
def test_the_interval_says_what_the_corrected_p_says(p: float, decided: bool) -> None:
    from scipy.stats import t

    found = Contrast(difference=float(t.isf(p / 2, 4)), error=1.0, df=4, over="5 seeds", tests=10)
    assert (found.p < ALPHA, found.decided) == (decided, decided)


def test_without_spread_there_is_no_test() -> None:
    assert paired([0.3], "seeds") is None
    assert paired([0.3, 0.1 + 0.2, 0.3], "seeds") is None
    assert paired([0.0, 0.0], "seeds") is None
    assert independent([1.0], [1.0, 2.0], "configurations") is None
    assert independent([1.0, 1.0], [2.0, 2.0], "configurations") is None


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("tests", [1, 6])
def test_the_smallest_difference_that_could_have_shown_shows_that_often(
    seeds: int, tests: int
) -> None:
    """Drawn with the true spread instead of the observed one, as in its definition."""
    least = Contrast(
        difference=0.0, error=1.0 / np.sqrt(seeds), df=seeds - 1, over="", tests=tests
    ).least
    draws = np.random.default_rng(seeds).normal(least, 1.0, (REPETITIONS, seeds))
    found = [paired(list(row), "seeds") for row in draws]
    rate = np.mean(
        [dataclasses.replace(each, tests=tests).decided for each in found if each is not None]
    )
    low, high = bounds(POWER)
    assert low < rate < high


class Figures:
    """A study whose trials' validation errors a test sets repeatedly."""

    def __init__(self, study: StudyConfig) -> None:
        self.state: StudyState = fold(made_up_events(study))

    def decided(self, draw: Callable[[np.random.Generator], dict[str, float]]) -> float:
        """How often any difference is decided if ``draw`` gives the errors by trial."""
        found = 0
        for repetition in range(REPETITIONS):
            errors = draw(np.random.default_rng(repetition))
            for trial in self.state.trials:
                trial.reports[max(trial.reports)]["metrics"]["validation/error"] = errors[trial.id]
            contrasts = [each for group in groups(self.state) for each in group.contrasts.values()]
            assert all(contrasts)
            found += any(each is not None and each.decided for each in contrasts)
        return found / REPETITIONS


def test_rows_that_do_not_differ_are_told_apart_as_rarely_as_said(tiny: Tiny) -> None:
    """Seeds with large differences hide nothing and prove nothing; all categories' tests together
    err with probability alpha."""
    two, four = (
        Figures(tiny("nothing", rows, "baseline=null", "seeds=[0,1,2,3]"))
        for rows in (FOUR_ROWS.split(", {label: c")[0] + "]", FOUR_ROWS)
    )

    def draw(figures: Figures) -> Callable[[np.random.Generator], dict[str, float]]:
        def errors(generator: np.random.Generator) -> dict[str, float]:
            shared = generator.normal(0.5, 0.1, 4)
            return {
                trial.id: shared[trial.seed] + generator.normal(0.0, 0.01)
                for trial in figures.state.trials
            }

        return errors

    low, high = bounds(ALPHA)
    assert low < two.decided(draw(two)) < high
    # Bonferroni; the tests share the reference, and the categories trials
    assert 0.2 * ALPHA < four.decided(draw(four)) < high


def test_configurations_are_no_seeds(tiny: Tiny) -> None:
    """Rows whose seeds have an effect that is the same for all configurations: forty trials of a
    row are four observations."""
    figures = Figures(
        tiny(
            "pooled",
            SPACE + "}",
            "search={num_samples: 10}",
            FOUR_ROWS.split(", {label: c")[0] + "]",
            "baseline=null",
            "seeds=[0,1,2,3]",
        )
    )

    def errors(generator: np.random.Generator) -> dict[str, float]:
        luck = {row: generator.normal(0.5, 0.02, 4) for row in "ab"}
        return {
            trial.id: luck[trial.row][trial.seed] + generator.normal(0.0, 0.005)
            for trial in figures.state.trials
        }

    low, high = bounds(ALPHA)
    assert low < figures.decided(errors) < high


def test_formats_of_a_random_search_are_compared_over_configurations(tiny: Tiny) -> None:
    """Each has its own learning rates, and these decide; every repetition draws both."""
    study = tiny(
        "random",
        SPACE + ", precision.format: {choice: [float32, lns16]}}",
        "search={num_samples: 40}",
        "rows=[]",
        "baseline=null",
    )
    figures = Figures(study)

    def errors(generator: np.random.Generator) -> dict[str, float]:
        return {trial.id: abs(generator.normal(0.3, 0.1)) for trial in figures.state.trials}

    low, high = bounds(ALPHA)
    assert low < figures.decided(errors) < high
    assert [group.exploratory for group in groups(figures.state)] == [
        "tested over configurations, which says nothing of other seeds"
    ]


def test_a_grid_is_compared_where_only_the_category_differs(tiny: Tiny) -> None:
    """A learning rate that one format lacks does not count against it."""
    space = "space={optimizer.lr: {grid: [0.01, 0.1]}, precision.format: {grid: [float32, lns16]}}"
    state = fold(
        made_up_events(
            tiny(
                "grid",
                space,
                "search={algorithm: grid}",
                "rows=[]",
                "baseline=null",
                "seeds=[0,1,2]",
            )
        )
    )
    noise = iter(np.random.default_rng(0).normal(0.0, 0.001, 12))
    for trial in state.trials:
        slow = trial.config["optimizer"]["lr"] == 0.01
        trial.reports[3]["metrics"]["validation/error"] = 0.1 + 0.5 * slow + next(noise)
        if slow and trial.config["precision"]["format"] == "lns16" and trial.seed == 2:
            trial.status = "failed"
    by_format = next(group for group in groups(state) if group.category == "format")
    contrast = by_format.contrasts["lns16"]
    assert contrast is not None
    assert (contrast.over, by_format.reference, by_format.exploratory) == ("3 seeds", "float32", "")
    assert abs(contrast.difference) < 0.5  # points; over all trials it would be 25
    assert not contrast.decided


def test_what_a_search_chose_by_results_is_not_tested(tiny: Tiny) -> None:
    study = tiny(
        "tpe",
        SPACE + ", optimizer.name: {choice: [sgd, adam]}}",
        "search={algorithm: tpe, num_samples: 12}",
        "seeds=[0,1]",
    )
    pretend = Pretend(make_plan(study), steady(bowl))
    pretend.run()
    found = groups(pretend.state)
    assert {group.category for group in found} == {"row", "optimizer.name"}
    assert all(each is None for group in found for each in group.contrasts.values())
    shown = [table for table in tables(pretend.state) if table.title.startswith("By ")]
    assert [table.title for table in shown] == [
        "By row (exploratory)",
        "By optimizer.name (exploratory)",
    ]
    assert all("chose by results" in table.note for table in shown)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=8, unique=True), st.integers(2, 5))
def test_more_pairs_alike_narrow_the_interval_by_the_same_spread(
    differences: list[float], times: int
) -> None:
    one = paired(differences, "seeds")
    assume(one is not None and one.error > 1e-6)
    assert one is not None
    assert one.over_pairs(len(differences)).half == pytest.approx(one.half)
    more = one.over_pairs(times * len(differences))
    assert more.error == pytest.approx(one.error / times**0.5)
    assert one.interval[0] < more.interval[0] <= one.difference <= more.interval[1]
    assert more.least < one.least


def test_the_reference_is_not_chosen_by_results_and_the_table_says_what_is_undecided(
    tiny: Tiny,
) -> None:
    state = fold(made_up_events(tiny("said", "seeds=[0,1,2]")))
    noise = iter([0.0, -0.0005, 0.001, -0.0012, 0.002, -0.001])
    for trial in state.trials:
        trial.reports[3]["metrics"]["validation/error"] = 0.1 + next(noise)
    (group,) = groups(state)
    assert (group.reference, list(group.figures)) == ("float32", ["float32", "lns matmul"])
    (table,) = [table for table in tables(state) if table.title == "By row"]
    first, second = table.lines
    assert first[3:] == ["-", "-", "-", "-"]
    assert second[3].startswith("-0.19 ± ")
    assert second[4] == "3 seeds"
    assert second[6].startswith("undecided (")
    contrast = group.contrasts["lns matmul"]
    assert contrast is not None
    assert second[6] == f"undecided ({contrast.least:.2g} would show)"
    assert "for the 1 tests of these tables" in table.note


def test_rows_of_other_data_are_in_no_comparison_of_formats(tiny: Tiny) -> None:
    """Curves are harder than digits, which says nothing about the format that both rows have."""
    curves = "data.name: mnist1d, data.validation_size: 300"
    rows = (
        "rows=[{label: digits}, {label: digits lns, overrides: {precision.format: lns12}},"
        f" {{label: curves lns, overrides: {{precision.format: lns12, {curves}}}}}]"
    )
    figures = {"digits": 0.1, "digits lns": 0.12, "curves lns": 0.6}
    state = fold(made_up_events(tiny("of one task", rows, "baseline=digits", "seeds=[0,1,2]")))
    for trial in state.trials:
        error = figures[trial.row] + 0.01 * trial.seed * (trial.row != "digits")
        trial.reports[max(trial.reports)]["metrics"]["validation/error"] = error
    found = {group.category: group.contrasts for group in groups(state)}
    assert found["row"]["curves lns"].difference == pytest.approx(51.0)
    assert found["format"]["lns12"].difference == pytest.approx(3.0)
