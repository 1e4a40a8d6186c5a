"""The storage of studies: a folder, or the URL of an object store.

With a URL, the local folder of a study is a cache (:mod:`trainers.object_store`). The store has::

    ledger/0000000042.jsonl   lines of the ledger from number 42 on, written once
    packs/0000000001-0000000999.jsonl  the same lines, 1 to 999, once more: quick to fetch
    locks/000003.json         the third writer: pid, host, what process ids are of, and a beat every
                              few seconds; at the end, the number of lines that it left
    checkpoints/TRIAL/EPOCH/  checkpoints, the manifest last
    control.json, report/     requests of the user; the report

Lines are in the store before the local copy has them, and so before any code acts on them. An
object of lines is named after the number of its first line and is only written if it does not
exist. So one of two writers is always refused, whatever their clocks and locks say; the lock only
makes this rare. A writer that is silent for :data:`SILENT_SECONDS` counts as dead.

Each round of the loop writes one object. A writer packs the objects when it starts and when it
ends, so that a reader can fetch a long ledger in a few requests.

Limits: MLflow's default database, the trials' output and their profiles stay in the cache of the
machine that wrote them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from study.ledger.events import Event
from study.ledger.lines import Lines
from trainers.files import check_own_folder, open_own_text, read_own, write_whole
from trainers.object_store import (
    Store,
    access,
    check_links,
    is_url,
    local_folder,
    open_store,
    place_of,
)

FILE, LOCK = "ledger.jsonl", "ledger.lock"
MOST_BYTES = 2**30
"""Largest ledger: some two million epochs."""
SEGMENTS, PACKS, LOCKS, REPORT = "ledger", "packs", "locks", "report"
PACKED = 100
"""Least number of objects that are packed."""
BEAT_SECONDS, SILENT_SECONDS = 5.0, 30.0
ANSWER_SECONDS = 20.0
"""Seconds that commands which only read wait for the store."""
_OWN = {
    SEGMENTS: re.compile(r"\d{10}\.jsonl"),
    PACKS: re.compile(r"\d{10}-\d{10}\.jsonl"),
    LOCKS: re.compile(r"\d{6}\.json"),
}
"""Names of a writer's objects."""

Found = TypeVar("Found")


