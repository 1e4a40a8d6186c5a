"""Supervision of the MLflow writer by the driver: starts it, forwards its warnings, and waits for
it at the end.

The driver sends nothing itself and does not import MLflow: :mod:`study.tracking.writer` reads the
ledger in its own process. Logging therefore costs training only the line in the ledger, even if the
tracking server is slow or down. A writer that dies is restarted, and reads its progress from the
store.
"""

from __future__ import annotations

import http
import json
import os
import subprocess
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study.plan.plan import Plan
from study.program import lns_study, module_command
from study.tracking.address import OFF, check_default, naming
from study.tracking.database_file import (
    PREFIX,
    DatabaseFileError,
    DatabaseLockedError,
    check_database,
)
from study.tracking.names import check_loggable
from study.tracking.sqlite import advice, is_locked
from study.tracking.writer import URI_VARIABLE, connect, reason
from study.tracking_uri import reveal, without_password
from trainers.object_store import place_of

MOST_STARTS = 5
"""Maximum number of times that the writer is started; afterwards only the ledger is written."""
PROBE_SECONDS = 10.0


def check_study(plan: Plan, say: Callable[[str], None]) -> None:
    """Check that MLflow can take what a study will send.

    Args:
        plan: the plan.
        say: prints one line for the user, as when the database is locked: the study trains, and its
            runs are sent once the lock is gone.

    Raises:
        ValueError: the store does not answer, another user owns it, or a name is too long for it.
    """
    study = plan.study
    if study.tracking == OFF:
        return
    check_loggable(plan)
    if study.tracking_uri is None:
        check_default(study.tracking, study.storage, "tracking_uri=")
    try:
        check_tracking(study.tracking)
    except DatabaseLockedError as locked:  # the writer process waits for it
        say(f"MLflow: {locked}; training starts without it")


def check_tracking(uri: str) -> None:
    """Check that an MLflow tracking store answers at a URI.

    A SQLite database may be missing; the writer creates it later.

    Raises:
        DatabaseLockedError: another process has locked the SQLite database.
        ValueError: the URI does not answer, is not an MLflow store, or needs a login.
    """
    if uri == OFF:
        return
    shown, uri = without_password(uri), reveal(uri)
    try:
        if uri.startswith(PREFIX):
            _check_sqlite(uri)
        elif uri.startswith(("http://", "https://")) and "@" not in uri:
            _probe(uri)
        else:
            if not uri.startswith(("http://", "https://")):
                _probe_database(uri)
            connect(uri).search_experiments(max_results=1)
    except DatabaseFileError as refused:
        raise ValueError(f"tracking_uri={shown!r}: {refused}") from None
    except Exception as error:
        if "error code 401" in str(error):
            raise ValueError(
                f"tracking_uri={shown!r}: the server requires a valid login (error 401); set"
                " MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment, also"
                " for the study; for `lns-study ui` without --team, set MLFLOW_TRACKING_TOKEN to"
                " the token in its link"
            ) from None
        why = reason(error)
        if is_locked(why):
            raise DatabaseLockedError(
                f"tracking_uri={shown!r}: is locked by another process{advice(uri, why)}"
            ) from None
        raise ValueError(
            f"tracking_uri={shown!r}: no MLflow tracking store answers ({why}); start a"
            f" server with `{lns_study('ui')}`, correct the address, or leave tracking_uri out for"
            f" a local sqlite file{advice(uri, why)}"
        ) from None


def _probe_database(uri: str) -> None:
    """Connect to a database once, because MLflow would retry for two minutes before an error."""
    import sqlalchemy

    seconds = {"connect_timeout": int(PROBE_SECONDS)}
    known = uri.startswith(("postgresql", "mysql"))
    engine = sqlalchemy.create_engine(
        uri, poolclass=sqlalchemy.NullPool, connect_args=seconds if known else {}
    )
    with engine.connect():
        pass


