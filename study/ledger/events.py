"""The events of a ledger: a typed dict for each kind, and their union :data:`Event`.

A comparison of ``event["event"]`` with a kind tells a type checker which keys the event has, so a
mistyped key is an error where events are written and where they are read. At run time events are
the plain dicts of the ledger's JSON. Optional keys may be missing: not every writer knows them, or
earlier versions did not write them.

An event that was taken over from another study or a shorter trial names it under ``source``, keeps
its original time, and has the ``commits`` of the code and the ``machines``. An event that a repair
restored has its origin under ``recovered``, and the ``code`` that a checkpoint names.
"""

# without `from __future__ import annotations`, by which TypedDict would not see NotRequired
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, cast, final

Config: TypeAlias = dict[str, Any]
"""Config of a trial or of a study, nested, as ``to_dict`` returns it."""


class Common(TypedDict, total=False):
    """Keys that events of every kind may have; :class:`~study.ledger.log.Ledger` adds ``time``."""

    time: float
    source: str
    commits: list[str]
    machines: list[dict[str, Any]]
    code: str
    recovered: str


class _OfTrial(Common):
    trial: str


class _ErrorEvent(_OfTrial):
    error: str


class NamedTrial(TypedDict):
    """A planned trial without its config: its id, the label of its row, its seed; and of a search
    the number of its configuration in the row, the sampled values and the algorithm's notes."""

    id: str
    row: str
    seed: int
    number: NotRequired[int | None]
    params: NotRequired[dict[str, Any]]
    asked: NotRequired[dict[str, Any]]


class TrialValues(NamedTrial):
    """A planned trial."""

    config: Config


@final
class Header(Common):
    """A ledger, or a part of one, begins."""

    event: Literal["ledger"]
    version: int
    id: str
    made_by: str


@final
class Planned(Common):
    """A run of the study starts; `size` is the number of trials with those that a search will
    propose, `stated` the digest of the statement, `prepared` the seconds since the command,
    `launch` the times of a launched study."""

    event: Literal["planned"]
    ledger: str
    key: str
    study: Config
    trials: list[TrialValues]
    size: NotRequired[int]
    only: NotRequired[str]
    stated: NotRequired[dict[str, Any]]
    prepared: NotRequired[float]
    data: NotRequired[list[dict[str, Any]]]
    provenance: NotRequired[dict[str, Any]]
    hardware: NotRequired[dict[str, Any]]
    launch: NotRequired[dict[str, float]]


@final
class Capacity(Common):
    """CPUs, GPUs and machines that the run has now."""

    event: Literal["capacity"]
    cpus: float
    gpus: int
    nodes: int


@final
class Started(_OfTrial):
    """Processes start or restart a trial: `slots` has one number per rank, `actor` is Ray's,
    `pid` and `host` are of a user's own loop."""

    event: Literal["started"]
    slots: NotRequired[list[int]]
    hosts: NotRequired[list[str]]
    cpus: NotRequired[float]
    gpus: NotRequired[float]
    actor: NotRequired[str]
    pid: NotRequired[int]
    host: NotRequired[str]


@final
class Report(_OfTrial):
    """A trial finished an epoch, in `seconds` by its process's clock (null if unknown); `repeated`
    are the seconds of earlier epochs that it trained again."""

    event: Literal["report"]
    epoch: int
    metrics: dict[str, float]
    pid: NotRequired[int]
    host: NotRequired[str]
    seconds: NotRequired[float | None]
    repeated: NotRequired[float]
    params: NotRequired[dict[str, Any]]


@final
class Checkpoint(_OfTrial):
    """A trial's state is on disk."""

    event: Literal["checkpoint"]
    epoch: int
    path: str


@final
class Restarted(_ErrorEvent):
    """A trial continues from its last checkpoint, because its process died or its node drains."""

    event: Literal["restarted"]


@final
class Relieved(_ErrorEvent):
    """A trial ran out of memory; it is tried again with other keys."""

    event: Literal["relieved"]
    relief: dict[str, Any]


@final
class Damaged(_ErrorEvent):
    """A trial's checkpoint could not be read."""

    event: Literal["damaged"]


@final
class Finished(_OfTrial):
    """A trial is done; `metrics` are the final ones (test/...), `epochs` of a user's own loop."""

    event: Literal["finished"]
    metrics: dict[str, float]
    epochs: NotRequired[int]


@final
class Stopped(_OfTrial):
    """The scheduler ended a trial early."""

    event: Literal["stopped"]
    by: str


@final
class Failed(_ErrorEvent):
    """A trial failed for good."""

    event: Literal["failed"]


@final
class Added(Common):
    """An adaptive search proposed a trial."""

    event: Literal["added"]
    planned: TrialValues


@final
class Edited(Common):
    """Limits were changed while the study ran."""

    event: Literal["edited"]
    limits: dict[str, Any]


@final
class Ended(Common):
    """The run is over; `outcome` is finished, failed, stopped or interrupted."""

    event: Literal["ended"]
    outcome: str


@final
class Repaired(Common):
    """`doctor --repair` wrote the ledger again; `damaged` is the file kept, `lost` is text, and
    `marks` are of its MLflow runs."""

    event: Literal["repaired"]
    damaged: str | None
    lost: list[str]
    marks: list[str]


@final
class Lost(Common):
    """A plan here could not be recovered."""

    event: Literal["lost"]
    what: str


End: TypeAlias = Finished | Stopped | Failed
TrialEvent: TypeAlias = (
    Started | Report | Checkpoint | Restarted | Relieved | Damaged | Finished | Stopped | Failed
)
Event: TypeAlias = (
    Planned | Capacity | Started | Report | Checkpoint | Restarted | Relieved | Damaged
    | Finished | Stopped | Failed | Added | Edited | Ended | Repaired | Lost
)  # fmt: skip
AnyEvent = TypeVar("AnyEvent", bound=Event)
Line: TypeAlias = Header | Event
"""What a line of a ledger may hold."""


def trial_of(event: Event) -> str:
    """Return the trial of an event; "" for an event of the study."""
    return event["trial"] if "trial" in event else ""  # noqa: SIM401


def stamped(event: AnyEvent, time: float) -> AnyEvent:
    """Return an event with a time, unless it has one, as its second key."""
    return cast(AnyEvent, {"event": event["event"], "time": time, **event})
