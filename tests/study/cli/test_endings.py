"""How commands end: with Ctrl-C, notices, their terminal, and their children."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.config import default_tracking_uri
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from study.tracking.address import WHERE
from tests.study.cli.test_entry import lns_study
from tests.study.tracking.conftest import runs_of


def _children(pid: int) -> set[int]:
    """Return the processes that descend from ``pid``."""
    done = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = {int(a): int(b) for a, b in (line.split() for line in done.stdout.splitlines())}
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {pid}


def _still_there(pids: set[int], seconds: float = 20) -> set[int]:
    deadline = time.monotonic() + seconds
    while (
        left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "send"),
    [(signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg)],
    ids=["SIGINT", "SIGTERM", "SIGTERM to the group"],
)
def test_ctrl_c_then_the_same_command_continues(
    folder: Path, wish: signal.Signals, send: Callable[[int, signal.Signals], None]
) -> None:
    """Ctrl-C during a run: exit code 130, no process left, MLflow's runs closed, and the next run
    only trains the rest."""
    command = [
        sys.executable,
        "-m",
        "study",
        "run",
        "tiny",
        "--plain",
        "trial.epochs=150",
        "rows=[{label: a}]",
        "baseline=null",
    ]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any("epoch 3/" in line for line in process.stdout)
    children = _children(process.pid)
    send(process.pid, wish)
    _, said = process.communicate(timeout=55)  # Ray's time-out is 60
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "the same command continues" in said
    assert not _still_there(children)
    before = fold(read_ledger(folder / "studies" / "tiny"))
    assert before.outcome == "interrupted"
    assert before.trials[0].epoch >= 3
    _, parent, (child,) = runs_of(before.config, f"sqlite:///{folder}/studies/mlflow.db")
    assert parent.info.status == child.info.status == "KILLED"
    assert (
        child.data.metrics["train/loss"]
        == before.trials[0].metric("train/loss")[before.trials[0].epoch]
    )
    done = lns_study(*command[3:], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"epoch {before.trials[0].epoch}/" not in done.stdout
    assert all(
        trial.status == FINISHED for trial in fold(read_ledger(folder / "studies" / "tiny")).trials
    )


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_ends_in_order(folder: Path) -> None:
    """Nothing reads its last output."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, for the tests too

    process = subprocess.Popen(
        [sys.executable, "-m", "study", "run", "tiny", "trial.epochs=3000", "rows=[{label: a}]",
         "baseline=null"],
        cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(theirs)
    ledger = folder / "studies" / "tiny" / "ledger.jsonl"
    while not (ledger.exists() and '"event": "report"' in ledger.read_text()):
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 4096)
        assert process.poll() is None
    children = _children(process.pid)
    os.close(ours)
    assert process.wait(timeout=55) == 130
    assert not _still_there(children)
    state = fold(read_ledger(ledger.parent))
    assert state.outcome == "interrupted"
    assert (ledger.parent / "report" / "report.md").exists()
    _, parent, _ = runs_of(state.config, f"sqlite:///{folder}/studies/mlflow.db")
    assert parent.info.status == "KILLED"


@pytest.mark.slow
def test_a_killed_gang_driver_continues_its_run(folder: Path) -> None:
    """With its own Ray: the restarted driver gets the CPUs back that workers of the killed one
    held."""
    gang = ["trial.workers=2", "trial.epochs=6", "rows=[{label: a}]", "baseline=null"]
    command = [sys.executable, "-m", "study", "run", "tiny", *gang, "name=killed"]
    ledger = folder / "studies" / "killed"
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not (reports := [event for event in read_ledger(ledger) if event["event"] == "report"]):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(reports[-1]["pid"], signal.SIGKILL)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    calm = lns_study("run", "tiny", *gang, "name=calm", cwd=folder)
    assert calm.returncode == 0, calm.stderr
    (ours,), (theirs,) = (
        fold(read_ledger(ledger)).trials,
        fold(read_ledger(folder / "studies" / "calm")).trials,
    )
    assert ours.test == theirs.test
    assert list(ours.reports) == list(theirs.reports) == [1, 2, 3, 4, 5, 6]
    assert ours.metric("train/loss") == theirs.metric("train/loss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "on_sigint"),
    [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_IGN)],
)
def test_ui_serves_and_ends_with_its_children(
    tmp_path: Path, wish: signal.Signals, on_sigint: Any
) -> None:
    """SIGTERM works also if SIGINT is ignored, as in a script's ``lns-study ui &``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "study", "ui", "--port", str(port), "--storage", str(tmp_path)]
    place = {"uri": default_tracking_uri(str(tmp_path)), "experiment": "1", "view": "v"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / WHERE).write_text(json.dumps(place))
    before = signal.signal(signal.SIGINT, on_sigint)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        assert "Starting" in process.stdout.readline()
        said = process.stdout.readline()
        link = next(word for word in said.split() if word.startswith(f"http://127.0.0.1:{port}/"))
        assert process.stdout.readline().startswith(f"mine: {link}#/experiments/1/runs?")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        for page in (link, f"{link}/"):
            assert urllib.request.urlopen(page, timeout=5).status == 200
        children = _children(process.pid)
    finally:
        process.send_signal(wish)
    assert process.wait(30) == 0
    assert children
    assert not _still_there(children)
