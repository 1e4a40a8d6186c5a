"""Messages about trials between processes.

Does not import torch, so processes that only forward messages start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # these import torch
    from trainers.config import DataConfig
    from trainers.data import DatasetInfo

HISTORY = "history"
"""Key of a report with the metrics of all earlier epochs, a list of dicts."""
FINAL = "final"
"""Key of the last report of a user's own loop with its return value, a dict of figures."""
NAMESPACE = "lns-study"
"""Ray namespace of the named actors that a trial's processes use."""

DETERMINISTIC = (
    ValueError,
    ArithmeticError,
    TypeError,
    AttributeError,
    NameError,
    NotImplementedError,
)
"""Errors that a retry would only raise again: invalid input, arithmetic errors, bugs. A dead
process or a full disk raises errors of other classes."""

JOIN, TRAIN, GO, STOP, LEAVE, CHECK = "join", "train", "go", "stop", "leave", "check"
"""Kinds of messages to a worker process: become a rank; train a trial; continue after a report;
stop after a report; write a checkpoint after the current epoch and end the trial there; examine
trials and their data."""
HELLO, MEET, JOINED, BEGAN, REPORT, ENDED, DIED, CHECKED = (
    "hello",
    "meet",
    "joined",
    "began",
    "report",
    "ended",
    "died",
    "checked",
)
"""Kinds of messages from a worker process, with their payloads in brackets: the process is up
(pid); the store where the ranks meet (port or path); it is a rank; a trial began
(:class:`Beginning`); a trial finished an epoch (metrics); a trial ended (``how``, ``text``, and
``retire``: the reason why the process exits); the process died (reason; sent by its node); trials
were examined (:class:`Examined`, or an error text)."""
PLACED = "placed"
"""Kind of the first message of a trial's supervisor on a cluster, with the places of the ranks:
``hosts``, Ray's ``nodes``, and the supervisor's ``actor`` and ``pid``."""
UNPLACED = "unplaced"
"""Kind of the message that replaces it if a node could not accept the trial for reasons unrelated
to the trial (reason)."""
DONE, STOPPED, LEFT, REFUSED, OUT_OF_MEMORY, FAILED = (
    "done",
    "stopped",
    "left",
    "refused",
    "out of memory",
    "failed",
)
"""How a trial ended: it was trained and tested; it was stopped; it was asked to leave and wrote a
checkpoint; it raised an error that a retry would repeat; it ran out of memory; any other error."""


class Message(NamedTuple):
    """A message between a worker process and its driver."""

    kind: str
    trial: str = ""
    payload: Any = None


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How a trial began.

    Attributes:
        damaged: description of the damaged checkpoints that were skipped; "" without any.
        history: metrics of the earlier epochs, from the checkpoint; empty for a new trial.
    """

    damaged: str = ""
    history: list[dict[str, float]] = field(default_factory=list)


class Examined(NamedTuple):
    """Result of an examination of trials.

    Attributes:
        data: the data sets that the trials use.
        reasons: for each trial, the reason why it cannot succeed, or None.
        changes: for each trial, the names of global state that the user's code changed during its
            examination, see :func:`trainers.workers.process_reset.process_state`.
    """

    data: dict[DataConfig, DatasetInfo]
    reasons: list[str | None]
    changes: list[list[str]]


def last_line(text: str) -> str:
    """Return the last non-blank line of a text, at most 500 characters; "" if all are blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
