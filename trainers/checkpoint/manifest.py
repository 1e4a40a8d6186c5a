"""The manifest of a checkpoint, ``state.json``: its state and the digests of its other files.

The manifest is written last. This module does not import torch.
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
"""File name of the manifest, which is written last; a folder without it is not a checkpoint."""


def sealed(state: Mapping[str, Any]) -> str:
    """Return the text of the manifest for ``state``, including a digest of all its values."""
    kept = json.loads(json.dumps(state))  # as it will be read back
    return json.dumps({**kept, "digest": _digest(kept)}, indent=1)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the manifest's values for the checkpoint in ``folder``.

    Manifests of earlier versions have no digest and are accepted without one.

    Raises:
        ValueError: the manifest is missing, does not match its digest, or names files outside of
            the checkpoint.
    """
    try:
        return parse_state(read_own(folder / STATE, MOST_JSON), folder)
    except OSError as error:
        raise _none_there(folder, error) from None


def parse_state(content: bytes, folder: Path) -> dict[str, Any]:
    """Parse a manifest as :func:`read_state` does; ``folder`` is used in error messages."""
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
    """Check that a manifest only names files in its folder; others could be overwritten."""
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
    """Return the SHA-256 of each file of a checkpoint, except the manifest, by file name.

    Raises:
        KeyError: the manifest does not list files.
    """
    return state["files"] if "files" in state else {state["tensors"]: state["sha256"]}


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a regular file.

    Raises:
        OSError: it is a link, or cannot be read.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of ``state`` as canonical JSON."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files, by name, into ``folder``, which must exist."""
    for name, content in files.items():
        write_whole(folder / name, content)
