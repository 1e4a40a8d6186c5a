"""Checkpoints of a user's own loop: the folder or the dict that it reported, as it is.

A loop's checkpoint is *staged* while the loop waits in its report, and *kept* once the epoch's
report is to be written: the staged folder is renamed, then its manifest is written, so that a
checkpoint is whole or absent, whenever the process dies. It holds the loop's folder as ``files``,
or ``dict.pt``, which ``torch.save`` writes and ``torch.load(weights_only=True)`` reads: reading it
runs no code. The manifest has the digest of each file.
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
    """The folder that a loop reported, which also answers as Ray's ``Checkpoint`` does."""

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Provide the folder's path."""
        yield str(self)


def stage(checkpoint: object, folder: Path) -> None:
    """Copy what a loop reported into ``folder``, in place of what was there; its parent exists.

    Raises:
        ValueError: it is neither a folder, a ``Checkpoint`` of Ray's nor a dict, or the dict has
            what could not be loaded.
        OSError: it cannot be written.
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
    """Make what is staged the checkpoint in ``folder``, with ``state`` in its manifest.

    Raises:
        OSError: it cannot be written.
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
    """Replace the state of the checkpoint in ``folder``, whose files stay.

    Raises:
        ValueError: there is no checkpoint.
        OSError: it cannot be written.
    """
    files = file_digests(read_state(folder))
    write_whole(folder / STATE, sealed({"files": files, **state}).encode(), sync=True)


def load(folder: Path) -> tuple[Path | dict[str, Any], dict[str, Any]]:
    """Return what a loop reported, a dict with tensors on the CPU or a folder, and the state.

    Raises:
        ValueError: no whole checkpoint is there.
    """
    try:
        state = read_state(folder)
        digests = state.pop("files")
        for name, digest in digests.items():
            if digest_file(folder / name) != digest:
                raise ValueError(f"{folder}: {name} does not match its digest; use an earlier one")
        if DICT in digests:  # no other file of that name is opened
            with open(open_own(folder / DICT, os.O_RDONLY), "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True), state
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{folder}: no whole checkpoint of a loop there ({error}); name one that a loop of this"
            " trial reported"
        ) from None
    return Folder(folder / FILES), state
