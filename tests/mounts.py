"""File systems for tests: mounted in a test's own folders, and unmounted while in use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(target: Path, source: Path | None = None, size: str = "64m") -> None:
    """Mount a tmpfs, or another folder, at ``target``; skip the test if mounting is not permitted.

    Args:
        target: mount point.
        source: folder to bind-mount; None for a tmpfs.
        size: size of the tmpfs.
    """
    memory = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    words = memory if source is None else ["--bind", str(source)]
    made = subprocess.run(["mount", *words, str(target)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")


def unmount(target: Path) -> None:
    """Unmount a file system that processes may still use (``umount --lazy``)."""
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only for all users, including root."""
    with mounted(folder, folder):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        yield


@contextmanager
def mounted(target: Path, source: Path | None = None, size: str = "64m") -> Iterator[None]:
    """Mount as :func:`mount` does; unmount at the end if it is still mounted."""
    mount(target, source, size)
    try:
        yield
    finally:  # Path.is_mount does not see a folder of the same file system
        subprocess.run(["umount", "--lazy", str(target)], capture_output=True)
