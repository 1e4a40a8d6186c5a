"""Files that are written in one step."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file such that readers find all of it, or the earlier one, whenever the process dies.

    Args:
        path: file in a folder that exists.
        content: all of it.
        sync: whether it is on the disk before it takes its name, so that it outlives the machine
            too. Checkpoints are; what can be made again need not wait for the disk.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
