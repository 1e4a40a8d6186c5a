"""The lock of a ledger: a file that names the process that writes it, or says how many lines
the last one left."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from study.errors import UserError
from study.ledger import storage
from trainers.files import (
    check_no_links,
    check_own_file,
    check_own_folder,
    open_own,
    open_own_text,
    read_own,
    read_own_json,
)

LOCK = storage.LOCK
OWN_FOLDERS = ("checkpoints", "profiles", "report", "tensorboard", "train")
"""Folders of a study's folder in which a run writes; a link in their place is refused."""
OF_TRIALS = ("checkpoints", "profiles", "train")
"""Folders among them that have a folder for each trial; a link among these is refused too."""
OUTPUT = "workers.log"
"""File in the study's folder with the output of the trials' processes."""
ALTERED = "by another process while the study ran"
"""Part of the error of a ledger that its one writer did not leave so."""
LOCK_ATTEMPTS = 6
MOST_LINES = 10**9
"""Most lines that a ledger is taken to have had."""
BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors of a lock that mean that another process has it."""


def is_locked(folder: Path) -> bool:
    """Tell whether a process writes the ledger in ``folder`` now.

    The process may be on another machine if the storage's locks reach that far.
    """
    with suppress(OSError), open(open_own(folder / LOCK, os.O_RDONLY), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in BUSY:  # no writer without locks
                return True
    return storage.is_locked_remotely(folder)


def take_lock(folder: Path) -> IO[str]:
    """Take the lock of the ledger in ``folder``; return its file, the contents unchanged.

    Raises:
        ValueError: another process has the lock, the storage has no locks, or a folder or log of
            the study's is a link.
        OSError: the lock's file is a link, or cannot be opened.
    """
    for name in OWN_FOLDERS:
        check = check_no_links if name in OF_TRIALS else check_own_folder
        check(folder / name)
    check_own_file(folder / OUTPUT)
    for attempt in range(LOCK_ATTEMPTS):  # is_locked takes it for moments
        lock = open_own_text(folder / LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            last = attempt + 1 == LOCK_ATTEMPTS
            if error.errno not in BUSY and (last or error.errno != errno.ESTALE):
                raise no_locks(folder, error) from None
            time.sleep(0 if last else 0.05)
        else:
            return lock
    raise ValueError(
        f"{folder}: {_describe_owner(folder / LOCK)} is running this study; only one may write its"
        " ledger; wait for it, or give this one another name with name=..."
    )


def no_locks(folder: Path, error: OSError) -> UserError:
    """Return the error for a lock in ``folder`` that fails although no other process has it."""
    return UserError(
        f"{folder}: its storage gives no lock ({error.strerror}), so that two processes could write"
        " one file; mount it with locks, or choose another storage with storage=..."
    )


def this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _read_lock(path: Path) -> dict[str, Any]:
    """Return the note in the lock file; version 1 wrote the process id alone."""
    try:
        note = read_own_json(path)
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {"pid": note}


def _describe_owner(path: Path) -> str:
    note = _read_lock(path)
    return f"process {note.get('pid', 'unknown')}" + (
        f" on {note['host']}" if "host" in note else ""
    )


def closed_at(path: Path) -> int:
    """Return how many lines the last writer left if it closed in order; 0 if that is unknown."""
    lines = _read_lock(path).get("lines", 0)
    return lines if isinstance(lines, int) and lines <= MOST_LINES else 0


def last_copy(path: Path, descriptor: int) -> str:
    """Say where the last complete copy is of an open ledger that is gone from ``path``.

    Makes one if no name leads to it.
    """
    opened = f"/proc/self/fd/{descriptor}"
    with suppress(OSError):
        if os.path.samestat(os.stat(moved := os.readlink(opened)), os.stat(opened)):
            return (
                f"the ledger is {moved} now, complete; move its folder back to {path.parent},"
                " then the same command continues"
            )
    lost = f"checkpoints, report and all else in {path.parent} are gone with it"
    try:
        copy = Path(tempfile.mkdtemp(prefix=f"{path.parent.name}-")) / path.name
        copy.write_bytes(Path(opened).read_bytes())
    except OSError as error:
        return f"{lost}, and no copy of the ledger could be made ({error})"
    return (
        f"{lost}, unless they can be mounted or restored; the last complete copy of the ledger"
        f" is {copy}: put it into {path.parent}, and the same command continues with the"
        " unfinished trials"
    )


def altered_since(path: Path, size: int, end: bytes) -> str:
    """Say that a ledger is not as its one writer left it; "" if it is.

    Args:
        path: the ledger.
        size: its size in bytes as it was left.
        end: the last bytes that were written.

    Raises:
        OSError: it cannot be read.
    """
    now = os.stat(path).st_size
    if now == size:
        return ""
    content = read_own(path, storage.MOST_BYTES)  # a file system may tell sizes late
    if len(content) == size and content.endswith(end):
        return ""
    how = "cut" if now < size else "written"
    return f"{path}: was {how} {ALTERED} ({now:,} bytes in place of {size:,})"
