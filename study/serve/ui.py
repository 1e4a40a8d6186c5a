"""MLflow's web interface over a storage folder, on this machine only (``lns-study ui``);
:mod:`study.serve.team` serves others.

One worker and no job execution: one process (:mod:`study.serve.mlflow_server`) instead of fifteen
and 2 GB. It listens on 127.0.0.1, answers only to that name and localhost, and admits only those
with the token in the printed link, since every user of the machine reaches 127.0.0.1. To watch a
remote machine, forward the port with ssh. The database's address, which may hold a password, and
the token go through the environment: everybody can read command lines.

The server runs in its own process group, so that Ctrl-C ends it and all of its children, and
nothing else.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from study.config import check_tracking_uri
from study.program import module_command
from study.serve.mlflow_server import TOKEN, mlflow_command
from study.tracking.address import HOST, is_server
from study.tracking_uri import without_login, without_password
from trainers.workers.descendants import end_with_parent

EVERYWHERE = "0.0.0.0"
MOST_LINKS = 10
READY_SECONDS = 60.0
STOP_SECONDS = 5.0
ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ENABLE_AI_GATEWAY": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "PYTHONWARNINGS": "ignore:starlette.middleware.wsgi is deprecated",  # MLflow 3.17's import
}


def serve(
    uri: str, artifacts: Path, port: int, say: Callable[[str], None], pages: Mapping[str, str]
) -> int:
    """Run the server in the foreground until Ctrl-C or SIGTERM; return its exit code.

    The exit code is 0 if it was asked to end.

    Args:
        uri: database of the tracking store.
        artifacts: folder for artifacts of new experiments.
        port: port to listen on.
        say: prints one line.
        pages: pages of studies within MLflow's interface, to each of which a link is printed.

    Raises:
        ValueError: the port is taken.
    """
    check_port(port)
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    return run(
        command(str(artifacts), port),
        environment(uri) | {TOKEN: token},
        port,
        say,
        page=f"?{urllib.parse.urlencode({'token': token})}",
        pages=pages,
    )


def run(
    words: list[str],
    variables: Mapping[str, str],
    port: int,
    say: Callable[[str], None],
    *,
    host: str = HOST,
    folder: str | None = None,
    page: str = "",
    pages: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a server's command line in the foreground, see :func:`serve`.

    Args:
        words: the command line.
        variables: environment variables to add to this process's.
        port: port on which the server listens.
        say: prints one line.
        host: host on which the server listens.
        folder: working folder of the server; None for this process's.
        page: path of the page to open.
        pages: what goes behind it for the page of each study, by name.
    """
    say("Starting MLflow, some seconds ...")
    server = subprocess.Popen(
        words,
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
        cwd=folder,
    )
    reached = HOST if host == EVERYWHERE else host
    try:
        if _wait_until_ready(server, reached, port):
            address = f"http://{reached}:{port}{f'/{page}' if page else ''}"
            lets_in = " (this link lets the browser in)" if page else ""
            say(f"MLflow is at {address}{lets_in}. Ctrl-C ends it.")
            for name, where in list(pages.items())[:MOST_LINKS]:
                say(f"{name}: {address}{where}")
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def check_servable(uri: str) -> None:
    """Refuse what ``lns-study ui`` cannot serve: anything but a database.

    Raises:
        ValueError: it is no tracking URI, or that of a server.
    """
    check_tracking_uri(uri)
    if is_server(uri):
        raise ValueError(
            f"tracking_uri={without_password(uri)!r}: must be a database, and this is a server"
            f" already; open {without_login(uri)} in a browser"
        )


def environment(uri: str) -> dict[str, str]:
    """Return the server's additional environment variables."""
    return {**ENVIRONMENT, "MLFLOW_BACKEND_STORE_URI": uri}


def command(
    artifacts: str,
    port: int,
    *,
    host: str = HOST,
    workers: int = 1,
    names: Sequence[str] = (),
    team: bool = False,
) -> list[str]:
    """Return the server's command line.

    Args:
        artifacts: folder or address for artifacts of new experiments.
        port: port to listen on.
        host: host to listen on.
        workers: number of processes that answer requests; several need uvloop and httptools.
        names: hosts, beside 127.0.0.1 and localhost, by which the server may be called; their pages
            may change things too.
        team: whether users must log in.
    """
    hosts = ",".join(
        name for host_ in (HOST, "localhost", *names) for name in (host_, f"{host_}:{port}")
    )
    origins = ",".join(
        f"{scheme}://{name}{end}"
        for name in names
        for scheme in ("http", "https")
        for end in ("", f":{port}")
    )
    if not team and workers == 1 and not names:
        arguments = [
            "--artifacts",
            artifacts,
            "--host",
            host,
            "--port",
            str(port),
            "--allowed-hosts",
            hosts,
        ]
        return [*module_command("study.serve.mlflow_server"), *arguments]
    more = ["--cors-allowed-origins", origins] if names else []
    more += ["--app-name", "basic-auth"] if team else []
    options = "--log-level warning" + " --loop uvloop --http httptools" * (team or workers > 1)
    return mlflow_command(artifacts, host, port, workers, hosts, more, options)


def check_port(port: int, host: str = HOST) -> None:
    """Refuse a port that is not free.

    Raises:
        ValueError: something listens there, or there is no such port or address.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port={port}: cannot listen on {host}:{port} ({error}); choose a free port from 1024"
            " to 65535 with --port"
        ) from None


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server's process group, children included: politely, then by force."""
    for wish, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(server.pid, wish)
        except ProcessLookupError:
            return
        if _group_ends(server, patience):
            return


def _group_ends(server: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the server and every process of its group to end; tell whether they have."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            server.poll()
            os.killpg(server.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def _wait_until_ready(server: subprocess.Popen[bytes], host: str, port: int) -> bool:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False
