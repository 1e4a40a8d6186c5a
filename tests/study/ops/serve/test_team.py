"""MLflow for a team: refusals, and a real server with logins and two workers over a real
PostgreSQL."""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from study.config import StudyConfig
from study.ledger.log import FILE, read_ledger
from study.ledger.state import fold
from study.ops.serve.mlflow_server import KNOWN, SECRET
from study.ops.serve.team import PASSWORD, Team, auth_settings, check
from study.tracking.payload import expected_points
from tests.study.cli.test_entry import assert_refused, lns_study
from tests.study.conftest import made_up_events, write_ledger
from tests.study.ops.serve.test_mlflow_server import UNUSABLE
from tests.study.servers import free_port
from tests.study.tracking.conftest import is_equal, report_in, runs_of, send

Tiny = Callable[..., StudyConfig]
ADMIN = ("admin", "correct horse battery")
ADA = ("ada", "staple staple staple")
NAME = "mlflow.team.example"


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--team"],
            (
                "--workers 4 over sqlite",
                "one process write at a time",
                "postgresql://",
                "--workers 1",
            ),
        ),
        (["--team", "--workers", "0"], ("--workers 0", "at least 1")),
        (
            ["--team", "--backend-store-uri", "mysql+pymysql://me:secret@host/db"],
            ("mysql+pymysql://me:***@host/db",),
        ),
        (
            ["--team", "--backend-store-uri", "postgresql://me@127.0.0.1:1/db"],
            ("does not answer", "me@", "PGPASSWORD"),
        ),
        (
            ["--team", "--backend-store-uri", "postgresql://me:secret@127.0.0.1:1/db"],
            ("holds a password", "me:***@", "PGPASSWORD", "MLFLOW_TRACKING_URI"),
        ),
        (
            ["--tracking-uri", "postgresql://127.0.0.1:1/db?user=me&password=secret"],
            ("holds a password", "password=***", "PGPASSWORD"),
        ),
        (
            ["--team", "--workers", "1", "--host", "0.0.0.0"],
            ("--host 0.0.0.0", "--allow-host NAME"),
        ),
        (["--team", "--workers", "1", "--allow-host", "*"], ("--allow-host '*'",)),
        (
            ["--team", "--workers", "1", "--artifacts", "."],
            ("--artifacts", "must not hold the storage"),
        ),
        (
            ["--team", "--workers=1", "--tracking-uri", "sqlite:///a/m.db", "--artifacts", "a"],
            ("--artifacts", "must not hold the database"),
        ),
        (
            ["--team", "--workers=1", "--tracking-uri=sqlite:////a/m.db", "--artifacts=file:///a"],
            ("--artifacts", "must not hold the database"),
        ),
        (["--team", "--workers", "1"], (f"{PASSWORD}: is not set", "at least 12")),
        (["--workers", "2"], ("--workers", "add --team")),
        (["--host", "0.0.0.0"], ("--host", "add --team")),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str],
    said: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from study.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PASSWORD, raising=False)
    assert main(["ui", "--port", str(free_port()), *arguments]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said), told
    assert "secret" not in told


def test_a_short_password_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "short")
    uri = f"sqlite:///{tmp_path / 'team.db'}"
    team = Team(
        uri=uri,
        storage=tmp_path,
        artifacts=str(tmp_path / "artifacts"),
        host="127.0.0.1",
        port=free_port(),
        workers=1,
    )
    with pytest.raises(ValueError, match=f"{PASSWORD}: has 5 characters.*at least 12"):
        check(team)


def test_artifacts_in_s3_without_boto3_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow would start, and fail at the first artifact."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "boto3" else found(name)
    )
    team = Team(
        uri=f"sqlite:///{tmp_path / 'team.db'}",
        storage=tmp_path,
        artifacts="s3://bucket/artifacts",
        host="127.0.0.1",
        port=free_port(),
        workers=1,
    )
    with pytest.raises(ValueError, match=r"--artifacts s3://.*: needs boto3.*lns-study\[aws\]"):
        check(team)


