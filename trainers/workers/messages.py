"""What processes tell each other of a trial.

Loads no torch, so that who only passes messages on need not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # which load torch
    from trainers.config import DataConfig
    from trainers.data import DatasetInfo

HISTORY = "history"
"""Key of a report that holds the metrics of the epochs before it, one dict each."""
FINAL = "final"
"""Key of the last report of a user's own loop that holds what it returned, a dict of figures."""
NAMESPACE = "lns-study"
"""Ray namespace of the actors that a trial's processes find by name."""

DETERMINISTIC = (
    ValueError,
    ArithmeticError,
    TypeError,
    AttributeError,
    NameError,
    NotImplementedError,
)
"""What a trial raises where a second try could only raise it again: the user's input, arithmetic, a
mistake in code. What a dead process or a full disk leads to is none of these."""

JOIN, TRAIN, GO, STOP, LEAVE, CHECK = "join", "train", "go", "stop", "leave", "check"
"""Kinds of messages to a worker process, which have it become a rank; train a trial; go on after a
report, or not; write a checkpoint after the epoch under way and end the trial there; examine trials
and their data."""
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
"""Kinds of messages from a worker process, with what each carries: the process is up (pid); where
ranks meet (port); it is a rank; a trial began (:class:`Beginning`); a trial finished an epoch
(metrics); a trial ended (``how``, ``text``, and ``retire``: why the process ends with it). Its node
sends that it died (why). The last carries :class:`Examined`, or a text: why the data cannot be
had."""
PLACED = "placed"
"""Kind of message that who supervises a trial on a cluster sends first, with where its ranks are:
``hosts``, Ray's ``nodes``, and the supervisor's ``actor`` and ``pid``."""
UNPLACED = "unplaced"
"""Kind of message that it sends in place of that where a node did not take the trial, by no fault
of the trial's (why)."""
DONE, STOPPED, LEFT, REFUSED, OUT_OF_MEMORY, FAILED = (
    "done",
    "stopped",
    "left",
    "refused",
    "out of memory",
    "failed",
)
"""Ways in which a trial ends: it is trained and tested; it was told to stop; it was told to leave,
and has left a checkpoint; it cannot work, and would not at a second try; memory ran out; anything
else."""


class Message(NamedTuple):
    """A message between a worker process and its driver."""

    kind: str
    trial: str = ""
    payload: Any = None


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How a trial began.

    Attributes:
        damaged: what is wrong with the checkpoints that were passed over; "" if none was.
        history: metrics of the epochs before, from the checkpoint; empty for a trial from scratch.
    """

    damaged: str = ""
    history: list[dict[str, float]] = field(default_factory=list)


class Examined(NamedTuple):
    """What an examination of trials has found.

    Attributes:
        data: the data sets that they use.
        reasons: why each trial could only fail, or None.
        changes: names of what the user's code has changed in its process where each was examined,
            see :func:`trainers.workers.process_reset.process_state`.
    """

    data: dict[DataConfig, DatasetInfo]
    reasons: list[str | None]
    changes: list[list[str]]


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, at most 500 characters; "" if all are."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
