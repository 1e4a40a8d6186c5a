"""MLflow: complete, never doubled, exactly what the ledger says."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.cli import main
from study.config import OUTSIDE, RowConfig, StudyConfig
from study.config.keys import apply
from study.ledger.lines import seal
from study.ledger.log import FILE, Follower, Ledger
from study.ledger.state import fold
from study.plan.identity import trial_id
from study.plan.plan import make_plan
from study.text import layout_of
from study.tracking.address import page
from study.tracking.names import NAME_LENGTH, check_loggable, restore, sanitise
from study.tracking.payload import KEY_TAG
from study.tracking.reconcile import reconcile
from study.tracking.runs import runs_with_key
from study.tracking.supervisor import check_tracking
from study.tracking.view import TAG, read_view, varied_keys, view_key, view_state
from study.tracking.writer import connect, sync, tracking_lock
from tests.study.conftest import made_up_events, write_ledger
from tests.study.servers import Server
from trainers.config import TrialConfig

Tiny = Callable[..., StudyConfig]


def send(
    study: StudyConfig, events: list[Any], report: Path | None = None, uri: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Send a ledger with these events to MLflow."""
    said: list[dict[str, Any]] = []
    folder = write_ledger(study, events)
    return (
        sync(folder, uri or study.tracking, folder.parent / "artifacts", report, said.append),
        said,
    )


def report_in(folder: Path) -> Path:
    """A report's folder with one file."""
    report = folder / "report"
    report.mkdir()
    (report / "report.html").write_text("x")
    return report


def runs_of(study: StudyConfig, uri: str | None = None) -> tuple[Any, Any, list[Any]]:
    """Client, parent run, child runs."""
    client = connect(uri or study.tracking)
    experiment = client.get_experiment_by_name(study.name)
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "study"]
    children = [run for run in runs if run.data.tags["kind"] == "trial"]
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in children)
    return client, parent, children


def is_equal(study: StudyConfig, uri: str | None = None) -> bool:
    """Whether the store has exactly what the ledger has."""
    before, _ = reconcile(
        study.folder, uri or study.tracking, study.folder.parent / "artifacts", repair=False
    )
    return before.equal


def test_every_trial_is_a_run_with_everything(tracked: Tiny, tmp_path: Path) -> None:
    study = tracked("tracked", "seeds=[0,1]")
    events = made_up_events(study)
    error, said = send(study, events, report_in(tmp_path))
    assert error == ""
    assert [message["kind"] for message in said] == ["opened"]
    client, parent, children = runs_of(study)
    assert len(children) == 4
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    run = children[0]
    assert run.data.params["precision.format"] in ("float32", "lns12")
    assert run.data.params["seed"] == run.data.tags["seed"]
    assert run.data.tags["git.commit"] == "c0ffee"
    assert run.data.tags["version.ray"] == "2.60.0"
    assert (run.data.tags["layout"], run.data.tags["status"]) == ("1 worker", "finished")
    history = client.get_metric_history(run.info.run_id, "validation/error")
    report = next(
        event
        for event in events
        if event["event"] == "report" and event["trial"] == run.data.tags["trial"]
    )
    assert [point.step for point in history] == [1, 2, 3]
    assert history[0].timestamp == int(report["time"] * 1000)
    assert run.data.metrics["test/error"] == pytest.approx(0.02, abs=1e-3)
    assert run.data.metrics["bits"] in (12, 32)
    assert run.data.metrics["cfg/optimizer.lr"] == float(run.data.params["optimizer.lr"])
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("digits", "d" * 36)
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "report", "config.yaml", "plan.yaml", "environment.yaml"}  # fmt: skip
    assert "float32/test_error_percent" in parent.data.metrics
    assert is_equal(study)


def test_sending_a_ledger_again_doubles_nothing(tracked: Tiny) -> None:
    study = tracked("tracked twice")
    events = made_up_events(study)
    for _ in range(2):
        assert send(study, events)[0] == ""
    assert len(runs_of(study)[2]) == 2
    assert is_equal(study)


