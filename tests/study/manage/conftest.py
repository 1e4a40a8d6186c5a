"""Studies in the test's own storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.ledger.events import Event

Tiny = Callable[..., StudyConfig]


def write(study: StudyConfig, events: list[Event]) -> Path:
    """A study's folder with that ledger."""
    study.folder.mkdir(parents=True)
    (study.folder / "ledger.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events)
    )
    return study.folder


@pytest.fixture
def local(tiny: Tiny, tmp_path: Path) -> Callable[..., StudyConfig]:
    """A tiny study in the test's own storage."""
    return lambda name, *overrides: tiny(name, f"storage={tmp_path / 'own'}", *overrides)
