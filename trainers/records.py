"""What processes tell each other of a trial. Loads no torch, so that who only passes it on need not wait for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

STATE = "state.json"
"""Of a checkpoint's files the one that is written last: without it there is no checkpoint."""
HISTORY = "history"
"""In a report: the metrics of the epochs before it, one dict each."""
NAMESPACE = "lns-study"
"""Ray's, of the actors that a trial's processes find by name."""

DETERMINISTIC = (ValueError, ArithmeticError, TypeError, AttributeError, NameError, NotImplementedError)
"""What a trial raises where a second try could only raise it again: the user's input, arithmetic, a mistake in code. What a dead process
or a full disk leads to is none of these."""

JOIN, TRAIN, GO, STOP, CHECK = "join", "train", "go", "stop", "check"
"""To a worker process: become a rank; train a trial; go on after a report, or do not; say what data and format forbid trials."""
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
"""From a worker process: it is up (pid); where ranks meet (port); it is a rank; what forbids trials (a text or None each); a
trial began (:class:`Beginning`); finished an epoch (metrics); ended (``how``, ``text``, and ``retire``: why the process ends
with it); and of it, from its node: it died (why)."""
DONE, STOPPED, REFUSED, OUT_OF_MEMORY, FAILED = "done", "stopped", "refused", "out of memory", "failed"
"""How a trial ended: trained and tested; told to stop; cannot work, a second try would not either; memory ran out; anything else."""

IN_PROCESS, PACKED, RAY_TRAIN = (
    "trainers.executors:InProcess",
    "trainers.executors:Packed",
    "trainers.ray_train_run:RayTrainRun",
)
"""Where a worker process finds the class that trains a trial."""


class Message(NamedTuple):
    """Between a worker process and who drives it."""

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
    """The last line of an error's text that says something, at most 500 characters; "" if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def sealed(state: Mapping[str, Any]) -> str:
    """The text of a checkpoint's :data:`STATE`, with a digest of everything in it."""
    kept = json.loads(json.dumps(state))  # as it will be read
    return json.dumps({**kept, "digest": _digest(kept)}, indent=1)


def read_state(folder: Path) -> dict[str, Any]:
    """What the checkpoint in ``folder`` has beside its tensors; one of an earlier version has no digest, and is taken as it is.

    Raises:
        ValueError: there is none, or it is not as it was written.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        digest = state.pop("digest", None)
    except (OSError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder}: no whole checkpoint there ({error}); name a folder that Training.save wrote") from None
    if digest is not None and digest != _digest(state):
        raise ValueError(f"{folder}: {STATE} does not match its digest; the checkpoint is damaged, use an earlier one")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Files by name into ``folder``, which is made; nothing where there are none."""
    if not files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
