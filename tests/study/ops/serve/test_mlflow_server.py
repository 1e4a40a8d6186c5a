"""MLflow's server for one user: one process, its guard, and no artifacts at places that clients
name."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Engine

from study.ops.serve.mlflow_server import TOKEN
from study.ops.serve.ui import command, environment, listen
from study.tracking.sqlite import prepare, write_statistics
from study.tracking.writer import connect
from study.tracking.writer_supervisor import check_tracking
from tests.study.servers import Server, connections, open_files

OTHER_MLFLOW = """
import study.ops.serve.mlflow_server as server
server.MLFLOW_SERVER_VARIABLES["ARTIFACT_ROOT_ENV_VAR"] = "_ANOTHER_NAME"
server.main()
"""


def search(uri: str, host: str = "127.0.0.1") -> int:
    """Return the status of a search for experiments."""
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
def test_sorting_runs_does_not_look_at_all_pairs_of_them(
    server: Server, key: str, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "LEFT OUTER JOIN" in statement and "LIMIT" in statement:
            asked.append((statement, parameters))

    path = tmp_path / "copy.db"
    with (
        closing(sqlite3.connect(server.folder / "mlflow.db")) as database,
        closing(sqlite3.connect(path)) as copy,
    ):
        database.backup(copy)
        assert copy.execute(
            "SELECT stat FROM sqlite_stat1 WHERE idx = 'sqlite_autoindex_latest_metrics_1'"
        ).fetchone()
        copy.execute("DROP TABLE sqlite_stat1")
        # data of other tests decide plans too
        for table in ("latest_metrics", "metrics", "params", "tags", "runs"):
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

    # as sqlite does it by itself
    assert any(step.startswith("SCAN anon") for step in steps()), steps()
    write_statistics(f"sqlite:///{path}")
    assert not any(step.startswith("SCAN anon") for step in steps()), steps()
    assert any("INDEX (run_uuid=?) LEFT-JOIN" in step for step in steps()), steps()


def test_another_mlflow_is_refused_and_not_served_without_its_guard(tmp_path: Path) -> None:
    with listen(0) as listening:
        words = command(str(tmp_path / "artifacts"), listening)
        at = words.index("study.ops.serve.mlflow_server")
        done = subprocess.run(
            [sys.executable, "-c", OTHER_MLFLOW, *words[at + 1 :]],
            env=os.environ | environment(f"sqlite:///{tmp_path}/mlflow.db") | {TOKEN: "secret"},
            capture_output=True,
            text=True,
            timeout=120,
            pass_fds=(listening.fileno(),),
        )
    assert done.returncode == 1
    assert (
        "ARTIFACT_ROOT_ENV_VAR is _MLFLOW_SERVER_ARTIFACT_ROOT, not _ANOTHER_NAME: lns-study"
        in done.stderr
    )


def test_a_server_without_a_token_does_not_start(tmp_path: Path) -> None:
    variables = os.environ | environment(f"sqlite:///{tmp_path}/mlflow.db")
    with listen(0) as listening:
        done = subprocess.run(
            command(str(tmp_path / "artifacts"), listening),
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
            pass_fds=(listening.fileno(),),
        )
    assert (done.returncode, f"{TOKEN} is not set" in done.stderr) == (2, True)


# --------------------------------------------------------------------------------------------------

SECRET = "the-token-of-the-link"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started like ``lns-study ui``."""
    server = Server(tmp_path_factory.mktemp("guarded"), token=SECRET)
    server.start()
    yield server
    server.stop()