@pytest.mark.slow
def test_a_percent_sign_in_the_database_survives_the_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MLflow reads it."""
    from mlflow.server.auth.config import read_auth_config

    uri = "postgresql://me:p%40ss@host/db"
    with (tmp_path / "auth.ini").open("w") as file:
        auth_settings(uri).write(file)
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(tmp_path / "auth.ini"))
    found = read_auth_config()
    assert found.database_uri == uri
    assert found.auth_cache_ttl_seconds == 60


# --------------------------------------------------------------------------------------------------


@contextmanager
def team_server(
    uri: str, folder: Path, *arguments: str, **environment: str
) -> Iterator[tuple[str, int]]:
    """Run ``lns-study ui --team`` as a user does; return the address and the process id."""
    words = [
        sys.executable,
        "-m",
        "study",
        "ui",
        "--team",
        "--backend-store-uri",
        uri,
        "--port",
        str(free_port()),
        *arguments,
    ]
    process = subprocess.Popen(
        words, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"http://127.0.0.1:\d+", said)
        assert found, said
        yield found[0], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def team(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Two workers over a separate database, with the users admin and ada."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as database:
        database.execute("CREATE DATABASE team")
    uri = f"{postgres.rpartition('/')[0]}/team"
    folder = tmp_path_factory.mktemp("team")
    with team_server(
        uri, folder, "--workers", "2", "--allow-host", NAME, **{PASSWORD: ADMIN[1]}
    ) as found:
        create = {"username": ADA[0], "password": ADA[1]}
        assert ask(found[0], "POST", "/api/2.0/mlflow/users/create", create, ADMIN)[0] == 200
        yield found


def ask(
    address: str,
    method: str,
    path: str,
    body: object = None,
    user: tuple[str, str] | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Return status and text of a request, which has a login if there is a ``user``."""
    there = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    if user is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(':'.join(user).encode()).decode()}"
    sent = body if isinstance(body, bytes) else json.dumps(body)
    there.request(method, path, sent, {"Content-Type": "application/json", **headers})
    answer = there.getresponse()
    text = answer.read().decode(errors="replace")
    there.close()
    return answer.status, text


def log_in(monkeypatch: pytest.MonkeyPatch, user: tuple[str, str]) -> None:
    for name, value in zip(
        ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"), user, strict=True
    ):
        monkeypatch.setenv(name, value)


SEARCH = "/api/2.0/mlflow/experiments/search"
ANY = {"max_results": 1}


@pytest.mark.slow
def test_only_who_knows_a_password_gets_in(team: tuple[str, int]) -> None:
    address, _ = team
    for path in (
        "/",
        SEARCH,
        "/api/3.0/mlflow/server-info",
        "/static-files/index.html",
        "/version",
        "/signup",
        "/no/such/route",
        "/ajax-api/2.0/mlflow/experiments/search",
        "/api/2.0/mlflow-artifacts/artifacts",
    ):
        assert ask(address, "GET", path)[0] == 401, path
    assert ask(address, "POST", SEARCH, ANY, ("admin", "wrong wrong wrong"))[0] == 401
    assert ask(address, "POST", SEARCH, ANY, ("admin", "password1234"))[0] == 401
    for user in (ADMIN, ADA):
        assert ask(address, "POST", SEARCH, ANY, user)[0] == 200
    assert (
        ask(
            address,
            "POST",
            "/api/2.0/mlflow/users/create",
            {"username": "eve", "password": "x" * 12},
            ADA,
        )[0]
        == 403
    )


@pytest.mark.slow
def test_hosts_and_pages_of_strangers_are_refused(team: tuple[str, int]) -> None:
    address, _ = team
    port = address.rpartition(":")[2]
    for host in (NAME, f"{NAME}:{port}", f"127.0.0.1:{port}"):
        assert ask(address, "POST", SEARCH, ANY, ADA, Host=host)[0] == 200, host
    for host in ("10.0.0.1", "evil.example", f"x.{NAME}"):
        assert ask(address, "POST", SEARCH, ANY, ADA, Host=host)[0] == 403, host
    by_proxy = {"Host": NAME, "Origin": f"https://{NAME}", "X-Forwarded-Proto": "https"}
    direct = {"Host": f"{NAME}:{port}", "Origin": f"http://{NAME}:{port}"}
    for own in (by_proxy, direct):
        assert ask(address, "POST", SEARCH, ANY, ADA, **own)[0] == 200, own
        assert (
            ask(address, "POST", SEARCH, ANY, ADA, **own | {"Origin": f"http://{NAME}"})[0] == 403
        )
    strangers = ("https://evil.example", "http://127.0.0.1:1", "http://localhost:1", "null")
    for origin in strangers:
        for method in ("POST", "GET"):
            assert ask(address, method, SEARCH, ANY, ADA, Origin=origin)[0] == 403, origin


