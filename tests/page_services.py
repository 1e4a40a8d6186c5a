"""Run the commands of pages, and start the real services that some of them need, on loopback: a Ray
cluster, PostgreSQL, an object store."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests.study import object_store
from tests.study.servers import free_port, postgres_programs

SECONDS = 180
"""Maximum time for a command on a busy machine; alone it takes some seconds."""
SERVERS = ("lns-study ui", "lns-study report --serve")
"""Prefixes of commands that serve until Ctrl-C."""
PASSWORD = "'correct horse battery staple'"


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service of a page's commands.

    Attributes:
        variables: environment variables of the commands.
        stands_for: replacements for words of the page.
        storage: folder of the studies that they run; None if they do not use a folder.
    """

    variables: dict[str, str] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)
    storage: Path | None


def start(name: str, request: pytest.FixtureRequest, folder: Path) -> Service:
    """Start the named service, which ends with the test; "" starts none."""
    found = {
        "": _nothing,
        "GPU": _gpu,
        "PostgreSQL": _postgres,
        "Ray": _ray,
        "S3": _s3,
        "S3 and aws": _s3_and_aws,
        "TensorBoard": _tensorboard,
    }
    return found[name](request, folder)


def _nothing(request: pytest.FixtureRequest, folder: Path) -> Service:
    return Service(storage=folder / "studies")


def _gpu(request: pytest.FixtureRequest, folder: Path) -> Service:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return _nothing(request, folder)


def _tensorboard(request: pytest.FixtureRequest, folder: Path) -> Service:
    if find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    return _nothing(request, folder)


def _postgres(request: pytest.FixtureRequest, folder: Path) -> Service:
    """PostgreSQL's own variables tell ``createdb`` where the cluster is; MLflow gets a free
    port."""
    there = urlsplit(request.getfixturevalue("postgres"))
    port = free_port()
    return Service(
        variables={
            "PATH": f"{postgres_programs()}:{os.environ['PATH']}",
            "PGHOST": str(there.hostname),
            "PGPORT": str(there.port),
            "PGUSER": str(there.username),
        },
        stands_for={
            "lns-study ui": f"lns-study ui --port {port}",
            "https://mlflow.example.org": f"http://127.0.0.1:{port}",
            "user@dbhost": f"{there.username}@{there.hostname}:{there.port}",
            "/srv/": f"{folder}/srv/",
            "'...'": PASSWORD,
        },
        storage=folder / "studies",
    )


def _ray(request: pytest.FixtureRequest, folder: Path) -> Service:
    address, variables = request.getfixturevalue("head")
    return Service(
        variables={
            name: text
            for name, text in variables.items()
            if name.startswith("RAY_") and name != "RAY_AUTH_MODE"  # the page names it
        },
        stands_for={"--to ray": f"--to ray --address {address}", "/shared/": f"{folder}/shared/"},
        storage=folder / "shared" / "studies",
    )


def _s3(request: pytest.FixtureRequest, folder: Path) -> Service:
    line = request.getfixturevalue("s3")
    object_store.new_bucket(line.port, "bucket")
    return Service(variables=object_store.environment(line, folder / "cache"), storage=None)


def _s3_and_aws(request: pytest.FixtureRequest, folder: Path) -> Service:
    if shutil.which("aws") is None:
        pytest.skip("aws is not installed")
    return _s3(request, folder)


class Shell:
    """Runs commands one after the other, as a reader in a terminal does.

    What a command exports is there for the next ones. A server runs in the background until the
    next server or :meth:`close`.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)
        self._server: subprocess.Popen[str] | None = None

    def run(self, command: str) -> None:
        """Run a command, or start it if it is a server; assert that it succeeds."""
        if command.startswith("export "):
            words = shlex.split(command, comments=True)[1:]
            self._environment |= dict(word.split("=", 1) for word in words)
        elif command.startswith(SERVERS):
            self._serve(command)
        else:
            run(command, self._folder, self._environment)

    def _serve(self, command: str) -> None:
        """Start a server, and return once it has printed its address."""
        self.close()
        with (self._folder / "server.log").open("w") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._server.stdout is not None
        for line in self._server.stdout:
            if "http://127.0.0.1" in line:
                return
        raise AssertionError(f"{command}\n{(self._folder / 'server.log').read_text()}")

    def close(self) -> None:
        """End the server with Ctrl-C."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.communicate(timeout=60)
            assert self._server.returncode == 0
            self._server = None


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a command of a page and return its output."""
    done = finished(command, folder, environment)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def finished(
    command: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