def visit(
    server: Server, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of a request."""
    there = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    sent = None if body is None else json.dumps(body)
    there.request(
        "GET" if body is None else "POST",
        path,
        sent,
        {"Content-Type": "application/json", **headers},
    )
    answer = there.getresponse()
    text = answer.read().decode(errors="replace")
    there.close()
    return answer.status, dict(answer.getheaders()), text


SEARCH, CREATE = "/api/2.0/mlflow/experiments/search", "/api/2.0/mlflow/experiments/create"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        SEARCH,
        CREATE,
        "/api/2.0/mlflow-artifacts/artifacts?path=x",
        "/ajax-api/2.0/mlflow/experiments/search",
        "//health",
        "/health/",
        f"/{SECRET[:-1]}/",
        f"/{SECRET}x/",
        f"//{SECRET}/",
        f"/{SECRET.upper()}/",
        f"/x/{SECRET}/",
        "/%E6%97%A5%E6%9C%AC/",
        "/%FF%00/",
        "/a%0D%0ASet-Cookie:%20a=b",
        f"/{SECRET}{SEARCH}",
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cookie": f"lns_study_0={SECRET}; lns-study={SECRET}; token={SECRET}"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic !"},
        {"Authorization": "Bearer \x80"},
        {"Referer": f"http://127.0.0.1/{SECRET}/"},
        {"X-Forwarded-For": "127.0.0.1", "X-HTTP-Method-Override": "GET"},
        {"X-Original-URL": f"/{SECRET}/", "X-Forwarded-Prefix": f"/{SECRET}"},
    ],
)
def test_who_does_not_know_the_token_gets_nothing(
    guarded: Server, path: str, headers: dict[str, str]
) -> None:
    for asked in (path, f"{path}{'&' if '?' in path else '?'}token=wrong", f"{path}?{SECRET}"):
        status, answered, text = visit(
            guarded, asked, {"name": "x"} if path == CREATE else None, **headers
        )
        assert (status, "Open the link" in text) == (401, True)
        assert SECRET not in text
        assert not answered.keys() & {"set-cookie", "location", "access-control-allow-origin"}
    assert visit(guarded, "/health")[0] == 200


def test_the_printed_link_lets_a_browser_in(guarded: Server) -> None:
    """In the path of all its requests, so no other server sees the token."""
    for path in (f"/{SECRET}", f"/{SECRET}/"):
        status, headers, text = visit(guarded, path)
        assert (status, headers["referrer-policy"]) == (200, "no-referrer")
        assert headers["x-frame-options"] == "SAMEORIGIN"
        assert "set-cookie" not in headers
    assert 'src="static-files/' in text
    pages = f"/{SECRET}{SEARCH.replace('/api', '/ajax-api')}"
    own = f"http://127.0.0.1:{guarded.port}"
    assert visit(guarded, pages, {"max_results": 1}, Origin=own)[0] == 200
    assert visit(guarded, pages, {"max_results": 1}, Host="evil.example")[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://127.0.0.1:1", "http://localhost:{port}", "https://evil.example", "null"]
)
def test_no_page_of_another_origin_is_answered(guarded: Server, origin: str) -> None:
    """Not even with the token, which a browser may have stored as a password."""
    headers = {
        "Origin": origin.format(port=guarded.port),
        "Authorization": f"Bearer {SECRET}",
        "Host": f"127.0.0.1:{guarded.port}",
    }
    for body in (None, {"max_results": 1}):
        status, answered, _ = visit(guarded, SEARCH, body, **headers)
        assert status == 403
        assert "access-control-allow-origin" not in answered


@pytest.mark.parametrize(
    "more", [("Host", "evil.example"), ("Origin", "http://evil.example"), ("Origin", "null")]
)
def test_a_second_host_or_origin_is_refused(guarded: Server, more: tuple[str, str]) -> None:
    own = f"127.0.0.1:{guarded.port}"
    fields = [("Authorization", f"Bearer {SECRET}"), ("Host", own), ("Origin", f"http://{own}")]
    for order in ([*fields, more], [more, *fields]):
        there = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        there.putrequest("GET", "/version", skip_host=True)
        for name, value in order:
            there.putheader(name, value)
        there.endheaders()
        assert there.getresponse().status == 403
        there.close()


ASSISTANT = "/ajax-api/3.0/mlflow/assistant"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", f"{ASSISTANT}/config"),
        ("GET", f"{ASSISTANT}/config"),
        ("POST", f"{ASSISTANT}/message"),
        ("GET", f"{ASSISTANT}/sessions/x/stream"),
        ("POST", "/ajax-api/3.0/jobs/"),
        ("GET", "/gateway/mlflow/v1/models"),
        ("POST", "/api/2.0/mlflow/webhooks"),
        ("POST", "/ajax-api/3.0/mlflow/scorer/invoke"),
        ("POST", "/api/2.0/mlflow/model-versions/create"),
        ("GET", "/model-versions/get-artifact?name=x&version=1&path=x"),
        ("TRACE", "/"),
        ("OPTIONS", "/"),
        ("DELETE", "/version"),
        ("GET", "//version"),
        ("GET", "/version/"),
        ("GET", "/x/../version"),
        ("GET", "/%2e/version"),
        ("GET", "/static-files%2fx%0a"),
    ],
)
def test_what_studies_do_not_need_is_not_served(guarded: Server, method: str, path: str) -> None:
    there = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    there.request(method, path, "{}", {"Authorization": f"Bearer {SECRET}"})
    answer = there.getresponse()
    assert (answer.status, b"and not this" in answer.read()) == (404, True)
    there.close()


def test_a_study_without_the_token_is_told_where_it_is(guarded: Server) -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_TOKEN to the token in its link"):
        check_tracking(guarded.uri)


def test_mlflows_clients_come_in_by_their_own_variables(
    guarded: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match="401"):
        connect(guarded.uri).search_experiments(max_results=1)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    assert connect(guarded.uri).search_experiments(max_results=1)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anybody")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    assert connect(guarded.uri).search_experiments(max_results=1)


@pytest.mark.parametrize("key", ["artifact_location", "artifactLocation"])
@pytest.mark.parametrize("prefix", ["/api/2.0", "/ajax-api/2.0"])
def test_clients_cannot_name_a_place_for_artifacts(
    guarded: Server, tmp_path: Path, prefix: str, key: str
) -> None:
    bearer = {"Authorization": f"Bearer {SECRET}"}
    body = {"name": f"takes {key} {prefix}", key: tmp_path.as_uri()}
    for sent in (body, json.dumps(body)):  # MLflow accepts JSON within JSON, too
        status, _, text = visit(guarded, f"{prefix}/mlflow/experiments/create", sent, **bearer)
        assert (status, "own place" in text) == (400, True), text
    assert (
        visit(
            guarded,
            f"{prefix}/mlflow/experiments/create",
            {"name": f"none {key} {prefix}"},
            **bearer,
        )[0]
        == 200
    )


HISTORY = "/ajax-api/2.0/mlflow/metrics/get-history-bulk"
LOGGED, RUNS = "/api/2.0/mlflow/logged-models", "/api/2.0/mlflow/runs"
FILES = f"/ajax-api{LOGGED.removeprefix('/api')}/m-0/artifacts/files?artifact_file_path="
FOLDERS = f"{LOGGED}/m-0/artifacts/directories?artifact_directory_path="
UNUSABLE: list[tuple[str, str, object]] = [
    ("GET", "/api/2.0/mlflow/artifacts/list", {"path": "a" * 300}),
    ("GET", "/api/2.0/mlflow/artifacts/list", {"path": "a\0b"}),
    ("POST", "/api/2.0/mlflow/artifacts/presigned-download-url", {"path": "a" * 300}),
    ("GET", f"{FILES}%00", None),
    ("GET", f"{FILES}%ff", None),
    ("GET", f"{FILES}{'a' * 300}", None),
    ("GET", f"{FOLDERS}%00", None),
    ("POST", f"{RUNS}/create", b"[" * 100_000),
    ("POST", f"{RUNS}/create", b'{"a":' * 3000 + b"1" + b"}" * 3000),
    ("POST", f"{RUNS}/create", [1]),
    ("POST", f"{RUNS}/create", 1),
    ("POST", f"{RUNS}/create", "x"),
    ("POST", f"{RUNS}/create", {"start_time": [1]}),
    ("POST", f"{RUNS}/log-metric", {"run_id": "0", "key": "k", "value": {}, "timestamp": 1}),
    ("POST", f"{RUNS}/log-batch", {"run_id": "0", "metrics": None}),
    ("POST", f"{RUNS}/log-batch", b""),
    ("POST", f"{RUNS}/log-batch", b"\xff"),
    ("POST", f"{RUNS}/set-tag", {"run_id": "0", "key": "k", "value": "\ud800"}),
    ("POST", f"{RUNS}/search", {"page_token": "\xe9"}),
    ("GET", f"{SEARCH}?max_results=1&page_token=%C3%A9", None),
    ("GET", f"{HISTORY}?metric_key=k&run_id=0&max_results=x", None),
    ("POST", f"{LOGGED}/search", {"experiment_ids": ["0"], "page_token": "x/"}),
    ("POST", "/graphql", {"query": "a"}),
    ("POST", "/graphql", b"{"),
]  # fmt: skip
"""Requests with values that MLflow answers with 500: method, path and body."""


@pytest.mark.parametrize(("method", "path", "body"), UNUSABLE)
def test_values_that_mlflow_cannot_use_are_answered_400(
    guarded: Server, method: str, path: str, body: object
) -> None:
    bearer = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    there = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
    there.request(method, path, body if isinstance(body, bytes) else json.dumps(body), bearer)
    answer = there.getresponse()
    text = answer.read().decode()
    there.close()
    assert answer.status == 400, text
    assert len(text) < 600
    assert "<html" not in text
    assert visit(guarded, SEARCH, {"max_results": 1}, **bearer)[0] == 200


def test_an_artifact_in_the_place_of_a_folder_is_answered_400(guarded: Server) -> None:
    """Or the reverse."""
    bearer = {"Authorization": f"Bearer {SECRET}"}
    top = "/api/2.0/mlflow-artifacts/artifacts/0/run/artifacts"
    for name, status in (("f", 200), ("f/g", 400), ("d/g", 200), ("d", 400), ("f", 200)):
        there = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        there.request("PUT", f"{top}/{name}", b"x", bearer)
        answer = there.getresponse()
        text = answer.read().decode()
        there.close()
        assert answer.status == status, (name, text)
        assert status == 200 or "use another name" in text


def test_the_token_is_in_no_command_line_and_no_child(guarded: Server) -> None:
    assert guarded._process is not None
    assert SECRET not in " ".join(psutil.Process(guarded._process.pid).cmdline())


def test_connections_that_send_nothing_keep_nobody_out(tmp_path: Path) -> None:
    server = Server(tmp_path, token=SECRET)
    with open_files(512):
        server.start()
    try:
        with connections(server.port, 700):
            assert visit(server, f"/{SECRET}/")[0] == 200
    finally:
        server.stop()


def test_a_local_database_commits_to_its_log_and_another_to_the_disk(tmp_path: Path) -> None:
    prepare(f"sqlite:///{tmp_path}/log.db")
    settings = {}
    for name in ("log", "other"):
        engine = create_engine(f"sqlite:///{tmp_path}/{name}.db")
        with engine.connect() as connection:
            settings[name] = [
                connection.execute(text(f"PRAGMA {key}")).scalar()
                for key in ("journal_mode", "synchronous")
            ]
        engine.dispose()
    assert settings == {"log": ["wal", 1], "other": ["delete", 2]}


def artifacts_of(server: Server, place: str) -> tuple[str, str]:
    """A run whose artifacts are elsewhere according to its database, and the experiment's id."""
    client = connect(f"sqlite:///{server.folder}/mlflow.db")
    run = client.create_run("0").info.run_id
    with closing(sqlite3.connect(server.folder / "mlflow.db")) as database, database:
        database.execute("UPDATE runs SET artifact_uri=? WHERE run_uuid=?", (place, run))
    return run, f"/get-artifact?run_uuid={run}&path="


def test_no_file_elsewhere_that_a_database_names_is_served(guarded: Server, tmp_path: Path) -> None:
    """A file that only its user may read, nor one to which a link among the artifacts leads."""
    (tmp_path / "id_rsa").write_text("a secret key")
    own = guarded.folder / "artifacts" / "own"
    (own / "report").mkdir(parents=True)
    (own / "page.txt").write_text("a page")
    (own / "link.txt").symlink_to(tmp_path / "id_rsa")
    (own / "linked").symlink_to(tmp_path)
    token = {"Authorization": f"Bearer {SECRET}"}
    _, pages = artifacts_of(guarded, own.as_uri())
    assert visit(guarded, f"{pages}page.txt", **token)[::2] == (200, "a page")
    asked = [f"{pages}link.txt", f"{pages}linked/id_rsa"]
    lists = [f"/api/2.0/mlflow/artifacts/list?run_id={artifacts_of(guarded, own.as_uri())[0]}"
             "&path=linked"]  # fmt: skip
    for place in (tmp_path.as_uri(), str(tmp_path), f"{own.as_uri()}/../../../.."):
        run, path = artifacts_of(guarded, place)
        asked.append(f"{path}id_rsa")
        lists.append(f"/api/2.0/mlflow/artifacts/list?run_id={run}")
    for path in (*asked, *lists):
        status, _, text = visit(guarded, path, **token)
        assert status >= 400, path
        assert not {"a secret key", "id_rsa"} & set(text.split()), path


def test_no_web_address_that_a_database_names_is_asked(guarded: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        there.settimeout(1.0)
        _, path = artifacts_of(guarded, f"http://127.0.0.1:{there.getsockname()[1]}/x")
        status, _, _ = visit(guarded, f"{path}y", Authorization=f"Bearer {SECRET}")
        assert status >= 400
        with pytest.raises(TimeoutError):
            there.accept()
