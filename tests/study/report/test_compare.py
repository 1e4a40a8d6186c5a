"""Comparison of two studies, and the other forms of a report."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from scipy.stats import ttest_1samp

from study.cli import main
from study.config import Metric, StudyConfig
from study.ledger.log import FILE
from study.ledger.state import StudyState, fold
from study.plan.plan import make_plan
from study.report.compare import compare, lines, verdict
from study.report.documents import overview
from study.report.figures.analysis import draw_front
from study.report.figures.style import LIGHT
from study.report.interactive import explore_data
from study.report.latex import escape, render_latex
from study.report.tables import remarks
from study.results.configurations import configurations, table
from study.results.importance import _all_observed, _optuna_study, importance
from study.results.statistics import best_of_budget, entries, front, interval, spread_measures
from study.results.summary import summarise
from tests.study.conftest import made_up_events, write_ledger
from tests.study.search.conftest import Pretend, errors_of

Tiny = Callable[..., StudyConfig]
SEARCH = (
    "space={optimizer.lr: {loguniform: [0.001, 1.0]}, batch_size: {choice: [16, 32]}}",
    "search.num_samples=20",
)


def made_up(study: StudyConfig, errors: dict[str, float] | None = None) -> StudyState:
    return fold(made_up_events(study, errors))


def searched(tiny: Tiny) -> StudyState:
    """A search whose error depends only on the learning rate: a parabola of its logarithm."""
    study = tiny("searched", *SEARCH)
    events = made_up_events(study)
    rates = {trial["id"]: trial["config"]["optimizer"]["lr"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            event["metrics"]["validation/error"] = (
                0.02 + 0.02 * (math.log10(rates[event["trial"]]) + 1.5) ** 2
            )
    return fold(events)


def noisy(
    study: StudyConfig, errors: dict[str, float], noise: Callable[[str, int], float]
) -> StudyState:
    """A made-up study; ``noise`` of row and seed, in per cent, is added to every trial's test
    error."""
    events = made_up_events(study, errors)
    planned = {trial["id"]: trial for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "finished":
            trial = planned[event["trial"]]
            event["metrics"] = event["metrics"] | {
                "test/error": (
                    event["metrics"]["test/error"] + noise(trial["row"], trial["seed"]) / 100
                )
            }
    return fold(events)


def test_matched_trials_are_compared_seed_by_seed(tiny: Tiny) -> None:
    """A seed's effect that all rows share is one observation, not one per row; every row's interval
    is also corrected."""
    seeds = "seeds=[0,1,2,3]"
    gaps = [0.1, 0.3, -0.1, 0.5]
    first = noisy(
        tiny("one", seeds), {"float32": 2.0, "lns matmul": 3.0}, lambda row, seed: 10.0 * seed
    )
    second = noisy(
        tiny("two", seeds),
        {"float32": 2.0, "lns matmul": 3.2},
        lambda row, seed: 10.0 * seed + gaps[seed],
    )
    found = compare(first, second)
    assert (found.matched_by, len(found.pairs), found.measured) == ("config", 8, "test error")
    assert found.contrast is not None
    assert found.contrast.difference == pytest.approx(0.3)
    assert (found.contrast.over, found.contrast.tests) == ("4 seeds", 3)
    assert found.contrast.p == pytest.approx(
        3 * ttest_1samp([gap + 0.1 for gap in gaps], 0.0).pvalue
    )
    assert [line[-1] for line in lines(found)] == ["+0.20 ± 0.63", "+0.40 ± 0.63"]
    assert "two minus one: +0.300 ± 0.6" in verdict(found)
    assert "undecided: a difference of 0.81 would have shown in 80 %" in verdict(found)


def test_configurations_that_share_a_number_are_not_mixed(tiny: Tiny) -> None:
    """A study whose space changed: new numbers beside its old ones."""
    first, second = searched(tiny), searched(tiny)
    for state in (first, second):
        for trial in state.trials:
            trial.number = (trial.number or 0) % 2
    gaps = []
    for number, trial in enumerate(second.trials):
        gaps.append(0.1 * (number % 3))
        trial.test = {"test/error": trial.test["test/error"] + gaps[-1] / 100}
    found = compare(first, second)
    assert found.contrast is not None
    assert found.difference == pytest.approx(statistics.fmean(gaps))
    assert found.contrast.difference == pytest.approx(found.difference)


def test_one_seed_of_many_configurations_is_compared_over_these(tiny: Tiny) -> None:
    first, second = searched(tiny), searched(tiny)
    for trial in second.trials:
        trial.test = {"test/error": trial.test["test/error"] + 1e-4 * (trial.number or 0)}
    found = compare(first, second)
    assert found.contrast is not None
    assert found.contrast.over == "40 configurations"


def test_other_configs_are_matched_by_row_and_one_seed_is_not_tested(tiny: Tiny) -> None:
    found = compare(made_up(tiny("one")), made_up(tiny("two", "trial.optimizer.lr=0.5")))
    assert (found.matched_by, found.contrast) == ("row", None)
    assert "too few seeds" in verdict(found)
    assert "2 pairs are equal" in verdict(found)


def test_studies_that_share_nothing_are_refused(tiny: Tiny) -> None:
    other = tiny("two", "rows=[{label: another}]", "baseline=null", "trial.epochs=2")
    with pytest.raises(ValueError, match="same label"):
        compare(made_up(tiny("one")), made_up(other))


def test_compare_leaves_nothing_in_the_working_folder(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studies = [tiny("left"), tiny("right")]
    for study in studies:
        write_ledger(study, made_up_events(study))
    assert main(["compare", "left", "right", "--storage", studies[0].storage]) == 0
    assert list(tmp_path.glob("*.png")) == []
    assert (
        (studies[0].folder / "report" / "compared-with-right.png")
        .read_bytes()
        .startswith(b"\x89PNG")
    )
    picture = tmp_path / "pairs.png"
    assert (
        main(["compare", "left", "right", "--storage", studies[0].storage, "-o", str(picture)]) == 0
    )
    assert "right minus left" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_says_that_a_ledger_is_damaged(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = [tiny("left"), tiny("right")]
    for study in studies:
        write_ledger(study, made_up_events(study))
    path = studies[1].folder / FILE
    lines_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines_[:-2], b"x" + lines_[-2][1:], lines_[-1]]))
    assert main(["compare", "left", "right", "--storage", studies[0].storage]) == 0
    assert "right: the ledger is damaged: line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("md", "report.md"),
        ("csv", "trials.csv"),
        ("parquet", "trials.parquet"),
        ("latex", "table.tex"),
    ],
)
def test_a_report_in_other_forms(
    tiny: Tiny, form: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny("formed")
    write_ledger(study, made_up_events(study))
    assert main(["report", "formed", "--storage", study.storage, "--format", form]) == 0
    assert str(study.folder / "report" / name) in capsys.readouterr().out
    assert (study.folder / "report" / name).stat().st_size > 100


def test_markdown_asked_for_is_the_reports_own_with_its_claims(tiny: Tiny) -> None:
    claim = "{name: good, claim: It works., source: a talk, value: {row: float32, at_most: 50}}"
    study = tiny("claimed", "seeds=[0,1,2]", f"claims=[{claim}]")
    write_ledger(study, made_up_events(study))
    assert main(["report", "claimed", "--storage", study.storage, "--format", "md"]) == 0
    assert "It works." in (study.folder / "report" / "report.md").read_text()


def test_latex_takes_nothing_for_its_own(tiny: Tiny) -> None:
    assert (
        escape(r"50 % of a_b & \input{x} ~ $5^2 #1 ±")
        == r"50 \% of a\_b \& \textbackslash{}input\{x\} \textasciitilde{} \$5\textasciicircum{}2"
        r" \#1 \(\pm\)"
    )
    assert r"\toprule" in render_latex(made_up(tiny("formed", "seeds=[0,1]")))


def test_importance_finds_the_key_that_matters(tiny: Tiny) -> None:
    found = importance(searched(tiny))
    assert found is not None
    assert found.configurations == 40
    assert found.single["optimizer.lr"] > 0.8
    assert max(found.pairs.values()) < 0.2
    assert found.best["optimizer.lr"] > 0.9
    places, errors = found.curves["optimizer.lr"]
    assert places[int(np.argmin(errors))] == pytest.approx(10**-1.5, rel=1.0)


def test_what_is_taken_from_the_inside_of_optuna_is_there(tiny: Tiny) -> None:
    """Names without a guarantee, so the version is capped in case one disappears."""
    from optuna._transform import _SearchSpaceTransform
    from optuna.importance import FanovaImportanceEvaluator

    state = searched(tiny)
    found = entries(state)
    domains = {domain.key: domain for domain in state.config.parsed_space.domains}
    study = _optuna_study(found, _all_observed(found, domains, ["optimizer.lr"]), "min")
    evaluator = FanovaImportanceEvaluator(n_trees=2, max_depth=2, seed=0)
    evaluator.evaluate(study, params=["optimizer.lr"])
    tree, *_ = evaluator._evaluator._trees
    assert (
        tree.get_marginal_variance(evaluator._evaluator._column_to_encoded_columns[0])
        <= tree.variance
    )
    # and two rows
    assert _SearchSpaceTransform(study.trials[0].distributions).transform(
        study.trials[0].params
    ).shape == (3,)


@pytest.mark.parametrize(("name", "next_"), [("optuna", "5.1"), ("mlflow", "3.18")])
def test_versions_are_capped_where_we_use_what_is_internal(name: str, next_: str) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (found,) = [one for one in map(Requirement, project["dependencies"]) if one.name == name]
    assert found.specifier.contains(metadata.version(name))
    assert not found.specifier.contains(next_)


def test_importance_needs_configurations(tiny: Tiny) -> None:
    assert importance(made_up(tiny("few"))) is None


def test_the_front_has_what_nothing_beats(tiny: Tiny) -> None:
    found = entries(searched(tiny))
    assert spread_measures(found) == ["metric", "bits"]
    best = front(found, ["metric", "bits"], Metric(name="validation/error"))
    for entry in best:
        assert not any(
            other.values["metric"] <= entry.values["metric"]
            and other.values["bits"] < entry.values["bits"]
            for other in found
        )
    assert (
        min(found, key=lambda entry: entry.values["metric"]).values["metric"]
        == best[0].values["metric"]
    )


@pytest.mark.parametrize(("errors", "drawn"), [([4, 3, 2, 1], True), ([2, 3, 4, 1], False)])
def test_a_front_of_two_dots_is_no_picture(tiny: Tiny, errors: list[int], drawn: bool) -> None:
    """Fewer bits cost accuracy, or the best with few bits dominates two of four."""
    bits = (12, 13, 14, 15)
    rows = ", ".join(
        f"{{label: '{n}', overrides: {{precision.format: 'lns({n},6)'}}}}" for n in bits
    )
    events = made_up_events(tiny("dots", f"rows=[{rows}]", "baseline=null"))
    of = {trial["id"]: trial["row"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            error = errors[bits.index(int(of[event["trial"]]))]
            event["metrics"] |= {"validation/error": error / 100, "bits": int(of[event["trial"]])}
    found, metric = entries(fold(events)), Metric(name="validation/error")
    assert len(found) == len(bits)
    assert (draw_front(found, ["metric", "bits"], metric, LIGHT) is not None) == drawn


def test_one_worker_sends_no_bytes_and_the_others_are_weighed_by_them(tiny: Tiny) -> None:
    study = tiny(
        "wired",
        "rows=[{label: a}, {label: b, overrides: {workers: 2}}, {label: c, overrides: {workers: 2,"
        " wire.name: int8}}]",
        "baseline=null",
    )
    events = made_up_events(study)
    of = {trial["id"]: trial["row"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report" and of[event["trial"]] != "a":
            event["metrics"]["bytes/sent"] = {"b": 4000.0, "c": 1000.0}[of[event["trial"]]]
    found = entries(fold(events))
    assert "bytes" in spread_measures(found)
    assert [entry.values.get("bytes") for entry in found] == [None, 12000.0, 3000.0]


def test_an_interval_equals_a_worked_example() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4841377, rel=1e-6)  # 4.3026527 / sqrt(3)
    assert interval([1.0]) is None


def unfinished(events: list[dict[str, Any]], trial: str) -> StudyState:
    """The ledger of a study in which one trial has not ended."""
    return fold(
        [event for event in events if event["event"] != "finished" or event["trial"] != trial]
    )


def test_a_configuration_counts_once_every_seed_has_finished(tiny: Tiny) -> None:
    """In fronts, rankings, heat maps, importance, the list of studies and gaps; before, the
    luckiest seeds counted."""
    study = tiny("seeds", *SEARCH, "seeds=[0,1]", "search.num_samples=10")
    events = made_up_events(study, {"lns matmul": 1.0})
    missing = next(
        trial
        for trial in events[0]["trials"]
        if trial["row"] == "float32" and trial["number"] == 3 and trial["seed"] == 1
    )
    numbers = {trial["id"]: trial["number"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            event["metrics"]["validation/error"] += numbers[event["trial"]] * 1e-3
    state = unfinished(events, missing["id"])
    assert {entry.name for entry in entries(state)} == {
        entry.name for entry in entries(fold(events))
    } - {"float32 #3"}
    found = importance(state)
    assert found is not None
    assert found.configurations == 19
    curves = best_of_budget(fold(events))
    assert [len(xs) for xs, _ in curves.values()] == [10, 10]  # each once its second seed has ended


def test_the_list_of_studies_has_no_lucky_seed(tiny: Tiny) -> None:
    study = tiny("lucky", "seeds=[0,1]")
    events = made_up_events(study)
    lucky = events[0]["trials"][0]["id"]
    for event in events:
        if event["event"] == "report" and event["trial"] == lucky:
            event["metrics"] = event["metrics"] | {"validation/error": 0.01}
    write_ledger(study, events)
    assert overview(study.folder)["best"] == f"validation/error {100 * (0.01 + 0.2 / 3) / 2:.2f} %"


def test_there_is_no_gap_before_both_rows_are_whole(tiny: Tiny) -> None:
    events = made_up_events(tiny("gaps", "seeds=[0,1]"), {"float32": 2.0, "lns matmul": 2.1})
    for trial in events[0]["trials"]:
        summary = summarise(unfinished(events, trial["id"]))
        assert [row.gap for row in summary.rows] == [None, None]
        assert [row.verdict for row in summary.rows] == ["", ""]
    assert summarise(fold(events)).rows[1].gap == pytest.approx(0.1)


def test_early_rounds_of_halving_are_in_no_figure(tiny: Tiny) -> None:
    """Also before a later round exists."""
    study = tiny(
        "halved",
        SEARCH[0],
        "search={scheduler: halving, num_samples: 9}",
        "rows=[]",
        "baseline=null",
    )
    pretend = Pretend(make_plan(study), errors_of)
    for trials, whole in ((9, 0), (3, 0), (1, 1)):
        pretend.run(trials)
        assert len(entries(pretend.state)) == whole
        assert sum(row.searched for row in summarise(pretend.state).rows) == whole
        conditions = [
            line["state"]
            for line in table(
                configurations(pretend.state.trials, ["validation/error"]), study.search.objectives
            )
        ]
        assert conditions.count("finished") == whole
        assert set(conditions) <= {"finished", "early round"}


def test_what_is_explored_is_plain_numbers(tiny: Tiny) -> None:
    data = explore_data(searched(tiny))
    assert data is not None
    assert (data["x"], data["y"]) == ("optimizer.lr", "validation error, %")
    assert len(data["trials"]) == 40
    assert explore_data(fold(made_up_events(tiny("nothing"))[:1])) is None


def test_what_diverged_is_left_out_by_name(tiny: Tiny) -> None:
    """A mean without it looks better than the row is."""
    study = tiny("diverged", "seeds=[0,1,2]", "metric=validation/loss")
    whole, events = made_up(study), made_up_events(study)
    lost = events[0]["trials"][1]
    for event in events:
        if event.get("trial") == lost["id"] and "metrics" in event:
            event["metrics"] |= {"validation/loss": math.nan, "test/loss": math.inf}
    state = fold(events)
    found = compare(whole, state)
    assert len(found.pairs) == 5
    assert "1 pair is left out, in which a trial diverged (lns matmul)" in verdict(found)
    assert "left out" not in verdict(compare(whole, whole))
    (said,) = [line for line in remarks(state, summarise(state)) if line.startswith("DIVERGED")]
    assert said == (
        "DIVERGED: 1 of 6 trials, whose last loss is not finite (lns matmul: 1 of 3); their"
        " configurations are left out of selections, tests, pictures and importance, but count in"
        " the mean of a row without a search."
    )
    assert not [line for line in remarks(whole, summarise(whole)) if "DIVERGED" in line]
