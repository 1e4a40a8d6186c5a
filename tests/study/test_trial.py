"""Executors by themselves, and gangs with a damaged checkpoint; no Ray needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import TrainingFailedError
from study.outcomes import REFUSED
from study.train_trial import SNAPSHOT, describe_failure, set_damaged_aside
from study.trial import InProcess, StudyTrial

from trainers import leftovers
from trainers.checkpoint import save_checkpoint
from trainers.config import DataConfig, ModelConfig, TrialConfig


@pytest.fixture
def gang_run(tmp_path: Path) -> Path:
    """The folder of a Ray Train run with one checkpoint."""
    run = tmp_path / "abc"
    save_checkpoint(run / "checkpoint_1", {"w": torch.zeros(3)}, {"epoch": 1})
    (run / SNAPSHOT).write_text(json.dumps({"latest_checkpoint_result": {"checkpoint_dir_name": "checkpoint_1"}}))
    return run


def test_a_whole_run_stays_where_it_is(gang_run: Path, tmp_path: Path) -> None:
    assert set_damaged_aside(gang_run) == ""
    assert set_damaged_aside(tmp_path / "never begun") == ""
    assert gang_run.exists()


@pytest.mark.parametrize("file", ["checkpoint_1/state.json", SNAPSHOT])
def test_a_damaged_run_is_moved_away(gang_run: Path, file: str) -> None:
    (gang_run / file).write_text("{")
    assert set_damaged_aside(gang_run)
    assert not gang_run.exists()
    assert len(list(gang_run.parent.glob("abc-damaged-*"))) == 1


def small(folder: Path) -> dict[str, Any]:
    """The plan of a short trial."""
    return {
        "config": TrialConfig(data=DataConfig(name="digits", train_size=128), model=ModelConfig(hidden=[8]), epochs=1).to_dict(),
        "checkpoints": str(folder / "checkpoints"),
        "checkpoint_every": 1,
        "resume_from": [],
        "packed_in": None,
    }


def test_a_failed_gang_says_the_last_line_of_its_error() -> None:
    error = TrainingFailedError("x")
    error.worker_failures = {0: ValueError("Traceback ...\nValueError: lr=0: must be above 0\n")}
    assert describe_failure(error) == "ValueError: lr=0: must be above 0"


def test_a_mistake_in_code_is_not_tried_again_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: InProcess) -> dict[str, Any]:
        return self.nothing_of_that_name  # type: ignore[attr-defined, no-any-return]

    trial = StudyTrial(config={"id": "one", "plan": json.dumps(small(tmp_path))})
    monkeypatch.setattr(InProcess, "step", wrong)
    result = trial.train()
    assert result["done"]
    assert result[REFUSED] == "AttributeError: 'InProcess' object has no attribute 'nothing_of_that_name'"


def test_who_drives_a_gang_waits_for_no_torch() -> None:
    code = "import sys, study.trial; assert 'ray.tune' in sys.modules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_that_keeps_too_much_ends_in_a_step_which_tune_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the reset, where Tune would give the next trial up."""
    plan = small(tmp_path)
    trial = StudyTrial(config={"id": "one", "plan": json.dumps(plan)})
    assert trial.train()["done"]
    plan["checkpoints"] = str(tmp_path / "others")
    assert trial.reset({"id": "two", "plan": json.dumps(plan)}, storage=trial._storage)
    assert trial.train()["done"]
    monkeypatch.setattr(leftovers, "MEMORY", -(1 << 40))
    assert trial.reset({"id": "three", "plan": json.dumps(plan)}, storage=trial._storage)
    with pytest.raises(leftovers.LeakError, match="new process"):
        trial.train()
