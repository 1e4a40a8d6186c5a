"""The manifest of a checkpoint, ``state.json``, which says what the checkpoint holds.

The manifest is the last file to be written. This module loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.files import MOST_JSON, open_own, read_own, write_whole

STATE = "state.json"
"""The file of a checkpoint that is written last: without it there is no checkpoint."""


def sealed(state: Mapping[str, Any]) -> str:
    """Return the text of :data:`STATE` for ``state``, with a digest of everything in it."""
    kept = json.loads(json.dumps(state))  # as it will be read
    return json.dumps({**kept, "digest": _digest(kept)}, indent=1)


def read_state(folder: Path) -> dict[str, Any]:
    """Return what the checkpoint in ``folder`` holds besides its tensors.

    A checkpoint of an earlier version has no digest and is accepted without one.

    Raises:
        ValueError: there is none, it does not match its digest, or names files elsewhere.
    """
    try:
        return parse_state(read_own(folder / STATE, MOST_JSON), folder)
    except OSError as error:
        raise _none_there(folder, error) from None


def parse_state(content: bytes, folder: Path) -> dict[str, Any]:
    """Return what a manifest says, see :func:`read_state`; ``folder`` is named in errors."""
    try:
        state: dict[str, Any] = json.loads(content)
        digest = state.pop("digest", None)
    except (AttributeError, ValueError, RecursionError) as error:
        raise _none_there(folder, error) from None
    if digest is not None and digest != _digest(state):
        raise ValueError(
            f"{folder}: {STATE} does not match its digest; the checkpoint is damaged, use an"
            " earlier one"
        )
    _check_names(state, folder)
    return state


def _check_names(state: Mapping[str, Any], folder: Path) -> None:
    """Refuse a manifest that names files outside its folder, which would be read or overwritten."""
    files = state.get("files", {})
    names = [*files, state.get("tensors", STATE)] if isinstance(files, dict) else [files]
    for name in names:
        if not isinstance(name, str) or name.startswith("/") or ".." in Path(name).parts:
            raise ValueError(
                f"{folder}: {STATE} names the file {name!r}; must be a name within the checkpoint:"
                " somebody changed it, use another one"
            )


def _none_there(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}: no whole checkpoint there ({error}); name a folder that Training.save wrote"
    )


def file_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint beside its manifest, by its name there.

    Raises:
        KeyError: the manifest names no files.
    """
    return state["files"] if "files" in state else {state["tensors"]: state["sha256"]}


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, which is no link.

    Raises:
        OSError: it cannot be read.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``state`` as canonical JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, by name, into ``folder``, which exists."""
    for name, content in files.items():
        write_whole(folder / name, content)