def test_a_profile_is_an_artifact_of_its_trial_once(tracked: Tiny) -> None:
    """Not before the trial has ended; a run that has ended is left alone, one that lost its end is
    completed with the same files."""
    study = tracked("tracked profile")
    events = made_up_events(study)
    first, second = dict.fromkeys(event["trial"] for event in events if "trial" in event)
    folder = study.folder / "profiles" / first
    folder.mkdir(parents=True)
    (folder / "rank0.txt").write_text("recorded")
    cut = next(
        number
        for number, event in enumerate(events)
        if event["event"] == "finished" and event["trial"] == first
    )
    send(study, events[:cut])
    assert profile_of(study, first) == {}
    send(study, events)
    assert profile_of(study, first) == {"profile/rank0.txt": "recorded"}
    assert profile_of(study, second) == {}
    (folder / "rank0.txt").write_text("changed since")
    send(study, events)
    assert profile_of(study, first) == {"profile/rank0.txt": "recorded"}
    client, _, children = runs_of(study)
    (run,) = [run.info.run_id for run in children if run.data.tags["trial"] == first]
    client.update_run(run, status="RUNNING")
    send(study, events)
    assert profile_of(study, first) == {"profile/rank0.txt": "changed since"}
    assert is_equal(study)


def profile_of(study: StudyConfig, trial: str) -> dict[str, str]:
    """Files of the profile that a trial's run has, with their text."""
    client, _, children = runs_of(study)
    (run,) = [run.info.run_id for run in children if run.data.tags["trial"] == trial]
    files = client.list_artifacts(run, "profile")
    return {
        file.path: Path(client.download_artifacts(run, file.path)).read_text() for file in files
    }


def test_more_seeds_keep_the_runs_there_are(tracked: Tiny) -> None:
    few = made_up_events(tracked("tracked longer"))
    study = tracked("tracked longer", "seeds=[0,1]")
    known = {event["trial"] for event in few if "trial" in event}
    more = [event for event in made_up_events(study) if event.get("trial") not in known]
    send(study, few)
    _, first, before = runs_of(study)
    send(study, [*few, *more])
    _, parent, children = runs_of(study)
    assert parent.info.run_id == first.info.run_id
    assert len(children) == 4
    assert {run.info.run_id for run in before} < {run.info.run_id for run in children}
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}


@pytest.mark.parametrize("cut", [2, 3, 4, 6, 8])
def test_a_ledger_that_was_sent_in_part_is_completed(tracked: Tiny, cut: int) -> None:
    study = tracked(f"tracked late {cut}")
    events = made_up_events(study)
    send(study, events[:cut])
    _, parent, children = runs_of(study)
    assert "RUNNING" not in {run.info.status for run in [parent, *children]}
    send(study, events)
    assert {run.info.status for run in runs_of(study)[2]} == {"FINISHED"}
    assert is_equal(study)


def retried(events: list[Any]) -> tuple[list[Any], list[Any]]:
    """A ledger whose first trial fails after its first epoch, and the same after it was retried and
    finished."""
    trial = events[0]["trials"][0]["id"]
    mine = [event for event in events if event.get("trial") == trial]
    others = [event for event in events[1:-1] if event.get("trial") != trial]
    failed = {"event": "failed", "time": mine[1]["time"] + 0.5, "trial": trial, "error": "boom"}
    first = [events[0], *mine[:2], failed, *others, {**events[-1], "outcome": "failed"}]
    rest = [
        {**event, "time": event["time"] + 600}
        for event in (events[0], mine[0], *mine[2:], events[-1])
    ]
    return first, [*first, *rest]


def test_a_retried_trial_has_every_epoch_and_no_error(tracked: Tiny) -> None:
    study = tracked("tracked retried")
    first, whole = retried(made_up_events(study))
    assert send(study, first)[0] == ""
    assert is_equal(study)
    assert send(study, whole)[0] == ""
    client, _, children = runs_of(study)
    (run,) = [run for run in children if run.data.tags["trial"] == first[0]["trials"][0]["id"]]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        1,
        2,
        3,
    ]
    assert run.data.tags["status"] == "finished"
    assert "error" not in run.data.tags
    assert is_equal(study)


def test_a_trial_that_is_tried_again_is_not_called_failed_meanwhile(tracked: Tiny) -> None:
    study = tracked("tracked trying")
    first, whole = retried(made_up_events(study))
    assert send(study, first)[0] == ""
    assert send(study, whole[:-2])[0] == ""
    (run,) = [
        run for run in runs_of(study)[2] if run.data.tags["trial"] == first[0]["trials"][0]["id"]
    ]
    assert {"status", "error"}.isdisjoint(run.data.tags)
    assert is_equal(study)


