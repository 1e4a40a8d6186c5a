"""Ask and tell: a study whose trials are run by the user's own loop.

:func:`ask` returns the next trial of a study's plan or of its search; :func:`tell` records its
results. Both write the same events as a run of the study, so reports, MLflow, ``lns-study status``
and a later run read them: ``added`` for a proposed trial, ``started`` with the process that asked,
then ``report`` of the last epoch and ``finished``, or ``failed``. Each call holds the ledger's
lock, so several processes can ask at the same time, and each gets a different trial.

A trial that was asked for and has no result is open. It is returned again once the process that
asked for it has ended on this machine, and any run of the study trains it. Trials that a run has
begun to train are not returned.

Source of the interface: T. Akiba et al., "Optuna", KDD 2019.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from study.config.metric import DERIVED
from study.engines.control import storage_refused
from study.errors import UserError, refusals
from study.ledger.events import Event, Started
from study.ledger.lock import is_locked
from study.ledger.log import Ledger, LedgerError, read_ledger
from study.ledger.state import ENDED, FAILED, RUNNING, StudyState, TrialState, fold
from study.ledger.studies import continued
from study.plan.plan import Plan, make_plan
from study.search.agenda import Agenda, adopt
from trainers.config import TrialConfig

LOCK_SECONDS = 30.0
"""Longest wait of a call for the ledger's lock (seconds)."""
CLOCK_SECONDS = 2.0
"""Precision of the start time of a process (seconds)."""
TEST = "test/"
"""Prefix of final metrics, by which no trial is chosen."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A trial to run.

    Attributes:
        trial: id of the trial.
        row: label of its row.
        seed: its seed.
        number: number of its configuration in the row; None if nothing is searched.
        params: sampled values by dotted key.
        config: its complete config.

    Example::

        >>> import tempfile, study
        >>> mine = study.create("quickstart", data="digits", storage=tempfile.mkdtemp())
        Data: scikit-learn's handwritten digits (1,797 images of 8 x 8)
        >>> mine.ask().config.precision.format
        'float32'
    """

    trial: str
    row: str
    seed: int
    number: int | None
    params: dict[str, Any]
    config: TrialConfig


def ask(folder: Path) -> Suggestion | None:
    """Return the next trial of the study in ``folder``.

    Returns:
        The trial, which the ledger now has as started; None if no trial is left, or if the search
        first needs the results of open trials.

    Raises:
        UserError: the study runs, its ledger is damaged, or its search finds nothing more.
    """
    with _opened(folder) as (ledger, state):
        askers = _askers(ledger.history)
        with refusals():
            plan = adopt(make_plan(state.config), state)
            _refuse_changed(plan, state)
            agenda = Agenda(
                plan,
                state,
                lambda trial: _discard(
                    ledger.append({"event": "added", "planned": trial.to_dict()})
                ),
            )
        while (trial := agenda.next()) is not None:
            if not _is_taken(state.known[trial.id], askers):
                pid, host = os.getpid(), socket.gethostname()
                ledger.append({"event": "started", "trial": trial.id, "pid": pid, "host": host})
                return _suggestion(state.known[trial.id])
        if agenda.exhausted:
            _end(ledger, state)
        return None


def _refuse_changed(plan: Plan, state: StudyState) -> None:
    """Refuse a plan with new trials: code, data or hardware have changed since ``create``."""
    last = {trial.id for trial in state.trials}
    if new := [trial for trial in plan.trials if trial.id not in last]:
        raise ValueError(
            f"{plan.study.name}: {len(new)} of its {len(plan.trials)} trials are not in its plan:"
            " code or data of yours changed, or this machine has other GPUs or data; call create()"
            " again, which makes a new plan"
        )


def asked(folder: Path) -> list[Suggestion]:
    """Return the open trials, which were asked for and have no result."""
    events = read_ledger(folder)
    state, askers = fold(events), _askers(events)
    return [
        _suggestion(trial)
        for trial in state.trials
        if trial.status == RUNNING and trial.id in askers
    ]


