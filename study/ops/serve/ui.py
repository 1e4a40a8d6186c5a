"""MLflow's web interface for a storage folder, for one user on this machine (``lns-study ui``).

:mod:`study.ops.serve.team` is the server for several users.

With one worker and no job execution it is one process (:mod:`study.ops.serve.mlflow_server`)
instead of fifteen processes with 2 GB. It listens on 127.0.0.1, and accepts only requests for that
name or localhost that have the token of the printed link, because every local user can connect to
127.0.0.1 (:mod:`study.ops.serve.guard`). For a remote machine, forward the port with ssh. The token
and the database's address, which may contain a password, are passed in environment variables,
because all users can read command lines.

The server runs in its own process group, so that Ctrl-C ends it and its children only.
"""

from __future__ import annotations

import http.client
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from study.config import check_tracking_uri
from study.ops.serve.guard import HEALTH, link, with_port
from study.ops.serve.mlflow_server import STORE, TOKEN
from study.program import module_command
from study.tracking.address import HOST, is_server
from study.tracking_uri import without_login, without_password
from trainers.descendants import end_with_parent

EVERYWHERE = "0.0.0.0"
MOST_LINKS = 10
BACKLOG = 2048
"""Maximum number of connections that wait while the server starts; uvicorn's default."""
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
        say: prints one line for the user.
        pages: address of each study's page within MLflow's interface, by name; links to the first
            :data:`MOST_LINKS` are printed.

    Raises:
        ValueError: the port is in use.
    """
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    with listen(port) as listening:
        return run(
            command(str(artifacts), listening),
            environment(uri) | {TOKEN: token},
            listening,
            say,
            link(HOST, port, token),
            pages=pages,
        )


def run(
    words: list[str],
    variables: Mapping[str, str],
    listening: socket.socket,
    say: Callable[[str], None],
    address: str,
    *,
    folder: str | None = None,
    pages: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a server's command line in the foreground, see :func:`serve`.

    Args:
        words: the command line.
        variables: environment variables to add to this process's environment.
        listening: socket on which the server listens; this process closes its copy.
        say: prints one line for the user.
        address: address to open in a browser.
        folder: working directory of the server; None for this process's.
        pages: suffix of the address for each study's page, by the study's name.
    """
    say("Starting MLflow, some seconds ...")
    host, port = listening.getsockname()[:2]
    server = start(words, variables, listening, folder=folder)
    try:
        if _wait_until_ready(server, HOST if host == EVERYWHERE else host, port):
            lets_in = " (this link lets the browser in)" if TOKEN in variables else ""
            say(f"MLflow is at {address}{lets_in}. Ctrl-C ends it.")
            for name, where in list(pages.items())[:MOST_LINKS]:
                say(f"{name}: {address}{where}")
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def start(
    words: list[str],
    variables: Mapping[str, str],
    listening: socket.socket,
    *,
    folder: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a server process, which inherits the socket; this process closes its copy."""
    with listening:
        return subprocess.Popen(
            words,
            env=os.environ | variables,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
            cwd=folder,
            pass_fds=(listening.fileno(),),
        )


def check_servable(uri: str) -> None:
    """Check that a tracking URI is a database, which ``lns-study ui`` can serve.

    Raises:
        ValueError: it is not a tracking URI, or is the address of a server.
    """
    check_tracking_uri(uri)
    if is_server(uri):
        raise ValueError(
            f"tracking_uri={without_password(uri)!r}: must be a database, and this is a server"
            f" already; open {without_login(uri)} in a browser"
        )


def environment(uri: str) -> dict[str, str]:
    """Return the server's additional environment variables."""
    return {**ENVIRONMENT, STORE: uri}


def command(
    artifacts: str, listening: socket.socket, *, workers: int = 1, names: Sequence[str] = ()
) -> list[str]:
    """Return the server's command line.

    Args:
        artifacts: folder or address for artifacts of new experiments.
        listening: socket to listen on.
        workers: number of worker processes; two or more need uvloop and httptools.
        names: allowed host names, besides 127.0.0.1 and localhost.
    """
    port = listening.getsockname()[1]
    return [
        *module_command("study.ops.serve.mlflow_server"),
        f"--fd={listening.fileno()}",
        f"--artifacts={artifacts}",
        f"--workers={workers}",
        f"--allowed-hosts={','.join(with_port((HOST, 'localhost', *names), port))}",
    ]


def listen(port: int, host: str = HOST) -> socket.socket:
    """Return a socket that listens on a port.

    From then on no other process can take the port, and clients wait until the server accepts their
    connection. Without a listener, a client on the same machine that retries could connect to
    itself (TCP simultaneous open; rare).

    Raises:
        ValueError: the port is in use, or port or address do not exist.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"port={port}: cannot listen on {host}:{port} ({error}); choose a free port from 1024"
            " to 65535 with --port"
        ) from None


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server's process group: SIGTERM first, SIGKILL after :data:`STOP_SECONDS`."""
    for wish, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(server.pid, wish)
        except ProcessLookupError:
            return
        if _group_ends(server, patience):
            return


def _group_ends(server: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until all processes of the server's group have ended; return whether they have."""
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
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}{HEALTH}", timeout=2):
                return True
        except (http.client.HTTPException, OSError):
            time.sleep(0.2)
    return False
