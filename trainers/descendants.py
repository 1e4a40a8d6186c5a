"""Killing all descendants of a process.

Process groups and sessions are not enough: a child can start its own session, and a process that
was forked twice has lost its parent. However, an orphan becomes a child of its nearest ancestor
that is a *subreaper* (``PR_SET_CHILD_SUBREAPER``, prctl(2)). A subreaper therefore finds all
orphaned descendants among its children, and can kill them.
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
"""The C library, loaded early, because a process with threads must not load it between fork and
exec."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
END_SECONDS = 5
"""Maximum number of seconds to wait for killed processes; a process that waits for a file server
only dies when the server answers."""
POLL_SECONDS = 0.005


def end_with_parent(notice: int = signal.SIGTERM) -> None:
    """Make the kernel send this process a signal when its parent dies."""
    _LIBC.prctl(PR_SET_PDEATHSIG, notice)


def set_name(name: bytes) -> None:
    """Set this process's name in ``ps`` and ``top``, at most 15 bytes."""
    _LIBC.prctl(PR_SET_NAME, name, 0, 0, 0)


def adopt_orphans() -> None:
    """Make orphaned descendants of this process its children (subreaper)."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill the children of this process, except the process ids in ``keep``.

    Children of a killed process become children of this one, and are killed by the next call.
    """
    for pid in _children():
        if pid not in keep:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_descendants() -> None:
    """Kill all descendants of this process and wait for their end, at most :data:`END_SECONDS`."""
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
    """Return the process ids of this process's children."""
    try:
        found = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread ended meanwhile
        found = []
    if found:
        return [int(pid) for text in found for pid in text.split()]
    return [child.pid for child in psutil.Process().children()]
