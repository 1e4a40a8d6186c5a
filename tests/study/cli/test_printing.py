"""What commands print and write of a ledger that a stranger may have written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from study.cli import main
from study.handle import load
from tests.study.conftest import made_up_events, write_ledger
from tests.study.tracking.conftest import Tiny

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2066\r"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def hostile_study(tiny: Tiny) -> Any:
    """A study whose question, labels and errors steer a terminal, and turn what is read round."""
    study = tiny("hostile", "seeds=[0,1]")
    events = made_up_events(study)
    plan = events[0]
    plan["study"]["question"] = f"Why {HOSTILE}?"
    plan["study"]["rows"][0]["label"] += HOSTILE
    plan["data"][0]["source"] += HOSTILE
    plan["provenance"]["commit"] += HOSTILE
    for trial in plan["trials"]:
        trial["row"] += HOSTILE if trial["row"] == plan["trials"][0]["row"] else ""
    if plan["study"].get("baseline"):
        plan["study"]["baseline"] = plan["study"]["rows"][0]["label"]
    first = plan["trials"][0]["id"]
    events = [
        event | {"event": "failed", "error": f"raised {HOSTILE}"}
        if event["event"] == "finished" and event["trial"] == first
        else event
        for event in events
    ]
    write_ledger(study, events)
    return study, first


def test_no_control_character_of_a_ledger_is_printed_or_in_a_report(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, first = hostile_study(tiny)
    there = ["--storage", study.storage]
    for words in (
        ["report", study.slug, "--format", "latex", *there],
        ["report", study.slug, "--format", "csv", *there],
        ["status", study.slug, *there],
        ["show", study.slug, first, *there],
        ["show", study.slug, "none", *there],
        ["list", *there],
        ["compare", study.slug, study.slug, *there],
        ["export", study.slug, "-o", str(tmp_path / "x.csv"), *there],
        ["doctor", study.slug, *there],
    ):
        main(words)
        said = capsys.readouterr()
        assert CONTROLS.search(said.out + said.err) is None, words
        if words[0] in ("report", "status"):
            assert r"\x1b" in said.out, words
    files = [tmp_path / "x.csv", *(study.folder / "report").glob("*.[mhtc]*")]
    assert {file.suffix for file in files} == {".csv", ".md", ".html", ".tex"}
    for file in files:
        assert CONTROLS.search(file.read_bytes().decode().replace("\r\n", "\n")) is None, file


def test_no_control_character_of_a_ledger_is_in_what_python_shows(tiny: Tiny) -> None:
    study, _ = hostile_study(tiny)
    shown = load(study.slug, study.storage)
    for text in (repr(shown), shown._repr_html_()):
        assert CONTROLS.search(text) is None
