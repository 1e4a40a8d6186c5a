"""Files of a study: written in one step, and opened without following a link that somebody else may
have put in their place."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from trainers.object_store import is_url, local_folder


def make_there(place: str) -> None:
    """Make a trial's folder, as that of its checkpoints, in the folder of its study.

    The study's folder is not made: where it was removed, moved or unmounted, that would leave a
    study without a ledger. A folder at which a storage was mounted stays, and is empty; one of a
    study never is. The folder is opened first, so that it does not go away in between.

    Args:
        place: ``study/checkpoints/TRIAL``; at a URL the folder is a cache, and made as a whole.

    Raises:
        FileNotFoundError: the study's folder is not there.
    """
    folder = local_folder(place)
    if is_url(place):
        folder.mkdir(parents=True, exist_ok=True)
        return
    kind, study = folder.parent, folder.parents[1]
    try:
        at = os.open(study, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not os.listdir(at):
                raise FileNotFoundError
            for path in (kind, folder):
                with suppress(FileExistsError):
                    os.mkdir(path.relative_to(study), dir_fd=at)
        finally:
            os.close(at)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{study}: was removed, moved or unmounted while the study ran"
        ) from None


def has_links(folder: Path) -> bool:
    """Tell whether a folder is or holds a link, which may lead out of it: whoever sends its files
    elsewhere would send what a stranger's link names."""
    return any(path.is_symlink() for path in (folder, *folder.rglob("*")))


MOST_JSON = 64 * 2**20
"""Largest file of JSON beside a ledger, in bytes."""


class NotRegularError(OSError):
    """A link, a pipe, a device or a folder in the place of a regular file or of a folder of ours.

    Its ``strerror`` has the rule and the remedy.
    """


def check_own_folder(folder: Path) -> None:
    """Refuse a link in the place of a folder that a study makes: what is written there would land
    wherever the link leads.

    Raises:
        ValueError: the folder is a link.
    """
    if folder.is_symlink():
        raise ValueError(
            f"{folder}: is a link to {os.readlink(folder)}, and a folder that lns-study makes must"
            " be none; remove the link, or move its folder here"
        )


def check_own_file(path: Path) -> None:
    """Refuse what is no regular file in the place of a file that a study writes.

    Raises:
        ValueError: it is a link, a pipe, a device or a folder.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path}: {_not_regular(path, None).strerror}")


def check_no_links(folder: Path) -> None:
    """Refuse a folder that a study makes, if it or one of its entries is a link.

    Raises:
        ValueError: with the link.
    """
    check_own_folder(folder)
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                check_own_folder(Path(entry.path))


def open_own(path: Path | str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a regular file, or make one, and return its descriptor; a link is not followed, and a
    pipe not waited for.

    Args:
        path: the file; links among the folders that lead to it are followed.
        flags: flags of ``os.open``; not ``O_TRUNC``, which is done by the caller, once it is known
            to be a regular file.
        dir_fd: descriptor of the folder that a relative path begins in.

    Raises:
        NotRegularError: it is a link, or no regular file.
        OSError: it cannot be opened.
    """
    mode = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, mode, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path, dir_fd) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path, dir_fd)
    return descriptor


def _not_regular(path: Path | str, dir_fd: int | None) -> NotRegularError:
    kind = "no regular file"
    with suppress(OSError):
        kind = f"a link to {os.readlink(path, dir_fd=dir_fd)}"
    text = f"is {kind}; it must be a regular file: remove what is in its place"
    return NotRegularError(errno.ELOOP, text, str(path))


def read_own(path: Path, most: int) -> bytes:
    """Return the contents of a regular file, which is no link.

    Raises:
        NotRegularError: it is a link, or no regular file.
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            text = f"has {size:,} bytes, more than {most:,}; move it away"
            raise OSError(errno.EFBIG, text, str(path))
        return file.read(most)


def read_own_json(path: Path) -> Any:
    """Return the values of a small file of JSON, as :func:`read_own` reads it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or is nested deeper than can be read.
    """
    try:
        return json.loads(read_own(path, MOST_JSON))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def open_own_text(path: Path) -> IO[str]:
    """Open a file of text to append to it and to read it, as :func:`open_own` opens it."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    return open(descriptor, "a+", encoding="utf-8")


def regular_files(folder: Path) -> list[Path]:
    """Return the regular files of a folder, without those of its folders and without links."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(found)]


@contextmanager
def folder_within(root: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """Make a folder below ``root``, and provide its descriptor; a link on the way is refused.

    Args:
        root: folder that is made if missing; links among the folders that lead to it are followed.
        parts: names of the folders on the way, none of them ``..``.

    Raises:
        OSError: one of them is a link, or cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(root, flags)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
            deeper = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = deeper
        yield at
    finally:
        os.close(at)


def write_at(folder: int, name: str, source: BinaryIO) -> None:
    """Copy ``source`` into a file of a folder, by its descriptor; it replaces a link there."""
    part = f".{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(open_own(part, flags, dir_fd=folder), "wb") as file:
        while block := source.read(2**20):
            file.write(block)
    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file such that readers find all of it, or the earlier one, whenever the process dies.

    Args:
        path: file in a folder that exists.
        content: all of it.
        sync: whether it is on the disk before it takes its name, so that it outlives the machine
            too. Checkpoints are; what can be made again need not wait for the disk.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        part.unlink()
    with open(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
