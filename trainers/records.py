"""What processes tell each other of a trial. Loads no torch, so that who only passes it on need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field

STATE = "state.json"
"""Of a checkpoint's files the one that is written last: without it there is no checkpoint."""
HISTORY = "history"
"""In a report: the metrics of the epochs before it, one dict each."""

DETERMINISTIC = (ValueError, ArithmeticError, TypeError, AttributeError, NameError, NotImplementedError)
"""What a trial raises where a second try could only raise it again: the user's input, arithmetic, a mistake in code. What a dead process
or a full disk leads to is none of these."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How a trial began.

    Attributes:
        damaged: what is wrong with the checkpoints that were passed over; "" if none was.
        history: metrics of the epochs before, from the checkpoint; empty for a trial from scratch.
    """

    damaged: str = ""
    history: list[dict[str, float]] = field(default_factory=list)
