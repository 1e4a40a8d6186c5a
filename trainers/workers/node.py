"""Management of one machine's worker processes: start, messages in both directions, kill.

With the local engine a :class:`Node` is in the study's own process; on the nodes of a Ray cluster
it is in an actor (:mod:`study.engines.ray.process_host`). Messages are forwarded without being
decoded, and in batches, so that the driver needs one call for many reports even with hundreds of
processes.

A process's death is reported after all messages that it sent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import platform
import queue
import selectors
import signal
import socket
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.user_code import digest_files, digest_package, names_code
from trainers.workers.fork_server import ForkServer
from trainers.workers.messages import (
    CHECK,
    CHECKED,
    DIED,
    Check,
    Checked,
    Died,
    Examined,
    FromWorker,
)

if TYPE_CHECKING:  # imported later, so that the server process starts first
    from trainers.config import DataConfig, TrialConfig
    from trainers.data import DatasetInfo

BATCH = 1000
"""Maximum number of messages per batch."""
RUN_BY_NODES = ("lns_ops", "trainers", "study/engines/ray")
"""Folders of this package whose code runs on the nodes of a cluster."""
SOURCES = (".py", ".cu", ".cuh")
"""Suffixes of code files."""


@dataclass
class _Process:
    """A worker process.

    Attributes:
        connection: our end of the connection to it.
        pid: its process id; None until it is known.
        unwanted: whether to kill it as soon as its process id is known.
    """

    connection: Connection
    pid: int | None = None
    unwanted: bool = False


def versions(modules: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions, by name, that must be equal on all machines of a study for equal bits.

    The version of this package is the start of the SHA-256 over the code that nodes run: the files
    of ``lns_ops`` and ``trainers``, and of the folder with a trial's supervisor. Builds of the same
    torch version for different devices count as equal.

    Args:
        modules: user code that every machine must have, as ``package.module:name``.
    """
    root = Path(__file__).parents[2]
    ours = [path for name in RUN_BY_NODES for path in sorted((root / name).rglob("*"))]
    code = digest_files(root, [path for path in ours if path.suffix in SOURCES])
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": metadata.version("torch").partition("+")[0],
        "lns-study": f"code {code}",
        **{name: digest_package(name) for name in modules},
    }


