"""Files that are written in one step."""

from __future__ import annotations

import os
from pathlib import Path

from trainers.object_store import is_url


def check_there(checkpoints: str) -> None:
    """Check that the study's folder, in which a trial has its checkpoints, is there.

    Making it anew, where it was removed, moved or unmounted, would leave a study without a ledger.
    A folder at which a storage was mounted stays, and is empty; one of a study never is.

    Args:
        checkpoints: where the trial has them; at a URL the folder is a cache, and made if missing.

    Raises:
        FileNotFoundError: it is not there.
    """
    study = Path(checkpoints).parents[1]
    if not is_url(checkpoints) and not (study.is_dir() and any(study.iterdir())):
        raise FileNotFoundError(f"{study}: was removed, moved or unmounted while the study ran")


def has_links(folder: Path) -> bool:
    """Tell whether a folder is or holds a link, which may lead out of it: whoever sends its files
    elsewhere would send what a stranger's link names."""
    return any(path.is_symlink() for path in (folder, *folder.rglob("*")))


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
