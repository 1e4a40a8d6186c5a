"""Made-up ledgers of runs whose trials held slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from study.ledger.events import Event
from study.ledger.slots import ENDS, Run, follow

BEGAN = 1_000_000.0
"""The start of every made-up run; all other times count from there."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A trial that held slots; with ``end`` None it still does. ``seconds`` are the epoch times in
    its reports, or None in ledgers without them."""

    trial: str
    begin: float
    end: float | None
    slots: Sequence[int] = (0,)
    cpus: float = 1.0
    gpus: float = 0.0
    reports: Sequence[float] = field(default=())
    seconds: Sequence[float | None] | None = None
    how: str = "finished"
    added: float | None = None
    own_loop: bool = False


def events_of(
    held: Iterable[Held],
    capacity: Iterable[tuple[float, float, float]],
    end: float | None,
    most: int | None = None,
    row: str = "row",
    prepared: float | None = None,
) -> list[Event]:
    """The ledger of a run: the resources of trials, the total resources (time, CPUs, GPUs), and its
    end, if it ended. ``prepared``: seconds from the command to the plan, if known."""
    held = list(held)
    known = dict.fromkeys(each.trial for each in held if each.added is None)
    loops = {each.trial for each in held if each.own_loop}
    planned = [
        {"id": trial, "row": row, "config": {"trainable": {"name": "loop" * (trial in loops)}}}
        for trial in known
    ]
    found: list[Event] = [
        {"event": "capacity", "time": time, "cpus": c, "gpus": g, "nodes": 1}
        for time, c, g in capacity
    ]
    for each in held:
        of = {"trial": each.trial}
        if each.added is not None:
            found.append(
                {"event": "added", "time": each.added, "planned": {"id": each.trial, "row": row}}
            )
        takes: dict[str, Any] = {
            "slots": list(each.slots),
            "hosts": ["host"] * len(each.slots),
            "cpus": each.cpus,
            "gpus": each.gpus,
        }
        found.append({"event": "started", "time": each.begin, **of, **takes})
        found += _reports_of(each)
        if each.end is not None:
            found.append({"event": each.how, "time": each.end, **of})
    # at one moment slots are released before they are held again
    order = {"report": 0} | dict.fromkeys(ENDS, 1)
    found.sort(key=lambda event: (event["time"], order.get(event["event"], 2)))
    noted = {} if prepared is None else {"prepared": prepared}
    study = {"max_concurrent": most}
    found.insert(0, {"event": "planned", "time": 0.0, "study": study, "trials": planned, **noted})
    if end is not None:
        found.append({"event": "ended", "time": end, "outcome": "finished"})
    return [{**event, "time": BEGAN + event["time"]} for event in found]


def _reports_of(held: Held) -> list[Event]:
    took: list[dict[str, Any]] = (
        [{}] * len(held.reports)
        if held.seconds is None
        else [{"seconds": seconds} for seconds in held.seconds]
    )
    of = {"event": "report", "trial": held.trial, "metrics": {}}
    return [
        {**of, "time": time, "epoch": n, **said}
        for n, (time, said) in enumerate(zip(held.reports, took, strict=True), 1)
    ]


def runs_of(events: list[Event]) -> list[Run]:
    """Return all runs in a ledger, the oldest first."""
    runs: list[Run] = []
    for event in events:
        follow(runs, event)
    return runs


def run_of(*arguments: Any, **options: Any) -> Run:
    """Return the run of :func:`events_of`."""
    (run,) = runs_of(events_of(*arguments, **options))
    return run


def with_slots(events: list[Event], cpus: float = 2.0) -> list[Event]:
    """Return a ledger of :func:`tests.study.conftest.made_up_events` with slots. Each trial is on
    slot 0, with one CPU, and reports epochs of one second."""
    slots = {"slots": [0], "hosts": ["host"], "cpus": 1.0, "gpus": 0.0}
    capacity = {"event": "capacity", "time": events[0]["time"], "cpus": cpus, "gpus": 0, "nodes": 1}
    more: dict[str, Event] = {"started": slots, "report": {"seconds": 1.0}}
    said = ({**event, **more.get(event["event"], {})} for event in events[1:])
    return [events[0], capacity, *said]
