"""The process that feeds MLflow: after any failure nothing is lost or doubled, and no run stays
RUNNING."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.config import StudyConfig
from study.ledger.events import Event
from study.ledger.log import Ledger
from study.ledger.state import FINISHED
from study.lifecycle import run_study
from study.tracking.tensorboard_alerts import LOCK as SINKS_LOCK
from study.tracking.tensorboard_alerts import Sinks
from study.tracking.writer import LOCK, connect, sync, tracking_lock
from study.tracking.writer_supervisor import Tracker, check_tracking
from tests.study.conftest import SilentView, copy_database, made_up_events, write_ledger
from tests.study.servers import Server
from tests.study.tracking.conftest import is_equal, runs_of

Tiny = Callable[..., StudyConfig]


def replay(ledger: Ledger, events: list[Event]) -> None:
    """Append made-up events."""
    for event in events:
        ledger.append(
            {
                "event": event["event"],
                **{key: value for key, value in event.items() if key not in ("event", "time")},
            }
        )


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_dead_server_and_a_dead_writer_lose_nothing(tracked: Tiny, server: Server) -> None:
    study = tracked("writer", "seeds=[0,1]", f"tracking_uri={server.uri}")
    events = made_up_events(study)
    said: list[str] = []
    opened: list[dict[str, str]] = []
    with Ledger(study.folder) as ledger:
        replay(ledger, events[:6])
        tracker = Tracker(
            study.folder,
            study.tracking,
            study.folder.parent / "artifacts",
            said.append,
            opened.append,
        )
        tracker.start()
        wait_for(lambda: opened)
        replay(ledger, events[6:9])
        server.kill()
        replay(ledger, events[9:14])
        wait_for(lambda: said)
        assert tracker.pid is not None
        assert study.tracking not in " ".join(psutil.Process(tracker.pid).cmdline())
        os.kill(tracker.pid, signal.SIGKILL)
        replay(ledger, events[14:])
        server.start()
        assert tracker.close(None) == ""
    assert "does not answer" in said[0]
    assert "lns-study mlflow sync" in said[0]
    assert len(opened) == 1
    assert {run.info.status for run in [runs_of(study)[1], *runs_of(study)[2]]} == {"FINISHED"}
    assert is_equal(study)


DRIVER = """
import os, signal, sys, json, time
from pathlib import Path
from study.ledger.log import Ledger
from study.tracking.tensorboard_alerts import LOCK as SINKS_LOCK
from study.tracking.tensorboard_alerts import Sinks
from study.tracking.writer_supervisor import Tracker
folder, uri, events = Path(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
with Ledger(folder) as ledger:
    for event in events:
        ledger.append({key: value for key, value in event.items() if key != "time"})
    Tracker(folder, uri, folder.parent / "artifacts", print).start()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_driver_leaves_no_run_running(tracked: Tiny, tmp_path: Path) -> None:
    import json

    study = tracked("writer alone")
    events = tmp_path / "events.json"
    # one trial finished, one in the middle
    events.write_text(json.dumps(made_up_events(study)[:8]))
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, str(study.folder), study.tracking, str(events)], check=False
    )
    assert driver.returncode == -signal.SIGKILL
    wait_for(lambda: Path(study.tracking.removeprefix("sqlite:///")).exists())

    def ended() -> bool:
        with tracking_lock(study.folder, 0.0) as free:
            return free and connect(study.tracking).get_experiment_by_name(study.name) is not None

    wait_for(ended)
    _, parent, children = runs_of(study)
    assert sorted(run.info.status for run in [parent, *children]) == [
        "FINISHED",
        "KILLED",
        "KILLED",
    ]
    assert is_equal(study)