@pytest.mark.slow
@pytest.mark.parametrize("user", [ADMIN, ADA])
def test_nobody_gets_at_what_runs_things_on_the_server(
    team: tuple[str, int], user: tuple[str, str], tmp_path: Path
) -> None:
    """From 127.0.0.1, as through a tunnel: MLflow's assistant would run a command of the client."""
    assistant, left = "/ajax-api/3.0/mlflow/assistant", tmp_path / "left"
    program = tmp_path / "codex"
    program.write_text(f"#!/bin/sh\ntouch {left}\n")
    program.chmod(0o755)
    config = {"providers": {"codex": {"model": "default", "selected": True}}}
    requests: list[tuple[str, str, object]] = [
        ("PUT", f"{assistant}/config", config),
        ("POST", f"{assistant}/message", {"message": f"touch {left}"}),
        ("GET", f"{assistant}/sessions/x/stream", None),
        ("GET", f"{assistant}/providers/codex/health", None),
        ("POST", f"{assistant}/skills/install", {"type": "custom", "custom_path": str(left)}),
        ("POST", "/ajax-api/3.0/jobs/", {"job_name": "x", "params": {}}),
        ("POST", "/ajax-api/3.0/mlflow/scorer/invoke", {"experiment_id": "0"}),
        ("POST", "/api/2.0/mlflow/webhooks", {"name": "x", "url": "http://127.0.0.1:1"}),
        ("POST", "/api/2.0/mlflow/registered-models/create", {"name": "x"}),
        ("POST", "/api/3.0/mlflow/traces", {}),
        ("POST", "/v1/traces", {}),
    ]
    for method, path, body in requests:
        for spelled in (path, f"/{path}", f"{path}/", path.replace("mlflow", "%6dlflow")):
            status, text = ask(team[0], method, spelled, body, user)
            assert (status, "and not this" in text) == (404, True), spelled
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["artifact_location", "artifactLocation"])
@pytest.mark.parametrize("prefix", ["/api/2.0", "/ajax-api/2.0"])
def test_clients_cannot_name_a_folder_of_the_servers(
    team: tuple[str, int], tmp_path: Path, prefix: str, key: str
) -> None:
    for user in (ADMIN, ADA):
        body = {"name": f"takes {user[0]} {key} {prefix}", key: tmp_path.as_uri()}
        for sent in (body, json.dumps(body)):  # MLflow accepts JSON within JSON, too
            status, text = ask(team[0], "POST", f"{prefix}/mlflow/experiments/create", sent, user)
            assert (status, "own place" in text) == (400, True), text


@pytest.mark.slow
def test_two_workers_answer_and_nothing_secret_is_in_a_command_line(team: tuple[str, int]) -> None:
    address, pid = team
    family = psutil.Process(pid).children(recursive=True)
    lines = [" ".join(process.cmdline()) for process in family]
    assert sum("spawn_main" in line for line in lines) == 2
    assert not [line for line in lines if "postgresql" in line or ADMIN[1] in line]
    server = next(process for process in family if "mlflow_server" in " ".join(process.cmdline()))
    variables = server.environ()
    assert (
        variables["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"]
        == variables["MLFLOW_ENABLE_AI_GATEWAY"]
        == "false"
    )
    assert len(variables[SECRET]) == 64
    settings = Path(variables["MLFLOW_AUTH_CONFIG_PATH"])
    assert settings.stat().st_mode & 0o077 == 0
    assert server.cwd() == str(settings.parent)
    assert {file.name for file in settings.parent.iterdir()} == {settings.name, KNOWN}
    assert (settings.parent / KNOWN).stat().st_mode & 0o077 == 0
    assert ask(address, "GET", "/health")[0] == 200


