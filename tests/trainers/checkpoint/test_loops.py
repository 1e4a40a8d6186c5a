"""Checkpoints of users' own loops."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.checkpoint.loops import keep, load


class Bomb:
    """What a stranger puts into a checkpoint: reading it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def test_a_checkpoint_of_a_loop_runs_no_code(tmp_path: Path) -> None:
    staged, folder = tmp_path / "staged", tmp_path / "checkpoint"
    staged.mkdir()
    torch.save({"weight": Bomb(tmp_path / "ran")}, staged / "dict.pt")
    keep(staged, folder, {"epoch": 1})
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        load(folder)
    assert not (tmp_path / "ran").exists()
