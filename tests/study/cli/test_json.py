"""``--json``: commands that read studies print one JSON document, with numbers as numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from study.cli import main
from study.config.compose import load
from tests.study.conftest import made_up_events, write_ledger


@pytest.fixture
def storage(folder: Path) -> Path:
    """A storage with two studies of the same trials; a loss of one is not finite."""
    storage = folder / "studies"
    for name in ("first", "second"):
        words = [f"name={name}", f"storage={storage}", "seeds=[0,1]", "tracking_uri=none"]
        study = load(str(folder / "tiny.yaml"), words)
        events = made_up_events(study)
        if name == "first":
            report = next(event for event in events if event["event"] == "report")
            report["metrics"]["train/loss"] = float("nan")
        write_ledger(study, events)
    return storage


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return the document that a command prints; JSON has no NaN."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_list_and_status(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--storage", str(storage))
    first, second = printed(capsys, "list", *there)
    assert (first["name"], second["condition"]) == ("first", "finished")
    assert first["trials"] == {"planned": 4, "ended": 4, "failed": 0, "diverged": 0}
    assert first["best"]["metric"] == "validation/error"
    assert 0 < first["best"]["value"] < 1
    assert first["time"] > 0
    status = printed(capsys, "status", "first", *there)
    assert [trial["seed"] for trial in status["trials"]] == [0, 0, 1, 1]
    assert {trial["status"] for trial in status["trials"]} == {"finished"}
    assert status["trials"][0]["test"]["test/error"] == 0.02
    assert status["limits"]["hours"] is None


def test_show_has_every_epoch_with_null_for_nan(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = printed(capsys, "show", "first", "float32, seed 0", "--storage", str(storage))
    assert [report["epoch"] for report in trial["epochs_reported"]] == [1, 2, 3]
    assert trial["epochs_reported"][0]["metrics"]["train/loss"] is None
    assert trial["config"]["seed"] == 0


def test_report_and_compare(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ("--storage", str(storage))
    report = printed(capsys, "report", "first", *there)
    assert [row["label"] for row in report["rows"]] == ["float32", "lns matmul"]
    assert report["rows"][0]["mean"] == pytest.approx(2.005)
    assert printed(capsys, "report", "first", "--verify", *there)["differences"] == []
    compared = printed(capsys, "compare", "first", "second", *there)
    assert (compared["studies"], compared["difference"]) == (["first", "second"], 0.0)
    assert {pair["seed"] for pair in compared["pairs"]} == {0, 1}


def test_plan_with_and_without_slots(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = printed(capsys, "plan", "first", "--storage", str(storage))
    assert (plan["size"], len(plan["trials"]), plan["excluded"]) == (4, 4, [])
    assert plan["expected"]["seconds"] > 0
    one, many = printed(capsys, "plan", "first", "--storage", str(storage), "--slots", "1", "4")
    assert (one["slots"], many["slots"]) == (1, 4)
    assert one["makespan"] > many["makespan"] > 0


def test_the_studies_that_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    known = {study["name"]: study for study in printed(capsys, "list", "--available")}
    assert known["format_atlas"]["small"] is True
    assert known["format_atlas"]["question"].startswith("Which number format")
