"""MLflow: complete, never doubled, never in the way of training."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.tracking import Tracker, check_tracking, connect
from study.ui import command, stop
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]


def send(
    study: StudyConfig, events: list[Any], storage: Path, report: Path | None = None, uri: str | None = None
) -> tuple[str, list[str]]:
    """Play a ledger to MLflow: the first event as history, the others live."""
    said: list[str] = []
    tracker = Tracker(uri or study.tracking, storage / "artifacts", said.append)
    tracker.start(events[:1])
    for event in events[1:]:
        tracker.listen(event)
    return tracker.close(report), said


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


def test_every_trial_is_a_run_with_everything(tiny: Tiny, storage: Path, tmp_path: Path) -> None:
    study = tiny("tracked", "seeds=[0,1]")
    events = made_up_events(study)
    assert send(study, events, storage, report_in(tmp_path)) == ("", [])
    client, parent, children = runs_of(study)
    assert len(children) == 4
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    run = children[0]
    assert run.data.params["precision.format"] in ("float32", "lns12")
    assert run.data.params["seed"] == run.data.tags["seed"]
    assert run.data.tags["git.commit"] == "c0ffee"
    assert run.data.tags["version.ray"] == "2.60.0"
    history = client.get_metric_history(run.info.run_id, "validation/error")
    report = next(event for event in events if event["event"] == "report" and event["trial"] == run.data.tags["trial"])
    assert [point.step for point in history] == [1, 2, 3]
    assert history[0].timestamp == int(report["time"] * 1000)
    assert run.data.metrics["test/error"] == pytest.approx(0.02, abs=1e-3)
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/report.html"]
    assert "float32/test_error_percent" in parent.data.metrics


def test_sending_a_ledger_again_doubles_nothing(tiny: Tiny, storage: Path) -> None:
    study = tiny("tracked twice")
    events = made_up_events(study)
    for _ in range(2):
        assert send(study, events, storage) == ("", [])
    client, _, children = runs_of(study)
    assert len(children) == 2
    assert all(len(client.get_metric_history(run.info.run_id, "train/loss")) == 3 for run in children)


def test_more_seeds_keep_the_runs_there_are(tiny: Tiny, storage: Path) -> None:
    few = made_up_events(tiny("tracked longer"))
    study = tiny("tracked longer", "seeds=[0,1]")
    known = {event["trial"] for event in few if "trial" in event}
    more = [event for event in made_up_events(study) if event.get("trial") not in known]
    send(study, few, storage)
    _, first, before = runs_of(study)
    send(study, [*few, *more], storage)
    _, parent, children = runs_of(study)
    assert parent.info.run_id == first.info.run_id
    assert len(children) == 4
    assert {run.info.run_id for run in before} < {run.info.run_id for run in children}
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}


def test_a_half_sent_ledger_is_completed(tiny: Tiny, storage: Path) -> None:
    study = tiny("tracked late")
    events = made_up_events(study)
    interrupted = [*events[:4], {"event": "ended", "time": time.time(), "outcome": "interrupted"}]
    send(study, interrupted, storage)
    _, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"KILLED"}
    send(study, events, storage)
    client, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert len(children) == 2
    assert all(len(client.get_metric_history(run.info.run_id, "train/loss")) == 3 for run in children)


def test_the_same_study_elsewhere_has_runs_of_its_own(tiny: Tiny, storage: Path) -> None:
    study = tiny("tracked elsewhere")
    mine = made_up_events(study)
    theirs = [{**mine[0], "ledger": "another"}, *mine[1:]]
    send(study, mine, storage)
    send(study, theirs, storage)
    client = connect(study.tracking)
    experiment = client.get_experiment_by_name(study.name)
    assert len(client.search_runs([experiment.experiment_id])) == 6


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////proc/nowhere/mlflow.db"])
def test_a_store_that_does_not_answer_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"no MLflow tracking store answers.*lns-study ui"):
        check_tracking(uri)


def test_a_store_that_dies_does_not_stop_training(tiny: Tiny, storage: Path) -> None:
    study = tiny("tracked nowhere")
    events = made_up_events(study)
    said: list[str] = []
    tracker = Tracker("http://127.0.0.1:9", storage / "artifacts", said.append)
    tracker.start(events[:1])
    began = time.monotonic()
    for event in events[1:]:
        tracker.listen(event)
    assert time.monotonic() - began < 0.1
    assert tracker.close(None)
    assert len(said) == 1
    assert "lns-study report" in said[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, storage: Path) -> Iterator[str]:
    """A real MLflow server on loopback over its own database."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command(f"sqlite:///{folder}/mlflow.db", folder / "artifacts", port), env=os.environ | quiet, start_new_session=True
    )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"{url} does not answer")


def test_through_a_real_server(tiny: Tiny, storage: Path, tmp_path: Path, server: str) -> None:
    study = tiny("served", f"tracking_uri={server}")
    assert send(study, made_up_events(study), storage, report_in(tmp_path)) == ("", [])
    client, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/report.html"]


def test_the_server_refuses_other_hosts(server: str) -> None:
    request = urllib.request.Request(f"{server}/api/2.0/mlflow/experiments/search", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=5)


def test_stop_ends_the_whole_group() -> None:
    process = subprocess.Popen(["bash", "-c", "sleep 100 & sleep 100"], start_new_session=True)
    stop(process)
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
