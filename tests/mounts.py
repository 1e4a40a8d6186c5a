"""File systems that a test mounts, in its own folders, and takes away while they are in use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(target: Path, source: Path | None = None, size: str = "64m") -> None:
    """Mount a file system in memory, or another folder, at a folder; skip the test where that is
    not permitted."""
    memory = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    words = memory if source is None else ["--bind", str(source)]
    made = subprocess.run(["mount", *words, str(target)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")


def unmount(target: Path) -> None:
    """Take away what is mounted, although processes use it (``umount --lazy``)."""
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder one that nobody can write, root neither, as another user's is for others."""
    with mounted(folder, folder):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


@contextmanager
def mounted(target: Path, source: Path | None = None, size: str = "64m") -> Iterator[None]:
    """The same, unmounted at the end if it is still there."""
    mount(target, source, size)
    try:
        yield
    finally:  # Path.is_mount does not see a folder of the same file system
        subprocess.run(["umount", "--lazy", str(target)], capture_output=True)
