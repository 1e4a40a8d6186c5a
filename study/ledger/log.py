"""The ledger: the events of a study, one JSON object per line, on disk before anyone acts on them.

It is the source of truth. MLflow and the report are made from it and can be made again. Its events
are in :mod:`study.ledger.events`. Time differences within one writer come from a monotonic clock,
so changes of the machine's clock do not affect them.

A restarted trial repeats the epochs since its checkpoint, bit for bit; the ledger keeps the first
report of each. A machine that crashes while a line is written leaves a torn last line: readers skip
it, the next writer removes it. Any other altered line is damage (:mod:`study.ledger.lines`):
readers skip it and report it, and writers refuse to continue until the ledger is repaired.

Limits: there is one writer at a time. A lock file names the writer's process and host or, once it
has closed, the number of lines that it left. The storage is local or NFS, with working fsync and
locks, or an object store, of which the folder is a cache (:mod:`study.ledger.storage`).
"""

from __future__ import annotations

import errno
import io
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from study.ledger import storage
from study.ledger.events import Event, Header, stamped
from study.ledger.lines import HEADER, VERSION, Damage, Lines, encodable, seal, unseal
from study.ledger.lock import LOCK, altered_since, closed_at, last_copy, take_lock, this_process
from study.program import NAME, STORAGE, lns_study, own_version
from study.tracking_uri import without_password
from trainers.files import open_own, read_own, sync_folder
from trainers.object_store import is_url, place_of

FILE = storage.FILE
ID_LENGTH = 12
"""Number of hex digits of a ledger's id."""
SHOWN = 3

Listener: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of the ledger in a study's folder.

    Attributes:
        events: whole events in order, without headers and repeated reports.
        numbers: numbers of ``events``.
        damage: places where the ledger is not as it was written.
        id: id of the ledger; "" if no whole line names it.
        number: number of the last line.
        checked: whether the ledger is of version 2.
    """

    events: list[Event]
    numbers: list[int]
    damage: list[Damage]
    id: str
    number: int
    checked: bool


def open_ledger(folder: Path) -> Contents:
    """Return the contents of the ledger in a study's folder; empty without a ledger.

    Raises:
        ValueError: the ledger cannot be read, or the object store does not answer.
    """
    storage.refresh(folder)
    closed = closed_at(folder / LOCK)  # before the ledger, which may grow meanwhile
    try:
        content = read_own(folder / FILE, storage.MOST_BYTES)
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise ValueError(
            f"{folder / FILE}: cannot be read ({error.strerror}); a ledger must be a readable file:"
            " move whatever is in its place, or correct its permissions"
        ) from None
    return _contents(content, closed, folder)


def read_ledger(folder: Path) -> list[Event]:
    """Return the undamaged events of a study's ledger, in order, without repeated reports.

    Returns an empty list without a ledger.
    """
    return open_ledger(folder).events


def readable_ledgers(folders: Iterable[Path]) -> Iterator[list[Event]]:
    """Yield what :func:`read_ledger` returns of each study whose ledger can be read."""
    for folder in folders:
        with suppress(ValueError):
            yield read_ledger(folder)


def describe_damage(damage: list[Damage]) -> str:
    """Describe the first damaged places, and say how many more there are."""
    more = f"; and {len(damage) - SHOWN} more" if len(damage) > SHOWN else ""
    return "; ".join(map(str, damage[:SHOWN])) + more


def how_to_repair(folder: Path) -> str:
    """Return the command that repairs the ledger in ``folder``."""
    place = place_of(folder.parent)
    usual = place == place_of(Path(STORAGE).resolve())
    return lns_study("doctor", folder.name, "--repair", storage=STORAGE if usual else place)


class Follower:
    """A reader of a ledger that another process writes.

    Args:
        folder: folder of the study; the ledger may not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._position, self._lines = folder, 0, Lines()
        self._seen: set[tuple[object, ...]] = set()
        self._file: os.stat_result | None = None

    def poll(self) -> list[Event]:
        """Return the whole events since the last call, without repeated reports.

        A line without its line break is left for the next call. A file that has taken the ledger's
        place is not read.
        """
        try:
            with open(open_own(self._folder / FILE, os.O_RDONLY), "rb") as file:
                found = os.fstat(file.fileno())
                self._file = self._file or found
                if not os.path.samestat(found, self._file):
                    return []
                file.seek(self._position)
                content = file.read(storage.MOST_BYTES)
        except FileNotFoundError:
            return []
        whole = content.rfind(b"\n") + 1
        self._position += whole
        read = [
            entry
            for line in content[:whole].split(b"\n")[:-1]
            if (entry := self._lines.read(line)) is not None
        ]
        return [
            storage.where_it_lies(event, self._folder)
            for _, event in read
            if _is_new(event, self._seen)
        ]


