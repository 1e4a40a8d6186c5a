"""A server process that has imported torch and all that a trial needs, and forks worker processes.

Importing torch, numba and this package takes two seconds of CPU time and 250 MB per process. A fork
takes milliseconds, and shares memory pages until they are written to. So each machine imports once,
and a worker that dies is replaced quickly.

The server must stay forkable. It computes nothing, so it has no threads and no CUDA context (a
child of a process with a CUDA context cannot use the GPU). It does not run the user's code, so
every child starts from a clean state. Each child has its own session, so code that signals its
process group does not reach other children.

The server runs in its own session, so Ctrl-C does not reach it. It exits when the process that
started it exits, and kills its children and their descendants (:mod:`trainers.descendants`). When a
child exits, the server kills the child's descendants. If the server itself is killed, its parent
does so, the *guard*, a process without any other task.

The method is the same as in ``multiprocessing``'s forkserver, which however imports its parent's
main module in every child (for a Ray worker, Ray) and cannot set environment variables per child.

Messages on the socket are one JSON object each: the server receives a :data:`Request` and sends a
:data:`Notice`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypedDict, final

from trainers.descendants import (
    END_SECONDS,
    adopt_orphans,
    end_descendants,
    end_with_parent,
    kill_children,
    set_name,
)
from trainers.files import open_own
from trainers.output import Output
from trainers.user_code import names_code, python_path

MESSAGE_BYTES = 1 << 16
SERVER = "import sys; from trainers.workers.fork_server import main; main(int(sys.argv[1]))"
GUARD = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
guard = os.getpid()
server = os.fork()
if not server:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end_with_parent
    if os.getppid() != guard:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.execv(sys.executable, [sys.executable, "-P", "-c", sys.argv[2], sys.argv[1]])
os.close(int(sys.argv[1]))
from trainers.workers.fork_server import guard
guard(server)
"""
"""Programs of the server and of its guard. The guard starts the server before its own imports, and
blocks SIGTERM until it can forward it."""
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's BLAS creates its threads when it is loaded; they would not survive the fork, and trials
do not compute with it."""


@final
class Fork(TypedDict):
    """Fork child ``key``; the message brings the child's end of a socket."""

    key: int
    environment: dict[str, str]
    lanes: int


@final
class Log(TypedDict):
    """Append the output to this file."""

    log: str


@final
class Load(TypedDict):
    """Load data sets."""

    data: list[dict[str, Any]]


@final
class Ready(TypedDict):
    """The server has started; the value is the seconds that it took."""

    ready: float


@final
class Forked(TypedDict):
    """Child ``forked`` has this process id."""

    forked: int
    pid: int


@final
class Failed(TypedDict):
    """Child ``failed`` could not be forked."""

    failed: int
    why: str


@final
class Exited(TypedDict):
    """The process ``exited`` with this status; a negative one is the signal."""

    exited: int
    status: int


Request: TypeAlias = Fork | Log | Load
Notice: TypeAlias = Ready | Forked | Failed | Exited


class ForkServer:
    """Client side: starts a server process and holds the socket to it.

    Args:
        log: file for the output of the server and its children; None to discard it.

    Attributes:
        socket: readable if the server has sent a message (:meth:`receive`), or has died.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(entry for entry in python_path() if entry)
        with open(log or os.devnull, "ab") as file:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # do not import from the current folder, which may be untrusted
                    "-c",
                    GUARD,
                    str(theirs.fileno()),
                    SERVER,
                ],
                env=ENVIRONMENT | os.environ | {"PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the server's guard."""
        return self._process.pid

    def fork(
        self, key: int, connection: socket.socket, environment: dict[str, str], lanes: int
    ) -> None:
        """Request a child that serves ``connection``, see
        :func:`trainers.workers.worker_process.serve`.

        Args:
            key: identifies the child in the server's answers.
            connection: the child's end of a socket.
            environment: environment variables in addition to the server's.
            lanes: maximum number of concurrent trials in the child.

        Raises:
            OSError: the server has died.
        """
        request: Fork = {"key": key, "environment": environment, "lanes": lanes}
        socket.send_fds(self.socket, [json.dumps(request).encode()], [connection.fileno()])

    def log(self, path: Path) -> None:
        """Append the output of the server and its children to another file from now on."""
        send(self.socket, {"log": str(path)})

    def load(self, data: list[dict[str, Any]]) -> None:
        """Load data sets in the server, shared by all children; given by ``DataConfig``'s keys."""
        send(self.socket, {"data": data})

    def receive(self) -> Notice | None:
        """Wait for the next message and return it; None if the server has died."""
        try:
            content = self.socket.recv(MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(content) if content else None

    def close(self) -> None:
        """Kill the server, its children and their descendants."""
        self.socket.close()
        self._process.terminate()
        self._process.wait()


def main(descriptor: int) -> None:
    """Run the server on the socket ``descriptor`` until the other end is closed."""
    began = time.monotonic()
    end_with_parent(signal.SIGTERM)
    adopt_orphans()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    _load()
    send(control, {"ready": time.monotonic() - began})
    _Server(control).serve()
    os._exit(0)


def guard(server: int) -> NoReturn:
    """Wait until the server exits, then kill its descendants; forward SIGTERM to it."""
    adopt_orphans()
    set_name(b"lns-study-guard")

    def end(*_: object) -> None:
        os.kill(server, signal.SIGTERM)
        signal.alarm(END_SECONDS)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(server, signal.SIGKILL))
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # keeps the process id reserved
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_descendants()
    os._exit(0)