def _check_sqlite(uri: str) -> None:
    """Check that the file is a database, or that its folder is writable.

    The file is only opened through SQLite. Closing a file descriptor of another kind would drop the
    locks of all connections of this process (POSIX), and another process could then delete the
    write-ahead log while it is in use.
    """
    path = Path(uri.removeprefix(PREFIX))
    check_database(uri)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _probe(uri: str) -> None:
    """Send one small request, as the client would.

    If the server asks for a login, repeat the request with MLflow's client, which has it.
    """
    body = json.dumps({"max_results": 1}).encode()
    request = urllib.request.Request(
        f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search",
        body,
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.UNAUTHORIZED:
            raise
        connect(uri).search_experiments(max_results=1)


class NoTracker:
    """Replacement for :class:`Tracker` if tracking is off.

    `lns-study mlflow sync --tracking-uri` can send the ledger later.
    """

    def start(self) -> None:
        """Do nothing."""

    def close(self, report: Path | None) -> str:
        """Return "", as for a complete store."""
        return ""

    def where(self) -> dict[str, str]:
        """Return an empty dict."""
        return {}


def make_tracker(
    folder: Path,
    uri: str,
    artifacts: Path,
    warn: Callable[[str], None],
    opened: Callable[[dict[str, str]], None],
) -> Tracker | NoTracker:
    """Return the tracker for a URI; see :class:`Tracker`."""
    return NoTracker() if uri == OFF else Tracker(folder, uri, artifacts, warn, opened)


class Tracker:
    """The supervisor of a study's writer process.

    Args:
        folder: folder of the study, with its ledger.
        uri: MLflow tracking URI, its password left out if this process knows it.
        artifacts: folder for artifacts if the store is a database; servers choose their own.
        warn: called with a message when the store stops answering, and when it answers again.
        opened: called once with the ids of the runs: ``experiment``, ``run`` and ``view``.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        artifacts: Path,
        warn: Callable[[str], None],
        opened: Callable[[dict[str, str]], None] = lambda where: None,
    ) -> None:
        self._words = [
            *module_command("study.tracking.writer"),
            "--folder",
            str(folder),
            "--artifacts",
            str(artifacts),
        ]
        self._uri, self._folder, self._warn, self._tell = uri, folder, warn, opened
        self._where: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._finish: str | None = None
        self._done: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mlflow-writer", daemon=True)

    def start(self) -> None:
        """Start the writer; the ledger must already have the plan."""
        self._spawn()
        self._thread.start()

    def close(self, report: Path | None) -> str:
        """Wait until the writer has sent everything and the report's folder, and closed all runs.

        Returns:
            The reason why data could not be sent, or "" if MLflow has everything.
        """
        with self._lock:
            self._finish = f"finish {report or ''}\n"
            self._ask_to_finish()
        self._thread.join()
        return self._done if self._done is not None else "the process that feeds MLflow died"

    def where(self) -> dict[str, str]:
        """Return ``experiment``, ``run`` (the parent's) and ``view``, once they are known."""
        return self._where

    @property
    def pid(self) -> int | None:
        """Process id of the writer."""
        return self._process.pid if self._process else None

    def _spawn(self) -> None:
        """Start a writer process in its own session, so that Ctrl-C and SIGHUP do not reach it."""
        self._process = subprocess.Popen(
            self._words,
            env=os.environ | {URI_VARIABLE: reveal(self._uri)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )

    def _ask_to_finish(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._finish or "")
            self._process.stdin.flush()
        except OSError:
            return  # it died; the reading thread restarts it and asks again

    def _run(self) -> None:
        for start in range(MOST_STARTS):
            if start:
                with self._lock:
                    self._spawn()
                    if self._finish is not None:
                        self._ask_to_finish()
            assert self._process is not None
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self._hear(json.loads(line))
            self._process.wait()
            if self._done is not None:
                return
        self._warn(
            f"the process that feeds MLflow died {MOST_STARTS} times; training continues,"
            f" and `{self._sync_later()}` sends the ledger later"
        )

    def _sync_later(self) -> str:
        storage = place_of(self._folder.parent)
        words = ["mlflow", "sync", self._folder.name, *naming(self._uri, storage)]
        return lns_study(*words, storage=storage)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "opened":
            known = bool(self._where)
            self._where = {key: str(message[key]) for key in ("experiment", "run", "view")}
            if not known:
                self._tell(self._where)
        elif message["kind"] == "trouble":
            self._warn(
                f"MLflow at {without_password(self._uri)} does not answer ({message['reason']});"
                " training continues, the ledger keeps everything, and missing data are sent when"
                f" it answers, or by `{self._sync_later()}`"
            )
        elif message["kind"] == "recovered":
            self._warn("MLflow answers again; nothing was lost")
        elif message["kind"] == "refused":
            self._warn(
                f"MLflow gets nothing of this run: {message['reason']}; training continues, and"
                f" `{self._sync_later()}` sends the ledger later"
            )
        elif message["kind"] == "done":
            self._done = message["error"]
