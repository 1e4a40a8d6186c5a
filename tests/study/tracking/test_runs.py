"""MLflow is complete, without repeats, and has exactly the ledger's data."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from study.config import StudyConfig
from study.engines.simulate import REQUESTS_A_TRIAL
from study.ledger.lines import seal
from study.ledger.log import FILE, Follower, Ledger
from study.ledger.state import fold
from study.ops.repair.sources import Known, Names, add_known_to_mlflow
from study.tracking import writer
from study.tracking.payload import datasets_of
from study.tracking.writer import connect, tracking_lock
from study.tracking.writer_supervisor import check_tracking
from tests.study.conftest import made_up_events, write_ledger
from tests.study.servers import Server
from tests.study.tracking.conftest import Tiny, break_store, is_equal, report_in, runs_of, send


def test_a_trial_has_the_data_set_that_it_trained_on_or_none() -> None:
    size = {"train": 90, "validation": 10, "test": 5}
    digits = {"name": "digits", "args": {}, "root": None, "source": "digits", **size}
    plan = {"data": [digits | {"digest": "d" * 64, "files": "f" * 64}]}

    def logged(**data: Any) -> list[tuple[str, dict[str, Any]]]:
        chosen = {"name": "digits", "args": {}, "root": None, "validation_size": 10, **data}
        trial = SimpleNamespace(own_loop=False, config={"data": chosen})
        found = [entry.dataset for entry in datasets_of(plan, trial)]
        return [(entry.digest, json.loads(entry.profile)) for entry in found]

    assert logged(train_size=90) == [("d" * 36, {"examples": size, "sha256": "d" * 64})]
    part = {"examples": size | {"train": 22}, "files and examples": f"{'f' * 24}-22"}
    assert logged(train_size=22) == [(f"{'f' * 24}-22", part)]
    assert logged(train_size=90, args={"noise": 0.5}) == []


def test_runs_follow_rows_that_are_renamed_and_means_seeds_that_are_taken_out(
    tracked: Tiny,
) -> None:
    rows = "rows=[{{label: {}}}, {{label: {}, overrides: {{precision.format: lns12}}}}]"
    before = tracked("renamed", rows.format("a", "b"), "baseline=null", "seeds=[0,1]")
    after = tracked("renamed", rows.format("b", "a"), "baseline=null", "seeds=[0]")
    events = made_up_events(before, {"a": 2.0, "b": 5.0})
    assert send(before, events)[0] == ""
    client, _, (one, *_) = runs_of(before)
    client.update_run(one.info.run_id, name="the one for the talk")
    planned = made_up_events(after)[0] | {"time": events[-1]["time"] + 1}
    replanned = [*events, planned, events[-1] | {"time": events[-1]["time"] + 2}]
    write_ledger(before, replanned)
    assert not is_equal(before)
    assert send(before, replanned)[0] == ""
    _, parent, children = runs_of(before)
    for run in children:
        row = {"float32": "b", "lns12": "a"}[run.data.params["precision.format"]]
        named = "the one for the talk" if run.info.run_id == one.info.run_id else None
        if run.data.tags["seed"] == "0":  # the others no longer belong to the plan
            assert run.data.tags["row"] == row
            assert run.info.run_name == (named or f"{row}, seed 0")
        assert run.info.status == "FINISHED"
    assert parent.data.metrics["a/test_error_percent"] == pytest.approx(5.0)
    assert parent.data.metrics["b/test_error_percent"] == pytest.approx(2.0)
    assert is_equal(before)


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
    assert run.data.params["bits"] == {"float32": "32", "lns12": "12"}[run.data.tags["format"]]
    measured = {
        f"{split}/{name}" for split in ("train", "validation") for name in ("loss", "error")
    }
    assert set(run.data.metrics) == measured | {"test/loss", "test/error", "seconds"}
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
    """Not before the trial has ended. An ended run is left alone; a run that lacks its end is
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
    """Return the profile files of a trial's run, with their text."""
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
    """A ledger whose first trial fails after its first epoch, and the same ledger after a
    successful retry."""
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


def test_settings_that_earlier_versions_sent_as_metrics_are_ignored(tracked: Tiny) -> None:
    """Such an experiment has the ledger's data, and a study of it continues in it."""
    study = tracked("tracked earlier", "rows=[{label: a}]", "baseline=null")
    events = made_up_events(study)
    cut = next(n for n, event in enumerate(events) if event.get("epoch") == 2)
    send(study, events[:cut])
    client, _, (run,) = runs_of(study)
    for name, step in {"cfg/optimizer.lr": 0, "cfg/epochs": 3, "bits": 0}.items():
        client.log_metric(run.info.run_id, name, 0.5, step=step)
    assert send(study, events)[0] == ""
    break_store(study, f"DELETE FROM params WHERE key='bits' AND run_uuid='{run.info.run_id}'")
    assert is_equal(study)
    known: dict[str, Known] = {}
    names = Names(reported={"validation/error"}, final={"test/error"})
    add_known_to_mlflow(known, study.name, "abc123", study.tracking, names, lambda mark: True)
    (found,) = known.values()
    assert sorted(found.epochs) == [1, 2, 3]
    assert not [name for epoch in found.epochs.values() for name in epoch if "/" not in name]
    assert not [name for epoch in found.epochs.values() for name in epoch if "cfg" in name]