class LedgerError(OSError):
    """A write to a ledger that its storage refused; nothing is written after it."""


class LedgerGoneError(LedgerError):
    """The ledger or its lock was removed, moved or replaced while a process wrote the ledger."""


class Ledger:
    """The one writer of a study's ledger; it calls listeners with every event that is on disk.

    Args:
        folder: folder of the study; made if missing.

    Attributes:
        broken: the first write error; nothing is written after it, so that the file has no gaps.
        id: random id of the ledger; checkpoints and MLflow runs contain it, which distinguishes
            them from the same study run elsewhere.
        history: events before this writer.

    Raises:
        ValueError: another process is writing the ledger, the storage has no locks, or the ledger
            is damaged.
        OSError: the folder cannot be written.
    """

    broken: LedgerError | None = None

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock = folder, take_lock(folder)
        self._remote: storage.RemoteLedger | None = None
        try:
            if is_url(place_of(folder)):
                self._remote = storage.RemoteLedger(folder, self._lock)
            contents = open_ledger(folder)
            _refuse_damage(folder, contents.damage)
            self._file = _open_for_append(folder / FILE)
            self._here, self._size = self._found(), os.stat(folder / FILE).st_size
            storage.write_lock(self._lock, this_process())
        except BaseException:
            if self._remote is not None:
                self._remote.close({})
            self._lock.close()
            raise
        self.history, self.id = contents.events, contents.id or new_id()
        self._number, self._headed = contents.number, contents.checked
        self._seen: set[tuple[object, ...]] = set()
        for event in self.history:
            _is_new(event, self._seen)
        self._listeners: list[Listener] = []
        self._last = b""
        self._since = time.time() - time.monotonic()  # setting the clock moves no event

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with every event from now on, in the writer's thread.

        The listener must be quick and must not raise.
        """
        self._listeners.append(listener)

    def append(self, event: Event) -> bool:
        """Write one event, stamped with the time; tell whether it was new.

        A repeated report is not written.

        Raises:
            LedgerError: it cannot be written, or an earlier one could not.
        """
        return bool(self.append_all([event]))

    def append_all(self, events: list[Event]) -> list[Event]:
        """Write several events at once, stamped with the time; return the new ones.

        Listeners are called once all events are on disk.

        Raises:
            LedgerError: this or an earlier write failed.
        """
        if self.broken is not None:
            raise self.broken
        now = self._since + time.monotonic()
        records = [
            record
            for event in map(encodable, map(_shown, events))
            if _is_new(record := stamped(event, now), self._seen)
        ]
        if not records:
            return []
        header = [] if self._headed else [make_header(self.id, now)]
        try:
            self._write(
                b"".join(
                    seal(record, self._number + place)
                    for place, record in enumerate([*header, *records], 1)
                )
            )
        except OSError as error:
            self.broken = error if isinstance(error, LedgerGoneError) else LedgerError(*error.args)
            raise self.broken from error
        self._number, self._headed = self._number + len(header) + len(records), True
        for record in records:
            for listener in self._listeners:
                listener(record)
        return records

    def _found(self) -> list[tuple[int, int] | None]:
        """Return device and inode of the files that the names of ledger and lock lead to now."""
        found: list[tuple[int, int] | None] = []
        for name in (FILE, LOCK):
            try:
                file = os.stat(self.folder / name)
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
            else:
                found.append((file.st_dev, file.st_ino))
        return found

    def _check_here(self) -> None:
        """Check that ledger and lock are still under their names, and as this writer left them.

        The files stay open when the study's folder is removed, moved or unmounted, and writing them
        succeeds.

        Raises:
            LedgerGoneError: they are not there; it names the last complete copy of the ledger.
            LedgerError: the ledger was cut or written by another process.
        """
        now = self._found()
        if now[0] == self._here[0] and now != self._here:
            now = self._found()  # the folder may have moved between the two files
        if now == self._here:
            if altered := altered_since(self.folder / FILE, self._size, self._last):
                raise LedgerError(f"{altered}; `{how_to_repair(self.folder)}` mends it")
            return
        path = self.folder / FILE
        if now[0] == self._here[0]:
            raise LedgerGoneError(
                f"{self.folder / LOCK}: was removed or replaced while the study ran, so another"
                " process could write the same ledger; nothing is lost, and the same command"
                " continues"
            )
        raise LedgerGoneError(
            f"{path}: was removed, moved, unmounted or replaced while the study ran;"
            f" {self._last_copy()}"
        )

    def _last_copy(self) -> str:
        """Return a phrase with the place of the last complete copy of the ledger.

        If the file has no name any more, it is copied first.
        """
        if self._remote is not None:
            return (
                f"{place_of(self.folder)} has every line; the same command continues from there,"
                " with a new cache"
            )
        return last_copy(self.folder / FILE, self._file.fileno())

    def _write(self, lines: bytes) -> None:
        """Write all lines to disk atomically, under the ledger's name."""
        self._check_here()
        if self._remote is not None:
            self._remote.append(self._number + 1, lines)
        start = self._file.tell()
        try:
            try:
                _write_all(self._file, lines)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._open_again(start, error)
                _write_all(self._file, lines)
        except OSError:
            with suppress(OSError):
                self._file.truncate(start)
            raise
        self._size, self._last = self._size + len(lines), lines
        self._check_here()

    def _open_again(self, end: int, stale: OSError) -> None:
        """Open the file again after its NFS server forgot it, if that is safe.

        It is if the lock can be taken again and the file ends as this writer left it.

        Raises:
            OSError: it is not safe; the error is ``stale``.
        """
        with suppress(OSError):
            self._lock.close()
        try:
            self._lock = take_lock(self.folder)
        except ValueError:
            raise stale from None
        storage.write_lock(self._lock, this_process())
        content = read_own(self.folder / FILE, storage.MOST_BYTES)
        if not content[:end].endswith(self._last) or len(content) < end:
            raise stale
        self._file = _open_for_append(self.folder / FILE)
        self._file.truncate(end)
        self._here = self._found()

    def close(self) -> None:
        """Close the file, note how many lines it has, and release the lock.

        A second call does nothing.
        """
        self._file.close()
        if not self._lock.closed:
            with suppress(OSError):  # the storage may be full; the note is optional
                note = {"lines": self._number} if self.broken is None else {}
                if self._remote is not None:
                    self._remote.close(note)
                storage.write_lock(self._lock, note)
            self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def new_id() -> str:
    """Return a random id for a ledger."""
    return uuid.uuid4().hex[:ID_LENGTH]


