"""The types of a ledger's events: what mypy says of a mistyped key, and what real ledgers hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from study.ledger.events import Line

ROOT = Path(__file__).parents[3]
KINDS = {get_args(kind.__annotations__["event"])[0]: kind for kind in get_args(Line)}
SEAL = {"n", "check"}
"""Keys that every line has beside those of its event."""
MISTYPED = """\
from study.ledger.events import Event


def write(events: list[Event]) -> None:
    events.append({"event": "stopped", "trial": "a", "by": "asha"})
    events.append({"event": "stopped", "trial": "a", "bye": "asha"})
    events.append({"event": "stopped", "trial": "a"})
    events.append({"event": "stoped", "trial": "a", "by": "asha"})
    events.append({"event": "stopped", "trial": "a", "by": 1})


def read(event: Event) -> str:
    if event["event"] == "stopped":
        return event["by"]
    if event["event"] == "failed":
        return event["eror"]
    match event["event"]:
        case "restarted":
            return event["error"]
        case "finished":
            return event["error"]
    return event["trial"]
"""
WRONG = {6, 7, 8, 9, 16, 21, 22}
"""Lines of :data:`MISTYPED` with an error."""


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
    (tmp_path / "snippet.py").write_text(MISTYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(tmp_path / "snippet.py")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    assert found == WRONG, done.stdout
