"""An MLflow store in a SQLite file: created atomically, with a write-ahead log and statistics.

MLflow creates its tables in many steps that take seconds, and cannot open a file if its process
died in between. Therefore a new file is completed in a temporary folder and then moved into place.

The write-ahead log (WAL) lets readers (``lns-study ui``) and the writer work at the same time, and
transactions do not wait for the disk. With ``synchronous=NORMAL`` the database always stays
consistent, and a killed process loses nothing. After a crash of the machine the last transactions
may be missing (https://www.sqlite.org/pragma.html#pragma_synchronous); the next run, ``mlflow
sync`` or ``mlflow verify --repair`` sends them again from the ledger. A network file system cannot
share the log between machines, so there the database keeps MLflow's settings.

The statistics are for SQLite's query planner (:func:`write_statistics`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from study.tracking.database_file import (
    PREFIX,
    check_database,
    opened,
    refuse_strange,
    watch_engines,
)
from trainers.files import open_own

BY_KEY = ("latest_metrics", "params", "tags")
"""Tables in which MLflow looks up one key over all runs, to sort or filter by it."""

PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Columns with artifact addresses, as ``(table, column)``."""


def prepare(uri: str) -> None:
    """Create the SQLite file of ``uri`` if it is missing, and switch a local file to WAL mode.

    All SQLAlchemy engines of this process then check SQLite files before they open them, and use
    ``synchronous=NORMAL`` in WAL mode.

    Raises:
        DatabaseFileError: the file failed a check (:mod:`study.tracking.database_file`).
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    watch_engines()
    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or "?" in uri or not path.parent.is_dir():
        return
    refuse_strange(uri)
    if not path.exists():
        _make(path)
    if not _is_local(path):
        return
    if not event.contains(Engine, "connect", _commit_to_the_log):
        event.listen(Engine, "connect", _commit_to_the_log)
    try:
        with closing(opened(path, 1.0)) as database:
            database.execute("PRAGMA journal_mode=WAL")
    except sqlite3.Error:
        return  # busy: the process that uses it has set the mode, or the next one will


def _make(path: Path) -> None:
    """Create a file with MLflow's tables, unless another process does so first."""
    from mlflow.db import commands
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    part = path.with_name(f".{path.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        made = Path(folder) / "mlflow.db"
        event.listen(Engine, "connect", _never_wait)
        try:
            commands.main(["upgrade", f"{PREFIX}{made}"], standalone_mode=False)
        finally:
            event.remove(Engine, "connect", _never_wait)
        stack.callback(part.unlink, missing_ok=True)
        part.unlink(missing_ok=True)
        descriptor = open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with made.open("rb") as source, open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path, follow_symlinks=False)  # unlike rename, never replaces a file
        except OSError:
            if not path.exists():  # a file system without links
                part.rename(path)


def write_statistics(uri: str) -> None:
    """Set statistics so that SQLite's query planner expects many runs per key.

    Without statistics SQLite assumes ten rows per key, and for each run it scans all rows of the
    key: sorting n runs by a metric took O(n^2) time (3,000 runs 0.45 s; with statistics 0.016 s).
    Statistics measured while there are few runs have the same effect, so for these tables they are
    set by hand (https://www.sqlite.org/optoverview.html#manctrl). Only a local file is changed.
    """
    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or not path.is_file() or not _is_local(path):
        return
    try:
        with closing(opened(path, 1.0)) as database, database:
            database.execute("PRAGMA analysis_limit=1000")
            database.execute("ANALYZE")
            for table in BY_KEY:
                database.execute("DELETE FROM sqlite_stat1 WHERE tbl = ?", (table,))
                many = (
                    (table, f"sqlite_autoindex_{table}_1", "1000000 1000 1"),
                    (table, f"index_{table}_run_uuid", "1000000 50"),
                )
                database.executemany(
                    "INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (?, ?, ?)", many
                )
    except sqlite3.Error:
        return  # busy, or no tables yet: the next start or study sets them


def rename_folder(uri: str, folder: Path, is_elsewhere: Callable[[str], bool]) -> None:
    """Replace the old artifact folder in a database's addresses by ``folder``.

    Only an old folder with the same name is replaced.

    Args:
        uri: address of a sqlite file; a missing file is not created.
        folder: absolute path of the artifact folder.
        is_elsewhere: returns whether an experiment's artifact address must be changed.

    Raises:
        DatabaseFileError: the file failed a check.
    """
    path = Path(uri.removeprefix(PREFIX))
    check_database(uri)
    if not path.is_file():
        return
    with closing(opened(path, 10.0)) as database, database:
        if not database.execute(
            "SELECT 1 FROM sqlite_master WHERE name = 'experiments'"
        ).fetchone():
            return
        query = "SELECT DISTINCT artifact_location FROM experiments"
        places = [place for (place,) in database.execute(query) if isinstance(place, str)]
        ends = {place.rpartition("/")[0] for place in places if is_elsewhere(place)}
        for old in sorted(ends):
            if old.rpartition("/")[2] != folder.name:
                continue
            new = folder.as_uri() if ":" in old else str(folder)
            for table, column in PLACES:
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
                    f" WHERE substr({column}, 1, ?) = ?",
                    (new, len(old) + 1, len(old) + 1, f"{old}/"),
                )


def _commit_to_the_log(connection: Any, _: object) -> None:
    if isinstance(connection, sqlite3.Connection) and connection.execute(
        "PRAGMA journal_mode"
    ).fetchone() == ("wal",):
        connection.execute("PRAGMA synchronous=NORMAL")


def _never_wait(connection: Any, _: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def is_locked(error: str) -> bool:
    """Return whether an error's text is that of SQLite about a file that is locked."""
    return "database is locked" in error


def advice(uri: str, error: str) -> str:
    """Return what to do about an error of a SQLite file; "" for other stores."""
    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or not path.is_file():
        return ""
    if is_locked(error):
        return f" (`fuser {path}` lists the processes that use it: wait for them, or end them)"
    return (
        f" (if {path} is damaged, end what uses it and rename it, with its -wal and -shm: a new one"
        " then gets all of the study, and `mlflow sync` sends others)"
    )


def _is_local(path: Path) -> bool:
    """Return whether a file is on a local disk according to /proc/mounts."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    mounts = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    fitting = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(fitting) and not max(fitting)[1].startswith(
        ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "gpfs", "ceph", "beegfs")
    )
