"""An MLflow store in a sqlite file: made whole, with a write-ahead log and statistics for queries.

MLflow makes its tables in many steps that take seconds, and opens no file whose process died
between two of them; so a new file is made elsewhere and gets its name with all of them.

With the log, readers (``lns-study ui``) and the writer work at the same time, and transactions are
committed to it without waiting for the disk. ``synchronous=NORMAL`` keeps the database consistent
whatever happens, and loses nothing if a process dies; if the machine does, the last transactions
may be missing (https://www.sqlite.org/pragma.html#pragma_synchronous). The ledger has them: the
next run, ``sync`` or ``reconcile`` sends them again. A network file system cannot share the log
between machines, so there the database stays as MLflow makes it.

The statistics are for sqlite's query planner (:func:`write_statistics`).
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
"""Tables in which MLflow looks up one key of all runs, to sort or filter by it."""

PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
"""Columns with addresses of artifacts."""


def prepare(uri: str) -> None:
    """Make the sqlite file of ``uri`` if it is missing, and have it use the log if it is local.

    Every engine of this process then commits to the log, and opens no sqlite file that is refused.

    Raises:
        DatabaseFileError: the file is refused (:mod:`study.tracking.database_file`).
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
        return  # busy: whoever uses it has set it, or the next one will


def _make(path: Path) -> None:
    """Make a file with MLflow's tables, unless another process is the first."""
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
            os.link(part, path, follow_symlinks=False)  # never over another's, as rename would
        except OSError:
            if not path.exists():  # a file system without links
                part.rename(path)


def write_statistics(uri: str) -> None:
    """Tell sqlite's query planner that many runs share a key, in a local file with MLflow's tables.

    Without statistics sqlite assumes that a key is in ten rows, and looks for each run among those
    of the key from their beginning: sorting n runs by a metric took time in n^2 (3,000 runs 0.45 s,
    0.016 s with statistics). Statistics measured while runs are few would say the same; so for
    these tables they are set by hand (https://www.sqlite.org/optoverview.html#manctrl).
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
        return  # busy, or no tables yet: the next start or study will


def rename_folder(uri: str, folder: Path, is_elsewhere: Callable[[str], bool]) -> None:
    """Replace the old artifact folder in a database's addresses by ``folder``.

    Only an old folder with the same name is replaced.

    Args:
        uri: address of a sqlite file; a missing file is not created.
        folder: absolute path of the artifact folder.
        is_elsewhere: returns whether an experiment's artifact address must be changed.

    Raises:
        DatabaseFileError: the file is refused.
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


def where_damaged(uri: str) -> str:
    """Return what helps where a store fails because its sqlite file is damaged; "" without one."""
    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or not path.is_file():
        return ""
    return (
        f" (if {path} is damaged, end what uses it and rename it, with its -wal and -shm: a new one"
        " then gets all of the study, and `sync` sends others)"
    )


def _is_local(path: Path) -> bool:
    """Tell whether a file lies on a disk of this machine, as far as /proc/mounts says."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    mounts = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    fitting = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(fitting) and not max(fitting)[1].startswith(
        ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "gpfs", "ceph", "beegfs")
    )
