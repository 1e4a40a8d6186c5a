"""The process that sends a study's ledger to MLflow: ``python -m study.tracking.writer``, started
by the driver, one per study.

The ledger is the journal: every report is in it, fsynced, before anybody acts on it. So the driver
sends nothing and imports no MLflow; this process reads the ledger's new lines every half second and
sends what each trial's run lacks, in batches. A slow server causes fewer, larger requests. If it
does not answer, the events wait, one warning is printed, and it is tried again every few seconds.

The process has a session of its own, so Ctrl-C and a killed driver leave it alone: when its
standard input closes it sends what the ledger has, closes the runs (KILLED, as the study was
interrupted) and ends, at the latest after :data:`LINGER_SECONDS` without the server. If this
process itself is killed, the driver starts another, which asks the store what it has. What could
not be sent is sent by ``lns-study sync``, or by the next run of the study.

Standard input: a line ``finish FOLDER`` (of the report; may be empty) asks it to end. Standard
output: JSON lines, ``opened`` (where the runs are), ``trouble`` (a sentence for the user),
``recovered``, ``done`` (with the error, or "").
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
from study.ledger.lines import Event
from study.ledger.lock import BUSY, is_locked, no_locks
from study.ledger.log import FILE, Follower
from study.ledger.state import PLANNED, StudyState, TrialState
from study.tracking.address import WHERE
from study.tracking.artifacts import Artifacts, PlaceError
from study.tracking.database_file import DatabaseFileError
from study.tracking.runs import Runs
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
"""Variables set before MLflow is imported, unless the user set them.

They turn telemetry off and make a dead server known in seconds, not minutes.
"""

URI_VARIABLE = "LNS_STUDY_WRITER_URI"
"""Environment variable with the store's address.

