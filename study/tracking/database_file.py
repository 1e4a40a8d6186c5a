"""Checks of a SQLite file before it is opened, because it may come from an untrusted source.

SQLite also reads the files beside a database. A leftover rollback journal is played back at the
first open. If the journal ends in the name of a *super-journal*, SQLite reads the file of that name
and may delete it, anywhere on the disk (https://www.sqlite.org/fileformat2.html, section 3, and
https://www.sqlite.org/atomiccommit.html). Only transactions over several databases write one, which
MLflow does not use. A named pipe would block, and a link would open another file. Therefore the
file and its journals must be regular files, and no journal may name a super-journal.

A view in place of a table, a trigger or a virtual table would run foreign SQL, possibly without
end, when MLflow reads or writes a table. MLflow (3.17) has one trigger and no views, so a database
with others is rejected. SQL functions called by a schema are limited to harmless ones
(``trusted_schema``).

Limit: a process that can write to the folder can swap files between the check and the open.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

PREFIX = "sqlite:///"
SIDES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the file names of a database."""
MAGIC = bytes.fromhex("d9d505f920a163d7")
"""Final bytes of a rollback journal that names a super-journal."""
OWN_TRIGGER = (
    "CREATE TRIGGER prevent_secrets_aad_mutation BEFORE UPDATE ON secrets FOR EACH ROW WHEN"
    " OLD.secret_id != NEW.secret_id OR OLD.secret_name != NEW.secret_name BEGIN SELECT"
    " RAISE(ABORT, 'secret_id and secret_name are immutable (used as AAD in encryption)'); END"
)
"""The only trigger of MLflow (3.17), with normalised white space."""
FOREIGN = (
    "SELECT type, name, sql FROM sqlite_master"
    " WHERE type IN ('view', 'trigger') OR upper(sql) LIKE 'CREATE VIRTUAL%'"
)


class DatabaseFileError(ValueError):
    """A SQLite file that failed a check and was not opened."""


class DatabaseLockedError(ValueError):
    """A SQLite file that another process keeps locked."""


def check_files(path: Path) -> None:
    """Check that a SQLite file and its journals are safe to open; a missing file is safe.

    It costs a few system calls. The database itself is not opened, because closing it would drop
    the locks of other connections in this process.

    Args:
        path: the file; links are followed first, as SQLite does.

    Raises:
        DatabaseFileError: the file or a journal is not a regular file, or the journal names a
            super-journal.
    """
    real = os.path.realpath(path)
    for side in SIDES:
        file = real + side
        try:
            mode = os.lstat(file).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise DatabaseFileError(
                f"{file}: is {kind}, and every file of a database must be a regular file; remove"
                " it, or name another store with --tracking-uri"
            )
    with suppress(FileNotFoundError, NotADirectoryError):
        if _ends_in(f"{real}-journal", MAGIC):
            raise DatabaseFileError(
                f"{real}-journal: names another file as its super-journal, which SQLite could"
                " delete; MLflow writes no such journal. Remove it if you do not know who wrote it;"
                " a transaction that was not finished is then lost, and `mlflow sync` sends it"
                " again"
            )


def _ends_in(file: str, end: bytes) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(file, flags)
    try:
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, len(end), max(0, size - len(end))) == end
    finally:
        os.close(descriptor)


def opened(path: Path, seconds: float) -> sqlite3.Connection:
    """Open an existing SQLite file after :func:`check_files`.

    Args:
        path: the file.
        seconds: maximum time to wait for a lock.

    Raises:
        DatabaseFileError: a check failed.
        sqlite3.Error: the file is not a database.
    """
    check_files(path)
    address = f"{Path(os.path.realpath(path)).as_uri()}?mode=rw"
    database = sqlite3.connect(address, timeout=seconds, uri=True)
    database.execute("PRAGMA trusted_schema=OFF")
    return database


def check_database(uri: str) -> None:
    """Check a SQLite file with :func:`check_files`, and that its schema runs no foreign SQL.

    Only the schema table is read. Other kinds of addresses and missing files pass.

    Args:
        uri: tracking URI.

    Raises:
        DatabaseFileError: a check failed.
        sqlite3.Error: the file is not a database.
    """
    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or "?" in uri:
        return
    check_files(path)
    if not path.exists():
        return
    with closing(opened(path, 10.0)) as database:
        found = database.execute(FOREIGN).fetchall()
    for kind, name, sql in found:
        if " ".join(str(sql).split()) != OWN_TRIGGER:
            what = "virtual table" if kind == "table" else kind
            raise DatabaseFileError(
                f"{path}: has the {what} {name!r}, whose SQL would run where MLflow uses its"
                " tables; MLflow makes no such thing. If it is yours, drop it and keep it in a"
                " database of its own that attaches this one; else use a store of your own with"
                " --tracking-uri"
            )


def refuse_strange(uri: str) -> None:
    """Run :func:`check_database`, but leave SQLite errors to the caller that opens the file."""
    with suppress(sqlite3.Error):
        check_database(uri)


def watch_engines() -> None:
    """Check every SQLite file that SQLAlchemy opens in this process, and set
    ``trusted_schema=OFF``.

    MLflow opens its database through SQLAlchemy.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    if not event.contains(Engine, "do_connect", _before):
        event.listen(Engine, "do_connect", _before)
        event.listen(Engine, "connect", _after)


def _before(dialect: Any, _: object, places: list[Any], options: dict[str, Any]) -> None:
    file = str(places[0]) if places and dialect.name == "sqlite" else ""
    if file and file != ":memory:" and not options.get("uri"):
        check_files(Path(file))


def _after(connection: Any, _: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA trusted_schema=OFF")
