"""What tests of whole studies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from study.api import Outcome, run_study
from study.config import StudyConfig
from study.ledger.lines import Event
from tests.study.conftest import SilentView

Tiny = Callable[..., StudyConfig]


TIMED = {"samples_per_second"}


def run(
    study: StudyConfig, react: Callable[[Event], None] = lambda event: None
) -> tuple[Outcome, SilentView]:
    view = SilentView(react)
    outcome = run_study(study, view, lambda line: None)
    return outcome, view


def results(state: Any) -> dict[str, Any]:
    """Everything a trial computed, by trial id: metrics of every epoch and the test, timings left
    out."""
    return {
        trial.id: (
            [
                {name: value for name, value in event["metrics"].items() if name not in TIMED}
                for _, event in sorted(trial.reports.items())
            ]
            + [trial.test]
        )
        for trial in state.trials
    }


def count_reports(study: StudyConfig) -> dict[tuple[str, int], int]:
    """Report lines in the ledger's file itself, by trial and epoch."""
    counts: dict[tuple[str, int], int] = {}
    import json

    for line in (study.folder / "ledger.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "report":
            key = (event["trial"], event["epoch"])
            counts[key] = counts.get(key, 0) + 1
    return counts
