"""Messages about trials between processes.

Does not import torch, so processes that only forward messages start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    NotRequired,
    TypeAlias,
    TypedDict,
    TypeVar,
)

if TYPE_CHECKING:  # these import torch
    from trainers.config import DataConfig, TrialConfig
    from trainers.data import DatasetInfo
    from trainers.telemetry.tally import Moment

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

JOIN: Final = "join"
TRAIN: Final = "train"
GO: Final = "go"
STOP: Final = "stop"
LEAVE: Final = "leave"
CHECK: Final = "check"
HELLO: Final = "hello"
MEET: Final = "meet"
JOINED: Final = "joined"
BEGAN: Final = "began"
REPORT: Final = "report"
MOMENT: Final = "moment"
ENDED: Final = "ended"
DIED: Final = "died"
CHECKED: Final = "checked"
PLACED: Final = "placed"
UNPLACED: Final = "unplaced"
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


class ExecutorPlan(TypedDict, total=False):
    """The part of a worker's plan that executors read, each what it needs.

    Attributes:
        executor: ``MODULE:CLASS`` of the executor.
        origin: stored in the trial's checkpoints.
        checkpoints: folder or URL of the trial's checkpoints.
        metrics: names that every report of a user's own loop must have.
        data: SHA-256 of the examples of each of the study's data sets.
        storage: folder of Ray Train's runs; "" for other executors.
        max_failures: number of restarts after a dead process.
        labels: Ray's label selector for the nodes of Ray Train's workers.
    """

    executor: str
    origin: dict[str, Any]
    checkpoints: str
    metrics: list[str]
    data: list[str]
    storage: str
    max_failures: int
    labels: dict[str, str]


class WorkerPlan(ExecutorPlan):
    """What a worker process needs to train a trial.

    Attributes:
        config: ``TrialConfig.to_dict()``.
        profile: folder or URL of the trial's profiles.
        checkpoint_every: number of epochs between two checkpoints.
        resume_from: checkpoints to continue from if ``checkpoints`` has none, best first.
        waits: whether the trial waits for an answer after each report.
        ray: address of the Ray that the process joins; "" for none.
        moments: whether the process sends :data:`Within` messages.
    """

    config: dict[str, Any]
    profile: str
    checkpoint_every: int
    resume_from: list[str]
    waits: bool
    ray: str
    moments: NotRequired[bool]


class Joining(TypedDict):
    """Values with which a process becomes a rank: the arguments of ``Worker._join``."""

    rank: int
    workers: int
    address: str
    store: int | str
    secret: str
    backend: str


class Ending(TypedDict):
    """How a trial ended, its error or "", and why the process exits or ""."""

    how: str
    text: str
    retire: str


class Places(TypedDict):
    """Machines and Ray nodes of a trial's ranks, and its supervisor's Ray actor and process."""

    hosts: list[str]
    nodes: list[str]
    actor: str
    pid: int


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


Kind = TypeVar("Kind", bound=str)
Payload = TypeVar("Payload")


@dataclass(frozen=True)
class Message(Generic[Kind, Payload]):
    """A message about a trial between two processes; the aliases below are its kinds."""

    kind: Kind
    trial: str = ""
    payload: Payload = None  # type: ignore[assignment]


Join: TypeAlias = Message[Literal["join"], Joining]
"""To a worker process: become a rank."""
Train: TypeAlias = Message[Literal["train"], WorkerPlan]
"""To a worker process: train a trial."""
Answer: TypeAlias = Message[Literal["go", "stop", "leave"], None]
"""To a worker process: continue after a report; stop after a report; write a checkpoint after the
current epoch and end the trial there."""
Check: TypeAlias = Message[Literal["check"], "tuple[list[TrialConfig], str]"]
"""To a worker process: examine trials and their data, and a device."""
Hello: TypeAlias = Message[Literal["hello"], int]
"""From a worker process: it is up, with this pid."""
Meet: TypeAlias = Message[Literal["meet"], int | str]
"""From rank 0: port or path of the store where the ranks meet."""
Joined: TypeAlias = Message[Literal["joined"], None]
"""From a worker process: it is a rank."""
Checked: TypeAlias = Message[Literal["checked"], Examined | str]
"""From a worker process: trials were examined, or the error's text."""
Began: TypeAlias = Message[Literal["began"], Beginning]
"""From a worker process: a trial began."""
Report: TypeAlias = Message[Literal["report"], dict[str, Any]]
"""From a worker process: a trial finished an epoch, with its metrics."""
Within: TypeAlias = Message[Literal["moment"], "Moment"]
"""From a worker process: where a trial is within an epoch. It may get lost, and is not recorded."""
Ended: TypeAlias = Message[Literal["ended"], Ending]
"""From a worker process: a trial ended."""
Died: TypeAlias = Message[Literal["died"], str]
"""From a node: a process died, for this reason."""
Placed: TypeAlias = Message[Literal["placed"], Places]
"""The first message of a trial's supervisor on a cluster."""
Unplaced: TypeAlias = Message[Literal["unplaced"], str]
"""Replaces it if a node could not accept the trial for this reason, unrelated to the trial."""

ToWorker: TypeAlias = Join | Train | Answer | Check
FromWorker: TypeAlias = Hello | Meet | Joined | Checked | Began | Report | Within | Ended | Died
ForLoop: TypeAlias = Placed | Unplaced | Began | Report | Within | Ended | Died
"""Messages for a study's loop, from its engine."""


def last_line(text: str) -> str:
    """Return the last non-blank line of a text, at most 500 characters; "" if all are blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
