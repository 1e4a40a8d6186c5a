"""The process that sends a study's ledger to MLflow: ``python -m study.tracking.writer``, started
by the driver, one per study.

Every report is in the ledger, fsynced, before it takes effect, so the driver sends nothing and does
not import MLflow. This process reads the ledger's new lines every half second and sends each
trial's run the missing data, in batches. A slow server gets fewer, larger requests. If the server
does not answer, the process prints one warning and retries every few seconds.

The process has its own session, so it survives Ctrl-C and a killed driver. When its standard input
closes, it sends the rest of the ledger, closes the runs (as KILLED, because the study was
interrupted) and exits, at the latest after :data:`LINGER_SECONDS` without the server. If this
process is killed, the driver starts another, which reads its progress from the store. Data that
could not be sent are sent by ``lns-study mlflow sync``, or by the next run of the study.

Standard input: a line ``finish FOLDER`` (the report's folder; may be empty) asks it to exit.
Standard output: JSON lines, ``opened`` (ids of experiment, run and view), ``trouble`` (a reason for
the user), ``recovered``, ``refused`` (why nothing can be sent in this run), ``done`` (with the
error, or "").
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.ledger.events import Event, Planned
from study.ledger.lock import BUSY, is_locked, no_locks
from study.ledger.log import FILE, Follower
from study.ledger.state import PLANNED, StudyState, TrialState
from study.tracking.address import WHERE
from study.tracking.artifacts import Artifacts, PlaceError
from study.tracking.database_file import DatabaseFileError, check_database
from study.tracking.mlflow_runs import Runs
from study.tracking.sqlite import prepare, write_statistics
from study.tracking.view import view_key
from study.tracking_uri import hide, reveal, without_login, without_password
from trainers.files import NotRegularError, open_own_text, write_whole

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Environment variables set before MLflow is imported, unless the user has set them.

They turn telemetry off, and shorten retries so that a dead server is detected in seconds.
"""

URI_VARIABLE = "LNS_STUDY_WRITER_URI"
"""Environment variable with the store's address.

The address may contain a password, and other users can read command lines.
"""
LOCK = "tracking.lock"
ROUND_SECONDS = 0.5
RETRY_SECONDS = 2.0
FINISH_SECONDS = 20.0
"""Seconds that a study waits at its end for a store that does not answer."""
LINGER_SECONDS = 120.0

Say = Callable[[dict[str, Any]], None]