It may hold a password, and everybody can read command lines.
"""
LOCK = "tracking.lock"
ROUND_SECONDS = 0.5
RETRY_SECONDS = 2.0
FINISH_SECONDS = 20.0
"""Seconds for which the end of a study waits for a store that does not answer."""
LINGER_SECONDS = 120.0

Say = Callable[[dict[str, Any]], None]


def connect(uri: str) -> Any:
    """Return an ``MlflowClient`` for a tracking URI, with telemetry off and migrations silent.

    Raises:
        ValueError: the URI's password was left out, and the environment does not have it.
    """
    import logging

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for logger in ("alembic", "mlflow", "sqlalchemy"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    prepare(uri)
    return MlflowClient(tracking_uri=reveal(uri))


class Sender:
    """A sender that keeps an MLflow store in step with a ledger's events.

    Args:
        uri: MLflow tracking URI.
        artifacts: the storage's folder for artifacts, where those of a database lie.
        folder: folder of the study.
        say: called with the messages of the module's standard output.
    """

    def __init__(self, uri: str, artifacts: Path, folder: Path, say: Say) -> None:
        self._uri, self._artifacts, self._folder, self._say = uri, artifacts, folder, say
        self.state = StudyState()
        self.failure = ""
        self._failed_before = False
        self._client: Any = None
        self._runs: Runs | None = None
        self._described: Event | None = None
        self._news: set[str] = set()
        self._retry_at = 0.0
        self.moved = time.monotonic()
        """Time of the last answer of the store, or of MLflow's start."""

    def hear(self, events: list[Event]) -> None:
        """Apply events; nothing is sent yet."""
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
        """Send all news, unless the store failed a moment ago; tell whether nothing is left."""
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
        """Send the rest and close every run; try again for ``patience`` seconds.

        Returns:
            The reason for which something could not be sent, or "".
        """
        deadline = time.monotonic() + patience
        if self._failed_before:
            self._runs = None  # look for twins once more: a reply that was lost may have been late
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
        """Find or make experiment and parent run, once per plan."""
        if self._runs is not None and self._runs.plan is self.state.plan:
            return
        if self._client is None:
            self._client = connect(self._uri)
            self.moved = time.monotonic()  # what MLflow itself takes is not the store's silence
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
        """Call ``action``; tell whether it succeeded.

        After a failure the reason is kept, the user is told if it is the first, and the next try
        waits.
        """
        try:
            action()
        except Exception as error:  # whatever the store raises, the ledger keeps everything
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

    ``name`` is the lock's file; other readers of the ledger have others.

    Waits up to ``patience`` seconds for another process to end.

    Raises:
        UserError: the file is a link, or no regular file; or the storage has no locks.
    """
    deadline = time.monotonic() + patience
    try:
        opened = open_own_text(folder / name)
    except NotRegularError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
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

    None in the inbox means that the driver is gone.

    Returns:
        The reason for which something could not be sent, or "".
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
        if is_locked(folder):  # another run of the study goes on, and feeds MLflow itself
            return "another process goes on with the study"
        return sender.finish(None, LINGER_SECONDS)


def sync(folder: Path, uri: str, artifacts: Path, report: Path | None, say: Say) -> str:
    """Send MLflow what it lacks of the ledger in ``folder``, now and in this process.

    Returns:
        The reason for which something could not be sent, or "".
    """
    with tracking_lock(folder, patience=0.0) as free:
        if not free:
            return "another process sends this study's ledger at the moment"
        sender = Sender(uri, artifacts, folder, _noting(folder, uri, say))
        sender.hear(Follower(folder).poll())
        return sender.finish(report, patience=0.0)


def _noting(folder: Path, uri: str, say: Say) -> Say:
    """Return ``say`` extended to note, without password, where the study's runs are.

    The note is a file in the study's folder.
    """

    def note(message: dict[str, Any]) -> None:
        if message["kind"] == "opened":
            place = {
                "uri": without_login(uri),
                **{key: message[key] for key in ("experiment", "run", "view")},
            }
            with suppress(FileNotFoundError):  # the folder was removed: its driver says so
                (folder / FILE).stat()  # a folder at which a storage was mounted is left
                write_whole(folder / WHERE, json.dumps(place).encode())
        say(message)

    return note


def reason(error: BaseException) -> str:
    """Describe the innermost cause in one line, without the URL's retries and without passwords."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = without_password(" ".join(str(error).split()))
    if isinstance(error, PlaceError | DatabaseFileError):
        return text
    return f"{type(error).__name__}: {text[:200]}"


def main() -> int:
    """Run the process; see the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m study.tracking.writer")
    for name in ("folder", "artifacts"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    uri = hide(os.environ[URI_VARIABLE])
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with our lines

    def say(message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), file=output, flush=True)
        except OSError:  # the driver is gone
            return

    inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asked = threading.Event()
    threading.Thread(target=_read, args=(inbox, asked), daemon=True).start()
    folder = Path(options.folder)
    if not (folder / FILE).exists():  # its driver says so, and what to do
        say({"kind": "done", "error": f"{folder}: was removed, moved or unmounted"})
        return 0
    with tracking_lock(folder, LINGER_SECONDS) as free:
        error = "another process sends this study's ledger"
        if free:
            sender = Sender(uri, Path(options.artifacts), folder, _noting(folder, uri, say))
            threading.Thread(target=_end_if_silent, args=(sender, asked, say), daemon=True).start()
            error = follow(folder, sender, inbox)
    say({"kind": "done", "error": error})
    return 0


def _read(inbox: queue.SimpleQueue[str | None], asked: threading.Event) -> None:
    for line in sys.stdin:
        inbox.put(line.strip())
        asked.set()
    inbox.put(None)


def _end_if_silent(sender: Sender, asked: threading.Event, say: Say) -> None:
    """End this process where a store leaves a call unanswered although the end was asked for.

    The study waits for :data:`FINISH_SECONDS` from then, or from the store's last answer; no
    limit of a client's own holds for every store.
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
