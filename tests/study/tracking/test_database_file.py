"""What a stranger may put in the place of a storage's database, or beside it."""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from study.cli.doctor_checks import _tracking
from study.config import StudyConfig
from study.ledger.studies import read
from study.report.write import write_report
from study.tracking import sqlite as made_by
from study.tracking.database_file import DatabaseFileError, check_database, check_files
from study.tracking.sqlite import _make, rename_folder
from study.tracking.writer import connect
from study.tracking.writer_supervisor import check_tracking
from tests.study.conftest import copy_database, made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
COMMANDS = [
    "report", "mlflow sync", "mlflow verify", "report --verify", "doctor", "ui", "ui --team",
]  # fmt: skip


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the reader's."""
    file = tmp_path / "home" / "precious"
    file.parent.mkdir()
    file.write_text("the reader's")
    return file


@pytest.fixture
def stored(tiny: Tiny, tmp_path: Path, database: Path) -> StudyConfig:
    """A study with a report, in a storage with an MLflow database."""
    study = tiny("stored", f"storage={tmp_path}/studies", "tracking_uri=null")
    write_ledger(study, made_up_events(study))
    write_report(read(study.folder), study.folder / "report")
    place = Path(study.storage) / "mlflow.db"
    copy_database(database, place)
    with closing(sqlite3.connect(place)) as opened:
        opened.execute("PRAGMA journal_mode=DELETE")
    return study


