"""What processes tell each other of a trial.

Loads no torch, so that who only passes messages on need not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

HISTORY = "history"
"""In a report: the metrics of the epochs before it, one dict each."""
FINAL = "final"
"""In the last report of a loop of the user's own: what it returned, a dict of figures."""
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
"""To a worker process: become a rank; train a trial; go on after a report, or do not; write a
checkpoint after the epoch under way and end the trial there; examine trials and their data."""
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
"""From a worker process: it is up (pid); where ranks meet (port); it is a rank; a trial began
(:class:`Beginning`); finished an epoch (metrics); ended (``how``, ``text``, and ``retire``: why the
process ends with it); and of it, from its node: it died (why). Last, the data of trials and what
forbids these (a text or None each), or a text: why the data cannot be had."""
DONE, STOPPED, LEFT, REFUSED, OUT_OF_MEMORY, FAILED = (
    "done",
    "stopped",
    "left",
    "refused",
    "out of memory",
    "failed",
)
"""How a trial ended: trained and tested; told to stop; told to leave, with a checkpoint; cannot
work, a second try would not either; memory ran out; anything else."""


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


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, at most 500 characters; "" if all are."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
