"""How an MLflow store in a sqlite file is kept: with a write-ahead log, to which transactions are committed without waiting for the disk.

With the log readers (``lns-study ui``) and the writer work at the same time. ``synchronous=NORMAL`` keeps the database consistent
whatever happens, and loses nothing where a process dies; where the machine does, the last transactions may be missing
(https://www.sqlite.org/pragma.html#pragma_synchronous). The ledger has them: the next run, ``sync`` or ``reconcile`` sends them again. A
file system of the network cannot share the log between machines, so there the database stays as MLflow makes it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

PREFIX = "sqlite:///"


def use_write_ahead_log(uri: str) -> None:
    """Keep the local sqlite file of ``uri`` so, made here if it is missing; every engine of this process then commits to the log."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    path = Path(uri.removeprefix(PREFIX))
    if not uri.startswith(PREFIX) or not path.parent.is_dir() or not _is_local(path):
        return
    if not event.contains(Engine, "connect", _commit_to_the_log):
        event.listen(Engine, "connect", _commit_to_the_log)
    try:
        with closing(sqlite3.connect(path, timeout=1.0)) as database:
            database.execute("PRAGMA journal_mode=WAL")
    except sqlite3.Error:
        return  # busy: whoever uses it has set it, or the next one will


def _commit_to_the_log(connection: Any, _: object) -> None:
    if isinstance(connection, sqlite3.Connection) and connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
        connection.execute("PRAGMA synchronous=NORMAL")


def _is_local(path: Path) -> bool:
    """Whether a file lies on a disk of this machine, as far as /proc/mounts tells."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    mounts = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    fitting = [(len(point), kind) for point, kind in mounts if path.resolve().is_relative_to(point)]
    return bool(fitting) and not max(fitting)[1].startswith(
        ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "gpfs", "ceph", "beegfs")
    )