def leave_journal(database: Path, target: Path) -> None:
    """A journal of an unfinished transaction that names ``target`` as its super-journal: SQLite
    replays it and deletes ``target``."""
    content, nonce = database.read_bytes(), 1
    page, pages = content[:4096], len(content) // 4096
    size = struct.unpack(">H", page[16:18])[0]
    assert size == len(page)
    total = (nonce + sum(page[at] for at in range(size - 200, 0, -200))) & 0xFFFFFFFF
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 1, nonce, pages, 512, size)
    name = str(target).encode()
    tail = struct.pack(">I", 0x40000000 // size + 1) + name
    tail += struct.pack(">II", len(name), sum(name)) + bytes.fromhex("d9d505f920a163d7")
    body = struct.pack(">I", 1) + page + struct.pack(">I", total)
    Path(f"{database}-journal").write_bytes(head.ljust(512, b"\0") + body + tail)


def give(study: StudyConfig, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the study in a separate process, which must not wait."""
    words = command.split()
    more = ["--port", "0"] if words[0] == "ui" else ["stored"]
    return subprocess.run(
        [sys.executable, "-m", "study", *words, *more, "--storage", study.storage],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"MLFLOW_AUTH_ADMIN_PASSWORD": "a password of 24 letters"},
    )  # fmt: skip


def test_sqlite_deletes_what_such_a_journal_names(stored: StudyConfig, precious: Path) -> None:
    """So the tests below test something."""
    database = Path(stored.storage) / "mlflow.db"
    leave_journal(database, precious)
    with closing(sqlite3.connect(database)) as opened:
        opened.execute("SELECT * FROM sqlite_master").fetchall()
    assert not precious.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_journal_has_a_file_of_the_readers_deleted(
    stored: StudyConfig, precious: Path, command: str
) -> None:
    leave_journal(Path(stored.storage) / "mlflow.db", precious)
    done = give(stored, command)
    assert precious.exists()
    assert "Traceback" not in done.stderr
    if command != "doctor":  # it opens none if the ledger is whole
        assert "super-journal" in done.stdout + done.stderr
        assert done.returncode > 0


@pytest.mark.parametrize("opens", [
    connect, check_tracking, check_database,
    lambda uri: rename_folder(uri, Path("/x"), lambda place: True),
])  # fmt: skip
def test_nothing_that_opens_a_database_plays_such_a_journal_back(
    stored: StudyConfig, precious: Path, opens: Callable[[str], Any]
) -> None:
    leave_journal(Path(stored.storage) / "mlflow.db", precious)
    with pytest.raises(ValueError, match="super-journal"):
        opens(stored.tracking)
    assert precious.exists()


def test_a_database_is_refused_before_mlflow_is_imported(
    stored: StudyConfig, precious: Path
) -> None:
    """Its import takes seconds, at each new attempt of the process that feeds it."""
    leave_journal(Path(stored.storage) / "mlflow.db", precious)
    code = (
        "import sys; from study.tracking.writer import connect\n"
        f"try: connect({stored.tracking!r})\n"
        "except ValueError: print('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_what_mlflow_opens_by_itself_is_checked_too(stored: StudyConfig, precious: Path) -> None:
    client = connect(stored.tracking)
    client._tracking_client.store.engine.dispose()
    leave_journal(Path(stored.storage) / "mlflow.db", precious)
    with pytest.raises(Exception, match="super-journal"):
        client.search_experiments()
    assert precious.exists()


def test_a_journal_without_such_a_name_is_played_back(stored: StudyConfig, precious: Path) -> None:
    database = Path(stored.storage) / "mlflow.db"
    leave_journal(database, precious)
    journal = Path(f"{database}-journal")
    journal.write_bytes(journal.read_bytes()[: 512 + 4096 + 8])
    check_database(stored.tracking)
    assert not journal.exists()
    assert precious.exists()


@pytest.mark.parametrize("side", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_the_files_of_a_database_are_regular(
    stored: StudyConfig, precious: Path, side: str, kind: str
) -> None:
    database = Path(stored.storage) / "mlflow.db"
    file = Path(f"{database}{side}")
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif side:
        file.symlink_to(precious if kind == "link" else precious.parent / "new")
    else:
        return  # a link to a database is followed, see below
    with pytest.raises(DatabaseFileError, match="must be a regular file"):
        check_files(database)
    done = give(stored, "report")
    assert "must be a regular file" in done.stderr
    assert "Traceback" not in done.stderr
    assert precious.read_text() == "the reader's"
    assert [path.name for path in precious.parent.iterdir()] == ["precious"]


@pytest.mark.parametrize("command", ["ui", "ui --team"])
def test_no_server_opens_a_database_out_of_the_storage_that_nobody_named(
    stored: StudyConfig, tmp_path: Path, command: str
) -> None:
    other = tmp_path / "other.db"
    sqlite3.connect(other).close()
    database = Path(stored.storage) / "mlflow.db"
    database.unlink()
    database.symlink_to(other)
    done = give(stored, command)
    assert done.returncode == 2
    assert f"is a link to {other}, out of the storage" in done.stderr
    assert other.read_bytes() == b""


def test_doctor_opens_no_database_out_of_the_storage_that_nobody_named(
    stored: StudyConfig, tmp_path: Path
) -> None:
    database = Path(stored.storage) / "mlflow.db"
    database.rename(tmp_path / "other.db")
    database.symlink_to(tmp_path / "other.db")
    found = _tracking(None, stored.storage)
    assert not found.good
    assert "out of the storage" in found.remedy
    assert _tracking(stored.tracking, stored.storage).good  # named


FOREIGN = {
    "view": "ALTER TABLE experiments RENAME TO e; CREATE VIEW experiments AS WITH RECURSIVE"
    " n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT e.* FROM e, n WHERE i < 0",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON tags BEGIN DELETE FROM runs; END",
    "virtual table": "CREATE VIRTUAL TABLE v USING fts5(a)",
    "trigger ": "DROP TRIGGER prevent_secrets_aad_mutation; CREATE TRIGGER"
    " prevent_secrets_aad_mutation BEFORE UPDATE ON tags BEGIN DELETE FROM runs; END",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_database_whose_schema_runs_sql_is_refused(stored: StudyConfig, what: str) -> None:
    with closing(sqlite3.connect(Path(stored.storage) / "mlflow.db")) as database:
        database.executescript(FOREIGN[what])
    for opens in (connect, check_tracking):
        with pytest.raises(ValueError, match=re.escape(f"has the {what.strip()} ")):
            opens(stored.tracking)
    done = give(stored, "ui")
    assert done.returncode == 2
    assert "has the " in done.stderr


def test_engines_trust_no_schema(stored: StudyConfig) -> None:
    store = connect(stored.tracking)._tracking_client.store
    with store.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA trusted_schema").scalar() == 0


def test_a_damaged_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Otherwise a run that starts with it, for example after a crash, would block without a
    remedy."""
    place = tmp_path / "mlflow.db"
    place.write_bytes(b"SQLite format 3\0" + b"x" * 4096)
    with pytest.raises(ValueError, match=rf"if {place} is damaged, .* rename it"):
        check_tracking(f"sqlite:///{place}")


def test_a_new_database_is_written_over_no_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / f".mlflow.db.{os.getpid()}").symlink_to(precious)
    _make(tmp_path / "mlflow.db")
    assert precious.read_text() == "the reader's"
    check_database(f"sqlite:///{tmp_path}/mlflow.db")
    assert not (tmp_path / "mlflow.db").is_symlink()


def test_a_file_of_the_same_name_that_was_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mlflow.db"
    link = os.link

    def late(*args: Any, **options: Any) -> None:
        place.write_text("another's")
        link(*args, **options)

    monkeypatch.setattr(made_by.os, "link", late)
    _make(place)
    assert place.read_text() == "another's"
