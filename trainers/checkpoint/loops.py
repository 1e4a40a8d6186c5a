"""Checkpoints of a user's own training loop: an unchanged copy of the folder or dict it reported.

A loop's checkpoint is *staged* while the loop waits in its report, and *kept* when the epoch's
report is written: the staged folder is renamed, then its manifest is written. Thus a checkpoint is
either complete or absent, even if the process is killed. It contains the loop's folder as
``files``, or its dict as ``dict.pt``, written by ``torch.save`` and read by
``torch.load(weights_only=True)``, which runs no code. The manifest has the digest of each file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainers.checkpoint.manifest import STATE, digest_file, file_digests, read_state, sealed
from trainers.files import open_own, write_whole

FILES, DICT = "files", "dict.pt"


class Folder(type(Path())):  # type: ignore[misc]
    """The folder that a loop reported, with the interface of Ray's ``Checkpoint``."""

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the folder's path."""
        yield str(self)


def stage(checkpoint: object, folder: Path) -> None:
    """Copy a loop's reported checkpoint into ``folder``, and delete the folder's earlier content.

    The folder's parent must exist.

    Raises:
        ValueError: the checkpoint is not a folder, a Ray ``Checkpoint`` or a dict, or the dict has
            values that ``torch.load(weights_only=True)`` rejects.
        OSError: the files cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if isinstance(checkpoint, dict):
        torch.save(checkpoint, folder / DICT)
        if unsafe := get_unsafe_globals_in_checkpoint(folder / DICT):
            raise ValueError(
                f"checkpoint has values of {', '.join(sorted(unsafe)[:4])}, which torch.load does"
                " not read with weights_only=True; give tensors, numbers, texts, lists and dicts,"
                " or a folder with files of your own"
            )
    elif hasattr(checkpoint, "as_directory"):  # Ray's
        with checkpoint.as_directory() as path:
            stage(path, folder)
    elif isinstance(checkpoint, str | os.PathLike):
        if not (source := Path(checkpoint)).is_dir():
            raise ValueError(f"checkpoint={str(source)!r} is no folder; give a folder, or a dict")
        shutil.copytree(source, folder / FILES)
    else:
        raise ValueError(
            f"checkpoint is of type {type(checkpoint).__name__}; give a folder, or a dict"
        )


def keep(staged: Path, folder: Path, state: dict[str, Any]) -> None:
    """Turn a staged folder into the checkpoint in ``folder``, with ``state`` in its manifest.

    Raises:
        OSError: the files cannot be written.
    """
    digests = {}
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        digests[path.relative_to(staged).as_posix()] = digest_file(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        (folder / STATE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    staged.rename(folder)
    write_whole(folder / STATE, sealed({"files": digests, **state}).encode(), sync=True)


def note(folder: Path, state: dict[str, Any]) -> None:
    """Replace the state in the manifest of the checkpoint in ``folder``; keep its files.

    Raises:
        ValueError: the checkpoint is missing.
        OSError: the manifest cannot be written.
    """
    files = file_digests(read_state(folder))
    write_whole(folder / STATE, sealed({"files": files, **state}).encode(), sync=True)


def load(folder: Path) -> tuple[Path | dict[str, Any], dict[str, Any]]:
    """Return a loop's checkpoint, a dict with tensors on the CPU or a folder, and the state.

    Raises:
        ValueError: the checkpoint is missing or damaged.
    """
    try:
        state = read_state(folder)
        digests = state.pop("files")
        for name, digest in digests.items():
            if digest_file(folder / name) != digest:
                raise ValueError(f"{folder}: {name} does not match its digest; use an earlier one")
        if DICT in digests:  # open only files that the manifest lists
            with open(open_own(folder / DICT, os.O_RDONLY), "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True), state
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{folder}: no whole checkpoint of a loop there ({error}); name one that a loop of this"
            " trial reported"
        ) from None
    return Folder(folder / FILES), state