def check_writable(folder: Path, key: str, remedy: str = "") -> None:
    """Make the folder if it is missing, and write a file in it.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(
            f"{key}={str(folder)!r}: must be a folder that can be written ({error.strerror}); "
            f"{remedy or f'choose another with {key}=/path/to/folder'}"
        ) from None


def check_storage(place: str) -> None:
    """Check that studies can be stored at a path or a URL.

    Raises:
        ValueError: it cannot be written, is another user's link, or its store would let two writers
            write one object.
    """
    check_links(place)
    check_writable(local_folder(place), "storage")
    if (store := open_store(place, ANSWER_SECONDS)) is None:
        return
    name = f".probe-{uuid.uuid4().hex}"
    try:
        store.put(name, b"first", new=True)
        try:
            store.put(name, b"second", new=True)
        except FileExistsError:
            return
        finally:
            store.remove(name)
    except OSError as error:
        raise ValueError(
            f"storage={place!r}: cannot be written ({error}); the bucket must exist;"
            f" {access(place)}"
        ) from None
    raise ValueError(
        f"storage={place!r}: the store overwrites an object that a condition (S3's If-None-Match,"
        " Google's ifGenerationMatch) protects, so two drivers could write one ledger; use a store"
        " with conditional writes, or a folder"
    )


def study_folders(place: str) -> list[Path]:
    """Return the folders of all studies at a path or a URL, by name.

    Raises:
        ValueError: the store does not answer.
    """
    top = local_folder(place)
    if (store := open_store(place, ANSWER_SECONDS)) is None:
        return sorted(path.parent for path in top.glob(f"*/{FILE}"))
    folders = [top / name for name in answered(store.folders)]
    for folder in folders:
        refresh(folder)
    return [folder for folder in folders if (folder / FILE).exists()]


def refresh(folder: Path) -> None:
    """Fetch the lines of a study's ledger that the copy in ``folder`` does not have.

    Does nothing if the folder is not a cache, or while a process of this machine writes the copy.

    Raises:
        ValueError: the store does not answer.
    """
    store = open_store(place_of(folder), ANSWER_SECONDS)
    if store is None or (not folder.exists() and not answered(store.names, SEGMENTS)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open_own_text(folder / LOCK) as lock, suppress(BlockingIOError):
        kept = False
        while not kept:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a driver may begin while lines are fetched
            found = answered(_fetch, folder, store)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = _keep(folder, lock, found)


def where_it_lies(event: Event, folder: Path) -> Event:
    """Return the event of a checkpoint with the path that it has in ``folder``, the folder of the
    study that is read, where that has been moved since the event was written."""
    if event["event"] != "checkpoint":
        return event
    written = event.get("path", "")
    if not written or is_url(written) or written.startswith(f"{folder.absolute()}{os.sep}"):
        return event
    # its own first: another study may have the old place by now
    here = folder.absolute().joinpath(*Path(written).parts[-3:])  # checkpoints/TRIAL/EPOCH
    return event | {"path": str(here)} if here.exists() else event


def is_locked_remotely(folder: Path) -> bool:
    """Tell whether a driver on any machine has written the store's lock within the last seconds.

    Compares the store's clock with this machine's.
    """
    store = open_store(place_of(folder), ANSWER_SECONDS)
    if store is None:
        return False
    names = sorted(answered(_sizes, store, LOCKS))
    if not names:
        return False
    path = f"{LOCKS}/{names[-1]}"
    note = json.loads(answered(store.get, path))
    return "pid" in note and answered(store.age, path) < SILENT_SECONDS


def share(folder: Path) -> str:
    """Send all files of a folder in a cache to the store; return the error, or ""."""
    if (store := open_store(place_of(folder), ANSWER_SECONDS)) is None:
        return ""
    try:
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        for path in sorted(files):
            name = path.relative_to(folder).as_posix()
            store.put(name, path.read_bytes())
    except OSError as error:
        return str(error)
    return ""


def fetch_report(folder: Path) -> None:
    """Fetch the report of a study in a cache if the store's report is newer.

    Raises:
        ValueError: the store does not answer.
    """
    if (store := open_store(place_of(folder), ANSWER_SECONDS)) is None:
        return
    check_own_folder(folder / REPORT)
    for name in answered(store.names, REPORT):
        path, key = folder / REPORT / name, f"{REPORT}/{name}"
        written = path.stat().st_mtime if path.exists() else 0.0
        if time.time() - written > answered(store.age, key):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, answered(store.get, key))


def write_lock(lock: IO[str], note: dict[str, Any]) -> None:
    """Write ``note`` to the lock file: ``pid`` and ``host`` of the writer, or ``lines`` left."""
    lock.truncate(0)
    lock.write(json.dumps(note))
    lock.flush()


class RemoteLedger:
    """The one writer of a study's ledger in an object store.

    Taking the lock waits for :data:`SILENT_SECONDS` where another writer may be dead.

    Args:
        folder: the cache, whose own lock is taken; its ledger is brought up to date.
        lock: file of that lock.

    Raises:
        ValueError: another driver writes the ledger, the store does not answer, or it has
            checkpoints and no ledger.
    """

    def __init__(self, folder: Path, lock: IO[str]) -> None:
        self._folder, self._store = folder, Store(place_of(folder))
        self._note = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "pids": _pids(),
            "id": uuid.uuid4().hex,
        }
        self._lost = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock")
        self._name = answered(self._take)
        _keep(folder, lock, answered(_fetch, folder, self._store))
        if not (folder / FILE).exists() and answered(self._store.names, "checkpoints"):
            self.close({})
            raise ValueError(
                f"{self._store.url}: has checkpoints, and their ledger is gone; remove them, or"
                " choose another name with name=..."
            )
        self._thread.start()
        with suppress(OSError):  # lines are there without packs too
            _pack(folder, Store(self._store.url, ANSWER_SECONDS))

    def append(self, number: int, lines: bytes) -> None:
        """Write the lines that begin with ``number``; they are durable on return.

        Raises:
            OSError: another driver has written lines or taken the lock, or the store does not
                answer.
        """
        if not self._lost:
            with suppress(FileExistsError):
                self._store.put(f"{SEGMENTS}/{number:010d}.jsonl", lines, new=True)
                return
        raise OSError(f"{self._store.url}: {self._lost or 'another driver continues this study'}")

    def close(self, note: dict[str, Any]) -> None:
        """Release the lock with a note, such as the number of lines."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError):  # then the lock falls silent
            store = Store(self._store.url, ANSWER_SECONDS)
            store.put(f"{LOCKS}/{self._name}", json.dumps(note).encode())
            if note:
                _pack(self._folder, store)

    def _take(self) -> str:
        """Take the lock; return its object's name."""
        names = sorted(_sizes(self._store, LOCKS))
        number = int(names[-1].removesuffix(".json")) + 1 if names else 1
        if names:
            self._await_end(f"{LOCKS}/{names[-1]}")
        name = f"{number:06d}.json"
        try:
            self._store.put(f"{LOCKS}/{name}", json.dumps(self._note).encode(), new=True)
        except FileExistsError:
            raise self._busy(self._store.get(f"{LOCKS}/{name}")) from None
        return name

    def _await_end(self, path: str) -> None:
        """Return when the writer of a lock has ended, or has been silent for long enough."""
        content = self._store.get(path)
        until, said = time.monotonic() + SILENT_SECONDS, False
        while (note := json.loads(content)).get("pid") is not None:
            here = (note["host"], note.get("pids")) == (socket.gethostname(), _pids())
            if here and not psutil.pid_exists(note["pid"]):
                return
            if not said:
                said = True
                print(
                    f"Process {note['pid']} on {note['host']} wrote {self._store.url} last and has"
                    f" not said that it ended; looking for {SILENT_SECONDS:.0f} s whether it lives"
                    " ...",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(1.0)
            before, content = content, self._store.get(path)
            if content != before and "pid" in json.loads(content):
                raise self._busy(content)
            if time.monotonic() > until:
                return

    def _busy(self, content: bytes) -> ValueError:
        note = json.loads(content)
        return ValueError(
            f"{self._store.url}: process {note.get('pid')} on {note.get('host')} is running this"
            " study; only one may write its ledger; wait for it, or give this one another name with"
            " name=..."
        )

    def _beat(self) -> None:
        """Show that this writer lives, and look whether another has taken its place."""
        store, beat = Store(self._store.url, 0.0), 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            with suppress(OSError):
                if max(_sizes(store, LOCKS), default="") != self._name:
                    self._lost = "another driver has taken the lock, after a silence of this one"
                    return
                content = json.dumps(self._note | {"beat": beat}).encode()
                store.put(f"{LOCKS}/{self._name}", content)


def _pids() -> str:
    """Return what process ids are of: the boot of a machine, and a namespace there.

    Containers may share the name of their host, and machines one name. Where the kernel does not
    tell, it is nothing else's.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return uuid.uuid4().hex


def answered(request: Callable[..., Found], *arguments: Any) -> Found:
    """Return what a request of a store finds; an error of the store becomes one for the user.

    Raises:
        ValueError: the store does not answer or refuses.
    """
    try:
        return request(*arguments)
    except OSError as error:
        raise ValueError(
            f"storage: {error}; check the network, the endpoint and the credentials"
        ) from None


@dataclass(frozen=True)
class _Fetched:
    """A store's ledger: the copy before, the lines now, and how many of them a writer closed with.

    ``other`` tells whether the copy was of another ledger.
    """

    have: bytes
    content: bytes
    other: bool
    closed: int


def _fetch(folder: Path, store: Store) -> _Fetched:
    """Fetch what a copy of a ledger lacks."""
    locks = [f"{LOCKS}/{name}" for name in _sizes(store, LOCKS)]
    # before the lines, which may be more meanwhile
    notes = [json.loads(note) for note in store.get_all(locks)]
    pieces = _pieces(store)
    have = _copy(folder)
    other = bool(have) and not (pieces and _begins(have, store))
    lines = [] if other else have.splitlines(keepends=True)
    # the last object that the copy may have in part, and those after it
    after = max((piece.begin for piece in pieces if piece.begin <= len(lines)), default=1)
    old = b"".join(lines[: after - 1])
    if len(old) != sum(piece.size for piece in pieces if piece.begin < after) or _damaged(lines):
        after, old = 1, b""
    new = [piece.name for piece in pieces if piece.begin >= after]
    content = b"".join([old, *store.get_all(new)])
    if old and not content.startswith(have):  # the store's first lines, then others
        content = b"".join(store.get_all([piece.name for piece in pieces]))
    closed = max((note.get("lines", 0) for note in notes), default=0)
    return _Fetched(have, content, other, closed)


def _keep(folder: Path, lock: IO[str], found: _Fetched) -> bool:
    """Bring the copy of a ledger up to date, and its lock's note; the caller has the lock.

    A copy of another ledger is thrown away with the rest of the cache. Returns False, and does
    nothing, where the copy has changed since the lines were fetched.
    """
    if _copy(folder) != found.have:
        return False
    if found.other:
        _empty(folder)
    if found.content != (b"" if found.other else found.have):
        write_whole(folder / FILE, found.content)
    write_lock(lock, {"lines": found.closed})
    return True


def _copy(folder: Path) -> bytes:
    path = folder / FILE
    return read_own(path, MOST_BYTES) if path.exists() else b""


@dataclass(frozen=True)
class _Piece:
    """An object with lines of a ledger: its name, first line's number, and size in bytes."""

    name: str
    begin: int
    size: int


def _pieces(store: Store) -> list[_Piece]:
    """Return the objects of a ledger in order: packs, and objects that are in no pack.

    A pack that does not match the lines, for example from before a repair, is ignored.
    """
    loose = {
        int(name.removesuffix(".jsonl")): size for name, size in _sizes(store, SEGMENTS).items()
    }
    found, end = [], 0
    for name, size in sorted(_sizes(store, PACKS).items()):
        first, last = map(int, name.removesuffix(".jsonl").split("-"))
        packed = sum(loose[begin] for begin in loose if first <= begin <= last)
        if first == end + 1 and size == packed:
            found.append(_Piece(f"{PACKS}/{name}", first, size))
            end = last
    for begin in sorted(begin for begin in loose if begin > end):
        found.append(_Piece(f"{SEGMENTS}/{begin:010d}.jsonl", begin, loose[begin]))
    return found


def _sizes(store: Store, under: str) -> dict[str, int]:
    """Return the sizes of the objects of ours by name, without what others put among them."""
    return {name: size for name, size in store.sizes(under).items() if _OWN[under].fullmatch(name)}


def _begins(have: bytes, store: Store) -> bool:
    """Tell whether a copy begins as the store's ledger does."""
    try:
        return have.startswith(store.get(f"{SEGMENTS}/{1:010d}.jsonl"))
    except FileNotFoundError:
        return False


def _pack(folder: Path, store: Store) -> None:
    """Write the unpacked lines as one pack, if they are many objects.

    The copy in ``folder`` has all lines. Nothing is written if it is damaged or does not match the
    store.
    """
    loose = [piece for piece in _pieces(store) if piece.name.startswith(SEGMENTS)]
    if len(loose) < PACKED:
        return
    lines = _copy(folder).splitlines(keepends=True)
    begin = loose[0].begin
    content = b"".join(lines[begin - 1 :])
    whole = len(content) == sum(piece.size for piece in loose) and not _damaged(lines)
    if whole and content.endswith(store.get(loose[-1].name)):
        store.put(f"{PACKS}/{begin:010d}-{len(lines):010d}.jsonl", content, new=True)


def _damaged(lines: list[bytes]) -> bool:
    reader = Lines()
    for line in lines:
        reader.read(line.rstrip(b"\n"))
    reader.end()
    return bool(reader.damage)


def _empty(folder: Path) -> None:
    """Remove everything in a cache but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
