"""Texts of the schema are read as spelled, and numbers in every usual form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from study.api import create
from study.config import StudyConfig
from study.config.compose import as_overrides, load
from study.config.yaml_loader import dump, parse
from tests.study.conftest import TINY

SPELLINGS = (
    "1.10", "1.1", "1e3", "1E3", "on", "off", "yes", "no", "true", "007", "010", "1:30", "0x1f",
    "1_000", "+1", ".5", "2026-11-24", "=", ".inf", "0o17", "-0",
)  # fmt: skip


def read(tmp_path: Path, text: str, *overrides: str) -> StudyConfig:
    path = tmp_path / "spelled.yaml"
    path.write_text(text)
    return load(str(path), [f"storage={tmp_path}/store", "tracking_uri=none", *overrides])


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_text_is_read_as_it_is_spelled(tmp_path: Path, spelled: str) -> None:
    """Names, labels, questions, claims, amendments, objectives, names of files."""
    study = read(
        tmp_path,
        f"""
question: {spelled}
trial: {{data: {{name: digits, root: {spelled}}}}}
baseline: {spelled}
rows:
  - {{label: {spelled}, overrides: {{data.root: {spelled}}}}}
  - label: other
    overrides: {{data: {{root: {spelled}}}}}
  - label: listed
    overrides: [data.root={spelled}]
claims:
  - {{name: a, claim: {spelled}, source: {spelled}, value: {{row: {spelled}, at_most: 1e1}}}}
  - {{name: b, claim: c, source: d, difference: {{rows: [{spelled}, other], at_most: 1}}}}
space: {{data.root: {{choice: [{spelled}, other]}}}}
alerts: {{finished: {spelled}}}
small: {{baseline: {spelled}, data.root: {spelled}}}
""",
    )
    assert study.question == spelled
    assert study.trial.data.root == spelled
    assert study.baseline == study.rows[0].label == spelled
    assert study.rows[0].overrides == {"data.root": spelled}
    assert study.rows[1].overrides == {"data": {"root": spelled}}
    assert study.claims[0].claim == study.claims[0].source == spelled
    assert study.claims[0].value == {"row": spelled, "at_most": 10.0}
    assert study.claims[1].difference["rows"] == [spelled, "other"]
    assert study.space == {"data.root": {"choice": [spelled, "other"]}}
    assert study.alerts == {"finished": spelled}
    assert study.small == {"baseline": spelled, "data.root": spelled}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_text_on_the_command_line_is_read_as_it_is_spelled(tmp_path: Path, spelled: str) -> None:
    study = read(
        tmp_path, TINY, f"question={spelled}", f"rows=[{{label: {spelled}}}]",
        f"baseline={spelled}", f"data.root={spelled}",
    )  # fmt: skip
    assert study.question == study.baseline == study.rows[0].label == spelled
    assert study.trial.data.root == spelled


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_text_in_python_stays_as_it_is(tmp_path: Path, spelled: str) -> None:
    changes = {
        "question": spelled, "rows": [{"label": spelled, "overrides": {"data.root": spelled}}],
        "baseline": None, "trial.model.args": {}, "space": {"data.root": {"grid": [spelled]}},
    }  # fmt: skip
    study = read(tmp_path, TINY, *as_overrides(changes))
    assert study.question == study.rows[0].label == spelled
    assert study.rows[0].overrides == {"data.root": spelled}
    assert study.space["data.root"] == {"grid": [spelled]}


def test_a_study_is_not_taken_over_by_another_spelling(tmp_path: Path) -> None:
    (tmp_path / "spelled.yaml").write_text(TINY)
    places: list[Path] = []
    for name in ("1.1", "1.10", "1e3", "1000.0", "007", "7"):
        study = read(tmp_path, TINY, f"name={name}")
        assert study.name == name
        places.append(study.folder)
    assert len(set(places)) == 6


@pytest.mark.parametrize("value", [1.1, 7, True])
def test_a_number_in_python_is_no_name(tmp_path: Path, value: Any) -> None:
    """In Python 1.10 is 1.1, and the author may have meant either."""
    (tmp_path / "spelled.yaml").write_text(TINY)
    with pytest.raises(ValueError, match=rf"name={value!r}: must be text.*name='{value}'"):
        create(str(tmp_path / "spelled.yaml"), name=value)
    with pytest.raises(ValueError, match=r"rows\[\]\.label=.*must be text"):
        create(str(tmp_path / "spelled.yaml"), rows=[{"label": value}])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-3", 1e-3), ("1E-3", 1e-3), ("1.e-3", 1e-3), (".5", 0.5), ("+.5", 0.5), ("1", 1.0),
        ("+1", 1.0), ("1e+0", 1.0), ("1_000.5", 1000.5), ("1.5E1", 15.0), ("0.5", 0.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["file", "command line"])
def test_a_number_is_read_as_people_write_it(
    tmp_path: Path, written: str, value: float, where: str
) -> None:
    text = f"""