def differing(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Return the versions of another machine that differ from ours, as ``NAME VERSION``.

    Args:
        theirs: all or some of the other machine's :func:`versions`.
        ours: this machine's versions.
    """
    return [f"{name} {version}" for name, version in theirs.items() if version != ours[name]]


def is_compared(config: TrialConfig) -> bool:
    """Return whether a trial's data files must be equal on all machines.

    Data made by the user's code are not compared; the code itself is.
    """
    return not (config.own_loop or names_code(config.data.name))


class Node:
    """The worker processes of one machine; calls may come from any thread.

    Args:
        log: file for the processes' output; None to discard it.
        data: see :meth:`load`.
    """

    def __init__(self, log: Path | None = None, data: Sequence[dict[str, Any]] = ()) -> None:
        self._log, self._data = log, list(data)
        self._lock = threading.RLock()
        self._processes: dict[int, _Process] = {}
        self._server: ForkServer | None = None
        self._said: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._examiners = itertools.count(0, -1)
        """Keys of the processes that examine trials: 0, -1, ...; other keys start at 1."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, daemon=True, name="node")
        self._thread.start()
        self._ready_server()

    def log(self, path: Path) -> None:
        """Append the processes' output to another file from now on."""
        with self._lock:
            self._log = path
            if self._server is not None:
                self._server.log(path)

    def load(self, data: Sequence[dict[str, Any]]) -> None:
        """Load data sets once for all later processes; given by ``DataConfig``'s keys."""
        with self._lock:
            self._data = list(data)
            self._ready_server().load(self._data)

    def start(self, key: int, environment: dict[str, str], lanes: int) -> None:
        """Start a process.

        Args:
            key: identifies the process; must be new.
            environment: additional environment variables.
            lanes: maximum number of concurrent trials in the process.
        """
        with self._lock:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:
                self._said.put(
                    (key, pickle.dumps(Died(DIED, payload=f"no process could be made: {error}")))
                )
                return
            self._processes[key] = _Process(Connection(ours.detach()))
            try:
                self._ready_server().fork(key, theirs, environment, lanes)
            except OSError as error:
                self._lose(key, f"no process could be made: {error}")
            else:
                self._watch(self._processes[key].connection.fileno(), key)
            finally:
                theirs.close()

    def send(self, key: int, message: bytes) -> None:
        """Send a pickled :data:`ToWorker` to a process; ignored if it has died."""
        process = self._processes.get(key)
        if process is not None:
            with contextlib.suppress(OSError):
                process.connection.send_bytes(message)

    def kill(self, key: int) -> None:
        """Kill a process; its death is reported like any other."""
        with self._lock:
            process = self._processes.get(key)
            if process is not None:
                process.unwanted = True
                self._end(process)

    def events(self, seconds: float) -> list[tuple[int, bytes]]:
        """Wait for messages of processes and return them with the processes' keys.

        Returns an empty list after ``seconds`` without a message.
        """
        try:
            found = [self._said.get(timeout=seconds)]
        except queue.Empty:
            return []
        with contextlib.suppress(queue.Empty):
            while len(found) < BATCH:
                found.append(self._said.get_nowait())
        return found

    def examine(
        self, trials: Sequence[TrialConfig], environment: dict[str, str], device: str = "cpu"
    ) -> Checked | Died:
        """Check trials and their data in separate processes, before other processes run.

        Trials with the same user code share a process, until one of them changes global state; the
        remaining trials then get a new process.

        Args:
            trials: configs of the trials.
            environment: environment variables of the processes.
            device: a device that each process must have.

        Returns:
            ``CHECKED`` with the combined result of
            :func:`~trainers.workers.worker_process.examine`, or with the text of its error; or
            ``DIED``.
        """
        data: dict[DataConfig, DatasetInfo] = {}
        reasons, changes = dict[int, str | None](), dict[int, list[str]]()
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, config in enumerate(trials):
            alike.setdefault(config.user_code, []).append(place)
        for places in alike.values():
            while places:
                message = self._examine([trials[place] for place in places], environment, device)
                if message.kind == DIED or isinstance(message.payload, str):
                    return message
                found = message.payload
                data |= found.data
                reasons |= zip(places, found.reasons, strict=False)
                changes |= zip(places, found.changes, strict=False)
                places = places[len(found.reasons) :]
        count = range(len(trials))
        used = dict.fromkeys(config.data for config in trials if config.data in data)
        examined = Examined(
            {config: data[config] for config in used},
            [reasons[place] for place in count],
            [changes[place] for place in count],
        )
        return Checked(CHECKED, payload=examined)

    def _examine(
        self, trials: Sequence[TrialConfig], environment: dict[str, str], device: str
    ) -> Checked | Died:
        """Examine trials in one process and return its last message."""
        key = next(self._examiners)
        self.start(key, environment, 1)
        self.send(key, pickle.dumps(Check(CHECK, payload=(list(trials), device))))
        while True:
            speaker, content = self._said.get()
            if self._closed:
                return Died(DIED, payload="the node was closed")
            message: FromWorker = pickle.loads(content)
            if speaker == key and message.kind in (CHECKED, DIED):
                self.kill(key)
                return message

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None
            os.write(self._woken, b"x")
            self._said.put((0, b""))
        self._thread.join()
        for process in self._processes.values():
            process.connection.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def _ready_server(self) -> ForkServer:
        if self._closed:
            raise RuntimeError(
                "this Node is closed: a study closes the one that it is given; make a new one"
            )
        if self._server is None:
            self._server = ForkServer(self._log)
            if self._data:
                self._server.load(self._data)
            self._watch(self._server.socket.fileno(), None)
        return self._server

    def _watch(self, descriptor: int, key: int | None) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, key)
        os.write(self._woken, b"x")

    def _listen(self) -> None:
        while not self._closed:
            try:
                for ready, _ in self._selector.select():
                    if ready.fd == self._wake:
                        os.read(self._wake, 1 << 16)
                    elif ready.data is None:
                        self._hear_server()
                    else:
                        self._hear(ready.data)
            # a bug: no further messages would arrive, so kill the processes and report their deaths
            except Exception:
                traceback.print_exc()
                with self._lock:
                    self._lose_all("the node lost its processes by a mistake; please report it")

    def _hear(self, key: int) -> None:
        """Receive one message of a process.

        If its connection was closed, the server reports its death.
        """
        process = self._processes.get(key)
        if process is None:
            return
        try:
            self._said.put((key, process.connection.recv_bytes()))
        except (EOFError, OSError):
            self._selector.unregister(process.connection.fileno())

    def _hear_server(self) -> None:
        with self._lock:
            if self._server is None:
                return
            message = self._server.receive()
            if message is None:
                self._lose_all("the process that forks workers died")
            elif "forked" in message:
                process = self._processes[message["forked"]]
                process.pid = message["pid"]
                if process.unwanted:
                    self._end(process)
            elif "failed" in message:
                self._lose(message["failed"], f"no process could be made: {message['why']}")
            elif "exited" in message:
                key = next(
                    key
                    for key, process in self._processes.items()
                    if process.pid == message["exited"]
                )
                self._lose(key, _describe(message["status"]))

    def _lose_all(self, why: str) -> None:
        if self._server is not None:
            self._selector.unregister(self._server.socket.fileno())
            self._server.close()
            self._server = None
        for key in list(self._processes):
            self._lose(key, why)

    def _lose(self, key: int, why: str) -> None:
        """Receive the last messages of a dead process, then report its death."""
        process = self._processes.pop(key)
        with contextlib.suppress(EOFError, OSError):
            while process.connection.poll():
                self._said.put((key, process.connection.recv_bytes()))
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(process.connection.fileno())
        process.connection.close()
        self._said.put((key, pickle.dumps(Died(DIED, payload=why))))

    @staticmethod
    def _end(process: _Process) -> None:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _describe(status: int) -> str:
    if status < 0:
        name = (
            signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        )
        return f"the trial's process died ({name})"
    return f"the trial's process ended with exit code {status}"
