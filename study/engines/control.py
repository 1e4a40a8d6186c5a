"""Control of a running study: requests from another terminal, Ctrl-C, and the study's limits.

*pause*, *stop* and *cancel* (``lns-study stop --now``) work as for a sweep of Weights & Biases.
*pause* starts no more trials until ``lns-study run --resume``. *stop* starts no more trials and
lets the running ones finish. *cancel* also ends the running ones: they may finish their current
epoch within :func:`grace_seconds` and write a checkpoint, from which they resume in the next run.
Ctrl-C and the signals of job controllers cancel; a limit that is reached stops. The strongest
request wins.

A request is a small file in the study's folder, ``control.json``, which is replaced atomically. The
process that runs the study reads it twice a second, and in an object store every two seconds. So a
study can be steered from any machine that sees the storage. Limits that are edited during a run use
the same file and are written to the ledger. A command of the user discards earlier requests and
limits. A job that its controller restarts, after a run that was killed or ended by a signal, keeps
them.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from study._compat import RAY_JOB
from study.config import LimitsConfig
from study.errors import UserError, refusals
from study.ledger.lock import ALTERED
from study.ledger.log import LedgerError
from study.ledger.state import ENDED, FAILED, StudyState
from study.ledger.storage import ANSWER_SECONDS, answered, check_writable
from study.results.objectives import gpu_seconds, joules
from trainers.files import MOST_JSON, read_own, read_own_json, write_whole
from trainers.object_store import is_url, open_store, place_of

FILE = "control.json"
POLL_SECONDS = 0.5
FETCH_SECONDS = 2.0
"""Seconds between two reads from an object store."""


GRACE_VARIABLE, GRACE_SECONDS = "LNS_STUDY_GRACE_SECONDS", 20.0
"""Environment variable with the grace period of a cancelled study, and its default. A Slurm job,
whose signal comes long before its end, sets more."""
JOB_SECONDS = 1.0
"""Default in a Ray job. Ray kills it three seconds after ``ray job stop``; by then ledger and
report must be closed."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSES = (*_FULL, errno.EIO, errno.EROFS, errno.ESTALE)
"""Errors of a storage that rejects writes for now; the study ends cleanly and can be resumed."""


def is_full(error: str) -> bool:
    """Return whether an error text says that a storage is full."""
    return any(os.strerror(code) in error for code in _FULL)


def storage_refused(error: str, folder: Path, kind: type[UserError] = UserError) -> UserError:
    """Return the error for a storage that rejected a write, with the remedy.

    Args:
        error: text of the original error.
        folder: folder of the study.
        kind: class of the returned error.
    """
    place = place_of(folder.parent)
    if os.strerror(errno.EFBIG) in error:
        mend = "raise the limit of a file's size (`ulimit -f`)"
    elif is_full(error):
        mend = f"free some space in {place}"
    elif ALTERED in error:
        mend = "let no other process write there"
    elif is_url(place):
        mend = f"see that {place} answers and that no other driver continues the study"
    else:
        mend = f"see that {place} can be written"
    return kind(
        f"{error}; {mend}, then give the same command again: trials that finished are kept, the"
        " others continue from their last checkpoint"
    )


def grace_seconds() -> float:
    """Return the grace period of a cancelled study (seconds).

    Raises:
        UserError: the environment variable is not a number of seconds.
    """
    said = os.environ.get(GRACE_VARIABLE, "")
    try:
        seconds = float(said or (JOB_SECONDS if RAY_JOB in os.environ else GRACE_SECONDS))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UserError(
            f"{GRACE_VARIABLE}={said}: must be a number of seconds, at least 0; use for example 20"
        )
    return seconds


class Wish(enum.IntEnum):
    """A request for a running study; stronger requests are larger."""

    RUN = 0
    PAUSE = 1
    STOP = 2
    CANCEL = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """A request and its reason; "" for RUN."""

    wish: Wish = Wish.RUN
    reason: str = ""