def test_the_same_study_elsewhere_has_runs_of_its_own(tracked: Tiny) -> None:
    study = tracked("tracked elsewhere")
    mine = made_up_events(study)
    theirs = [{**mine[0], "ledger": "another"}, *mine[1:]]
    send(study, theirs)
    send(study, mine)
    client = connect(study.tracking)
    experiment = client.get_experiment_by_name(study.name)
    assert len(client.search_runs([experiment.experiment_id])) == 6
    assert is_equal(study)


def test_infinity_is_a_tag_and_nan_stays_nan(tracked: Tiny) -> None:
    study = tracked("tracked infinity", "rows=[{label: a}]", "baseline=null")
    events = made_up_events(study)
    reports = [event for event in events if event["event"] == "report"]
    reports[0]["metrics"] |= {"train/loss": math.inf, "validation/loss": math.nan}
    reports[2]["metrics"] |= {"train/loss": -math.inf}
    assert send(study, events)[0] == ""
    client, _, (run,) = runs_of(study)
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [2]
    assert math.isnan(client.get_metric_history(run.info.run_id, "validation/loss")[0].value)
    assert run.data.tags["nonfinite/train/loss"] == "+inf at 1, -inf at 3"
    assert is_equal(study)


def test_settings_that_change_while_a_trial_runs_are_step_metrics(tracked: Tiny) -> None:
    study = tracked("tracked changes", "rows=[{label: a}]", "baseline=null")
    events = made_up_events(study)
    reports = [event for event in events if event["event"] == "report"]
    reports[1]["params"] = {"optimizer.lr": 0.5}
    send(study, events)
    client, _, (run,) = runs_of(study)
    history = {
        point.step: point.value
        for point in client.get_metric_history(run.info.run_id, "cfg/optimizer.lr")
    }
    assert history == {0: float(run.data.params["optimizer.lr"]), 2: 0.5}
    assert is_equal(study)


@given(st.text(max_size=40))
def test_names_are_legal_and_come_back(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(sanitise(name))
    assert restore(sanitise(name)) == name


@given(st.text(alphabet="a:3d./=", max_size=8), st.text(alphabet="a:3d./=", max_size=8))
def test_no_two_names_meet(first: str, second: str) -> None:
    assert (sanitise(first) == sanitise(second)) == (first == second)


def test_plain_names_stay_and_others_are_readable() -> None:
    assert [sanitise(name) for name in ("validation/error", "a b-c.d_e", "dp=2")] == [
        "validation/error",
        "a b-c.d_e",
        "dp:3d:2",
    ]


def test_what_mlflow_would_cut_off_is_refused(tracked: Tiny) -> None:
    """A config's names are shorter; an older study's need not be."""
    study = tracked("long", "baseline=null")
    label, name = "=" * NAME_LENGTH, "n" * 501
    for changed, said in (
        (
            replace(study, rows=[RowConfig(label=label)]),
            r"label: has .* characters as MLflow stores it, which takes 250",
        ),
        (replace(study, name=name), r"name: has 501 characters"),
    ):
        with pytest.raises(ValueError, match=said):
            check_loggable(make_plan(changed))


@pytest.mark.parametrize(
    "uri",
    ["http://127.0.0.1:9", "sqlite:////proc/nowhere/mlflow.db", f"sqlite:///{Path(__file__)}"],
)
def test_a_store_that_does_not_answer_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"no MLflow tracking store answers.*lns-study ui"):
        check_tracking(uri)


def test_the_view_has_the_columns_the_sort_and_the_charts(tracked: Tiny) -> None:
    study = tracked("tracked view")
    _, (opened,) = send(study, made_up_events(study))
    client = connect(study.tracking)
    tags = client.get_experiment(opened["experiment"]).tags
    state = read_view(tags[TAG + opened["view"]])
    assert opened["view"] == view_key({"ledger": "abc123"})
    assert state["orderByKey"] == "metrics.`validation/error`"
    assert {"tags.`row`", "params.`precision.format`", "metrics.`test/error`"} <= set(
        state["selectedColumns"]
    )
    assert {chart["type"] for chart in state["compareRunCharts"]} == {"PARALLEL", "SCATTER", "LINE"}
    assert (
        page("7", "k") == "#/experiments/7/runs?viewStateShareKey=k&workflowType=machine_learning"
    )