@pytest.mark.slow
def test_a_ledger_is_sent_by_who_has_logged_in(
    tracked: Tiny, team: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tracked("of a team", f"tracking_uri={team[0]}", "seeds=[0,1]")
    events = made_up_events(study)
    write_ledger(study, events)
    arguments = (
        "mlflow",
        "sync",
        study.slug,
        "--storage",
        study.storage,
        "--tracking-uri",
        team[0],
    )
    assert_refused(
        lns_study(*arguments, cwd=tmp_path),
        "requires a valid login",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
    )
    log_in(monkeypatch, ("ada", "a wrong password"))
    assert_refused(lns_study(*arguments, cwd=tmp_path), "requires a valid login")
    log_in(monkeypatch, ADA)
    done = lns_study(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MLflow has everything" in done.stdout
    assert is_equal(study)
    assert send(study, events, report_in(tmp_path))[0] == ""
    client, parent, children = runs_of(study)
    assert len(children) == 4
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == [
        "report/report.html"
    ]
    assert (
        Path(
            client.download_artifacts(parent.info.run_id, "report/report.html", str(tmp_path))
        ).read_text()
        == "x"
    )
    log_in(monkeypatch, ADMIN)
    assert is_equal(study)


@pytest.mark.slow
def test_a_password_in_the_uri_logs_in_and_later_comes_from_the_environment(
    tracked: Tiny, team: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    study = tracked("of ada", f"tracking_uri={team[0].replace('//', f'//ada:{quote(ADA[1])}@')}")
    assert send(study, made_up_events(study), report_in(tmp_path))[0] == ""
    assert is_equal(study)
    named = team[0].replace("//", "//ada:***@")
    arguments = ("mlflow", "sync", study.slug, "--storage", study.storage, "--tracking-uri", named)
    assert_refused(
        lns_study(*arguments, cwd=tmp_path), "ada:***@", "not stored", "MLFLOW_TRACKING_PASSWORD"
    )
    assert_refused(
        lns_study(*arguments, cwd=tmp_path, MLFLOW_TRACKING_PASSWORD="wrong"),
        "requires a valid login",
    )
    done = lns_study(*arguments, cwd=tmp_path, MLFLOW_TRACKING_PASSWORD=ADA[1])
    assert done.returncode == 0, done.stderr
    assert ADA[1] not in (study.folder / FILE).read_text()


@pytest.mark.slow
def test_a_study_feeds_a_teams_server_while_it_runs(
    tiny: Tiny, team: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tiny("runs for a team", f"tracking_uri={team[0]}")
    config = tmp_path / "tiny.yaml"
    arguments = (
        "run",
        str(config),
        f"name={study.name}",
        f"storage={study.storage}",
        f"tracking_uri={team[0]}",
        "--plain",
    )
    assert_refused(lns_study(*arguments, cwd=tmp_path), "requires a valid login")
    log_in(monkeypatch, ADA)
    done = lns_study(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert is_equal(study)
    state = fold(read_ledger(study.folder))
    assert all(expected_points(trial, state.plan) for trial in state.trials)


@pytest.mark.slow
def test_nobody_else_reads_the_passwords_hashes(tmp_path: Path) -> None:
    database = tmp_path / "team.db"
    uri, names = f"sqlite:///{database}", ["team.db", "team.db-wal", "team.db-shm"]
    before = os.umask(0o022)
    try:
        for turn in range(2):
            with team_server(uri, tmp_path, "--workers", "1", **{PASSWORD: ADMIN[1]}) as (at, _):
                assert ask(at, "POST", SEARCH, ANY, ADMIN)[0] == 200
                there = {name: (tmp_path / name) for name in names if (tmp_path / name).exists()}
                assert "team.db" in there
                modes = {name: oct(file.stat().st_mode & 0o777) for name, file in there.items()}
                assert set(modes.values()) == {"0o600"}, (turn, modes)
            database.chmod(0o644)  # as an earlier version left it
    finally:
        os.umask(before)


@pytest.mark.slow
def test_users_stay_and_the_first_password_is_asked_for_once(tmp_path: Path) -> None:
    """One worker over sqlite; the database has its users from then on."""
    uri = f"sqlite:///{tmp_path / 'team.db'}"
    for environment in ({PASSWORD: ADMIN[1]}, {PASSWORD: ""}):
        with team_server(uri, tmp_path, "--workers", "1", **environment) as (address, _):
            assert ask(address, "POST", SEARCH, ANY, ADMIN)[0] == 200
            assert ask(address, "POST", SEARCH, ANY, ("admin", ""))[0] == 401


@pytest.mark.slow
def test_a_flood_of_wrong_passwords_is_refused_and_who_was_in_stays_in(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'team.db'}"
    with team_server(uri, tmp_path, "--workers", "1", **{PASSWORD: ADMIN[1]}) as (address, _):
        assert ask(address, "POST", SEARCH, ANY, ADMIN)[0] == 200
        with ThreadPoolExecutor(60) as many:
            wrong = [many.submit(ask, address, "GET", "/", None, ("admin", f"{number}"))
                     for number in range(60)]  # fmt: skip
            assert ask(address, "POST", SEARCH, ANY, ADMIN)[0] == 200
        found = Counter(asked.result()[0] for asked in wrong)
        assert found[401] <= found[429], found
        assert found.total() == found[401] + found[429]
        assert ask(address, "POST", SEARCH, ANY, ADMIN)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a" * 300, "%00", "%ff", ".", "a/./b", "a/../b", "a/"])
def test_an_odd_name_of_an_artifact_is_answered_400(team: tuple[str, int], name: str) -> None:
    path = f"/api/2.0/mlflow-artifacts/artifacts/{name}"
    for method in ("PUT", "GET", "DELETE"):
        status, text = ask(team[0], method, path, "x", ADMIN)
        assert (status, text.startswith("artifact ")) == (400, True), text


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "body"), UNUSABLE)
def test_values_that_mlflow_cannot_use_are_answered_400(
    team: tuple[str, int], method: str, path: str, body: object
) -> None:
    for user in (ADMIN, ADA):
        status, text = ask(team[0], method, path, body, user)
        assert (400 <= status < 500, "<html" in text) == (True, False), text
