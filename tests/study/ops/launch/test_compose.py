"""``conf/cluster/compose.yaml`` without Docker: its own command lines run on loopback, over a real
PostgreSQL, and a study that is launched to its Ray head has its runs and artifacts in its MLflow.

Not tried here: the images of others, the network and the volumes of Docker.
"""

from __future__ import annotations

import base64
import http.client
import lzma
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from study.cli import main
from study.cli.entry import parse
from study.ops.launch.kuberay import ARCHIVE
from tests.study.conftest import TINY
from tests.study.ops.launch.machines.compose_host import FILE, Host, free_ports
from tests.study.ops.launch.machines.stand_in_store import PORT
from tests.study.servers import free_port

RAY = f"/tmp/lns-compose-{os.getpid()}"
"""Ray's folder; its sockets need short paths."""
LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def make_secrets(folder: Path) -> None:
    """Run the lines at the head of the file, which make the secrets."""
    head = FILE.read_text().partition("services:")[0]
    lines = re.findall(r"^#   (.*)$", head, re.M)
    made = "\n".join(line for line in lines if not re.match("docker|ssh", line))
    assert "mkdir" in made
    subprocess.run(["bash", "-euc", made], cwd=folder, check=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A machine with the secrets, before any service runs."""
    ports = free_ports(("postgres", 5432), ("store", 7070), ("mlflow", 5000), ("ray", 8265))
    host = Host(tmp_path, ports)
    (tmp_path / ".secrets").rmdir()
    make_secrets(tmp_path)
    yield host
    host.close()
    shutil.rmtree(RAY, ignore_errors=True)


def test_the_head_of_the_file_makes_every_secret_and_keeps_others_out(host: Host) -> None:
    made = sorted((host.folder / ".secrets").iterdir())
    named = {name for each in host.services.values() for name in each.get("secrets", [])}
    assert {path.name for path in made} == named
    assert all(re.fullmatch("[0-9a-f]{64}", path.read_text()) for path in made)
    assert len({path.read_text() for path in made}) == len(made)
    # the containers' user may differ from the user who made them
    assert {path.stat().st_mode & 0o777 for path in made} == {0o444}
    assert (host.folder / ".secrets").stat().st_mode & 0o777 == 0o700


def test_a_launch_from_beside_the_secrets_takes_none_along(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (host.folder / "tiny.yaml").write_text(TINY)
    shutil.copy(FILE, host.folder)
    monkeypatch.chdir(host.folder)
    for target in ("ray", "slurm", "kuberay"):
        assert main(["launch", "tiny.yaml", "--to", target, "--dry-run", "storage=/studies"]) == 0
    assert_no_secret_travels(host)
    shutil.copytree(host.folder / ".secrets", host.folder / "secrets")
    assert main(["launch", "tiny.yaml", "--to", "ray", "--dry-run", "storage=/studies"]) == 2
    assert re.search("secrets/[a-z]+: is a token or a key alone", capsys.readouterr().err)


def assert_no_secret_travels(host: Host) -> None:
    """The package in the host's folder, including archives, has the study and no secret."""
    (stage,) = (host.folder / ".lns-study").iterdir()
    assert (stage / "folder" / "tiny.yaml").is_file()
    written = [path.read_bytes() for path in stage.rglob("*") if path.is_file()]
    for manifest in stage.glob("kuberay.yaml"):
        data, _ = yaml.safe_load_all(manifest.read_text())
        written.append(lzma.decompress(base64.b64decode(data["binaryData"][ARCHIVE])))
    secrets = [path.read_bytes() for path in (host.folder / ".secrets").iterdir()]
    assert len(secrets) == 5
    assert not [secret for secret in secrets for text in written if secret in text]


def test_the_program_takes_what_each_service_gives_it(host: Host) -> None:
    given = [
        line.partition("lns-study ")[2].split()
        for service in host.services.values()
        for line in service.get("command", [])
        if "lns-study " in line
    ]
    assert len(given) == 1
    for arguments in given:
        options = parse(arguments)
        # only names: each is also accepted with the port
        assert [name for name in options.allow_host if not re.fullmatch("[a-z]+", name)] == []
    for name, service in host.services.items():
        for word in host.words(name) if "command" in service else []:
            checked = subprocess.run(["bash", "-n"], input=word, text=True, capture_output=True)
            assert checked.returncode == 0, (name, checked.stderr)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_study_launched_to_the_ray_head_is_in_the_mlflow_of_the_file(
    host: Host, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.ports["postgres", 5432] = int(re.findall(r":(\d+)/", postgres)[0])
    make_database(postgres, host.secret("postgres"))
    host.start("store", asked=f"{host.address('store', 7070)}/moto-api/", **store_port(host))
    mlflow = host.address("mlflow", 5000)
    host.start("mlflow", f"--port {host.ports['mlflow', 5000]}", f"{mlflow}/health")
    check_names(host)
    for _ in range(2):  # at every start of the machine
        done = host.run("logins")
        assert done.returncode == 0, done.stderr
    host.start("ray", options_of_ray(host), host.address("ray", 8265))

    (tmp_path / "tiny.yaml").write_text(TINY)
    launched = launch(host, f"tracking_uri={mlflow}", f"storage={tmp_path}/volumes/studies")
    assert launched.returncode == 0, launched.stdout + launched.stderr
    assert_no_secret_travels(host)
    words = [sys.executable, "-m", "study", "status", "tiny", "--storage"]
    status = subprocess.run(
        [*words, f"{tmp_path}/volumes/studies"], env=host.environment("ray"), capture_output=True
    )
    assert status.returncode == 0, status.stderr  # `docker compose exec ray lns-study status ...`
    for name, value in zip(LOGIN, ("admin", host.secret("admin")), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    check_runs(mlflow, tmp_path)
    with urllib.request.urlopen(f"{host.address('store', 7070)}/artifacts?list-type=2") as kept:
        assert b"report/report.html" in kept.read()


def make_database(postgres: str, password: str) -> None:
    """Do what the PostgreSQL image does at its first start: create a user with a password, and its
    database."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as database:
        database.execute(f"CREATE ROLE mlflow LOGIN PASSWORD '{password}'")
        database.execute("CREATE DATABASE mlflow OWNER mlflow")
        (file,) = database.execute("SHOW hba_file").fetchone() or ()
        lines = "('host all mlflow all scram-sha-256'), ('host all all all trust')"
        database.execute(f"COPY (VALUES {lines}) TO '{file}'")  # type: ignore[arg-type]
        database.execute("SELECT pg_reload_conf()")
    there = postgres.replace("study@", "mlflow:wrong@")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(there)


def store_port(host: Host) -> dict[str, str]:
    """Return the variable with the port of the store's replacement."""
    return {PORT: str(host.ports["store", 7070])}


def check_names(host: Host) -> None:
    """Query MLflow by the names that the other services and browsers use."""
    port = host.ports["mlflow", 5000]
    status = {}
    for name in (f"mlflow:{port}", f"localhost:{port}", f"127.0.0.1:{port}", "evil.example"):
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        there.request("GET", "/api/2.0/mlflow/experiments/search", headers={"Host": name})
        status[name] = there.getresponse().status
        there.close()
    assert list(status.values()) == [401, 401, 401, 403], status


def options_of_ray(host: Host) -> str:
    """Return what separates a Ray head from others on this machine, as a container does."""
    return (
        f"--num-cpus=2 --port={free_port()} --dashboard-port={host.ports['ray', 8265]}"
        f" --node-ip-address=127.0.0.1 --temp-dir={RAY}"
        f" --ray-client-server-port={free_port()} --dashboard-agent-listen-port={free_port()}"
    )


def launch(host: Host, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Launch the study as from a laptop, with the token and without a login for MLflow."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "MLFLOW_", "AWS_"))
    }
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{host.folder}/.secrets/ray"}
    words = ["launch", "tiny.yaml", "--to", "ray", "--address", host.address("ray", 8265)]
    return subprocess.run(
        [sys.executable, "-m", "study", *words, *overrides],
        cwd=host.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )


def check_runs(mlflow: str, folder: Path) -> None:
    """Find the study's runs and its report in MLflow, and read the report through the server."""
    from mlflow.server.auth.client import AuthServiceClient
    from mlflow.tracking import MlflowClient

    assert not AuthServiceClient(mlflow).get_user("studies").is_admin
    client = MlflowClient(mlflow)
    (experiment,) = client.search_experiments(filter_string="name = 'tiny'")
    assert experiment.artifact_location.startswith("mlflow-artifacts:")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 3
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    text = client.download_artifacts(parent.info.run_id, "report/report.html", str(folder))
    assert "lns matmul" in Path(text).read_text()
