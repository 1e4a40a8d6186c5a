"""Two studies side by side, the other forms of a report, the live page."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from study.analysis import _optuna_study, entries, front, groups, holm, importance, interval, spread_measures
from study.cli import main
from study.compare import compare, lines, verdict
from study.config import StudyConfig
from study.dashboard import Page, make_app
from study.interactive import explore_data
from study.ledger import Ledger
from study.report_formats import escape, render_latex
from study.state import StudyState, fold
from tests.study.conftest import made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
SEARCH = ("space={optimizer.lr: {loguniform: [0.001, 1.0]}, batch_size: {choice: [16, 32]}}", "search.num_samples=20")


def made_up(study: StudyConfig, errors: dict[str, float] | None = None) -> StudyState:
    return fold(made_up_events(study, errors))


def searched(tiny: Tiny) -> StudyState:
    """A search whose error is a parabola of the logarithm of the learning rate, and of nothing else."""
    study = tiny("searched", *SEARCH)
    events = made_up_events(study)
    rates = {trial["id"]: trial["config"]["optimizer"]["lr"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            event["metrics"]["validation/error"] = 0.02 + 0.02 * (math.log10(rates[event["trial"]]) + 1.5) ** 2
    return fold(events)


def test_matched_trials_are_paired_and_tested(tiny: Tiny) -> None:
    seeds = "seeds=[0,1,2,3]"
    first = made_up(tiny("one", seeds), {"float32": 2.0, "lns matmul": 3.0})
    second = made_up(tiny("two", seeds), {"float32": 2.5, "lns matmul": 3.25})
    found = compare(first, second)
    assert (found.matched_by, len(found.pairs), found.measured) == ("config", 8, "test error")
    assert found.difference == pytest.approx(0.375)
    assert found.p == pytest.approx(2 / 2**8)
    assert [line[-1][:5] for line in lines(found)] == ["+0.50", "+0.25"]
    assert "two minus one: +0.375" in verdict(found)


def test_other_configs_are_matched_by_row_and_few_pairs_are_not_tested(tiny: Tiny) -> None:
    found = compare(made_up(tiny("one")), made_up(tiny("two", "trial.optimizer.lr=0.5")))
    assert (found.matched_by, found.p) == ("row", None)
    assert "too few pairs" in verdict(found)
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
    assert (studies[0].folder / "report" / "compared-with-right.png").read_bytes().startswith(b"\x89PNG")
    picture = tmp_path / "pairs.png"
    assert main(["compare", "left", "right", "--storage", studies[0].storage, "-o", str(picture)]) == 0
    assert "right minus left" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("form", "name"), [("md", "report.md"), ("csv", "trials.csv"), ("parquet", "trials.parquet"), ("latex", "table.tex")]
)
def test_a_report_in_other_forms(tiny: Tiny, form: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    study = tiny("formed")
    write_ledger(study, made_up_events(study))
    assert main(["report", "formed", "--storage", study.storage, "--format", form]) == 0
    assert str(study.folder / "report" / name) in capsys.readouterr().out
    assert (study.folder / "report" / name).stat().st_size > 100


def test_latex_takes_nothing_for_its_own(tiny: Tiny) -> None:
    assert escape(r"50 % of a_b & \input{x} ~ $5^2 #1 ±") == (
        r"50 \% of a\_b \& \textbackslash{}input\{x\} \textasciitilde{} \$5\textasciicircum{}2 \#1 \(\pm\)"
    )
    assert r"\toprule" in render_latex(made_up(tiny("formed", "seeds=[0,1]")))


def test_importance_finds_the_key_that_matters(tiny: Tiny) -> None:
    found = importance(searched(tiny))
    assert found is not None
    assert found.configurations == 40
    assert found.single["optimizer.lr"] > 0.8
    assert max(found.pairs.values()) < 0.2
    places, errors = found.curves["optimizer.lr"]
    assert places[int(np.argmin(errors))] == pytest.approx(10**-1.5, rel=1.0)


def test_what_is_taken_from_the_inside_of_optuna_is_there(tiny: Tiny) -> None:
    """Names without a promise, so the version is capped where one may go."""
    from optuna._transform import _SearchSpaceTransform
    from optuna.importance import FanovaImportanceEvaluator

    state = searched(tiny)
    study, names = _optuna_study(
        entries(state), ["optimizer.lr"], {domain.key: domain for domain in state.config.parsed_space.domains}
    )
    evaluator = FanovaImportanceEvaluator(n_trees=2, max_depth=2, seed=0)
    evaluator.evaluate(study, params=names)
    (tree, *_) = evaluator._evaluator._trees
    assert tree.get_marginal_variance(evaluator._evaluator._column_to_encoded_columns[0]) <= tree.variance
    assert _SearchSpaceTransform(study.trials[0].distributions).transform(study.trials[0].params).shape == (3,)  # and two rows


@pytest.mark.parametrize(("name", "next_"), [("optuna", "5.1"), ("mlflow", "3.18")])
def test_versions_are_capped_where_we_use_what_is_internal(name: str, next_: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (found,) = [one for one in map(Requirement, project["dependencies"]) if one.name == name]
    assert found.specifier.contains(metadata.version(name))
    assert not found.specifier.contains(next_)


def test_importance_needs_configurations(tiny: Tiny) -> None:
    assert importance(made_up(tiny("few"))) is None


def test_the_front_has_what_nothing_beats(tiny: Tiny) -> None:
    found = entries(searched(tiny))
    assert spread_measures(found) == ["error", "bits"]
    best = front(found, ["error", "bits"])
    for entry in best:
        assert not any(
            other.values["error"] <= entry.values["error"] and other.values["bits"] < entry.values["bits"] for other in found
        )
    assert min(found, key=lambda entry: entry.values["error"]).values["error"] == best[0].values["error"]


def test_one_worker_sends_no_bytes_and_the_others_are_weighed_by_them(tiny: Tiny) -> None:
    study = tiny("wired", "rows=[{label: a}, {label: b, overrides: {workers: 2}}, {label: c, overrides: {workers: 2, wire.name: int8}}]",
                 "baseline=null")  # fmt: skip
    events = made_up_events(study)
    of = {trial["id"]: trial["row"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report" and of[event["trial"]] != "a":
            event["metrics"]["bytes/sent"] = {"b": 4000.0, "c": 1000.0}[of[event["trial"]]]
    found = entries(fold(events))
    assert "bytes" in spread_measures(found)
    assert [entry.values.get("bytes") for entry in found] == [None, 12000.0, 3000.0]


def test_holm_and_interval_equal_worked_examples() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4841377, rel=1e-6)  # 4.3026527 / sqrt(3)
    assert interval([1.0]) is None


def test_groups_are_tested_where_they_are_large_enough(tiny: Tiny) -> None:
    assert [group.category for group in groups(searched(tiny))] == ["row"]
    assert groups(searched(tiny))[0].overall == pytest.approx(1.0, abs=0.05)
    assert groups(made_up(tiny("few")))[0].overall is None


def test_what_is_explored_is_plain_numbers(tiny: Tiny) -> None:
    data = explore_data(searched(tiny))
    assert data is not None
    assert (data["x"], data["y"]) == ("optimizer.lr", "validation error, %")
    assert len(data["trials"]) == 40
    assert explore_data(fold(made_up_events(tiny("nothing"))[:1])) is None


def test_the_live_page_grows_with_the_ledger(tiny: Tiny) -> None:
    study = tiny("live")
    events = made_up_events(study)
    write_ledger(study, events[:6])
    client = make_app(Page(study.folder, every=0.0), "secret").test_client()
    for path in ("/", "/?token=", "/?token=wrong"):
        assert client.get(path, headers={"Host": "127.0.0.1:5001"}).status_code == 401
    client.set_cookie("lns_study_dashboard", "wrong")
    assert client.get("/", headers={"Host": "127.0.0.1:5001"}).status_code == 401
    let_in = client.get("/?token=secret", headers={"Host": "127.0.0.1:5001"})
    assert (let_in.status_code, let_in.headers["Location"]) == (303, "/")
    client.set_cookie("lns_study_dashboard", "secret", domain="127.0.0.1")
    client.set_cookie("lns_study_dashboard", "secret")
    assert b"1 of 2 trials have ended" in client.get("/", headers={"Host": "127.0.0.1:5001"}).data
    write_ledger(study, events)
    answer = client.get("/", headers={"Host": "localhost:5001"})
    assert b"2 of 2 trials have ended" in answer.data
    assert b'http-equiv="refresh"' not in answer.data
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_the_live_page_of_a_study_that_has_ended_is_not_running(tiny: Tiny) -> None:
    """Its last event is written while it still holds the lock."""
    study = tiny("live end")
    write_ledger(study, made_up_events(study))
    client = make_app(Page(study.folder, every=0.0)).test_client()
    with Ledger(study.folder):
        assert b"running: 2 of 2 trials" in client.get("/", headers={"Host": "localhost"}).data
    answer = client.get("/", headers={"Host": "localhost"}).data
    assert b"finished: 2 of 2 trials" in answer
    assert b'http-equiv="refresh"' not in answer
