"""The types of a ledger's events: what mypy says of a mistyped key, and what real ledgers hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from study.ledger.events import Line

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
KINDS = {get_args(kind.__annotations__["event"])[0]: kind for kind in get_args(Line)}
SEAL = {"n", "check"}
"""Keys that every line has beside those of its event."""
MISTYPED = """\
from study.ledger.events import Event
from trainers.workers.messages import DIED, ENDED, Died, Ended, FromWorker, WorkerPlan


def write(events: list[Event]) -> None:
    events.append({"event": "stopped", "trial": "a", "by": "asha"})
    events.append({"event": "stopped", "trial": "a", "bye": "asha"})  # wrong
    events.append({"event": "stopped", "trial": "a"})  # wrong
    events.append({"event": "stoped", "trial": "a", "by": "asha"})  # wrong
    events.append({"event": "stopped", "trial": "a", "by": 1})  # wrong


def read(event: Event) -> str:
    if event["event"] == "stopped":
        return event["by"]
    if event["event"] == "failed":
        return event["eror"]  # wrong
    match event["event"]:
        case "restarted":
            return event["error"]
        case "finished":
            return event["error"]  # wrong
    return event["trial"]  # wrong


def send(plan: WorkerPlan) -> list[FromWorker]:
    plan["checkpoint_evry"] = 1  # wrong
    return [
        Ended(ENDED, "a", {"how": "done", "text": "", "retire": ""}),
        Ended(ENDED, "a", {"how": "done", "text": "", "retires": ""}),  # wrong
        Died(ENDED, "a", "why"),  # wrong
        Died(DIED, "a", "why"),
    ]


def receive(message: FromWorker) -> str:
    if message.kind == DIED:
        return message.payload
    if message.kind == ENDED:
        return message.payload["hwo"]  # wrong
    return ""
"""


def test_the_golden_ledger_has_events_of_these_types() -> None:
    path = ROOT / "tests" / "golden" / "studies" / "golden" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["event"] for line in lines}) == 8
    for line in lines:
        kind = KINDS[line["event"]]
        assert kind.__required_keys__ <= line.keys() <= {*kind.__annotations__, *SEAL}


def test_only_keys_that_may_be_missing_are_optional() -> None:
    """Postponed annotations would hide NotRequired from TypedDict."""
    assert "seconds" in KINDS["report"].__optional_keys__
    assert {"event", "trial", "epoch", "metrics"} == KINDS["report"].__required_keys__


@pytest.mark.slow
def test_a_mistyped_key_is_a_type_error(tmp_path: Path) -> None:
    """With the repository's own settings and cache, as ``mypy`` alone."""
    (tmp_path / "snippet.py").write_text(MISTYPED)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "snippet.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    wrong = {n for n, line in enumerate(MISTYPED.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout
