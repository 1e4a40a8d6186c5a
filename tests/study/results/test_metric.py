"""Studies of another metric than the error: whatever ranks or draws it has the right way round.

A study in which lower is better and its mirror image, the same figures negated with higher better,
must come to the same choices.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from study.config import Metric, RowConfig, StudyConfig
from study.config.compose import change
from study.evidence.verify import Source
from study.ledger.events import Event
from study.ledger.state import StudyState, TrialState, fold
from study.report.compare import compare, verdict
from study.report.documents import overview
from study.report.export import export_rows
from study.report.figures.analysis import draw_heat_map, draw_parallel
from study.report.figures.results import _most_telling
from study.report.figures.style import LIGHT, png
from study.report.pictures import tables
from study.report.tables import render_markdown, render_text
from study.results.answer import answer
from study.results.configurations import best, configurations, pareto_front, ranked
from study.results.importance import importance
from study.results.objectives import joules
from study.results.statistics import (
    METRIC,
    Entry,
    HeatMap,
    _of_points,
    best_of_budget,
    costs,
    entries,
    front,
    groups,
    heat_map,
    rank_formats,
)
from study.results.summary import judge, summarise
from study.tracking.models import _best
from study.tracking.payload import row_figures
from study.tracking.view import view_state
from study.views.progress import summary as summary_line
from tests.study.conftest import made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
SCORE = "trial.metrics={score: {name: 'torchmetrics:R2Score'}}"
HIGHER = ("metric=validation/score", "mode=max")
LOWER = ("metric=validation/score",)
SEARCH = ("space={optimizer.lr: {loguniform: [0.001, 1.0]}}", "search.num_samples=12")
GRID = (
    "rows=[{label: a}, {label: b, overrides: {precision.format: lns12}},"
    " {label: c, overrides: {workers: 2}},"
    " {label: d, overrides: {precision.format: lns12, workers: 2}, worse_by: 0.2}]",
    "baseline=a",
    "seeds=[0,1,2]",
)


def scored(study: StudyConfig, sign: int = 1) -> list[Event]:
    """A study's ledger in which every trial has a score, by row, learning rate and seed."""
    events = made_up_events(study)
    trials = {trial.id: trial for trial in fold(events).trials}
    rows = list(dict.fromkeys(trial.row for trial in trials.values()))

    def score(trial: TrialState, epoch: int) -> float:
        rate = trial.config["optimizer"]["lr"]
        noise = 0.01 * ((7 * trial.seed + 3 * rows.index(trial.row)) % 5)
        place = 0.3 * rows.index(trial.row) + (math.log10(rate) + 1.5) ** 2
        return sign * (place + noise + 0.5 / epoch)

    for event in events:
        if event["event"] == "report":
            value = score(trials[event["trial"]], event["epoch"])
            event["metrics"] = event["metrics"] | {"validation/score": value}
        if event["event"] == "finished":
            event["metrics"] = {"test/score": score(trials[event["trial"]], 3)}
    return events


