"""MLflow is compared with the ledger and repaired."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from study.api import run
from study.cli import main
from study.config import OUTSIDE, StudyConfig
from study.config.keys import apply
from study.ledger.log import FILE, read_ledger
from study.ledger.state import fold
from study.plan.identity import trial_id
from study.report.write import write_report
from study.tracking.mlflow_runs import runs_with_key
from study.tracking.payload import KEY_TAG, MARK_TAG
from study.tracking.reconcile import reconcile
from study.tracking.writer import connect
from tests.study.conftest import TINY, copy_database, made_up_events, write_ledger
from tests.study.servers import Server
from tests.study.tracking.conftest import Tiny, break_store, is_equal, runs_of, send
from trainers.config import TrialConfig


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
    break_store(study, statement.format(run=run.info.run_id))
    words = ["mlflow", "verify", "reconciled", "--storage", study.storage]
    words += ["--tracking-uri", study.tracking]
    assert main(words) == 1
    assert re.search(said, capsys.readouterr().out)
    assert main([*words, "--repair"]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert main(words) == 0


def test_the_final_figure_is_the_latest_where_the_last_epoch_reported_one(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's own loop may report the test error and also return a different one."""
    study = tracked("final", "seeds=[0,1,2]")
    events = made_up_events(study)
    for event in events:
        if event["event"] == "report":
            event["metrics"]["test/error"] = 0.5
            event["time"] = at = round(event["time"], 3) + 0.0009
        elif event["event"] == "finished":
            event["metrics"]["test/error"], event["time"] = 0.3, at
    send(study, events)
    client, _, runs = runs_of(study)
    assert [run.data.metrics["test/error"] for run in runs] == [0.3] * len(runs)
    assert is_equal(study)
    write_report(fold(events), study.folder / "report")
    words = ["final", "--storage", study.storage, "--tracking-uri", study.tracking]
    assert main(["mlflow", "sync", *words]) == 0
    assert main(["report", *words, "--verify"]) == 0, capsys.readouterr().out
    assert main(["mlflow", "verify", *words]) == 0
    history = client.get_metric_history(runs[0].info.run_id, "test/error")
    assert len(history) == study.trial.epochs + 1