def test_a_comparison_opens_on_the_metric(tracked: Tiny) -> None:
    """MLflow's page opens on the metric that a run's list has first."""
    study = tracked("tracked first")
    send(study, made_up_events(study))
    _, _, runs = runs_of(study)
    assert [next(iter(run.data.metrics)) for run in runs] == ["validation/error"] * 2


@pytest.mark.parametrize(
    "uri",
    ["http://127.0.0.1:9", "sqlite:////proc/nowhere/mlflow.db", f"sqlite:///{Path(__file__)}"],
)
def test_a_store_that_does_not_answer_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"no MLflow tracking store answers.*lns-study ui"):
        check_tracking(uri)


def test_follower_reads_whole_lines_only_and_each_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    line = seal({"event": "report", "trial": "a", "epoch": 2, "time": 1, "metrics": {}}, 3)
    assert follower.poll() == []
    with Ledger(tmp_path) as ledger:
        ledger.append({"event": "report", "trial": "a", "epoch": 1, "metrics": {}})
        with (tmp_path / FILE).open("ab") as file:
            file.write(line[:24])
        assert [event["epoch"] for event in follower.poll()] == [1]
        with (tmp_path / FILE).open("ab") as file:
            file.write(line[24:])
        assert [event["epoch"] for event in follower.poll()] == [2]
        assert follower.poll() == []


# --------------------------------------------------------------------------------------------------


def test_settings_that_were_sent_before_a_trial_started_are_no_difference(tracked: Tiny) -> None:
    """A trial that continues a shorter one has epochs, and a run, before it starts."""
    study = tracked("tracked early", "rows=[{label: a}]", "baseline=null")
    planned, started, first, *rest = made_up_events(study)
    send(study, [planned, first])
    assert send(study, [planned, first, {**started, "time": first["time"] + 0.5}, *rest])[0] == ""
    assert is_equal(study)


def test_only_one_process_sends_a_ledger(tracked: Tiny) -> None:
    study = tracked("tracked alone")
    folder = write_ledger(study, made_up_events(study))
    with tracking_lock(folder, 0.0) as free:
        assert free
        assert "another process" in send(study, made_up_events(study))[0]


# --------------------------------------------------------------------------------------------------


def test_through_a_real_server(
    tracked: Tiny, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a metric that is NaN, which simplejson refuses; requests prefers simplejson if it is
    installed."""
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
    strict = SimpleNamespace(loads=partial(json.loads, parse_constant=int), dumps=json.dumps)
    monkeypatch.setattr(requests.models, "complexjson", strict)
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


def test_a_database_that_does_not_answer_is_not_left_to_mlflows_two_minutes_of_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(uri: str) -> None:
        raise AssertionError("asked MLflow")

    monkeypatch.setattr("study.tracking.writer_supervisor.connect", waits)
    with pytest.raises(ValueError, match=r"ada:\*\*\*@127.0.0.1:9.*Connection refused"):
        check_tracking("postgresql://ada:secret@127.0.0.1:9/studies")


class Counted:
    """A client that counts its calls."""

    def __init__(self, client: Any, calls: Counter[str]) -> None:
        self._client, self._calls = client, calls

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            return call(*args, **kwargs)

        return counted


def test_a_trial_makes_as_many_requests_as_a_simulation_says(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls for two more trials; each of these methods is one request to a server."""
    found: list[Counter[str]] = []
    for name, seeds in (("one seed", "seeds=[0]"), ("two seeds", "seeds=[0,1]")):
        calls: Counter[str] = Counter()
        monkeypatch.setattr(
            writer, "connect", lambda uri, calls=calls: Counted(connect(uri), calls)
        )
        study = tracked(name, seeds)
        assert send(study, made_up_events(study))[0] == ""
        found.append(calls)
    more = found[1] - found[0]
    assert more.total() == 2 * REQUESTS_A_TRIAL


def test_no_file_that_a_study_links_to_is_sent(tracked: Tiny, tmp_path: Path) -> None:
    """Such as a report, a profile, or a folder that a stranger's ledger calls a checkpoint."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "id_rsa").write_text("a secret of the reader's")
    study = tracked("linked", "rows=[{label: a}]", "baseline=null", "seeds=[0]")
    events = made_up_events(study)
    trial = events[1]["trial"]
    checkpoint = {"event": "checkpoint", "time": events[2]["time"], "trial": trial, "epoch": 1}
    events.insert(3, checkpoint | {"path": str(home)})
    report = report_in(write_ledger(study, events))
    (report / "link").symlink_to(home / "id_rsa")
    (study.folder / "profiles").mkdir()
    (study.folder / "profiles" / trial).symlink_to(home)
    assert send(study, events, report)[0] == ""
    sent = [path for path in (study.folder.parent / "artifacts").rglob("*") if path.is_file()]
    assert sent
    assert not [path for path in sent if "a secret" in path.read_bytes().decode(errors="replace")]


def test_a_ledger_whose_trials_would_name_folders_elsewhere_is_refused(tracked: Tiny) -> None:
    study = tracked("elsewhere")
    planned, *events = made_up_events(study)
    planned["trials"][0]["id"] = "../../home"
    with pytest.raises(ValueError, match="ids have letters"):
        send(study, [planned, *events])
