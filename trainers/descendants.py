"""The end of a process together with everything that it has started.

A process group or a session does not hold what a process starts: a child may take a session of its
own, and one that was forked twice has no parent left to be found by. But an orphan becomes a child
of its nearest ancestor that is a *subreaper* (``PR_SET_CHILD_SUBREAPER``, prctl(2)). So a process
that is one finds among its children whatever descends from those that have died, and can end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_LIBC = ctypes.CDLL(None)
"""C library, loaded here: between fork and exec of a process with threads nothing may be."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
END_SECONDS = 5
"""Most seconds to wait for killed processes: one that waits for a file server dies when that
answers."""
POLL_SECONDS = 0.005


def end_with_parent(notice: int = signal.SIGTERM) -> None:
    """Have this process, a child, sent a signal once its parent has died."""
    _LIBC.prctl(PR_SET_PDEATHSIG, notice)


def set_name(name: bytes) -> None:
    """Set the name by which ``ps`` and ``top`` show this process, at most 15 bytes."""
    _LIBC.prctl(PR_SET_NAME, name, 0, 0, 0)


def adopt_orphans() -> None:
    """Have the descendants of this process become its children when their parents die."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill the children of this process, but for those to keep.

    What a killed one has started becomes a child when it dies, and is killed by the next call.
    """
    for pid in _children():
        if pid not in keep:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill everything that descends from this process, and wait until it is gone."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until:
        kill_children()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    """Return the ids of the children of this process."""
    try:
        found = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended meanwhile
        found = []
    if found:
        return [int(pid) for text in found for pid in text.split()]
    return [child.pid for child in psutil.Process().children()]