def connect(uri: str) -> Any:
    """Return an ``MlflowClient`` for a tracking URI, with telemetry off and migrations silent.

    Raises:
        DatabaseFileError: a SQLite file failed a check.
        ValueError: the URI's password was removed, and the environment does not have it.
        sqlite3.Error: a SQLite file is locked or damaged. MLflow would find out after two minutes.
    """
    import logging

    check_database(uri)  # before the import of MLflow, which takes seconds
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for logger in ("alembic", "mlflow", "sqlalchemy"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    prepare(uri)
    return MlflowClient(tracking_uri=reveal(uri))


class Sender:
    """Keeps an MLflow store up to date with a ledger's events.

    Args:
        uri: MLflow tracking URI.
        artifacts: artifact folder of the storage, used if the store is a database.
        folder: folder of the study.
        say: called with the messages described in the module docstring.
    """

    def __init__(self, uri: str, artifacts: Path, folder: Path, say: Say) -> None:
        self._uri, self._artifacts, self._folder, self._say = uri, artifacts, folder, say
        self.state = StudyState()
        self.failure = ""
        self._failed_before = False
        self._client: Any = None
        self._runs: Runs | None = None
        self._described: Planned | None = None
        self._news: set[str] = set()
        self._retry_at = 0.0
        self.moved = time.monotonic()
        """Time of the store's last answer, or of MLflow's import; in seconds, monotonic."""

    def hear(self, events: list[Event]) -> None:
        """Apply events without sending them."""
        for event in events:
            self.state.apply(event)
            if event["event"] == "planned":
                self._news |= {
                    trial.id
                    for trial in self.state.trials
                    if trial.reports or trial.status != PLANNED
                }
            elif "trial" in event:
                self._news.add(event["trial"])

    def send(self) -> bool:
        """Send all new data, unless the store has just failed; return whether all were sent."""
        if not self.state.plan or time.monotonic() < self._retry_at:
            return False
        if not self._attempt(self._open):
            return False
        for trial in [trial for trial in self.state.trials if trial.id in self._news]:
            if not self._attempt(partial(self._push, trial)):
                return False
            self._news.discard(trial.id)
        return True

    def finish(self, report: Path | None, patience: float) -> str:
        """Send the rest and close every run; retry for ``patience`` seconds.

        Returns:
            The reason why data could not be sent, or "".
        """
        deadline = time.monotonic() + patience
        if self._failed_before:
            self._runs = None  # look for twins again: a request may have succeeded after a timeout
        while not (self.send() and self._attempt(lambda: self._close(report))):
            if not self.state.plan:
                return ""
            if time.monotonic() > deadline:
                return self.failure
            time.sleep(min(0.2, RETRY_SECONDS))
        return ""

    def _push(self, trial: TrialState) -> None:
        self._opened().push(trial)

    def _close(self, report: Path | None) -> None:
        for trial in self.state.known.values():
            self._opened().settle(trial)
            self.moved = time.monotonic()
        self._opened().finish(self.state, report)
        write_statistics(self._uri)

    def _open(self) -> None:
        """Find or make the experiment and the parent run, once per plan."""
        if self._runs is not None and self._runs.plan is self.state.plan:
            return
        if self._client is None:
            self._client = connect(self._uri)
            self.moved = time.monotonic()  # the time of MLflow's import does not count as silence
        artifacts = Artifacts(self._uri, self._artifacts)
        self._runs = Runs(self._client, self.state, artifacts, self._folder)
        if self._described is not self.state.plan:
            self._runs.describe(view_key(self.state.plan))
            self._described = self.state.plan
            experiment, run = self._runs.parent_ids
            self._say(
                {
                    "kind": "opened",
                    "experiment": experiment,
                    "run": run,
                    "view": view_key(self.state.plan),
                }
            )

    def _opened(self) -> Runs:
        assert self._runs is not None
        return self._runs

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Call ``action``; return whether it succeeded.

        After a failure the next attempt is delayed; the first of several failures is reported.
        """
        try:
            action()
        except Exception as error:  # any error of the store: the ledger keeps everything
            if not self.failure:
                self._say({"kind": "trouble", "reason": reason(error)})
            self.failure, self._failed_before = reason(error), True
            self._runs = None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        self.moved = time.monotonic()
        if self.failure:
            self._say({"kind": "recovered"})
        self.failure = ""
        return True


@contextmanager
def tracking_lock(folder: Path, patience: float, name: str = LOCK) -> Iterator[bool]:
    """Take the lock for sending the ledger in ``folder`` to MLflow; yield whether it was free.

    Waits up to ``patience`` seconds for another process to release it. ``name`` is the lock file;
    other readers of the ledger use other names.

    Raises:
        UserError: the lock file is not a regular file or cannot be opened, or the storage does not
            support locks.
    """
    deadline = time.monotonic() + patience
    try:
        opened = open_own_text(folder / name)
    except NotRegularError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    except PermissionError:
        raise UserError(
            f"{folder / name}: cannot be opened; you must be able to write it: remove it, or change"
            " its permissions"
        ) from None
    with opened as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in BUSY:
                    raise no_locks(folder, error) from None
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.1)
            else:
                yield True
                return


def follow(folder: Path, sender: Sender, inbox: queue.SimpleQueue[str | None]) -> str:
    """Send a ledger while it is written, until ``inbox`` has ``finish FOLDER``.

    None in the inbox means that the driver has exited.

    Returns:
        The reason why data could not be sent, or "".
    """
    follower = Follower(folder)
    while True:
        try:
            word = inbox.get(timeout=ROUND_SECONDS)
        except queue.Empty:
            sender.hear(follower.poll())
            sender.send()
            continue
        sender.hear(follower.poll())
        if word is not None:
            report = word.removeprefix("finish").strip()
            return sender.finish(Path(report) if report else None, FINISH_SECONDS)
        if is_locked(folder):  # another run of the study is active, with its own writer
            return "another process is running the study"
        return sender.finish(None, LINGER_SECONDS)


def sync(folder: Path, uri: str, artifacts: Path, report: Path | None, say: Say) -> str:
    """Send the missing data of the ledger in ``folder`` to MLflow, in this process.

    Returns:
        The reason why data could not be sent, or "".
    """
    with tracking_lock(folder, patience=0.0) as free:
        if not free:
            return "another process sends this study's ledger at the moment"
        sender = Sender(uri, artifacts, folder, _noting(folder, uri, say))
        sender.hear(Follower(folder).poll())
        return sender.finish(report, patience=0.0)


def _noting(folder: Path, uri: str, say: Say) -> Say:
    """Return a ``say`` that also records the location of the study's runs in ``mlflow.json``.

    The file is in the study's folder and does not contain the login.
    """

    def note(message: dict[str, Any]) -> None:
        if message["kind"] == "opened":
            place = {
                "uri": without_login(uri),
                **{key: message[key] for key in ("experiment", "run", "view")},
            }
            with suppress(FileNotFoundError):  # the folder was removed: the driver reports it
                (folder / FILE).stat()  # do not write into the mount point of an unmounted storage
                write_whole(folder / WHERE, json.dumps(place).encode())
        say(message)

    return note


def reason(error: BaseException) -> str:
    """Describe an error's innermost cause in one line, without passwords."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = without_password(" ".join(str(error).split()))
    if isinstance(error, PlaceError | DatabaseFileError):
        return text
    return f"{type(error).__name__}: {text[:200]}"


def main() -> int:
    """Run the process; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m study.tracking.writer")
    for name in ("folder", "artifacts"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    uri = hide(os.environ[URI_VARIABLE])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of libraries out of our JSON lines

    def say(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=output, flush=True)
        except OSError:  # the driver has exited
            return

    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asked = threading.Event()
    threading.Thread(target=_read, args=(inbox, asked), daemon=True).start()
    folder = Path(options.folder)
    if not (folder / FILE).exists():  # the driver reports it, with a remedy
        say({"kind": "done", "error": f"{folder}: was removed, moved or unmounted"})
        return 0
    try:
        with tracking_lock(folder, LINGER_SECONDS) as free:
            error = "another process sends this study's ledger"
            if free:
                sender = Sender(uri, Path(options.artifacts), folder, _noting(folder, uri, say))
                watch = threading.Thread(target=_end_if_silent, args=(sender, asked, say))
                watch.daemon = True
                watch.start()
                error = follow(folder, sender, inbox)
    except UserError as refused:
        error = str(refused)
        say({"kind": "refused", "reason": error})
    say({"kind": "done", "error": error})
    return 0


def _read(inbox: queue.SimpleQueue[str | None], asked: threading.Event) -> None:
    for line in sys.stdin:
        inbox.put(line.strip())
        asked.set()
    inbox.put(None)


def _end_if_silent(sender: Sender, asked: threading.Event, say: Say) -> None:
    """Exit the process if the store does not answer after the driver has asked for the end.

    The limit is :data:`FINISH_SECONDS` after that request or the store's last answer. It is needed
    because not every kind of store has a timeout of its own.
    """
    asked.wait()
    sender.moved = time.monotonic()
    while (left := sender.moved + FINISH_SECONDS - time.monotonic()) > 0:
        time.sleep(left)
    silence = f"TimeoutError: no answer for {FINISH_SECONDS:g} s"
    say({"kind": "done", "error": sender.failure or silence})
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
