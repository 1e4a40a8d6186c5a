"""Fixtures for tests of whole studies."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.ledger.events import Event
from study.lifecycle import Outcome, run_study
from tests.study.conftest import TINY, SilentView, raw_lines

Tiny = Callable[..., StudyConfig]


TIMED = {"samples_per_second"}


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def both(tiny: Tiny, request: pytest.FixtureRequest) -> Tiny:
    """A tiny study on the local engine, then on the ray engine; the tests must pass on both."""
    engine = request.param
    if engine == "ray":
        request.getfixturevalue("ray_session")
    return lambda name, *overrides: tiny(f"{name} {engine}", f"engine={engine}", *overrides)


def run(
    study: StudyConfig, react: Callable[[Event], None] = lambda event: None
) -> tuple[Outcome, SilentView]:
    view = SilentView(react)
    outcome = run_study(study, view, lambda line: None)
    return outcome, view


def run_tiny(folder: Path, *overrides: str) -> tuple[StudyConfig, Outcome]:
    """The tiny study after one undisturbed run."""
    path = folder / "tiny.yaml"
    path.write_text(TINY)
    study = load(str(path), list(overrides))
    outcome, view = run(study)
    assert [event["event"] for event in view.events].count("finished") == 2
    return study, outcome


def killing_once(killed: list[str]) -> Callable[[Event], None]:
    """Return a reaction that kills the process of the first trial at its second epoch, once."""

    def react(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not killed:
            killed.append(event["trial"])
            os.kill(event["pid"], signal.SIGKILL)

    return react


def results(state: Any) -> dict[str, Any]:
    """Return all results of a trial by trial id: metrics of every epoch and of the test, without
    timings."""
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
    """Return the reports in the ledger's file itself, by trial and epoch."""
    return Counter(
        (event["trial"], event["epoch"])
        for event in raw_lines(study.folder)
        if event["event"] == "report"
    )