def tell(
    folder: Path,
    suggestion: Suggestion,
    values: float | Mapping[str, float] | None = None,
    *,
    error: str | Exception = "",
) -> None:
    """Record a trial's results, or its failure.

    Args:
        folder: folder of the study.
        suggestion: the trial.
        values: value of the first objective, or values by metric: every objective of the search but
            ``bits`` and ``seconds``, and any others; ``test/error`` and so on are the final ones.
            NaN for a trial that diverged.
        error: reason for which it failed, instead of values.

    Raises:
        UserError: the study runs or does not know the trial, the trial is not open, or the values
            are not numbers, have a name that is taken, or lack an objective.
    """
    with _opened(folder) as (ledger, state):
        trial = state.known.get(suggestion.trial)
        if trial is None or trial.status != RUNNING or trial.id not in _askers(ledger.history):
            status = "not in its plan" if trial is None else trial.status
            raise UserError(
                f"trial {suggestion.trial!r}: is {status}, and tell() takes each trial from ask()"
                " once; ask for another"
            )
        if (values is None) != bool(error):
            raise UserError(
                f"tell: values={values!r} and error={error!r}: one of them must be given; use for"
                " example tell(suggestion, 0.12) or tell(suggestion, error='diverged')"
            )
        reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        events: list[Event] = [{"event": "failed", "trial": trial.id, "error": reason}]
        if values is not None:
            metrics = _metrics(values, state)
            final = {name: value for name, value in metrics.items() if name.startswith(TEST)}
            epoch = {name: value for name, value in metrics.items() if name not in final}
            events = [
                {"event": "report", "trial": trial.id, "epoch": trial.epochs, "metrics": epoch},
                {"event": "finished", "trial": trial.id, "metrics": final},
            ]
        ledger.append_all(events)
        search = state.config.search
        if not (search.adaptive or search.confirm_seeds):
            _end(ledger, state)


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Ledger, StudyState]]:
    """Provide the ledger in ``folder`` and its state, which follows it; wait for the lock.

    Raises:
        UserError: the folder is a copy, the study runs, its ledger is damaged, or the storage
            refuses a write.
    """
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            ledger = Ledger(folder)
            break
        except ValueError as error:
            if not is_locked(folder) or time.monotonic() > until:
                raise UserError(str(error)) from error
            time.sleep(0.05)
    try:
        with ledger:
            state = fold(ledger.history)
            with refusals():
                continued(state.config, folder)
            ledger.listen(state.apply)
            yield ledger, state
    except LedgerError as error:
        raise storage_refused(f"storage: ledger: {error}", folder) from None


def _askers(events: list[Event]) -> dict[str, Started]:
    """Return the last ``started`` event of each trial that was last started by ``ask``."""
    last = {event["trial"]: event for event in events if event["event"] == "started"}
    return {trial: event for trial, event in last.items() if "pid" in event}


def _is_taken(trial: TrialState, askers: dict[str, Started]) -> bool:
    """Return whether a process may still report the trial, or a run has begun it."""
    if trial.reports:
        return True
    asker = askers.get(trial.id)
    if trial.status != RUNNING or asker is None:
        return False
    if asker["host"] != socket.gethostname():
        return True
    return _lives(asker["pid"], asker["time"])


def _lives(pid: int, since: float) -> bool:
    """Return whether the process with this id at this time still runs."""
    try:
        process = psutil.Process(pid)
        gone = process.status() == psutil.STATUS_ZOMBIE
        return not gone and process.create_time() <= since + CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # somebody else's process
        return True


def _metrics(values: float | Mapping[str, float], state: StudyState) -> dict[str, float]:
    """Return the values by metric.

    Raises:
        UserError: a value is not a number, or an objective is missing.
    """
    wanted = [name for name in state.config.search.objectives if name not in DERIVED]
    given = values if isinstance(values, Mapping) else dict.fromkeys(wanted[:1], values)
    try:
        metrics = {str(name): float(value) for name, value in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"tell: values={values!r}: must be numbers ({error}); use for example"
            f" {{{(wanted or ['validation/error'])[0]!r}: 0.12}}"
        ) from None
    if taken := [name for name in metrics if name in ("", "epoch", *DERIVED)]:
        raise UserError(
            f"tell: values={values!r}: the name {taken[0]!r} is taken by what a trial is known by"
            " anyway; leave it out, or give it another name"
        )
    if missing := [name for name in wanted if name not in metrics]:
        raise UserError(
            f"tell: values={values!r}: must have every objective of the search, and"
            f" {', '.join(missing)} is missing; give it, NaN if the trial diverged"
        )
    return metrics


def _suggestion(trial: TrialState) -> Suggestion:
    return Suggestion(
        trial=trial.id,
        row=trial.row,
        seed=trial.seed,
        number=trial.number,
        params=trial.params,
        config=TrialConfig.from_dict(trial.config),
    )


def _end(ledger: Ledger, state: StudyState) -> None:
    """Record the end of the study once every trial has ended."""
    if state.outcome == "stopped" and all(trial.status in ENDED for trial in state.trials):
        failed = any(trial.status == FAILED for trial in state.trials)
        ledger.append({"event": "ended", "outcome": "failed" if failed else "finished"})


def _discard(_: object) -> None:
    pass
