"""Checkpoints in files: whole or absent, without pickles, and refused if damaged."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.bomb import Bomb
from tests.trainers.training.test_trainer import config
from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.checkpoint.loops import load as load_loop
from trainers.checkpoint.manifest import STATE, read_state, sealed
from trainers.training.trainer import Training


@pytest.mark.parametrize(
    "names",
    [{"tensors": "../w", "sha256": ""}, {"files": {"/tmp/w": ""}}, {"files": {"a/../../w": ""}}],
)
def test_a_manifest_that_names_files_elsewhere_is_refused(
    tmp_path: Path, names: dict[str, object]
) -> None:
    (tmp_path / STATE).write_text(sealed({"epoch": 1, **names}))
    for read in (read_state, load_checkpoint, load_loop):
        with pytest.raises(ValueError, match=r"names the file '.*must be a name within"):
            read(tmp_path)


def test_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    Training(config()).save(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".safetensors"]


def torch_file(value: Any) -> bytes:
    """Write a file as ``torch.save`` does."""
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("write", [pickle.dumps, torch_file])
def test_a_pickle_in_the_place_of_tensors_is_refused_and_runs_nothing(
    tmp_path: Path, write: Callable[[Any], bytes]
) -> None:
    """Its name and digest belong to the state, which is whole."""
    folder, ran = tmp_path / "checkpoint", tmp_path / "ran"
    Training(config()).save(folder)
    (tensors,) = folder.glob("*.safetensors")
    content = write({"x": Bomb(ran)})
    tensors.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    (folder / STATE).write_text(sealed(read_state(folder) | {"sha256": digest}))
    for read in (load_checkpoint, Training(config()).restore):
        with pytest.raises(ValueError, match="no whole checkpoint"):
            read(folder)
    assert not ran.exists()
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.is_dir()


def test_interrupted_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """Every prefix of the write sequence: the new tensor file may exist, whole or not; the state
    still names the old one."""
    save_checkpoint(tmp_path, {"x": torch.ones(3)}, {"epoch": 1})
    (tmp_path / "tensors-0123.safetensors.part").write_bytes(b"half")
    (tmp_path / "tensors-0123.safetensors").write_bytes(b"whole but not named by the state")
    (tmp_path / "state.json.part").write_text('{"ten')
    tensors, state = load_checkpoint(tmp_path)
    assert torch.equal(tensors["x"], torch.ones(3))
    assert state == {"epoch": 1}


@pytest.mark.parametrize(
    "how", ["no folder", "no state", "torn state", "no tensors", "flipped byte"]
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "checkpoint"
    if how != "no folder":
        save_checkpoint(folder, {"x": torch.ones(3)}, {"epoch": 1})
        state, tensors = folder / STATE, next(folder.glob("*.safetensors"))
        if how == "no state":
            state.unlink()
        elif how == "torn state":
            state.write_text(state.read_text()[:20])
        elif how == "no tensors":
            tensors.unlink()
        else:
            content = bytearray(tensors.read_bytes())
            content[-1] ^= 1
            tensors.write_bytes(content)
    with pytest.raises(ValueError, match=r"no whole checkpoint|damaged"):
        load_checkpoint(folder)


def test_saving_again_keeps_one_tensor_file(tmp_path: Path) -> None:
    for epoch in range(3):
        save_checkpoint(tmp_path, {"x": torch.full((2,), float(epoch))}, {"epoch": epoch})
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert json.loads((tmp_path / STATE).read_text())["epoch"] == 2
