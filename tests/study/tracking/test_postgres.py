"""A real PostgreSQL as MLflow's store: a ledger is sent, sent again, and reads back equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.tracking.writer_supervisor import check_tracking
from tests.study.conftest import made_up_events
from tests.study.tracking.conftest import is_equal, report_in, runs_of, send

Tiny = Callable[..., StudyConfig]

pytestmark = pytest.mark.slow


def test_a_ledger_in_postgresql(tracked: Tiny, postgres: str, tmp_path: Path) -> None:
    check_tracking(postgres)
    study = tracked("in postgres", f"tracking_uri={postgres}")
    events = made_up_events(study)
    report = report_in(tmp_path)
    for _ in range(2):
        assert send(study, events, report)[0] == ""
    _, parent, children = runs_of(study)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    assert parent.info.artifact_uri.startswith(f"{study.folder.parent.as_uri()}/artifacts/")
    assert is_equal(study)
