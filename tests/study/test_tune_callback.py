"""What Tune tells becomes ledger events; no Ray session needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from study.tune_callback import LedgerCallback

from study.ledger import Ledger, read_ledger
from trainers.records import HISTORY


class Trial:
    """What the callback reads of one of Tune's trials."""

    config: ClassVar = {"id": "abc"}
    last_result: ClassVar = {"done": True}


def metrics(epoch: int) -> dict[str, Any]:
    return {"epoch": float(epoch), "train/loss": 1 / epoch, "validation/error": 0.5}


def test_epochs_that_the_ledger_lacks_are_taken_from_a_later_result_once(tmp_path: Path) -> None:
    trial = Trial()
    with Ledger(tmp_path) as ledger:
        callback = LedgerCallback(ledger)
        callback.on_trial_result(1, [], trial, metrics(1) | {"pid": 7})
        callback.on_trial_result(2, [], trial, metrics(3) | {HISTORY: [metrics(1), metrics(2)], "pid": 8})
        callback.on_trial_result(3, [], trial, {"epoch": 3, "test/loss": 0.1, HISTORY: [metrics(1), metrics(2), metrics(3)]})
        callback.on_trial_complete(3, [], trial)
    events = read_ledger(tmp_path)
    reports = [event for event in events if event["event"] == "report"]
    assert [event["epoch"] for event in reports] == [1, 2, 3]
    assert [event["metrics"]["train/loss"] for event in reports] == [1, 1 / 2, 1 / 3]
    assert (tmp_path / "ledger.jsonl").read_text().count('"report"') == 3
    assert events[-1]["event"] == "finished"
    assert events[-1]["metrics"] == {"test/loss": 0.1}
