"""Real servers on loopback for tests: PostgreSQL, and an MLflow server that can be killed and
started again at the same port."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from study.ops.serve.mlflow_server import TOKEN
from study.ops.serve.ui import command, environment, listen, start, stop


def free_port() -> int:
    """Return a port of loopback that no process listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def open_files(number: int) -> Iterator[None]:
    """The usual limit on open files for processes that start here, which they may raise."""
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@contextmanager
def connections(port: int, number: int) -> Iterator[None]:
    """Connections that send nothing, as another user of the machine may hold them."""
    with ExitStack() as held:
        for _ in range(number):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        yield


class Server:
    """A server over its own database in ``folder``, at the address ``uri``.

    Not running until :meth:`start`; open to all without a ``token``.
    """

    def __init__(self, folder: Path, database: str = "", token: str = "") -> None:
        self.port = free_port()
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self._database = database or f"sqlite:///{folder}/mlflow.db"
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return when it answers."""
        listening = listen(self.port)
        self._process = start(
            [
                *command(str(self.folder / "artifacts"), listening),
                *([] if self._token else ["--open"]),
            ],
            environment(self._database) | {TOKEN: self._token},
            listening,
        )
        for _ in range(900):
            assert self._process.poll() is None
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"{self.uri} does not answer")

    def kill(self) -> None:
        """Kill the server, as a power cut would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal to all of the server's processes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End the server by a request to terminate."""
        if self._process is not None:
            stop(self._process)
            self._process = None


def postgres_programs() -> Path | None:
    """Return the folder of PostgreSQL's programs."""
    found = shutil.which("initdb")
    here = (
        [Path(found).resolve()]
        if found
        else sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    )
    return here[-1].parent if here else None


@contextmanager
def postgres_cluster(programs: Path) -> Iterator[str]:
    """Run a PostgreSQL cluster for the tests, and return the URI of a database in it. PostgreSQL
    refuses to run as root, so root runs it as the user postgres."""
    folder = Path(tempfile.mkdtemp(prefix="lns-study-postgres-"))
    who: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, "postgres")
        who = ["runuser", "-u", "postgres", "--"]
    port = free_port()
    control = [*who, str(programs / "pg_ctl"), "-D", str(folder / "data"), "-w"]
    quiet = {"stdout": subprocess.DEVNULL, "check": True, "cwd": "/", "timeout": 300}
    try:
        subprocess.run(
            [
                *who,
                str(programs / "initdb"),
                "-D",
                str(folder / "data"),
                "-A",
                "trust",
                "-U",
                "study",
            ],
            **quiet,
        )  # type: ignore[call-overload]
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories=''"
        start = [*control, "-l", str(folder / "log"), "-o", options, "start"]
        subprocess.run(start, **quiet)  # type: ignore[call-overload]
        yield f"postgresql://study@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run(
            [*control, "-m", "immediate", "stop"], stdout=subprocess.DEVNULL, cwd="/", check=False
        )
        shutil.rmtree(folder, ignore_errors=True)