def test_the_view_of_a_search_shows_what_it_varies_before_it_has_trials(tiny: Tiny) -> None:
    space = (
        "space={optimizer.lr: {loguniform: [0.01, 1]}, model: {choice: [{hidden: [8]}, {hidden:"
        " [16]}]}}"
    )
    plan = make_plan(tiny("a search's view", space, "search={algorithm: tpe, num_samples: 2}"))
    event = plan.to_event()
    assert event["trials"] == []
    assert varied_keys(event) == [
        "optimizer.lr",
        "model.hidden",
        "precision.format",
        "precision.scope",
    ]
    state = view_state(event)
    assert {"params.`optimizer.lr`", "params.`model.hidden`"} <= set(state["selectedColumns"])
    charts = {chart["uuid"]: chart for chart in state["compareRunCharts"]}
    assert charts["parallel"]["selectedParams"][:2] == ["optimizer.lr", "model.hidden"]
    assert "error-optimizer.lr" in charts


def test_follower_reads_whole_lines_only_and_each_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    line = seal({"event": "report", "trial": "a", "epoch": 2, "time": 1, "metrics": {}}, 3)
    assert follower.poll() == []
    with Ledger(tmp_path) as ledger:
        ledger.append("report", trial="a", epoch=1, metrics={})
        with (tmp_path / FILE).open("ab") as file:
            file.write(line[:24])
        assert [event["epoch"] for event in follower.poll()] == [1]
        with (tmp_path / FILE).open("ab") as file:
            file.write(line[24:])
        assert [event["epoch"] for event in follower.poll()] == [2]
        assert follower.poll() == []


# --------------------------------------------------------------------------------------------------


def _break(study: StudyConfig, statement: str) -> None:
    with closing(sqlite3.connect(study.tracking.removeprefix("sqlite:///"))) as database, database:
        assert database.execute(statement).rowcount > 0


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "DELETE FROM metrics WHERE run_uuid='{run}' AND key='train/loss' AND step=2",
            "lacks train/loss at step 2",
        ),
        (
            "UPDATE metrics SET value=7 WHERE run_uuid='{run}' AND key='train/loss' AND step=2",
            "train/loss = 7.0 at step 2",
        ),
        ("DELETE FROM params WHERE run_uuid='{run}' AND key='epochs'", "lacks param epochs"),
        ("UPDATE params SET value='9' WHERE run_uuid='{run}' AND key='epochs'", "param epochs = 9"),
        (
            "UPDATE runs SET status='RUNNING' WHERE run_uuid='{run}'",
            r"its end \(FINISHED; it is RUNNING\)",
        ),
        ("UPDATE runs SET lifecycle_stage='deleted' WHERE run_uuid='{run}'", "lacks its run"),
        (
            (
                "UPDATE tags SET value='abc123/stranger' WHERE run_uuid='{run}' AND"
                " key='lns_study.key'"
            ),
            "belongs to no trial",
        ),
    ],
)
def test_reconcile_finds_and_mends(
    tracked: Tiny, capsys: pytest.CaptureFixture[str], statement: str, said: str
) -> None:
    study = tracked("reconciled")
    if not (study.folder / FILE).exists():
        send(study, made_up_events(study))
    _, _, (run, *_) = runs_of(study)
    _break(study, statement.format(run=run.info.run_id))
    words = [
        "reconcile",
        "reconciled",
        "--storage",
        study.storage,
        "--tracking-uri",
        study.tracking,
    ]
    assert main([*words, "--check"]) == 1
    assert re.search(said, capsys.readouterr().out)
    assert main(words) == 0
    assert "2 runs" in capsys.readouterr().out
    assert main([*words, "--check"]) == 0


LACKS = [
    (
        "DELETE FROM metrics WHERE run_uuid='{run}' AND key='train/loss' AND step=2",
        "lacks train/loss at step 2",
    ),
    (
        "DELETE FROM metrics WHERE run_uuid='{run}' AND key='cfg/optimizer.lr'",
        "lacks cfg/optimizer.lr at step 0",
    ),
    ("DELETE FROM params WHERE run_uuid='{run}' AND key='epochs'", "lacks param epochs"),
    ("INSERT INTO tags VALUES ('error', 'stale', '{run}')", "the tag error"),
    (
        "UPDATE tags SET value='x' WHERE run_uuid='{run}' AND key='mlflow.parentRunId'",
        "the parent run",
    ),
]