def _load() -> None:
    """Import everything that a trial's first epoch would import."""
    import numpy.ctypeslib  # noqa: F401

    # torch imports it, in half a second, at the first detach of a tensor subclass
    import torch.distributed.tensor

    import trainers.workers.in_process
    import trainers.workers.own_loop
    import trainers.workers.worker_process  # noqa: F401

    torch.get_default_device()  # these import modules when they are first called
    with torch.profiler.record_function("load"):
        pass
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork either
    faulthandler.enable()
    gc.collect()
    # the children's garbage collector then skips the libraries' objects, whose pages stay shared
    gc.freeze()


class _Server:
    """Server side; see the module docstring.

    Args:
        control: socket to the process that started the server.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._outputs: dict[int, Output] = {}
        """Output of each child, by process id."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._hear)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)
        self._ends = False

    def serve(self) -> None:
        """Serve until the other end of the socket is closed, or SIGTERM arrives."""
        signal.set_wakeup_fd(self._woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            while not self._ends:
                for ready, _ in self._selector.select():
                    ready.data()
        except SystemExit:
            pass  # raised by the signal handler, possibly while data are loaded
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end_descendants()
            for output in self._outputs.values():
                output.close()

    def _hear(self) -> None:
        content, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        if not content:
            self._ends = True
            return
        request: Request = json.loads(content)
        if "log" in request:
            _print_to(request["log"])
        elif "data" in request:
            _load_data(request["data"])
        else:
            self._fork(descriptors[0], request)

    def _fork(self, connection: int, request: Fork) -> None:
        printed, prints = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if not pid:
                others = [*(key.fd for key in self._selector.get_map().values()), self._woken]
                self._selector.close()
                _become_worker(connection, prints, [*others, printed], request)
        except OSError as error:
            os.close(printed)
            send(self._control, {"failed": request["key"], "why": str(error)})
            return
        finally:
            os.close(connection)
            os.close(prints)
        output = self._outputs[pid] = Output(printed)
        self._selector.register(output, selectors.EVENT_READ, lambda: self._read(output))
        send(self._control, {"forked": request["key"], "pid": pid})

    def _read(self, output: Output) -> None:
        if not output.read():
            self._selector.unregister(output)

    def _reap(self) -> None:
        """Report the children that have exited, after killing their descendants."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, MESSAGE_BYTES)
        ended: list[tuple[int, int]] = []
        with contextlib.suppress(ChildProcessError):
            while (each := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(each)
        gone = {pid: self._outputs.pop(pid) for pid, _ in ended if pid in self._outputs}
        kill_children(keep=self._outputs)
        for output in gone.values():
            if output in self._selector.get_map():
                self._selector.unregister(output)
            output.close()
        for pid, status in ended:
            if pid in gone:
                code = os.waitstatus_to_exitcode(status)
                send(self._control, {"exited": pid, "status": code})


def _load_data(configs: list[dict[str, Any]]) -> None:
    """Load data sets for all later children.

    Errors are ignored; the trials that use the data raise them again.
    """
    from trainers.config import DataConfig
    from trainers.data import load

    for config in configs:
        if names_code(config["name"]):
            continue  # the user's code only runs in trial processes
        with contextlib.suppress(Exception):
            load(DataConfig(**config))


def _print_to(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with contextlib.suppress(OSError), open(open_own(path, flags), "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def send(control: socket.socket, message: Request | Notice) -> None:
    """Send a message; errors are ignored, because the reader detects the closed socket."""
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())


def _become_worker(connection: int, prints: int, others: list[int], request: Fork) -> None:
    """Run a forked child: serve its connection, then exit.

    Args:
        connection: the child's end of the socket.
        prints: pipe for the child's output.
        others: the server's file descriptors, to be closed.
        request: the message that requested the child.
    """
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL)
        adopt_orphans()
        set_name(b"lns-study-work")
        os.setsid()
        for descriptor in others:
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(prints, stream.fileno())
        os.close(prints)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # keeps the output if it is killed
        os.environ.update(request["environment"])
        if request["lanes"] > 1:  # streams, for which CUDA has eight queues by default
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        from trainers.workers.worker_process import serve

        serve(Connection(connection), request["lanes"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
