"""The ledger: what happened in a study, one JSON object a line, appended and fsynced before anyone acts on it.

It is the truth. MLflow and the report are made from it and can be made again. Events, each with ``event`` and ``time`` (seconds
since 1970)::

    planned     a run of the study begins: config, trials, data, code
    capacity    CPUs, GPUs and machines that the run has now    cpus, gpus, nodes
    started     a trial was given to processes, or again        trial, slots (one a rank), hosts, cpus, gpus
    report      a trial finished an epoch                       trial, epoch, metrics, pid, host
    checkpoint  a trial's state is on disk                      trial, epoch, path
    restarted   a trial's process died and will be restarted    trial, error
    relieved    a trial ran out of memory; once more with other keys   trial, error, relief
    damaged     a trial's checkpoint could not be read          trial, error
    finished    a trial is done                                 trial, metrics (test/...)
    stopped     the scheduler ended a trial early               trial, by
    failed      a trial is given up                             trial, error
    added       an adaptive search proposed a trial             planned
    edited      limits were changed while the study ran         limits
    ended       the run is over                                 outcome: finished, failed, stopped or interrupted

What was taken over from another study or a shorter trial names it under ``source``, has the time at which it happened there, and says in
which ``commits``; a report how many ``seconds`` the epoch took.

A restarted trial repeats the epochs since its checkpoint, bit for bit; the ledger keeps the first report of each. A machine
that dies while a line is written leaves a torn line: readers skip it, the next writer starts a new line after it.

Limits: one writer at a time (a lock file says who); local or NFS storage with working fsync.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

FILE = "ledger.jsonl"
LOCK = "ledger.lock"
LOCK_ATTEMPTS = 6

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]


def read_ledger(folder: Path) -> list[Event]:
    """Every whole event of a study's folder, in order, repeated reports dropped; empty if there is no ledger."""
    path = folder / FILE
    if not path.exists():
        return []
    seen: set[tuple[object, ...]] = set()
    events = [event for line in path.read_bytes().split(b"\n") if (event := _parse(line)) is not None]
    return [event for event in events if _is_new(event, seen)]


class Follower:
    """Reads a ledger that another process writes, from its beginning and then whatever has been added.

    Args:
        folder: the study's; the ledger may not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._position = folder / FILE, 0
        self._seen: set[tuple[object, ...]] = set()

    def poll(self) -> list[Event]:
        """The whole events since the last call, repeated reports dropped. A line without its end is left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1
        self._position += whole
        events = [event for line in content[:whole].split(b"\n") if (event := _parse(line)) is not None]
        return [event for event in events if _is_new(event, self._seen)]


class Ledger:
    """The one writer of a study's ledger; listeners hear every event after it is on disk.

    Args:
        folder: the study's; made if missing.

    Attributes:
        broken: why the file could not be written; from then on nothing is, so that what it holds has no gaps.

    Raises:
        ValueError: another process is writing it.
        OSError: the folder cannot be written.
    """

    broken: OSError | None = None

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _take_lock(folder / LOCK)
        self.history = read_ledger(folder)
        """The events before this writer."""
        self._seen: set[tuple[object, ...]] = set()
        for event in self.history:
            _is_new(event, self._seen)
        self._listeners: list[Listener] = []
        self._file = _open_for_append(folder / FILE)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every event from now on, in the writer's thread; it must be quick and not raise."""
        self._listeners.append(listener)

    def append(self, event: str, **values: Any) -> bool:
        """Write one event, stamped with the time; False, and nothing written, if it repeats a known report.

        Raises:
            OSError: it cannot be written, or one before it could not.
        """
        return bool(self.append_all([{"event": event, **values}]))

    def append_all(self, events: list[Event]) -> list[Event]:
        """Write several events at once, stamped with the time, and hear of them once all are on disk; those that were new.

        Raises:
            OSError: they cannot be written, or one before them could not.
        """
        if self.broken is not None:
            raise self.broken
        now = time.time()
        records = [record for event in events if _is_new(record := {"event": event["event"], "time": now, **event}, self._seen)]
        if not records:
            return []
        try:
            self._write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        except OSError as error:
            self.broken = error
            raise
        for record in records:
            for listener in self._listeners:
                listener(record)
        return records

    def _write(self, line: bytes) -> None:
        """The whole line on disk, or none of it."""
        start = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(start)
            raise

    def close(self) -> None:
        """Close the file and give the lock up; a second call does nothing."""
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _parse(line: bytes) -> Event | None:
    """The event of a line; None for an empty or torn one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "time" in event else None


def _is_new(event: Event, seen: set[tuple[object, ...]]) -> bool:
    """False for the second report of an epoch; remembers the first in ``seen``."""
    if event["event"] != "report":
        return True
    key = (event.get("trial"), event.get("epoch"))
    if key in seen:
        return False
    seen.add(key)
    return True


def _open_for_append(path: Path) -> io.FileIO:
    """The file, at the start of a line whatever a crash left, its name on disk too."""
    file = path.open("ab", buffering=0)
    if file.tell() and not path.read_bytes().endswith(b"\n"):
        file.write(b"\n")
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return file


def is_locked(folder: Path) -> bool:
    """Whether a process writes the ledger in ``folder`` now, on this machine or, where the storage's locks reach that far, on another."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _try_lock(lock: IO[str]) -> bool:
    """Take the lock, over the moments in which :func:`is_locked` looks at it."""
    for attempt in range(LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05 if attempt + 1 < LOCK_ATTEMPTS else 0)
        else:
            return True
    return False


def _take_lock(path: Path) -> IO[str]:
    lock = path.open("a+", encoding="utf-8")
    if not _try_lock(lock):
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ValueError(
            f"{path.parent}: process {owner} is running this study; only one may write its ledger; wait for it, or give this one "
            "another name with name=..."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
