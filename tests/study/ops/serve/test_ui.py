"""How to reach the runs in a browser, wherever they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from study.config import default_tracking_uri
from study.ops.serve.ui import check_servable
from study.tracking.address import WHERE, how_to_open, pages_of
from tests.study.servers import free_port

WAITS = """
import sys
from study.cli.entry import main
from study.ops.serve import ui
code = f"import os, time; open({sys.argv[1]!r}, 'w').write(str(os.getpid())); time.sleep(600)"
ui.command = lambda *_: [sys.executable, "-c", code]
main(["ui", "--tracking-uri", sys.argv[2], "--port", sys.argv[3]])
"""


@pytest.mark.parametrize("notice", [signal.SIGHUP, signal.SIGKILL])
def test_no_server_outlives_its_command(notice: signal.Signals, tmp_path: Path) -> None:
    """The terminal is closed, and the command killed."""
    pid, uri = tmp_path / "pid", f"sqlite:///{tmp_path / 'm.db'}"
    words = [sys.executable, "-c", WAITS, str(pid), uri, str(free_port())]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # unlike under nohup
    )
    until = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.05)
    server = psutil.Process(int(pid.read_text()))
    process.send_signal(notice)
    process.wait(60)
    _, alive = psutil.wait_procs([server], timeout=30)
    assert not alive


FROM_ITS_PORT = """
import socket, sys
from study.cli.entry import main
connect = socket.create_connection
def from_its_port(address, *rest, **options):
    connection = socket.socket()
    try:
        connection.bind(address)  # by chance, where the port is one that the kernel gives out
        connection.connect(address)
        return connection
    except OSError:
        return connect(address, *rest, **options)
socket.create_connection = from_its_port
sys.exit(main(["ui", "--port", sys.argv[1]]))
"""


def test_who_waits_for_the_server_does_not_meet_itself(tmp_path: Path) -> None:
    """A port without a listener answers a connection from the same port."""
    words = [sys.executable, "-c", FROM_ITS_PORT, str(free_port())]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "Starting MLflow" in process.stdout.readline()
    assert "MLflow is at http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


PAGE = "#/experiments/1/runs/2"
THEN = "   then open its link to this study"


@pytest.mark.parametrize(
    ("uri", "storage", "said"),
    [
        (default_tracking_uri("studies"), "studies", f"lns-study ui{THEN}"),
        (
            default_tracking_uri("my studies"),
            "my studies",
            f"lns-study ui --storage 'my studies'{THEN}",
        ),
        (
            "sqlite:////data/a b.db",
            "studies",
            f"lns-study ui --tracking-uri 'sqlite:////data/a b.db'{THEN}",
        ),
        (
            "sqlite:////data/a.db",
            "/s",
            f"lns-study ui --tracking-uri sqlite:////data/a.db --storage /s{THEN}",
        ),
        (
            "postgresql://me:secret@host/db",
            "studies",
            f"lns-study ui --tracking-uri 'postgresql://me:***@host/db'{THEN}",
        ),
        ("http://127.0.0.1:5001", "studies", f"http://127.0.0.1:5001/{PAGE}"),
        ("https://host/", "/s", f"https://host/{PAGE}"),
        ("https://me:secret@host/", "/s", f"https://host/{PAGE}"),
    ],
)
def test_how_to_open_a_store(uri: str, storage: str, said: str) -> None:
    assert how_to_open(uri, storage, PAGE) == said


def test_the_latest_studies_of_a_store_come_first(tmp_path: Path) -> None:
    for age, (name, uri) in enumerate({"b": "sqlite:///x", "a": "sqlite:///x", "c": "y"}.items()):
        note = tmp_path / name / WHERE
        note.parent.mkdir()
        note.write_text(json.dumps({"uri": uri, "experiment": str(age), "view": "v"}))
        os.utime(note, (1000 - age, 1000 - age))
    (tmp_path / "a" / "x").mkdir()
    pages = pages_of(tmp_path, "sqlite:///x")
    assert list(pages) == ["b", "a"]
    assert pages["a"].startswith("#/experiments/1/runs?viewStateShareKey=v")


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://host:1", r"server already; open http://host:1"),
        ("file:/x", r"must start with one of"),
    ],
)
def test_what_the_ui_cannot_serve_is_refused(uri: str, said: str) -> None:
    check_servable("sqlite:////data/a.db")
    with pytest.raises(ValueError, match=said):
        check_servable(uri)
