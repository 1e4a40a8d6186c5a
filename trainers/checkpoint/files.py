"""Checkpoints on disk: tensors in a safetensors file, everything else in JSON.

They contain no pickle, so reading one runs no code. A folder contains ``state.json`` and one
``tensors-*.safetensors``. The JSON is written last, by rename, and has digests of itself and of the
tensor file. Thus a checkpoint is either complete or absent, even if the process is killed. LNS
values are stored as their int16 codes.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from trainers.checkpoint.manifest import STATE, read_state, sealed
from trainers.files import open_own, write_whole


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint into ``folder``; an earlier one is replaced only when this is complete.

    Args:
        folder: folder of the checkpoint; created if missing. Its parent must exist.
        tensors: plain tensors; LNS tensors as codes.
        state: JSON values.
    """
    folder.mkdir(exist_ok=True)
    content = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    write_whole(folder / name, content, sync=True)
    manifest = sealed({"tensors": name, "sha256": digest, **state})
    write_whole(folder / STATE, manifest.encode(), sync=True)
    for old in folder.glob("tensors-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of the checkpoint in ``folder``.

    Raises:
        ValueError: the checkpoint is missing, or its files do not belong together.
    """
    try:
        state = read_state(folder)
        with open(open_own(folder / str(state.pop("tensors")), os.O_RDONLY), "rb") as file:
            content = file.read()
        digest = state.pop("sha256")
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(
                f"{folder}: the tensor file does not match its digest; the checkpoint is damaged,"
                " use an earlier one"
            )
        return load(content), state
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: no whole checkpoint there ({error}); name a folder that Training.save wrote"
        ) from None