trial:
  optimizer: {{lr: {written}}}
  model: {{name: net.py:make, args: {{own: {written}, all: [{written}]}}}}
rows: [{{label: a, overrides: {{optimizer.lr: {written}}}}}]
space:
  optimizer.momentum: {{choice: [{written}, 0.25]}}
  optimizer.weight_decay: {{loguniform: [{written}, 1e6]}}
"""
    changes: list[str] = []
    if where == "command line":
        values = yaml.load(text, yaml.BaseLoader)
        changes = [
            f"optimizer.lr={written}", "model.name=net.py:make",
            f"model.args={{own: {written}, all: [{written}]}}",
            f"rows=[{{label: a, overrides: {{optimizer.lr: {written}}}}}]",
            *(f"space.{key}={_flow(domain)}" for key, domain in values["space"].items()),
        ]  # fmt: skip
        text = "name: spelled"
    study = read(tmp_path, "name: spelled", *changes) if changes else read(tmp_path, text)
    assert study.trial.optimizer.lr == value
    assert study.trial.model.args == {"own": value, "all": [value]}
    assert study.rows[0].overrides == {"optimizer.lr": value}
    assert study.space["optimizer.momentum"]["choice"] == [value, 0.25]
    assert study.parsed_space.domains[1].values == (value, 1e6)


def _flow(values: dict[str, list[str]]) -> str:
    ((kind, entries),) = values.items()
    return f"{{{kind}: [{', '.join(entries)}]}}"


@pytest.mark.parametrize("written", ["1e1", "1E+1", "10", "010", "+10", "1_0", "10.0", "0xa"])
def test_a_whole_number_is_read_as_people_write_it(tmp_path: Path, written: str) -> None:
    study = read(
        tmp_path,
        f"""
seeds: [0, {written}]
trial: {{epochs: {written}, model: {{hidden: [{written}]}}}}
rows: [{{label: a, overrides: {{batch_size: {written}}}}}]
space: {{batch_size: {{choice: [{written}, 20]}}, epochs: {{randint: [{written}, 2e2]}}}}
""",
    )
    assert study.seeds == [0, 10]
    assert study.trial.epochs == 10
    assert study.trial.model.hidden == [10]
    assert study.rows[0].overrides == {"batch_size": 10}
    assert study.space == {
        "batch_size": {"choice": [10, 20]}, "epochs": {"randint": [10, 200]},
    }  # fmt: skip
    numbers = [*study.seeds, *study.space["batch_size"]["choice"]]
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize("written", ["1.5", "1e-1", "abc", "1e400", ".nan"])
def test_what_is_no_whole_number_is_refused(tmp_path: Path, written: str) -> None:
    with pytest.raises(ValueError, match=r"epochs.*must be a whole number"):
        read(tmp_path, f"trial: {{epochs: {written}}}")


@pytest.mark.parametrize(
    ("written", "value"), [("on", True), ("off", False), ("yes", True), ("no", False)]
)
def test_yes_is_true_where_the_schema_has_a_truth_value(
    tmp_path: Path, written: str, value: bool
) -> None:
    study = read(
        tmp_path,
        f"""
tensorboard: {written}
rows: [{{label: a, overrides: {{precision.kahan_sum: {written}}}}}]
trial: {{model: {{name: net.py:make, args: {{own: {written}}}}}}}
""",
    )
    assert study.tensorboard is value
    assert study.rows[0].overrides == {"precision.kahan_sum": value}
    assert study.trial.model.args == {"own": written}


@pytest.mark.parametrize("spelled", [*SPELLINGS, "null", "~", "", "1.e5", "a: b", "${x}"])
def test_what_is_printed_as_yaml_is_read_as_it_was(spelled: str) -> None:
    values = {"name": spelled, spelled: [1e-5, 1.0, 7, True, None, spelled]}
    assert parse(dump(values)) == values
    assert yaml.safe_load(dump(values)) == values


def test_a_key_stands_once_however_it_is_spelled() -> None:
    with pytest.raises(yaml.YAMLError, match="stands twice"):
        parse("{1: a, '1': b}")
    assert parse("{1: a, on: b, 1.10: c}") == {"1": "a", "on": "b", "1.10": "c"}


def test_merged_mappings_are_read_by_the_same_schema(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
trial: &base {data: {name: digits, root: 1.10}}
rows:
  - {label: 1.10, <<: {overrides: {data.root: 007}}}
""",
    )
    assert study.trial.data.root == "1.10"
    assert study.rows[0].label == "1.10"
    assert study.rows[0].overrides == {"data.root": "007"}
