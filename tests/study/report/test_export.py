"""Exports: forms that other programs read, with one namespace for trials and one for metrics."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from study.api import Study
from study.cli import main
from study.config import StudyConfig
from study.ledger.events import Event
from study.ledger.state import fold
from study.report.export import export
from study.report.interactive import explore_data
from study.report.tables import render_csv
from tests.study.conftest import made_up_events, write_ledger

Tiny = Callable[..., StudyConfig]
CLASHING = {
    "id": 1.5, "row": 2.5, "number": 3.5, "seed": 4.5, "status": 5.5, "error": 6.5,
    "restarts": 7.5, "bits": 8.5, "seconds": 9.5, "config.epochs": 10.5, "metrics.seed": 11.5,
}  # fmt: skip
"""Metrics of a loop with the names of a trial's columns, and values that no trial has."""


def reporting(study: StudyConfig, metrics: dict[str, float]) -> list[Event]:
    events = made_up_events(study)
    for event in events:
        if event["event"] in ("report", "finished"):
            event["metrics"] = {**event["metrics"], **metrics}
    return events


@pytest.mark.parametrize("frame", ["trials", "epochs"])
def test_a_metric_never_takes_a_trials_column(tiny: Tiny, frame: str) -> None:
    plain, clashing = tiny("plain"), tiny("clashing")
    write_ledger(plain, reporting(plain, {"accuracy": 0.5}))
    write_ledger(clashing, reporting(clashing, {"accuracy": 0.5, **CLASHING}))
    ours, theirs = (getattr(Study(each.folder), frame) for each in (plain, clashing))
    for name in ours.columns:
        assert list(ours[name]) == list(theirs[name]), name
    assert list(ours["accuracy"].unique()) == [0.5]
    found = {name: list(theirs[f"metrics.{name}"].unique()) for name in CLASHING}
    assert found == {name: [value] for name, value in CLASHING.items()}
    assert set(theirs.columns) - set(ours.columns) == {f"metrics.{name}" for name in CLASHING}
    polars = Study(clashing.folder).polars("trials" if frame == "trials" else "epochs")
    assert set(polars.columns) == set(theirs.columns)


def test_nor_an_objective_one_of_the_list_of_configurations(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def train(config): ...\n")
    loop = f"trial.trainable={{name: '{tmp_path}/loop.py:train'}}"
    study = tiny(
        "objectives", "space={epochs: {grid: [1, 2]}}", loop,
        "search={algorithm: grid, objectives: {row: min, state: min, epochs: max}}",
        "metric=accuracy", "rows=[]", "baseline=null",
    )  # fmt: skip
    values = {"row": 2.5, "state": 3.5, "epochs": 4.5, "accuracy": 0.5}
    heading, *lines = render_csv(fold(reporting(study, values))).splitlines()
    assert heading == "row,number,epochs,metrics.row,metrics.state,metrics.epochs,state"
    assert lines == [f"objectives,{n},{n},2.5,3.5,4.5,finished" for n in (1, 2)]


def test_nor_an_axis_of_the_page(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def train(config): ...\n")
    loop = f"trial.trainable={{name: '{tmp_path}/loop.py:train'}}"
    study = tiny("axis", loop, "metric=seed", "seeds=[0,1]", "rows=[]", "baseline=null")
    data = explore_data(fold(reporting(study, {"seed": 4.5})))
    assert data is not None
    assert [line["values"]["seed"] for line in data["trials"]] == [0, 1]
    assert [line["values"][data["y"]] for line in data["trials"]] == [4.5, 4.5]


@pytest.mark.parametrize("epochs", [False, True])
def test_json_is_an_array_and_jsonl_has_a_line_each(
    tiny: Tiny, tmp_path: Path, epochs: bool
) -> None:
    study = tiny("forms", "seeds=[0,1]")
    state = fold(reporting(study, {"train/loss": math.nan}))
    count = 12 if epochs else 4
    for form in ("json", "jsonl"):
        assert export(state, tmp_path / f"x.{form}", form, epochs=epochs) == count
    array = json.loads((tmp_path / "x.json").read_text(), parse_constant=_refuse)
    lines = [
        json.loads(line, parse_constant=_refuse)
        for line in (tmp_path / "x.jsonl").read_text().splitlines()
    ]
    assert array == lines
    assert len(array) == count
    assert {row["train/loss"] for row in array} == {None}
    assert len(pandas.read_json(tmp_path / "x.json")) == count
    assert len(pandas.read_json(tmp_path / "x.jsonl", lines=True)) == count


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def test_export_to_a_dash_writes_to_standard_output(
    tiny: Callable[..., StudyConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    study = tiny("exported to a dash")
    write_ledger(study, made_up_events(study))
    words = ["export", study.slug, "--storage", study.storage, "-o", "-"]
    assert main(words) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
    assert [row["status"] for row in rows] == ["finished"] * len(rows) != []
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trial["id"] for trial in found] == [row["id"] for row in rows]
    assert not (tmp_path / "-").exists()