@pytest.mark.parametrize(("statement", "said"), LACKS)
def test_sync_finds_and_mends_what_a_run_that_ended_lacks(
    tracked: Tiny, capsys: pytest.CaptureFixture[str], statement: str, said: str
) -> None:
    study = tracked("synchronised")
    if not (study.folder / FILE).exists():
        send(study, made_up_events(study))
    run = runs_of(study)[2][0].info.run_id
    _break(study, statement.format(run=run))
    words = [study.slug, "--storage", study.storage]
    assert main(["reconcile", *words, "--check"]) == 1
    assert said in capsys.readouterr().out
    assert main(["sync", *words]) == 0
    assert "MLflow has everything" in capsys.readouterr().out
    assert is_equal(study)
    assert run in {run.info.run_id for run in runs_of(study)[2]}


def test_sync_deletes_nothing_and_names_what_is_too_much(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tracked("synchronised with more")
    send(study, made_up_events(study))
    run = runs_of(study)[2][0].info.run_id
    _break(
        study, f"UPDATE metrics SET value=7 WHERE key='train/loss' AND step=2 AND run_uuid='{run}'"
    )
    assert main(["sync", study.slug, "--storage", study.storage]) == 1
    said = capsys.readouterr()
    assert "train/loss = 7.0 at step 2" in said.err
    assert "lns-study reconcile" in said.err
    assert "MLflow has everything" not in said.out
    assert run in {run.info.run_id for run in runs_of(study)[2]}


@pytest.mark.parametrize("key", ["data.root", "gpus"])
def test_reconcile_keeps_runs_whose_params_changed_without_changing_the_trial(
    tracked: Tiny, key: str
) -> None:
    """The data's folder and the share of a GPU; and params and metrics of the user's own."""
    study = tracked(f"reconciled {key}")
    events = made_up_events(study)
    send(study, events)
    client, _, (run, *_) = runs_of(study)
    client.log_param(run.info.run_id, "my own", "1")
    client.log_metric(run.info.run_id, "my metric", 1.0)
    again = json.loads(json.dumps(events[0])) | {"time": events[-1]["time"] + 1}
    for trial in again["trials"]:
        trial["config"] = apply(trial["config"], {key: {"data.root": "/another", "gpus": 0.5}[key]})
    write_ledger(study, [*events, again, events[-1]])
    before, after = reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")
    assert before.false == {}
    assert after.equal
    assert client.get_run(run.info.run_id).info.lifecycle_stage == "active"
    assert main(["sync", study.slug, "--storage", study.storage]) == 0


def test_reconcile_keeps_runs_of_trials_that_were_changed_when_memory_ran_out(
    tracked: Tiny,
) -> None:
    study = tracked("reconciled relief", "rows=[{label: a}]", "baseline=null")
    planned, started, first, *rest = made_up_events(study)
    send(study, [planned, started, first])
    relieved = {
        "event": "relieved",
        "time": first["time"],
        "trial": first["trial"],
        "error": "full",
    }
    relieved["relief"] = {"memory.activation_checkpoints": True, "batch_size": 8}
    write_ledger(
        study, [planned, started, first, relieved, started | {"time": first["time"] + 0.5}, *rest]
    )
    before, after = reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")
    assert before.false == {}
    assert after.equal


@pytest.mark.parametrize("key", OUTSIDE)
def test_what_a_param_may_differ_in_is_no_part_of_a_trials_identity(key: str) -> None:
    config = apply(TrialConfig().to_dict(), {key: {"data.root": "/another", "gpus": 0.5}[key]})
    assert trial_id(TrialConfig.from_dict(config)) == trial_id(TrialConfig())


def test_a_run_that_is_made_anew_keeps_its_users_tags(tracked: Tiny) -> None:
    study = tracked("reconciled notes")
    send(study, made_up_events(study))
    client, _, (run, *_) = runs_of(study)
    client.set_tag(run.info.run_id, "mlflow.note.content", "mine")
    client.set_tag(run.info.run_id, "paper", "figure 3")
    _break(
        study, f"UPDATE params SET value='9' WHERE run_uuid='{run.info.run_id}' AND key='epochs'"
    )
    assert reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")[1].equal
    (anew,) = [
        other for other in runs_of(study)[2] if other.data.tags["trial"] == run.data.tags["trial"]
    ]
    assert anew.info.run_id != run.info.run_id
    assert (anew.data.tags["mlflow.note.content"], anew.data.tags["paper"]) == ("mine", "figure 3")


def test_settings_that_were_sent_before_a_trial_started_are_no_difference(tracked: Tiny) -> None:
    """A trial that goes on from a shorter one has epochs, and a run, before it starts."""
    study = tracked("tracked early", "rows=[{label: a}]", "baseline=null")
    planned, started, first, *rest = made_up_events(study)
    send(study, [planned, first])
    assert send(study, [planned, first, {**started, "time": first["time"] + 0.5}, *rest])[0] == ""
    assert is_equal(study)


@pytest.mark.parametrize("command", ["sync", "reconcile"])
def test_children_of_a_deleted_parent_run_are_found_and_put_under_the_new_one(
    tracked: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    study = tracked(f"orphans of {command}")
    send(study, made_up_events(study))
    client, parent, children = runs_of(study)
    client.delete_run(parent.info.run_id)
    words = [study.slug, "--storage", study.storage]
    assert main([command, *words]) == 0
    _, anew, moved = runs_of(study)  # which looks at their parent
    assert anew.info.run_id != parent.info.run_id
    assert {run.info.run_id for run in moved} == {run.info.run_id for run in children}
    assert {"config.yaml", "plan.yaml", "environment.yaml"} <= {
        file.path for file in client.list_artifacts(anew.info.run_id)
    }
    _break(study, f"UPDATE tags SET value='{parent.info.run_id}' WHERE value='{anew.info.run_id}'")
    assert main(["reconcile", *words, "--check"]) == 1
    assert "the parent run" in capsys.readouterr().out


def test_a_long_history_is_read_whole(
    tracked: Tiny, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers for many runs at once, up to a number of points."""
    from study.tracking import reconcile as module

    study = tracked("read whole", f"tracking_uri={server.uri}", "seeds=[0,1]")
    events = made_up_events(study)
    send(study, events)
    assert is_equal(study)
    monkeypatch.setattr(module, "MOST_POINTS", 5)
    assert is_equal(study)


def test_reconcile_deletes_twins(tracked: Tiny) -> None:
    study = tracked("reconciled twins")
    send(study, made_up_events(study))
    client, parent, (run, *_) = runs_of(study)
    tags = {
        KEY_TAG: run.data.tags[KEY_TAG],
        "kind": "trial",
        "mlflow.parentRunId": parent.info.run_id,
    }
    twin = client.create_run(run.info.experiment_id, tags=tags)
    before, after = reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")
    assert before.strangers == [twin.info.run_id]
    assert after.equal
    assert len(list(runs_with_key(client, run.info.experiment_id, "abc123"))) == 3


def test_only_one_process_sends_a_ledger(tracked: Tiny) -> None:
    study = tracked("tracked alone")
    folder = write_ledger(study, made_up_events(study))
    with tracking_lock(folder, 0.0) as free:
        assert free
        assert "another process" in send(study, made_up_events(study))[0]


# --------------------------------------------------------------------------------------------------


def test_through_a_real_server(tracked: Tiny, tmp_path: Path, server: Server) -> None:
    study = tracked("served", f"tracking_uri={server.uri}")
    events = made_up_events(study)
    next(event for event in events if event["event"] == "report")["metrics"]["train/loss"] = (
        math.nan
    )
    assert send(study, events, report_in(tmp_path))[0] == ""
    client, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == [
        "report/report.html"
    ]
    assert is_equal(study)


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1", "192.168.1.1"])
def test_the_server_refuses_other_hosts(server: Server, host: str) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"{server.uri}/api/2.0/mlflow/experiments/search", headers={"Host": host}
    )
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=5)


def test_state_of_a_sent_ledger_is_the_ledgers(tracked: Tiny) -> None:
    study = tracked("tracked state")
    events = made_up_events(study, outcome="interrupted")
    send(study, events)
    _, parent, _ = runs_of(study)
    assert fold(events).outcome == "interrupted"
    assert parent.info.status == "KILLED"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"workers": 1, "layout": {}}, "1 worker"),
        ({"workers": 4}, "dp 4"),
        ({"workers": 2, "layout": {"pp": 2}}, "pp 2"),
        ({"workers": 4, "layout": {"tp": 2}}, "dp 2 x tp 2"),
        ({"workers": 2, "layout": {"fsdp": True}}, "dp 2 sharded"),
    ],
)
def test_a_layout_has_a_name(config: dict[str, Any], said: str) -> None:
    assert layout_of(config) == said
