"""A Ray on this machine that ends with the process that started it.

It runs in separate processes (``ray start --block``). If a part of Ray dies, ``ray start`` ends all
other parts; if an agent dies, only its raylet ends. :class:`OwnRay` notices both at its next look.

Every client of a Ray cluster can run code as its user. This Ray listens on 127.0.0.1 only, requires
a token that only our processes inherit, and serves no metrics, which would need no token.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from study._compat import RAY_CURRENT, RAY_FOR_NOBODY_ELSE, reread_ray_variables
from study.engines.ray_token import TOKEN
from study.errors import UserError
from study.program import module_command
from trainers.descendants import end_with_parent

TOKEN_BYTES = 32
"""Length of a token, as Ray takes it."""
START_SECONDS = 120.0
LAST_LINES = 8
"""Number of lines of its log that are shown if Ray does not start."""
END_SECONDS = 15.0
"""Seconds that `ray start` has to end: it takes 2, or hangs in a call to a dead control store."""


class OwnRay:
    """The processes of a Ray of this machine that ends with this process.

    Args:
        cpus, gpus: resources that it has.
        dashboard: whether to serve the State API (part of Ray's dashboard): by it Ray Train notices
            that a killed driver's workers still hold their CPUs. Without it the restarted driver
            would wait for them for ever.

    Attributes:
        address: address of its control store.
        lost: reason for which it must be renewed; "" while it is there.

    Raises:
        UserError: it does not start.
    """

    address = lost = ""

    def __init__(self, cpus: float, gpus: int, dashboard: bool) -> None:
        # All users may write into Ray's folder, and late processes of a dead Ray create it again.
        # So it lies in a folder that only this user can open, and that outlives every Ray in it.
        self._folder, self._number = Path(tempfile.mkdtemp(prefix="ray-")), 0
        self._parts: dict[str, psutil.Process] = {}
        # a new token for this Ray, whatever the variables contain for other clusters
        token = dict(zip(TOKEN, ("token", secrets.token_hex(TOKEN_BYTES)), strict=True))
        ours = token | RAY_FOR_NOBODY_ELSE
        self._before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        reread_ray_variables()
        self._options = [
            f"--num-cpus={cpus:g}",
            f"--num-gpus={gpus}",
            f"--include-dashboard={dashboard}",
            "--dashboard-host=127.0.0.1",
            "--no-monitor",  # the autoscaler, which serves metrics to everybody
        ]
        self.renew()

    def look(self) -> None:
        """Check that its processes run, and set ``lost``.

        ``ray start`` takes the end of a raylet whose agents died for intended, and may itself wait
        for a control store that has died.
        """
        for name in {"gcs_server", "raylet"} - self._parts.keys():
            if part := _child(self._process.pid, name):
                self._parts[name] = part
        died = self._process.poll() is not None or not all(map(_runs, self._parts.values()))
        self.lost = "one of its processes died" if died else ""

    def renew(self) -> None:
        """Start a new Ray.

        Raises:
            UserError: it does not start.
        """
        if self._number:
            self._end()
        self._number += 1
        folder = self._folder / f"r{self._number}"  # short, as sockets' paths are
        start = [
            *module_command("ray.scripts.scripts"),
            "start",
            "--head",
            "--block",
            "--port=0",
            "--disable-usage-stats",
        ]
        # by default every Ray takes the same three, and `ray start` fails if another Ray has them
        names = ("dashboard", "ray-client-server", "dashboard-agent-listen")
        ports = [
            f"--{name}-port={port}"
            for name, port in zip(names, _free_ports(len(names)), strict=True)
        ]
        self._printed, self._parts = folder.with_name("start.log"), {}
        with self._printed.open("wb") as log:
            self._process = subprocess.Popen(
                [*start, *self._options, *ports, f"--temp-dir={folder}"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # out of reach of signals to our process group, such as Ctrl-C
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        until = time.monotonic() + START_SECONDS
        while not (address := _text(folder / RAY_CURRENT)):
            if self._process.poll() is not None or time.monotonic() > until:
                failure = self.failure()
                self.close()
                raise failure
            time.sleep(0.05)
        self.address, self.lost = address, ""

    def failure(self) -> UserError:
        """Return the error with the last lines that `ray start` printed before it failed.

        It names a copy of the log, because :meth:`close` removes Ray's folder.
        """
        printed = _text(self._printed)
        descriptor, log = tempfile.mkstemp(prefix="ray-start-", suffix=".log")
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{printed}\n")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        last = "".join(f"\n  {line}" for line in lines[-LAST_LINES:]) or " it printed nothing"
        return UserError(
            f"Ray does not start on this machine:{last}\nAll of its log is in {log}; mend what it"
            " names, often a port, memory or a full disk, and repeat the command. A study that"
            " needs no Ray trains without it with engine=local"
        )

    def close(self) -> None:
        """End its processes and remove their folder, which stays if one of them cannot be ended."""
        if self._end():
            shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        reread_ray_variables()

    def _end(self) -> bool:
        """End all processes of the newest Ray; return whether none is left."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its processes, then itself
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        # the agents and workers of a raylet that died look for it now and then, and end late
        until = time.monotonic() + END_SECONDS
        while (late := _writers(self._folder)) and time.monotonic() < until:
            for process in late:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(late, timeout=1.0)
        return not late


def _free_ports(number: int) -> list[int]:
    """Return different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _child(process: int, name: str) -> psutil.Process | None:
    """Return the child of a process with this name, or None."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name() == name:
                    return child
    return None


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _writers(folder: Path) -> list[psutil.Process]:
    """Return the processes of this user, without this one, that have files in a folder open to
    write them, as all processes of a Ray have their logs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.uids().real == os.getuid():
                files = process.open_files()
                if any(f.mode != "r" and Path(f.path).is_relative_to(folder) for f in files):
                    found.append(process)
    return found


def _text(path: Path) -> str:
    """Return the contents of a file; "" if the file does not exist."""
    return path.read_text(errors="replace").strip() if path.exists() else ""
