"""A study over a network of the user's own: named relative to its file, searched, identified by its
code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from study.api import run_study
from study.config.compose import load
from study.execution.preflight import preflight
from study.ledger.state import FINISHED
from study.plan.plan import make_plan
from tests.study.conftest import SilentView
from tests.trainers.user_network import NETWORK

STUDY = """
name: own
trial:
  {model: {name: "net.py:make_net"}, data: {name: "net.py:digits"}, epochs: 1, batch_size: 20}
baseline: float32
rows:
  - {label: float32}
  - {label: lns, overrides: {precision.format: lns12, precision.kahan_sum: true}}
cpus: 2
tracking_uri: none
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.yaml").write_text(STUDY)
    (tmp_path / "own" / "net.py").write_text(NETWORK)
    return tmp_path / "own"


def ids(folder: Path, *overrides: str) -> list[str]:
    study = load(str(folder / "own.yaml"), [f"storage={folder}", *overrides])
    return [trial.id for trial in make_plan(study).trials]


def test_trials_are_known_by_their_code_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    before = ids(folder)
    shutil.copytree(folder, tmp_path / "moved")
    assert ids(tmp_path / "moved") == before
    (folder / "net.py").write_text(NETWORK.replace("width=4", "width=5"))
    assert not set(ids(folder)) & set(before)


def test_its_arguments_are_searched(folder: Path) -> None:
    plan = make_plan(
        load(
            str(folder / "own.yaml"),
            [
                f"storage={folder}",
                "space={model.args.width: {choice: [2, 3]}}",
                "search={algorithm: grid}",
                "trial.model.args={width: 2}",
            ],
        )
    )
    widths = [trial.config.model.args["width"] for trial in plan.trials]
    assert widths == [2, 2, 3, 3]
    assert len({trial.id for trial in plan.trials}) == 4


def test_a_network_that_does_not_fit_is_refused_before_anything_starts(folder: Path) -> None:
    flat = f"trial.model.name={folder / 'net.py'}:flat"
    study = load(str(folder / "own.yaml"), [f"storage={folder}", flat])
    with pytest.raises(ValueError, match=r"into \(2, 7\); return outputs of shape \(batch, 10\)"):
        preflight(make_plan(study))


def test_its_trials_do_not_share_a_process(folder: Path) -> None:
    study = load(str(folder / "own.yaml"), [f"storage={folder}", "executor=packed"])
    with pytest.raises(ValueError, match=r"executor=packed with model\.name=.*use executor=auto"):
        preflight(make_plan(study))


def test_it_runs_and_says_when_its_code_has_changed(folder: Path) -> None:
    said: list[str] = []
    outcome = run_study(
        load(str(folder / "own.yaml"), [f"storage={folder}"]), SilentView(), said.append
    )
    assert [trial.status for trial in outcome.state.trials] == [FINISHED] * 2
    (folder / "net.py").write_text(NETWORK.replace("width=4", "width=5"))
    again = run_study(
        load(str(folder / "own.yaml"), [f"storage={folder}"]), SilentView(), said.append
    )
    assert any("has changed since the last run" in line for line in said)
    assert len(again.state.known) == 4