@pytest.fixture(params=[GRID, SEARCH], ids=["rows", "search"])
def mirrored(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[StudyState, StudyState]:
    """The same study with lower better and, negated, with higher better."""
    lower = tiny("mirrored", SCORE, *request.param, *LOWER)
    higher = tiny("mirrored", SCORE, *request.param, *HIGHER)
    return fold(scored(lower)), fold(scored(higher, -1))


def names(found: list[Entry]) -> list[str]:
    return [entry.name for entry in found]


def test_choices_are_the_same(mirrored: tuple[StudyState, StudyState]) -> None:
    lower, higher = mirrored
    for of_metric in (
        lambda state, metric: names(front(entries(state), [METRIC, "bits"], metric)),
        lambda state, metric: [
            (line["entry"], line["rank_metric"], line["rank_bits"])
            for line in rank_formats(entries(state), metric)
        ],
        lambda state, metric: [row.label for row in _most_telling(summarise(state))],
        lambda state, metric: [
            found.id
            for row in summarise(state).rows
            if (found := _best(row.trials, metric)) is not None
        ],
        lambda state, metric: [row.params for row in summarise(state).rows],
        lambda state, metric: [row.verdict for row in summarise(state).rows],
        lambda state, metric: [
            (entry.row, entry.number)
            for entry in ranked(
                configurations(state.trials, state.config.search.objectives),
                state.config.search.objectives,
            )
        ],
        lambda state, metric: summary_line(state, running=True).rpartition("(")[2],
    ):
        first = of_metric(lower, lower.config.primary_metric)
        assert first == of_metric(higher, higher.config.primary_metric)
    assert names(front(entries(lower), [METRIC, "bits"], lower.config.primary_metric))


def test_figures_are_negated(mirrored: tuple[StudyState, StudyState]) -> None:
    lower, higher = mirrored
    metrics = [state.config.primary_metric for state in mirrored]
    assert {row: ([*xs], [-y for y in ys]) for row, (xs, ys) in best_of_budget(lower).items()} == {
        row: (xs, ys) for row, (xs, ys) in best_of_budget(higher).items()
    }
    maps = [
        heat_map(entries(state), metric) for state, metric in zip(mirrored, metrics, strict=True)
    ]
    if maps[0] is not None and maps[1] is not None:
        np.testing.assert_array_equal(maps[0].values, -maps[1].values)
    for one, other in zip(groups(lower), groups(higher), strict=True):
        assert one.figures == {k: [-v for v in values] for k, values in other.figures.items()}
        for name, contrast in one.contrasts.items():
            mirror = other.contrasts[name]
            if contrast is None or mirror is None:
                assert contrast is mirror
                continue
            assert mirror.difference == pytest.approx(-contrast.difference)
            assert mirror.p == pytest.approx(contrast.p)
    for row, mirror_row in zip(summarise(lower).rows, summarise(higher).rows, strict=True):
        assert (row.gap is None) == (mirror_row.gap is None)
        assert row.gap is None or row.gap == pytest.approx(-(mirror_row.gap or 0.0))
    first, second = importance(lower), importance(higher)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.single == pytest.approx(second.single, abs=0.05)


@pytest.mark.parametrize(
    ("mode", "gap", "said"),
    [("min", 0.3, "pass"), ("min", -0.3, "fail"), ("max", -0.3, "pass"), ("max", 0.3, "fail")],
)
def test_worse_is_lower_where_higher_is_better(mode: str, gap: float, said: str) -> None:
    metric = Metric(name="validation/score", mode=mode)
    assert judge(RowConfig(label="x", worse_by=0.2), gap, metric) == said
    assert judge(RowConfig(label="x", within=0.4), gap, metric) == "pass"


def test_the_best_row_is_the_highest_and_differences_have_no_points(tiny: Tiny) -> None:
    study = tiny("words", SCORE, *GRID, *HIGHER)
    state = fold(scored(study, -1))
    told = answer(state, summarise(state))
    assert told == (
        "d is worse than a by 0.9067 (0.7792 to 1.034), c by 0.5933 (0.4659 to 0.7208) and b by"
        " 0.2967 (0.1692 to 0.4241). (Test score, higher is better; 95 %, 3 seeds, 5 test"
        " examples.)"
    )
    assert "points" not in told
    assert "%" not in told.replace("95 %", "")
    alone = fold(scored(tiny("words", SCORE, *GRID, "baseline=null", *HIGHER), -1))
    assert answer(alone, summarise(alone)).startswith("Highest test score: a, -0.4367 ± 0.02, ")
    assert "lower (chosen by these values of score)." in answer(alone, summarise(alone))
    text = render_text(state)
    assert "test score" in text
    assert "worse than a by at least 0.2" in text
    assert "error" not in text + render_markdown(state, summarise(state), [])
    shown = [heading for table in tables(state) for heading in table.headings]
    assert {"validation score", "mean validation score"} <= set(shown)


def brightness(figure: Figure | None) -> np.ndarray:
    assert figure is not None
    return np.asarray(Image.open(io.BytesIO(png(figure))).convert("L")).astype(float)


def test_dark_cells_of_a_heat_map_are_the_worst_ones() -> None:
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    names_ = ["a", "b"], "layout", ["c", "d"]
    lower, higher = (Metric(name="validation/score", mode=mode) for mode in ("min", "max"))

    def difference(first: np.ndarray, second: np.ndarray) -> float:
        drawn = draw_heat_map(HeatMap(*names_, first), lower, LIGHT)
        mirror = draw_heat_map(HeatMap(*names_, second), higher, LIGHT)
        a, b = brightness(drawn), brightness(mirror)
        width = min(a.shape[1], b.shape[1])
        return float(np.abs(a[:, :width] - b[:, :width]).mean())

    assert difference(values, 5 - values) < 5
    assert difference(values, values) > 30


def test_shades_of_rows_compare_the_formats_of_each() -> None:
    """A row with large values, such as another loss, does not make the others look alike."""
    names_ = ["a", "b"], "row", ["c", "d"]
    metric = Metric(name="validation/loss", mode="min")
    drawn, scaled = (
        brightness(draw_heat_map(HeatMap(*names_, np.array(values)), metric, LIGHT))
        for values in ([[1.0, 10.0], [2.0, 20.0]], [[1.0, 1.0], [2.0, 2.0]])
    )
    assert np.abs(drawn - scaled).mean() < 5  # the figures in the cells


def test_a_heat_map_has_rows_where_there_is_one_layout(tiny: Tiny) -> None:
    formats = "space={precision.format: {grid: [float32, bfloat16]}}"
    rows = "rows=[{label: small}, {label: large, overrides: {model.hidden: [8]}}]"
    studied = (*LOWER, "baseline=null", rows, formats, "search={algorithm: grid}")
    state = fold(scored(tiny("tasks", SCORE, *studied)))
    found = heat_map(entries(state), state.config.primary_metric)
    assert found is not None
    assert (found.formats, found.category) == (["float32", "bfloat16"], "row")
    assert found.columns == [row.label for row in state.config.rows]
    assert np.isfinite(found.values).all()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_dark_lines_of_parallel_coordinates_are_the_best_ones(tiny: Tiny, mode: str) -> None:
    state = fold(scored(tiny("parallel", SCORE, *SEARCH, *LOWER, "search.num_samples=2")))
    found = [entry for entry in entries(state) if entry.row == "float32"]
    lines = [
        dataclasses.replace(
            entry, params={"optimizer.lr": value}, values=dict(entry.values) | {METRIC: value}
        )
        for entry, value in zip(found, (1.0, 2.0), strict=True)
    ]
    drawn = brightness(draw_parallel(lines, Metric(name="validation/score", mode=mode), LIGHT))
    middle = drawn[40:-54, drawn.shape[1] // 2 - 50]  # between the axes, without title and ticks
    high, low = middle[: len(middle) // 2].min(), middle[len(middle) // 2 :].min()
    assert (high < low) == (mode == "max")


def test_studies_are_compared_by_their_metric_and_refused_with_two(tiny: Tiny) -> None:
    one, other = (fold(scored(tiny(name, SCORE, *GRID, *HIGHER), -1)) for name in ("one", "two"))
    found = compare(one, other)
    assert found.measured == "test score"
    assert "+0 of test score over 12 pairs" in verdict(found)
    errors = fold(made_up_events(tiny("three", SCORE, *GRID)))
    with pytest.raises(
        ValueError, match=r"validation/score \(max\), the other about validation/er"
    ):
        compare(one, errors)


def test_trials_that_did_not_report_it_are_said_by_name(tiny: Tiny) -> None:
    study = tiny("lacking", SCORE, *GRID, *HIGHER)
    state = fold(made_up_events(study))
    said = "12 trials reported no validation/score; they reported: train/error, train/loss,"
    assert said in render_text(state)
    assert said in answer(state, summarise(state))
    state = fold(
        event | {"metrics": {"test/loss": 1.0}} if event["event"] == "finished" else event
        for event in scored(study, -1)
    )
    assert "12 trials ended with no test/score; they ended with: test/loss;" in render_text(state)


def test_a_figure_of_no_split_is_that_of_the_last_epoch(tiny: Tiny) -> None:
    study = tiny("own", "metric=accuracy", "mode=max", "seeds=[0,1]")
    events = made_up_events(study)
    for event in events:
        if event["event"] == "report":
            event["metrics"] = {"accuracy": 0.5 + 0.1 * event["epoch"]}
        if event["event"] == "finished":
            event["metrics"] = {}
    text = render_text(fold(events))
    assert "row         accuracy" in text
    assert "0.8 ± 0" in text
    assert re.search("(reported|ended with) no", text) is None


def test_the_interface_of_mlflow_shows_and_sorts_by_it(tiny: Tiny) -> None:
    state = fold(scored(tiny("view", SCORE, *GRID, *HIGHER), -1))
    shown = view_state(state.plan)
    assert shown["orderByKey"] == "metrics.`validation/score`"
    assert shown["orderByAsc"] is False
    assert "metrics.`test/score`" in shown["selectedColumns"]
    assert not any("error" in column for column in shown["selectedColumns"])
    assert set(row_figures(state)) == {
        f"{row}/test_score{end}" for row in "abcd" for end in ("", "_sd")
    }
    write_ledger(state.config, scored(state.config, -1))
    assert overview(state.config.folder)["best"].startswith("validation/score -0.")


def test_the_default_is_what_the_loss_reports_and_objectives_follow(tiny: Tiny) -> None:
    assert tiny("d").primary_metric == Metric(name="validation/error")
    regression = tiny("d", "trial.loss.name=mse", *SEARCH)
    assert regression.primary_metric == Metric(name="validation/loss")
    assert regression.search.objectives == {"validation/loss": "min"}
    assert StudyConfig.from_dict(regression.to_dict()) == regression
    higher = tiny("d", SCORE, *HIGHER)
    assert higher.search.objectives == {"validation/score": "max"}
    assert StudyConfig.from_dict(higher.to_dict()) == higher
    assert change(higher, ["metric=validation/loss", "mode=min"]).search.objectives == {
        "validation/loss": "min"
    }
    given = tiny("d", SCORE, *SEARCH, *HIGHER, "search={objectives: {validation/loss: min}}")
    assert given.search.first == Metric(name="validation/loss")
    assert (
        best(
            configurations(fold(scored(given)).trials, ["validation/loss"]),
            {"validation/loss": "min"},
        )
        is not None
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["metric=test/error"], "nothing may be chosen by the test set; use metric=validation/err"),
        (
            ["metric=validation/r2"],
            "metric=validation/r2 .*reports loss, error; .*trial.metrics.r2",
        ),
        (
            ["metric=validation/error", "trial.loss.name=mse"],
            "loss.name=mse.*reports loss; use for example",
        ),
        (["mode=max"], "mode=max with metric=validation/error: is better the lower"),
        (["mode=up"], "mode"),
        (["metric=bits"], "metric='bits': must be the name of a figure that trials report"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(tiny: Tiny, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("refused", *overrides)


SPENT = ("telemetry/joules", "telemetry/modelled_joules", "bytes/sent")


def spending(tiny: Tiny, name: str, *overrides: str) -> tuple[StudyConfig, list[Event]]:
    """Two configurations: the first spends 9, 1 and 1 in its epochs, the second 2, 2 and 2."""
    study = tiny(
        "spending", "rows=[{label: a}]", "baseline=null", "trial.telemetry=true", *overrides,
        "space={optimizer.lr: {grid: [0.1, 0.2]}}", "search.algorithm=grid",
    )  # fmt: skip
    events = made_up_events(study)
    first = next(event["trial"] for event in events if event["event"] == "report")
    for event in events:
        if event["event"] == "report":
            spent = [9.0, 1.0, 1.0] if event["trial"] == first else [2.0] * 3
            event["metrics"][name] = spent[event["epoch"] - 1]
    return study, events


@pytest.mark.parametrize("name", SPENT)
def test_what_is_spent_adds_up_over_the_epochs(tiny: Tiny, name: str) -> None:
    study, events = spending(
        tiny, name, f"search={{objectives: {{{name}: min}}, constraints: {{{name}: '<= 7'}}}}"
    )
    state = fold(events)
    found = configurations(state.trials, [name], state.config.search.constraints)
    assert [entry.objectives[name] for entry in found] == [11.0, 6.0]
    assert [bool(entry.broken) for entry in found] == [True, False]
    assert [entry.params["optimizer.lr"] for entry in pareto_front(found, {name: "min"})] == [0.2]
    chosen = best(found, {name: "min"})
    assert chosen is not None
    assert chosen.params["optimizer.lr"] == 0.2
    measured = {value for entry in entries(state) for value in entry.values.values()}
    assert measured >= {11.0, 6.0}
    assert [row[name] for row in export_rows(state)] == [11.0, 6.0]
    assert "6" in summary_line(state, running=True)
    folder = write_ledger(study, events)
    assert Source(folder).of_row("a") == [state.trials[1].id]


@pytest.mark.parametrize("name", SPENT)
def test_a_trial_of_which_an_epoch_is_not_known_has_no_sum(tiny: Tiny, name: str) -> None:
    _, events = spending(tiny, name)
    del next(event for event in events if event["event"] == "report")["metrics"][name]
    assert math.isnan(configurations(fold(events).trials, [name])[0].objectives[name])


@pytest.mark.parametrize("name", SPENT)
def test_a_metric_that_is_spent_is_a_sum_in_the_table(tiny: Tiny, name: str) -> None:
    study, events = spending(tiny, name, f"metric={name}")
    state = fold(events)
    row = summarise(state).rows[0]
    assert (row.mean, row.params) == (6.0, {"optimizer.lr": 0.2})
    source = Source(write_ledger(study, events))
    assert source.finals == {state.trials[0].id: 11.0, state.trials[1].id: 6.0}


def test_energy_of_a_shared_gpu_is_counted_by_the_share_as_the_limit_does(tiny: Tiny) -> None:
    _, events = spending(tiny, "telemetry/joules")
    for trial in events[0]["trials"]:
        trial["config"] |= {"device": "cuda", "gpus": 0.25}
    state = fold(events)
    assert costs(state)["joules"] == joules(state) == pytest.approx(17.0 / 4)


@pytest.mark.parametrize(
    "search",
    [
        "constraints: {bytes/sent: '<= 7'}",
        "objectives: {bits: min, bytes/sent: min}, constraints: {bytes/sent: '<= 7'}",
        "objectives: {seconds: max}, constraints: {bits: '<= 32', bytes/sent: '<= 7'}",
    ],
)
def test_a_report_is_verified_by_the_configuration_that_keeps_the_constraints(
    tiny: Tiny, search: str
) -> None:
    study, events = spending(tiny, "bytes/sent", f"search={{{search}}}")
    row = summarise(fold(events)).rows[0]
    assert row.params == {"optimizer.lr": 0.2}
    assert Source(write_ledger(study, events)).of_row("a") == [row.trials[0].id]


def test_a_report_is_verified_by_the_configuration_that_has_most_seeds(tiny: Tiny) -> None:
    """As after a race in which it took part to the end."""
    study, events = spending(tiny, "bytes/sent", "seeds=[0,1]")
    first = next(trial for trial in events[0]["trials"] if trial["seed"] == 1)
    events[0]["trials"].remove(first)
    events = [event for event in events if event.get("trial") != first["id"]]
    row = summarise(fold(events)).rows[0]
    assert sorted(Source(write_ledger(study, events)).of_row("a")) == sorted(
        trial.id for trial in row.trials
    )
    assert len(row.trials) == 2


def test_a_report_is_verified_by_the_configurations_of_the_last_round(tiny: Tiny) -> None:
    study, events = spending(tiny, "bytes/sent")
    for number, trial in enumerate(events[0]["trials"]):
        trial["asked"] = {"round": number, "rounds": 2}
    row = summarise(fold(events)).rows[0]
    assert row.params == {"optimizer.lr": 0.2}
    assert Source(write_ledger(study, events)).of_row("a") == [row.trials[0].id]


def test_the_best_keeps_the_constraints_and_is_confirmed(tiny: Tiny) -> None:
    """As in the table: no infeasible configuration, and no lucky one without confirmation."""
    state = fold(scored(tiny("bests", SCORE, *SEARCH, *LOWER)))
    found = [entry for entry in entries(state) if entry.row == "float32"]
    metric = state.config.primary_metric
    order = sorted(found, key=lambda entry: entry.values[METRIC])
    infeasible = [dataclasses.replace(entry, eligible=entry is not order[0]) for entry in found]
    confirmed = [
        dataclasses.replace(entry, trials=entry.trials * 2) if entry is order[3] else entry
        for entry in found
    ]
    for these, first in ((found, order[0]), (infeasible, order[1]), (confirmed, order[3])):
        (line,) = rank_formats(these, metric)
        assert line["entry"] == first.name


def test_the_rows_of_a_point_are_one_configuration(tiny: Tiny) -> None:
    """Rows of a random search are tried at the same points: 12, not 24."""
    found = entries(fold(scored(tiny("points", SCORE, *SEARCH, *LOWER))))
    assert len(found) == 2 * len(_of_points(found))
