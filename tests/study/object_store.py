"""Object stores on loopback: a real S3 server (moto's), one with Google's API, and connections to
them that can be cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.study import google_store
from tests.study.servers import free_port
from trainers import object_store

BUCKET = "study-bucket"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
"""The example in AWS's documentation."""


class Line:
    """A TCP connection from a port of its own to a server.

    Attributes:
        change: changes the bytes on their way to the server.
        left: bytes that still get through to the server; None for all.
    """

    def __init__(self, server: int) -> None:
        self.port, self.left = free_port(), None
        self.change: Callable[[bytes], bytes] = lambda content: content
        self._server, self._open = server, set[socket.socket]()
        self.mend()

    def mend(self) -> None:
        """Let connections through."""
        self.left: int | None = None
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and refuse new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open |= {client, server}
                threading.Thread(target=self._send, args=(client, server), daemon=True).start()
                threading.Thread(target=self._receive, args=(server, client), daemon=True).start()

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while content := client.recv(1 << 16):
                if self.left is not None:
                    content, self.left = content[: self.left], self.left - len(content)
                server.sendall(self.change(content))
                if self.left is not None and self.left <= 0:
                    return self.cut()
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)
        return None

    def _receive(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while content := server.recv(1 << 16):
                client.sendall(content)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)


@contextmanager
def serve() -> Iterator[int]:
    """Yield the port of an S3 server that ends with the block."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                assert process.poll() is None
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=2).close()
                    break
                time.sleep(0.1)
            yield port
        finally:
            process.kill()
            process.wait()


def new_bucket(server: int, name: str = BUCKET) -> None:
    """Create a bucket on a server that has none."""
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{server}/{name}", method="PUT")
    ).close()


def environment(line: Line, folder: Path) -> dict[str, str]:
    """Return the variables for a process that uses the bucket, with its cache in ``folder``."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        object_store.CACHE: str(folder),
    }


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """The port of the session's own S3 server."""
    with serve() as port:
        yield port


@pytest.fixture
def s3(s3_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The connection to an empty bucket, :data:`BUCKET`, which this process and its children
    use."""
    line = Line(s3_server)
    for name, value in environment(line, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    object_store._filesystem.cache_clear()
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{s3_server}/moto-api/reset", method="POST")
    ).close()
    new_bucket(s3_server)
    yield line
    line.cut()
    object_store._filesystem.cache_clear()


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The connection to an empty bucket with Google's API, :data:`BUCKET`, used like :func:`s3`."""
    with google_store.serve(BUCKET) as port:
        line = Line(port)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{line.port}")
        monkeypatch.setenv(object_store.CACHE, str(tmp_path / "cache"))
        object_store._filesystem.cache_clear()
        yield line
        line.cut()
        object_store._filesystem.cache_clear()


@pytest.fixture(params=["s3", "gs"])
def store_line(request: pytest.FixtureRequest) -> tuple[str, Line]:
    """Each kind of store in turn: the URL of its empty bucket, and the connection to it."""
    name = {"s3": "s3", "gs": "google"}[request.param]
    return f"{request.param}://{BUCKET}", request.getfixturevalue(name)


@contextmanager
def cache(folder: Path) -> Iterator[None]:
    """Use caches in another folder, as on another machine."""
    before = os.environ[object_store.CACHE]
    os.environ[object_store.CACHE] = str(folder)
    try:
        yield
    finally:
        os.environ[object_store.CACHE] = before
