"""A real PostgreSQL as MLflow's store: a ledger is sent, sent again, and reads back equal."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.tracking import check_tracking
from tests.study.conftest import made_up_events
from tests.study.test_tracking import is_equal, runs_of, send

Tiny = Callable[..., StudyConfig]


def _programs() -> Path | None:
    """The folder of PostgreSQL's programs."""
    found = shutil.which("initdb")
    here = [Path(found).resolve()] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return here[-1].parent if here else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_programs() is None, reason="PostgreSQL is not installed: apt-get install postgresql"),
]


@pytest.fixture
def postgres() -> Iterator[str]:
    """A cluster of the test's own on loopback; PostgreSQL refuses to run as root, so root runs it as the user postgres."""
    programs = _programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="lns-study-postgres-"))
    who: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        who = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    control = [*who, str(programs / "pg_ctl"), "-D", str(folder / "data"), "-w"]
    quiet = {"stdout": subprocess.DEVNULL, "check": True, "cwd": "/", "timeout": 300}
    try:
        subprocess.run([*who, str(programs / "initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "study"], **quiet)  # type: ignore[call-overload]
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories=''"
        subprocess.run([*control, "-l", str(folder / "log"), "-o", options, "start"], **quiet)  # type: ignore[call-overload]
        yield f"postgresql://study@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], stdout=subprocess.DEVNULL, cwd="/", check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_ledger_in_postgresql(tracked: Tiny, postgres: str) -> None:
    pytest.importorskip("psycopg", reason="pip install 'lns-study[team]'")
    check_tracking(postgres)
    study = tracked("in postgres", f"tracking_uri={postgres}")
    events = made_up_events(study)
    for _ in range(2):
        assert send(study, events)[0] == ""
    _, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert is_equal(study)