def make_header(id_: str, time_: float) -> Header:
    """Return the line with which a ledger, or a part of one, begins."""
    return {
        "event": HEADER,
        "time": time_,
        "version": VERSION,
        "id": id_,
        "made_by": f"{NAME} {own_version()}",
    }


def _contents(content: bytes, closed: int, folder: Path) -> Contents:
    lines = Lines()
    whole = content.rfind(b"\n") + 1
    # whole but for its line break, which a crash cut off
    last = [content[whole:]] if unseal(content[whole:])[1] is not None else []
    read = [
        entry
        for line in [*content[:whole].split(b"\n")[:-1], *last]
        if (entry := lines.read(line)) is not None
    ]
    lines.end(closed)
    seen: set[tuple[object, ...]] = set()
    kept = [
        (number, event)
        for number, event in sorted(read, key=lambda entry: entry[0])
        if _is_new(event, seen)
    ]
    return Contents(
        events=[storage.where_it_lies(event, folder) for _, event in kept],
        numbers=[number for number, _ in kept],
        damage=lines.damage, id=lines.id, number=lines.number, checked=lines.checked,
    )  # fmt: skip


def _refuse_damage(folder: Path, damage: list[Damage]) -> None:
    if damage:
        raise ValueError(
            f"{folder / FILE} is damaged: {describe_damage(damage)}; nothing was started;"
            f" `{how_to_repair(folder)}` keeps this file beside the new one and restores what"
            " checkpoints and MLflow know"
        )


def _shown(event: Event) -> Event:
    """Return an event without the passwords of addresses that an error of the user's code names."""
    return event | {"error": without_password(event["error"])} if "error" in event else event


def _is_new(event: Event, seen: set[tuple[object, ...]]) -> bool:
    """Return whether an event is not a repeated report; reports are remembered in ``seen``."""
    if event["event"] != "report":
        return True
    key = (event.get("trial"), event.get("epoch"))
    if key in seen:
        return False
    seen.add(key)
    return True


def _open_for_append(path: Path) -> io.FileIO:
    """Open the file for appending, at the start of a line even after a crash, its name on disk."""
    file = io.FileIO(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    if file.tell() and not (content := read_own(path, storage.MOST_BYTES)).endswith(b"\n"):
        start = content.rfind(b"\n") + 1
        if unseal(content[start:])[1] is None:
            file.truncate(start)
        else:
            file.write(b"\n")
    sync_folder(path.parent)
    return file


def _write_all(file: io.FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]
    os.fsync(file.fileno())
