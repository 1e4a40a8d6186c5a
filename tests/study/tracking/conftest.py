"""A made-up ledger sent to MLflow, and the store's content afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from study.config import StudyConfig
from study.tracking.reconcile import reconcile
from study.tracking.writer import connect, sync
from tests.study.conftest import write_ledger

Tiny = Callable[..., StudyConfig]


def send(
    study: StudyConfig, events: list[Any], report: Path | None = None, uri: str | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """Send a ledger with these events to MLflow."""
    said: list[dict[str, Any]] = []
    folder = write_ledger(study, events)
    return (
        sync(folder, uri or study.tracking, folder.parent / "artifacts", report, said.append),
        said,
    )


def report_in(folder: Path) -> Path:
    """A report's folder with one file."""
    report = folder / "report"
    report.mkdir()
    (report / "report.html").write_text("x")
    return report


def runs_of(study: StudyConfig, uri: str | None = None) -> tuple[Any, Any, list[Any]]:
    """Return client, parent run and child runs."""
    client = connect(uri or study.tracking)
    experiment = client.get_experiment_by_name(study.name)
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "study"]
    children = [run for run in runs if run.data.tags["kind"] == "trial"]
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in children)
    return client, parent, children


def is_equal(study: StudyConfig, uri: str | None = None) -> bool:
    """Return whether the store has exactly the ledger's data."""
    before, _ = reconcile(
        study.folder, uri or study.tracking, study.folder.parent / "artifacts", repair=False
    )
    return before.equal


def break_store(study: StudyConfig, statement: str) -> None:
    """Change the store's database behind MLflow's back."""
    with closing(sqlite3.connect(study.tracking.removeprefix("sqlite:///"))) as database, database:
        assert database.execute(statement).rowcount > 0