LACKS = [
    (
        "DELETE FROM metrics WHERE run_uuid='{run}' AND key='train/loss' AND step=2",
        "lacks train/loss at step 2",
    ),
    ("DELETE FROM params WHERE run_uuid='{run}' AND key='bits'", "lacks param bits"),
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
    break_store(study, statement.format(run=run))
    words = [study.slug, "--storage", study.storage]
    assert main(["mlflow", "verify", *words]) == 1
    assert said in capsys.readouterr().out
    assert main(["mlflow", "sync", *words]) == 0
    assert "MLflow has everything" in capsys.readouterr().out
    assert is_equal(study)
    assert run in {run.info.run_id for run in runs_of(study)[2]}


def test_sync_deletes_nothing_and_names_what_is_too_much(
    tracked: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tracked("synchronised with more")
    send(study, made_up_events(study))
    run = runs_of(study)[2][0].info.run_id
    break_store(
        study, f"UPDATE metrics SET value=7 WHERE key='train/loss' AND step=2 AND run_uuid='{run}'"
    )
    assert main(["mlflow", "sync", study.slug, "--storage", study.storage]) == 1
    said = capsys.readouterr()
    assert "train/loss = 7.0 at step 2" in said.err
    assert "lns-study mlflow verify --repair" in said.err
    assert "MLflow has everything" not in said.out
    assert run in {run.info.run_id for run in runs_of(study)[2]}


def test_what_helps_where_the_database_is_damaged_is_said(
    tracked: Tiny, database: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text in it is damaged. The campaign of faults (tests/faults) follows the message."""
    place = tmp_path / "mlflow.db"
    copy_database(database, place)
    study = tracked("damaged", f"tracking_uri=sqlite:///{place}")
    assert send(study, made_up_events(study))[0] == ""
    break_store(study, "UPDATE params SET value=CAST(x'64be' AS TEXT)")
    words = [study.slug, "--storage", study.storage, "--tracking-uri", study.tracking]
    for command in (["mlflow", "sync"], ["mlflow", "verify", "--repair"], ["report"]):
        assert main([*command, *words]) == 1
        assert f"if {place} is damaged, end what uses it and rename it" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_say_what_helps_where_the_database_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database whose creation was interrupted: some tables exist."""
    place = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(place)) as half:
        half.execute("CREATE TABLE datasets (dataset_uuid TEXT)")
    (tmp_path / "tiny.yaml").write_text(TINY)
    to = {"storage": str(tmp_path / "studies"), "tracking_uri": f"sqlite:///{place}"}
    words = ["run", str(tmp_path / "tiny.yaml"), *(f"{key}={value}" for key, value in to.items())]
    helps = f"if {place} is damaged, end what uses it and rename it"
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "table datasets already exists" in said
    assert helps in said
    assert set(run(tmp_path / "tiny.yaml", **to).trials["status"]) == {"finished"}
    assert helps in capsys.readouterr().out


@pytest.mark.parametrize("key", ["data.root", "gpus"])
def test_reconcile_keeps_runs_whose_params_changed_without_changing_the_trial(
    tracked: Tiny, key: str
) -> None:
    """The data's folder and the share of a GPU; and the user's own params and metrics."""
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
    assert main(["mlflow", "sync", study.slug, "--storage", study.storage]) == 0


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
    break_store(
        study, f"UPDATE params SET value='9' WHERE run_uuid='{run.info.run_id}' AND key='epochs'"
    )
    assert reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")[1].equal
    (anew,) = [
        other for other in runs_of(study)[2] if other.data.tags["trial"] == run.data.tags["trial"]
    ]
    assert anew.info.run_id != run.info.run_id
    assert (anew.data.tags["mlflow.note.content"], anew.data.tags["paper"]) == ("mine", "figure 3")


@pytest.mark.parametrize("command", ["sync", "verify --repair"])
def test_children_of_a_deleted_parent_run_are_found_and_put_under_the_new_one(
    tracked: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    study = tracked(f"orphans of {command}")
    send(study, made_up_events(study))
    client, parent, children = runs_of(study)
    client.delete_run(parent.info.run_id)
    words = [study.slug, "--storage", study.storage]
    assert main(["mlflow", *command.split(), *words]) == 0
    _, anew, moved = runs_of(study)  # which looks at their parent
    assert anew.info.run_id != parent.info.run_id
    assert {run.info.run_id for run in moved} == {run.info.run_id for run in children}
    assert {"config.yaml", "plan.yaml", "environment.yaml"} <= {
        file.path for file in client.list_artifacts(anew.info.run_id)
    }
    break_store(
        study, f"UPDATE tags SET value='{parent.info.run_id}' WHERE value='{anew.info.run_id}'"
    )
    assert main(["mlflow", "verify", *words]) == 1
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
        MARK_TAG: run.data.tags[MARK_TAG],
        "kind": "trial",
        "mlflow.parentRunId": parent.info.run_id,
    }
    twin = client.create_run(run.info.experiment_id, tags=tags)
    before, after = reconcile(study.folder, study.tracking, study.folder.parent / "artifacts")
    assert before.strangers == [twin.info.run_id]
    assert after.equal
    assert len(list(runs_with_key(client, run.info.experiment_id, "abc123"))) == 3


def copied(study: StudyConfig, place: Path) -> StudyConfig:
    """A copy of a study, as ``cp -r`` makes it, with the same MLflow store."""
    copy = replace(study, storage=str(place), tracking_uri=study.tracking)
    shutil.copytree(study.folder, copy.folder)
    return copy


def go_on(study: StudyConfig, seeds: list[int]) -> None:
    """Train more seeds, and send them."""
    more = made_up_events(replace(study, seeds=[*study.seeds, *seeds]))
    known = fold(read_ledger(study.folder)).known
    added = [event for event in more if event.get("trial") not in known]
    added = [event | {"time": time.time()} for event in added]
    assert send(study, [*read_ledger(study.folder), *added])[0] == ""


def stored_runs(study: StudyConfig) -> dict[str, Any]:
    """Return all copies' runs of a study in their store, by id, without deleting any."""
    client = connect(study.tracking)
    experiment = client.get_experiment_by_name(study.name)
    return {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}


def points_of(study: StudyConfig, runs: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the history of the training loss in runs of a study's store."""
    client = connect(study.tracking)
    return {id_: [*map(str, client.get_metric_history(id_, "train/loss"))] for id_ in runs}


@pytest.mark.parametrize("seeds", [[1], [2]], ids=["the same trial", "another trial"])
def test_two_copies_of_a_study_leave_each_others_runs_alone(
    tracked: Tiny, tmp_path: Path, seeds: list[int]
) -> None:
    """They do not delete each other's runs: whatever each sends, the other's runs stay
    unchanged."""
    first = tracked(f"copied {seeds}", "seeds=[0]")
    send(first, made_up_events(first))
    second = copied(first, tmp_path / "elsewhere")
    go_on(first, [1])
    had = stored_runs(first)
    points = points_of(first, had)
    go_on(second, seeds)
    for study in (second, first, second):
        before, after = reconcile(study.folder, study.tracking, tmp_path / "artifacts")
        assert before is after, [*before.differences()]
        assert after.runs == 4
    assert stored_runs(first).keys() > had.keys()
    assert points_of(first, had) == points


def test_a_copy_of_a_running_study_deletes_nothing_of_its_runs(
    tracked: Tiny, tmp_path: Path
) -> None:
    """The copy knows less, and nothing that the original lacks."""
    study = tracked("copied while it runs", "seeds=[0]", "rows=[{label: a}]", "baseline=null")
    events = made_up_events(study)
    send(study, events[:3])
    copy = copied(study, tmp_path / "elsewhere")
    send(study, events)
    (run,) = runs_of(study)[2]
    for mended in (copy, study, copy, study):
        assert reconcile(mended.folder, study.tracking, tmp_path / "artifacts")[1].equal
    stored = stored_runs(study)
    assert run.info.run_id in stored
    assert len(stored) == 4


def test_a_study_that_was_moved_keeps_its_runs(tracked: Tiny, tmp_path: Path) -> None:
    study = tracked("moved away", "seeds=[0]")
    send(study, made_up_events(study))
    had = stored_runs(study)
    moved = copied(study, tmp_path / "elsewhere")
    shutil.rmtree(study.folder)
    go_on(moved, [1])
    assert reconcile(moved.folder, study.tracking, tmp_path / "artifacts")[0].equal
    now = stored_runs(study)
    assert now.keys() > had.keys()
    assert len(now) == 5


@pytest.mark.parametrize(("file", "equal"), [("/there/net.py", True), ("/here/a.py", False)])
def test_code_is_the_same_in_another_folder(
    tracked: Tiny, tmp_path: Path, file: str, equal: bool
) -> None:
    """As for a study that is moved with its code: no run is made again."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "net.py").write_text("from torch.nn import Flatten as net\n")
    name = f"{tmp_path}/here/net.py:net"
    (tmp_path / "tiny.yaml").write_text(TINY.replace("hidden: [16]", f"name: '{name}'"))
    study = replace(tracked("moved code"), name=f"moved code {equal}")
    events = made_up_events(study)
    send(study, events)
    assert name in json.dumps(events)
    write_ledger(study, json.loads(json.dumps(events).replace("/here/net.py", file)))
    assert is_equal(study) == equal


def test_a_false_run_of_an_earlier_version_gets_a_true_one_beside_it(
    tracked: Tiny, tmp_path: Path
) -> None:
    """It has no mark, and may belong to another copy."""
    study = tracked("without marks", "seeds=[0]")
    send(study, made_up_events(study))
    run = runs_of(study)[2][0].info.run_id
    break_store(study, f"DELETE FROM tags WHERE key='{MARK_TAG}' AND run_uuid='{run}'")
    break_store(study, f"UPDATE metrics SET value=7 WHERE key='train/loss' AND run_uuid='{run}'")
    before, after = reconcile(study.folder, study.tracking, tmp_path / "artifacts")
    assert (len(before.false), after.equal) == (1, True)
    assert run in stored_runs(study)
    assert reconcile(study.folder, study.tracking, tmp_path / "artifacts")[0].equal


class Killed(BaseException):
    """End the process here."""


class Mortal:
    """A client of the real store whose process is killed before its n-th change."""

    CHANGES = ("create", "delete", "log", "set", "update", "restore")

    def __init__(self, client: Any, changes: int) -> None:
        self._client, self._left = client, changes

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if not name.startswith(self.CHANGES):
            return call

        def change(*arguments: Any, **named: Any) -> Any:
            if self._left == 0:
                raise Killed
            self._left -= 1
            return call(*arguments, **named)

        return change


def test_reconcile_killed_anywhere_keeps_the_users_tags_and_ends_right_the_next_time(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from study.tracking import reconcile as module

    study = tracked("reconciled killed", "rows=[{label: a}]", "baseline=null")
    send(study, made_up_events(study))
    client, _, (run,) = runs_of(study)
    client.set_tag(run.info.run_id, "mlflow.note.content", "mine")
    artifacts = study.folder.parent / "artifacts"
    killed = True
    for changes in range(100):
        run = runs_of(study)[2][0].info.run_id
        break_store(study, f"UPDATE params SET value='9' WHERE run_uuid='{run}' AND key='epochs'")
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(module, "connect", lambda uri, n=changes: Mortal(connect(uri), n))
            reconcile(study.folder, study.tracking, artifacts)
            killed = False
        tags = [run.data.tags.get("mlflow.note.content") for run in runs_of(study)[2]]
        assert "mine" in tags
        assert reconcile(study.folder, study.tracking, artifacts)[1].equal
        (only,) = runs_of(study)[2]
        assert only.data.tags["mlflow.note.content"] == "mine"
        if not killed:
            return
    raise AssertionError("it never came to its end")