class Control:
    """Decisions about what a running study does next; policy alone, its callers act.

    Args:
        folder: folder of the study.
        state: state of the study, kept up to date.
        limits: limits of the config.
        edited: called with limits that were edited, once each.
        spent: seconds of earlier runs that count in ``limits.hours``.
    """

    def __init__(
        self,
        folder: Path,
        state: StudyState,
        limits: LimitsConfig,
        edited: Callable[[dict[str, Any]], object] = lambda limits: None,
        spent: float = 0.0,
    ) -> None:
        self._path, self._state, self._edited = folder / FILE, state, edited
        self._limits = limits
        self._store = open_store(place_of(folder), 0.0)
        self._fetched = -FETCH_SECONDS
        self._began = time.monotonic() - spent
        self._asked = Decision()
        self._looked = -POLL_SECONDS
        self._stamp = 0
        self._limit = ""
        self._begun: set[str] = set()
        self.interrupted = False
        """Whether Ctrl-C was pressed."""
        self.leaving = False
        """Whether trials write their last checkpoint, since the study is cancelled."""
        self.hurried = False
        """Whether Ctrl-C was pressed while they did."""
        self.storage_error = ""
        """Error with which the storage refused a write; ends the study as *cancel* does."""

    def begun(self, trial: str) -> None:
        """Note that a trial was handed out."""
        self._begun.add(trial)

    def again(self, trial: str) -> None:
        """Note that a trial will be handed out again."""
        self._begun.discard(trial)

    def fail_storage(self, reason: str) -> None:
        """Note that the storage refuses writes."""
        self.storage_error = self.storage_error or f"storage: {reason}"

    @contextmanager
    def watch_storage(self) -> Iterator[None]:
        """Pass errors of a storage that refuses writes to :meth:`fail_storage`."""
        try:
            yield
        except OSError as error:
            if not isinstance(error, LedgerError) and error.errno not in _REFUSES:
                raise
            self.fail_storage(str(error))

    @property
    def full(self) -> bool:
        """Whether ``limits.trials`` leaves no room for another trial."""
        most = self._limits.trials
        return (
            most is not None
            and len(
                self._begun | {trial.id for trial in self._state.trials if trial.status in ENDED}
            )
            >= most
        )

    def decide(self, *, fresh: bool = False) -> Decision:
        """Return what to do now.

        This is cheap: the file and the limits are read twice a second at most, unless ``fresh`` is
        set.
        """
        if self.interrupted:
            return Decision(wish=Wish.CANCEL, reason="interrupted")
        if self.storage_error:
            return Decision(wish=Wish.CANCEL, reason=self.storage_error)
        if fresh or time.monotonic() - self._looked >= POLL_SECONDS:
            self._looked = time.monotonic()
            self._read()
            self._limit = reached(self._limits, self._state, time.monotonic() - self._began)
        asked = self._asked
        return (
            Decision(wish=Wish.STOP, reason=self._limit)
            if self._limit and asked.wish < Wish.STOP
            else asked
        )

    def _fetch(self) -> None:
        """Bring the file up to date with the object store, if the study has one that answers."""
        if self._store is None or time.monotonic() - self._fetched < FETCH_SECONDS:
            return
        self._fetched = time.monotonic()
        with suppress(OSError):
            content = self._store.get(FILE)
            if not self._path.exists() or read_own(self._path, MOST_JSON) != content:
                write_whole(self._path, content)

    def _read(self) -> None:
        self._fetch()
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            values = read_own_json(self._path)
            wish = Wish[str(values.get("wish", "run")).upper()]
            limits = values.get("limits")
            wanted = self._limits if limits is None else LimitsConfig(**limits)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # replaced, or not ours, while it was read: looked at again
        self._stamp = stamp
        self._asked = Decision(
            wish=wish, reason="" if wish == Wish.RUN else f"asked to {wish.name.lower()}"
        )
        if wanted != self._limits:
            self._limits = wanted
            self._edited(limits)


def reached(limits: LimitsConfig, state: StudyState, seconds: float) -> str:
    """Describe which limit is reached; "" if none.

    Args:
        limits: limits in force.
        state: state of the study.
        seconds: duration of this run, including earlier runs that it continues.
    """
    ended = sum(trial.status in ENDED for trial in state.trials)
    failed = sum(trial.status == FAILED for trial in state.trials)
    gpu_hours = gpu_seconds(state) / 3600
    if limits.trials is not None and ended >= limits.trials:
        return f"limits.trials={limits.trials} reached"
    if limits.hours is not None and seconds >= 3600 * limits.hours:
        return f"limits.hours={limits.hours:g} reached"
    if limits.gpu_hours is not None and gpu_hours >= limits.gpu_hours:
        return f"limits.gpu_hours={limits.gpu_hours:g} reached"
    if limits.joules is not None and (spent := joules(state)) >= limits.joules:
        return f"limits.joules={limits.joules:g} reached ({spent:g} spent)"
    if limits.failures is not None and failed >= limits.failures:
        return f"limits.failures={limits.failures} reached"
    return ""


def ask(folder: Path, *, wish: Wish | None = None, limits: dict[str, Any] | None = None) -> None:
    """Write a request or edited limits for the process that runs the study in ``folder``.

    An omitted argument keeps its earlier value.

    Raises:
        UserError: the folder cannot be written, or the object store does not answer or refuses, as
            with credentials that only read.
    """
    path, store = folder / FILE, open_store(place_of(folder), ANSWER_SECONDS)
    with refusals():
        check_writable(folder, "study", "only users with write access can steer the study")

    def before() -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(store.get(FILE)) if store else read_own_json(path)
        except (FileNotFoundError, ValueError):
            return {}
        return found

    with refusals():
        values = answered(before)
    if wish is not None:
        values["wish"] = wish.name.lower()
    if limits is not None:
        values["limits"] = limits
    content = json.dumps(values).encode()
    if store is not None:
        with refusals():
            answered(store.put, FILE, content)
    write_whole(path, content)


def clear(folder: Path, *, keep: bool = False) -> None:
    """Remove the requests and edited limits of an earlier run.

    With ``keep`` they stay; only a cached copy, which may be outdated, is removed.
    """
    store = open_store(place_of(folder))
    if store is not None and not keep:
        store.remove(FILE)
    if store is not None or not keep:
        (folder / FILE).unlink(missing_ok=True)
