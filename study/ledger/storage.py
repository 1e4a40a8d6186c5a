"""The folder that studies are stored in."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_writable(folder: Path, key: str, remedy: str = "") -> None:
    """Make the folder if it is missing, and write a file in it.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(
            f"{key}={str(folder)!r}: must be a folder that can be written ({error.strerror}); "
            f"{remedy or f'choose another with {key}=/path/to/folder'}"
        ) from None
