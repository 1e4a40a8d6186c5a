"""Checkpoints of users' own loops."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from tests.trainers.bomb import Bomb
from trainers.checkpoint.loops import keep, load


def test_a_checkpoint_of_a_loop_runs_no_code(tmp_path: Path) -> None:
    staged, folder = tmp_path / "staged", tmp_path / "checkpoint"
    staged.mkdir()
    torch.save({"weight": Bomb(tmp_path / "ran")}, staged / "dict.pt")
    keep(staged, folder, {"epoch": 1})
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.timeout(60)
def test_a_file_that_the_manifest_does_not_name_is_not_opened(tmp_path: Path) -> None:
    """Its digest is not known, and a pipe would block."""
    staged, folder = tmp_path / "staged", tmp_path / "checkpoint"
    staged.mkdir()
    keep(staged, folder, {"epoch": 1})
    os.mkfifo(folder / "dict.pt")
    assert load(folder) == (folder / "files", {"epoch": 1})
