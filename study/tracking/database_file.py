"""What a sqlite file must be before it is opened: a stranger may have put it into a storage.

SQLite acts on what lies beside a database. A rollback journal that its writer left is played back
at the first open; if it ends in the name of a *super-journal*, the file of that name is read as
one and may be deleted, wherever it is (https://www.sqlite.org/fileformat2.html, section 3, and
https://www.sqlite.org/atomiccommit.html). Only a transaction over several databases writes one, and
MLflow has none. A pipe is waited for, and a link leads to another file. So before a file is opened,
it and its journals must be regular files, and no journal may name a super-journal.

A view in the place of a table, a trigger or a virtual table runs a stranger's SQL, which may have
no end, where MLflow reads or writes a table. MLflow has one trigger and no views (3.17); a database
with others is refused, and functions that a schema calls are confined to harmless ones
(``trusted_schema``).

Limit: who can write to the folder while the database is opened can exchange files in between.
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
"""Endings of the names of the files that make a database."""
MAGIC = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a rollback journal that names a super-journal."""
OWN_TRIGGER = (
    "CREATE TRIGGER prevent_secrets_aad_mutation BEFORE UPDATE ON secrets FOR EACH ROW WHEN"
    " OLD.secret_id != NEW.secret_id OR OLD.secret_name != NEW.secret_name BEGIN SELECT"
    " RAISE(ABORT, 'secret_id and secret_name are immutable (used as AAD in encryption)'); END"
)
"""The trigger that MLflow makes, blanks apart (3.17)."""
FOREIGN = (
    "SELECT type, name, sql FROM sqlite_master"
    " WHERE type IN ('view', 'trigger') OR upper(sql) LIKE 'CREATE VIRTUAL%'"
)


class DatabaseFileError(ValueError):
    """A sqlite file that is not opened."""


def check_files(path: Path) -> None:
    """Refuse a sqlite file that leads elsewhere, whether it exists yet or not.

    It costs a few system calls. The database itself is not opened: closing it would drop the locks
    that other connections of this process have.

    Args:
        path: the file; links that lead to it are followed, as SQLite follows them.

    Raises:
        DatabaseFileError: it, or a file beside it, is a link or no regular file; or its journal
            names a super-journal.
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
                " what is in its place, or name another store with --tracking-uri"
            )
    with suppress(FileNotFoundError, NotADirectoryError):
        if _ends_in(f"{real}-journal", MAGIC):
            raise DatabaseFileError(
                f"{real}-journal: names another file as its super-journal, which SQLite could"
                " delete; MLflow writes no such journal. Remove it if you do not know who wrote it;"
                " a transaction that was not finished is then lost, and `sync` sends it again"
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
    """Open a sqlite file that exists, see :func:`check_files`.

    Args:
        path: the file.
        seconds: time to wait for a lock.

    Raises:
        DatabaseFileError: it is refused.
        sqlite3.Error: it is no database.
    """
    check_files(path)
    address = f"{Path(os.path.realpath(path)).as_uri()}?mode=rw"
    database = sqlite3.connect(address, timeout=seconds, uri=True)
    database.execute("PRAGMA trusted_schema=OFF")
    return database


def check_database(uri: str) -> None:
    """Refuse a sqlite file whose schema runs SQL of its own, or that :func:`check_files` refuses.

    Only the table of the schema is read. Other addresses, and a file that is missing, pass.

    Args:
        uri: tracking URI.

    Raises:
        DatabaseFileError: it is refused.
        sqlite3.Error: it is no database.
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
    """Refuse a database as :func:`check_database` does; what is none is left to who opens it."""
    with suppress(sqlite3.Error):
        check_database(uri)


def watch_engines() -> None:
    """Have every sqlite file that SQLAlchemy opens in this process checked before, and opened with
    ``trusted_schema=OFF``: MLflow opens them by itself."""
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
