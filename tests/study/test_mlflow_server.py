"""MLflow's server for one user: one process, and MLflow's own command where MLflow is not as that process knows it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Engine

from study import mlflow_server
from study.sqlite import use_write_ahead_log, write_statistics
from study.ui import command, environment, stop
from study.writer import connect
from tests.study.servers import Server, free_port

OTHER_MLFLOW = """
import study.mlflow_server as server
known = server._variables
server._variables = lambda uri, artifacts: known(uri, artifacts) | {"ARTIFACT_ROOT_ENV_VAR": ("_ANOTHER_NAME", "x")}
server.main()
"""


def search(uri: str, host: str = "127.0.0.1") -> int:
    """The status that a search for experiments ends with."""
    request = urllib.request.Request(
        f"{uri}/api/2.0/mlflow/experiments/search",
        json.dumps({"max_results": 5}).encode(),
        {"Content-Type": "application/json", "Host": host},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_one_process_serves_with_mlflows_protection(server: Server) -> None:
    assert server._process is not None
    assert psutil.Process(server._process.pid).children(recursive=True) == []
    assert search(server.uri) == 200
    assert search(server.uri, "evil.example") == 403
    with closing(sqlite3.connect(server.folder / "mlflow.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("key", ["metrics.`validation/error`", "params.`seed`", "tags.`row`"])
def test_sorting_runs_does_not_look_at_all_pairs_of_them(server: Server, key: str, tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "LEFT OUTER JOIN" in statement and "LIMIT" in statement:
            asked.append((statement, parameters))

    path = tmp_path / "copy.db"
    with closing(sqlite3.connect(server.folder / "mlflow.db")) as database, closing(sqlite3.connect(path)) as copy:
        database.backup(copy)
        assert copy.execute("SELECT stat FROM sqlite_stat1 WHERE idx = 'sqlite_autoindex_latest_metrics_1'").fetchone()
        copy.execute("DROP TABLE sqlite_stat1")
        for table in ("latest_metrics", "metrics", "params", "tags", "runs"):  # what other tests have left decides plans too
            copy.execute(f"DELETE FROM {table}")
        copy.commit()
    event.listen(Engine, "before_cursor_execute", note)
    try:
        connect(f"sqlite:///{path}").search_runs(["0"], order_by=[f"{key} ASC"])
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    ((statement, parameters),) = asked

    def steps() -> list[str]:
        with closing(sqlite3.connect(path)) as copy:
            return [row[3] for row in copy.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]

    assert any(step.startswith("SCAN anon") for step in steps()), steps()  # as sqlite does it by itself
    write_statistics(f"sqlite:///{path}")
    assert not any(step.startswith("SCAN anon") for step in steps()), steps()
    assert any("INDEX (run_uuid=?) LEFT-JOIN" in step for step in steps()), steps()


@pytest.mark.slow
def test_another_mlflow_is_served_by_its_own_command(tmp_path: Path) -> None:
    port = free_port()
    words = command(str(tmp_path / "artifacts"), port)
    assert words[1:3] == ["-m", "study.mlflow_server"]
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_MLFLOW, *words[3:]],
        env=os.environ | environment(f"sqlite:///{tmp_path}/mlflow.db"),
        stderr=(tmp_path / "stderr").open("w"),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None
            try:
                assert search(f"http://127.0.0.1:{port}") == 200
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert search(f"http://127.0.0.1:{port}", "evil.example") == 403
        assert psutil.Process(process.pid).children(recursive=True)
    finally:
        stop(process)
    assert "ARTIFACT_ROOT_ENV_VAR is _MLFLOW_SERVER_ARTIFACT_ROOT, not _ANOTHER_NAME; starting `mlflow server`" in (
        tmp_path / "stderr"
    ).read_text(encoding="utf-8")


def test_names_are_those_of_the_mlflow_that_is_installed() -> None:
    from mlflow.server import constants

    for known, (name, _) in mlflow_server._variables("sqlite:///x", "y").items():
        assert getattr(constants, known) == name


def test_a_local_database_commits_to_its_log_and_another_to_the_disk(tmp_path: Path) -> None:
    use_write_ahead_log(f"sqlite:///{tmp_path}/log.db")
    settings = {}
    for name in ("log", "other"):
        engine = create_engine(f"sqlite:///{tmp_path}/{name}.db")
        with engine.connect() as connection:
            settings[name] = [connection.execute(text(f"PRAGMA {key}")).scalar() for key in ("journal_mode", "synchronous")]
        engine.dispose()
    assert settings == {"log": ["wal", 1], "other": ["delete", 2]}