@pytest.mark.slow
def test_a_server_that_stays_away_is_told_at_the_end(
    tracked: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tracked("writer nowhere", "tracking_uri=http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    folder = write_ledger(study, made_up_events(study))
    tracker = Tracker(folder, study.tracking, folder.parent / "artifacts", said.append)
    tracker.start()
    assert "127.0.0.1:9/api/2.0/mlflow" in tracker.close(None)
    (told,) = said
    assert "MLflow at http://127.0.0.1:9 does not answer" in told


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_study_trains_while_another_process_locks_the_database(
    tiny: Tiny, database: Path, tmp_path: Path, mode: str
) -> None:
    """An exclusive lock keeps readers out; without a write-ahead log a reader keeps writers out."""
    copy_database(database, tmp_path / "mlflow.db")
    study = tiny(f"locked {mode}", f"tracking_uri=sqlite:///{tmp_path}/mlflow.db")
    said: list[str] = []
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:
        other.execute(f"PRAGMA journal_mode={mode}")
        other.execute(f"PRAGMA locking_mode={'exclusive' if mode == 'wal' else 'normal'}")
        other.execute("BEGIN EXCLUSIVE" if mode == "wal" else "BEGIN")
        other.execute("SELECT count(*) FROM experiments").fetchall()
        outcome = run_study(study, SilentView(), said.append)
        assert {trial.status for trial in outcome.state.trials} == {FINISHED}
        assert outcome.tracking_error
        if mode == "wal":
            assert "database is locked" in outcome.tracking_error
            assert any("is locked by another process" in line for line in said)
            assert any("lns-study mlflow sync" in line for line in said)
            with pytest.raises(ValueError, match=r"is locked by another process.*fuser"):
                check_tracking(study.tracking)
    assert sync(study.folder, study.tracking, study.folder.parent / "artifacts", None, print) == ""
    assert is_equal(study)


@pytest.mark.timeout(120)
def test_a_study_trains_while_files_of_its_side_processes_are_links(
    tracked: Tiny, tmp_path: Path
) -> None:
    """The link is named once, with the rule and the remedy, and nothing is written through it."""
    other = tmp_path / "file"
    other.write_text("the reader's")
    study = tracked("linked lock", "seeds=[0]", "epochs=1", "alerts={finished: 'true'}")
    study.folder.mkdir(parents=True)
    for name in (LOCK, SINKS_LOCK):
        (study.folder / name).symlink_to(other)
    said: list[str] = []
    outcome = run_study(study, SilentView(), said.append)
    assert {trial.status for trial in outcome.state.trials} == {FINISHED}
    for name, text in ((LOCK, "lns-study mlflow sync"), (SINKS_LOCK, "next run")):
        (line,) = [line for line in said if f"{name}: is a link to {other}" in line]
        assert "must be a regular file: remove or replace it" in line
        assert text in line
    assert f"{LOCK}: is a link to {other}" in outcome.tracking_error
    assert not [line for line in said if "died" in line]
    assert other.read_text() == "the reader's"
    (study.folder / LOCK).unlink()
    assert sync(study.folder, study.tracking, study.folder.parent / "artifacts", None, print) == ""
    assert is_equal(study)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_server_that_accepts_and_says_nothing_does_not_hold_the_end_up(
    tracked: Tiny, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a client's own limit is: here ten minutes, for some databases none."""
    study = tracked("writer silence", f"tracking_uri={server.uri}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    folder = write_ledger(study, made_up_events(study))
    tracker = Tracker(folder, study.tracking, folder.parent / "artifacts", lambda line: None)
    server.signal(signal.SIGSTOP)
    try:
        tracker.start()
        assert "no answer for 20 s" in tracker.close(None)
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_study_whose_server_is_gone_for_a_while_and_whose_trial_is_killed(
    tracked: Tiny, server: Server
) -> None:
    """The server comes back before the last epochs, and the study itself sends the missing data."""
    study = tracked(
        "writer study", "seeds=[0,1,2,3]", "trial.epochs=30", f"tracking_uri={server.uri}"
    )
    said: list[str] = []
    steps = iter(("away", "kill", "back", "over"))
    due = {"away": 5, "kill": 60, "back": 200}
    step, count = next(steps), 0

    def disturb(event: Event) -> None:
        nonlocal step, count
        count += event["event"] == "report"
        if event["event"] != "report" or count < due.get(step, 10**6):
            return
        if step == "away":
            wait_for(lambda: any(line.startswith("MLflow: ") for line in said))
            server.kill()
        elif step == "kill":
            os.kill(event["pid"], signal.SIGKILL)
        else:
            wait_for(lambda: any("does not answer" in line for line in said))
            server.start()
        step = next(steps)

    outcome = run_study(study, SilentView(disturb), said.append)
    assert step == "over"
    assert outcome.tracking_error == ""
    assert (
        sum("does not answer" in line for line in said)
        == sum("answers again" in line for line in said)
        == 1
    )
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    assert sum(trial.restarts for trial in outcome.state.trials) == 1
    _, parent, children = runs_of(study)
    assert len(children) == 8
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert is_equal(study)


KILLED = """
import os, sys
from mlflow.store.db import utils
utils._upgrade_db = lambda engine: os.kill(os.getpid(), 9)  # some tables are there, no version
from study.tracking.writer import connect
connect(sys.argv[1]).search_experiments()
"""


def test_a_process_that_dies_while_it_makes_a_database_leaves_none(tmp_path: Path) -> None:
    """The next one creates it; a half-finished one would never open again."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = subprocess.run([sys.executable, "-c", KILLED, uri], timeout=120)
    assert done.returncode == -9
    assert not list(tmp_path.iterdir())
    assert len(connect(uri).search_experiments()) == 1
    assert [path.name for path in tmp_path.glob("*.db")] == ["mlflow.db"]


def test_a_database_that_another_process_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def link(part: Path, path: Path, **_: bool) -> None:
        monkeypatch.undo()
        connect(uri).create_experiment("theirs")
        os.link(part, path)

    monkeypatch.setattr(os, "link", link)
    assert connect(uri).get_experiment_by_name("theirs") is not None


def test_a_database_is_made_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(part: Path, path: Path, **_: bool) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "link", refuse)
    assert len(connect(f"sqlite:///{tmp_path}/mlflow.db").search_experiments()) == 1
    assert not list(tmp_path.glob(".*"))


def test_processes_of_a_study_that_is_gone_end_without_a_word(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver reports that it is gone: nothing is restarted, and nothing is created in its
    place, such as at its mount point."""
    spawned: list[list[str]] = []
    start = subprocess.Popen.__init__

    def note(process: Any, words: Any, *more: Any, **keys: Any) -> None:
        spawned.append(words)
        start(process, words, *more, **keys)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    study = tiny("gone", "alerts={failed: 'true'}", "tensorboard=true")
    for folder in (tmp_path / "nowhere", study.folder):
        said: list[str] = []
        study.folder.mkdir(parents=True, exist_ok=True)
        tracker = Tracker(folder, "sqlite:///:memory:", tmp_path / "artifacts", said.append)
        tracker.start()
        error = tracker.close(None)
        assert f"{folder}: was removed, moved or unmounted" in error
        assert said == []
    sinks = Sinks(study, said.append)
    sinks.start()
    sinks.close()
    assert (said, len(spawned)) == ([], 3)
    assert list(study.folder.iterdir()) == []
    assert not (tmp_path / "nowhere").exists()
