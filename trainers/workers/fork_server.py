"""A server process that has loaded torch and all that a trial needs, and forks worker processes.

Loading torch, numba and this package takes two seconds of a core and 250 MB in every process that
does it; a fork takes milliseconds, and its pages are shared until one of the processes writes to
them. So each machine loads once, and a worker that dies is replaced at once.

The server must stay forkable: it computes nothing, so it has neither threads of its own nor a CUDA
context (a child of a process that has one cannot use the GPU). It runs in a session of its own, out
of reach of Ctrl-C, and dies with the process that started it; its children die with it
(``PR_SET_PDEATHSIG``, prctl(2)).

The method is that of ``multiprocessing``'s forkserver. That one, however, imports the main module
of its parent in every child (a Ray worker's is Ray) and cannot give one child an environment of its
own.

Messages on the socket are one JSON object each. The server sends ``{"ready": seconds}`` and, about
its children, ``{"forked": KEY, "pid": PID}``, ``{"failed": KEY, "why": WHY}`` and ``{"exited": PID,
"status": STATUS}`` (negative: the signal). It receives ``{"log": PATH}``, ``{"data": [...]}``, and
``{"key": KEY, "environment": {...}, "lanes": N}`` with the child's end of a socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
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
from typing import Any

from trainers.user_code import names_code, python_path

MESSAGE_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""C library, loaded here: between fork and exec of a process with threads nothing may be."""
PR_SET_NAME = 15
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library makes its threads when it is loaded; they would not survive the fork, and trials
compute elsewhere."""


class ForkServer:
    """The starting side: a server process and the socket to it.

    Args:
        log: file that takes what the server and its children print; None for nowhere.

    Attributes:
        socket: readable where the server has a message, see :meth:`receive`; closed where it has
            died.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(entry for entry in python_path() if entry)
        with open(log or os.devnull, "ab") as file:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # the current folder, in which others may have left a module, first
                    "-c",
                    (
                        "import sys; from trainers.workers.fork_server import main;"
                        " main(int(sys.argv[1]))"
                    ),
                    str(theirs.fileno()),
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
        """The server's process id."""
        return self._process.pid

    def fork(
        self, key: int, connection: socket.socket, environment: dict[str, str], lanes: int
    ) -> None:
        """Ask for a child that serves ``connection``, see
        :func:`trainers.workers.worker_process.serve`.

        Args:
            key: names it in the server's answers.
            environment: variables that it has beside the server's.
            lanes: trials that it may train at once.

        Raises:
            OSError: the server has died.
        """
        request = json.dumps({"key": key, "environment": environment, "lanes": lanes}).encode()
        socket.send_fds(self.socket, [request], [connection.fileno()])

    def log(self, path: Path) -> None:
        """Have what is printed appended to a file from now on."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"log": str(path)}).encode())

    def load(self, data: list[dict[str, Any]]) -> None:
        """Have data sets loaded once for all children, by ``DataConfig``'s keys."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps({"data": data}).encode())

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message and return it; None where the server has died."""
        try:
            content = self.socket.recv(MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(content) if content else None

    def close(self) -> None:
        """End the server and all its children."""
        self.socket.close()
        self._process.kill()
        self._process.wait()


def main(descriptor: int) -> None:
    """Serve ``descriptor`` until whoever started this closes the other end."""
    began = time.monotonic()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    _load()
    send(control, {"ready": time.monotonic() - began})
    _serve(control)


def _load() -> None:
    """Load everything that a trial's first epoch would load."""
    # torch loads it, half a second, with the first detach of a tensor subclass
    import torch.distributed.tensor

    import trainers.workers.worker_process  # noqa: F401

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork either
    faulthandler.enable()
    gc.collect()
    # the children's collector never looks through the libraries' objects, whose pages stay shared
    gc.freeze()


def _serve(control: socket.socket) -> None:
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        for ready, _ in selector.select():
            if ready.fd == wake:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, MESSAGE_BYTES)
                _reap(control)
                continue
            content, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not content:
                return
            request = json.loads(content)
            if "log" in request:
                _print_to(request["log"])
                continue
            if "data" in request:
                _load_data(request["data"])
                continue
            try:
                pid = os.fork()
            except OSError as error:
                os.close(descriptors[0])
                send(control, {"failed": request["key"], "why": str(error)})
                continue
            if not pid:
                selector.close()
                _become_worker(control, (wake, woken), descriptors[0], request)
            os.close(descriptors[0])
            send(control, {"forked": request["key"], "pid": pid})


def _load_data(configs: list[dict[str, Any]]) -> None:
    """Load data sets for all children to come.

    What cannot be loaded is refused by the trials that want it.
    """
    from trainers.config import DataConfig
    from trainers.data import load

    for config in configs:
        if names_code(config["name"]):
            continue  # runs in the processes of trials alone
        with contextlib.suppress(Exception):
            load(DataConfig(**config))


def _print_to(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        send(control, {"exited": pid, "status": os.waitstatus_to_exitcode(status)})


def send(control: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; where nobody listens any more, do nothing, which whoever reads notices."""
    with contextlib.suppress(OSError):
        control.send(json.dumps(message).encode())


def end_with_parent(notice: int = signal.SIGTERM) -> None:
    """Have this process, a child, sent a signal once its parent has died."""
    _LIBC.prctl(PR_SET_PDEATHSIG, notice)


def _become_worker(
    control: socket.socket, pipe: tuple[int, int], descriptor: int, request: dict[str, Any]
) -> None:
    """Serve a forked child's own connection, and end the child."""
    status = 1
    try:
        end_with_parent(signal.SIGKILL)
        _LIBC.prctl(PR_SET_NAME, b"lns-study-work", 0, 0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for end in pipe:
            os.close(end)
        os.environ.update(request["environment"])
        if request["lanes"] > 1:  # streams, for which CUDA has eight queues by default
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        from trainers.workers.worker_process import serve

        serve(Connection(descriptor), request["lanes"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
