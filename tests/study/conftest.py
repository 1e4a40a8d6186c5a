"""The fixtures of the study tests: one Ray session, one storage folder with its MLflow database,
tiny studies, and made-up ledgers."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.engines.ray_session import ENVIRONMENT
from study.ledger.events import Event
from study.ledger.log import FILE
from study.ledger.state import fold
from study.plan.plan import make_plan
from study.tracking.writer import ENVIRONMENT as TRACKING_ENVIRONMENT
from study.tracking.writer import connect
from tests.study.servers import Server, postgres_cluster, postgres_programs

Tiny = Callable[..., StudyConfig]

TINY = """
name: tiny
trial:
  {data: {name: digits, validation_size: 300}, model: {hidden: [16]}, epochs: 3, batch_size: 32}
baseline: float32
rows:
  - {label: float32, overrides: {precision.format: float32}, published: 2.14}
  - label: lns matmul
    overrides: {precision.format: lns12, precision.scope: matmul}
    published: 2.12
    within: 0.15
seeds: [0]
cpus: 2
"""


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    for name, value in (ENVIRONMENT | TRACKING_ENVIRONMENT).items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def ray_session(_environment: None, ray_cluster: None) -> None:
    """The session's Ray, started with the environment that a study gives it."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file's storage folder; its tests use different study names in it."""
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database to copy, because MLflow takes seconds to make one."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


def copy_database(database: Path, place: Path) -> None:
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(place)) as copy:
        source.backup(copy)


@pytest.fixture
def tiny(tmp_path: Path, storage: Path) -> Callable[..., StudyConfig]:
    """A study that trains in a second, and sends nothing to MLflow: ``tiny("name",
    "trial.epochs=2")``."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return lambda name, *overrides: load(
        str(path), [f"name={name}", f"storage={storage}", "tracking_uri=none", *overrides]
    )


@pytest.fixture
def local(tiny: Tiny, tmp_path: Path) -> Tiny:
    """A tiny study in the test's own storage."""
    return lambda name, *overrides: tiny(name, f"storage={tmp_path / 'own'}", *overrides)


@pytest.fixture
def tracked(
    tiny: Callable[..., StudyConfig], storage: Path, database: Path
) -> Callable[..., StudyConfig]:
    """The same with the storage's MLflow database, or a store that the overrides name."""
    if not (own := storage / database.name).exists():
        copy_database(database, own)
    return lambda name, *overrides: tiny(name, "tracking_uri=null", *overrides)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real, running MLflow server on loopback over its own database; a test that stops it starts
    it again."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a database in a real PostgreSQL of the session's own."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="pip install 'lns-study[team]'")
    with postgres_cluster(programs) as uri:
        yield uri


class SilentView:
    """A reporter that shows nothing, records events, and lets a test act on each."""

    def __init__(self, react: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self._react = react

    def start(self, state: Any) -> None:
        """Do nothing."""

    def listen(self, event: Event) -> None:
        """Record the event, then react."""
        self.events.append(event)
        self._react(event)

    def stop(self) -> None:
        """Do nothing."""


def raw_lines(folder: Path) -> list[Event]:
    """Return all lines of a ledger's file; a reader would leave out repeated ones."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def write_ledger(study: StudyConfig, events: list[Event]) -> Path:
    """Create the study's folder with these events as its ledger; no process writes it."""
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    return study.folder


def made_up_events(
    study: StudyConfig, errors: dict[str, float] | None = None, outcome: str = "finished"
) -> list[Event]:
    """The ledger of a study that was not trained; ``errors``: final test error by row, per cent."""
    plan = make_plan(study)
    began = time.time() - 1000
    provenance = {"commit": "c0ffee", "dirty": False, "versions": {"ray": "2.60.0"},
                  "python": "3.11", "platform": "Linux"}  # fmt: skip
    data = {"name": "digits", "source": "made up", "digest": "d" * 64, "root": None, "train": 10,
            "validation": 5, "test": 5}  # fmt: skip
    planned = {**plan.to_event("abc123"), "data": [data], "provenance": provenance}
    events: list[Event] = [{"event": "planned", "time": began} | planned]
    for number, trial in enumerate(plan.trials):
        start = began + 10 * number
        events.append({"event": "started", "time": start, "trial": trial.id})
        for epoch in range(1, trial.config.epochs + 1):
            metrics = {
                "train/loss": 1 / epoch,
                "train/error": 0.1 / epoch,
                "validation/loss": 1 / epoch,
                "validation/error": 0.2 / epoch,
            }
            report = {"trial": trial.id, "epoch": epoch, "metrics": metrics}
            events.append({"event": "report", "time": start + epoch} | report)
        error = (errors or {}).get(trial.row, 2.0) / 100 + trial.seed * 1e-4
        finished = {"trial": trial.id, "metrics": {"test/loss": 0.1, "test/error": error}}
        events.append({"event": "finished", "time": start + 9} | finished)
    return [*events, {"event": "ended", "time": began + 500, "outcome": outcome}]


def with_errors(study: StudyConfig, errors: dict[str, list[float]]) -> list[Event]:
    """A finished study, its test errors in per cent by row and seed."""
    events = made_up_events(study)
    trials = {trial.id: trial for trial in fold(events).trials}
    for event in events:
        if event["event"] == "finished":
            trial = trials[event["trial"]]
            event["metrics"]["test/error"] = errors[trial.row][trial.seed] / 100
    return events
