"""Files of a study: written atomically, and opened without following links, which other users may
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
    """Create a trial's folder, such as that of its checkpoints, in the folder of its study.

    The study's folder itself is never created: if it was removed, moved or unmounted, that would
    make a study without a ledger. An empty folder counts as missing, because it is the mount point
    of an unmounted storage. The study's folder is opened first, so it cannot disappear in between.

    Args:
        place: ``study/checkpoints/TRIAL``. For a URL the folder is only a cache, and its parents
            are created too.

    Raises:
        FileNotFoundError: the study's folder is missing or empty.
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
    """Return whether a folder is or contains a link. Uploading the folder would then send the
    link's target, which can be any file."""
    return any(path.is_symlink() for path in (folder, *folder.rglob("*")))


MOST_JSON = 64 * 2**20
"""Maximum size of a JSON file beside a ledger, in bytes."""


class NotRegularError(OSError):
    """A link, pipe, device or folder where a regular file is expected.

    Its ``strerror`` has the rule and the remedy.
    """


def check_own_folder(folder: Path) -> None:
    """Check that a folder of a study is not a link, which could redirect files to any place.

    Raises:
        ValueError: the folder is a link.
    """
    if folder.is_symlink():
        raise ValueError(
            f"{folder}: is a link to {os.readlink(folder)}, and a folder that lns-study makes must"
            " be none; remove the link, or move its folder here"
        )


def check_own_file(path: Path) -> None:
    """Check that a file that a study writes is a regular file, if it exists.

    Raises:
        ValueError: it is a link, a pipe, a device or a folder.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path}: {_not_regular(path, None).strerror}")


def check_no_links(folder: Path) -> None:
    """Check that neither a folder of a study nor its entries are links.

    Raises:
        ValueError: one is a link.
    """
    check_own_folder(folder)
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                check_own_folder(Path(entry.path))


def open_own(path: Path | str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open or create a regular file and return its descriptor; never follows a link or blocks on a
    pipe.

    Args:
        path: the file; links among its parent folders are followed.
        flags: flags of ``os.open``, without ``O_TRUNC``: the caller truncates the file after it is
            known to be regular.
        dir_fd: descriptor of the folder that a relative path starts from.

    Raises:
        NotRegularError: it is not a regular file.
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
    text = f"is {kind}; it must be a regular file: remove or replace it"
    return NotRegularError(errno.ELOOP, text, str(path))


def read_own(path: Path, most: int) -> bytes:
    """Return the contents of a regular file.

    Raises:
        NotRegularError: it is not a regular file, for example a link.
        OSError: it cannot be read, or has more than ``most`` bytes.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            text = f"has {size:,} bytes, more than {most:,}; move it away"
            raise OSError(errno.EFBIG, text, str(path))
        return file.read(most)


def read_own_json(path: Path) -> Any:
    """Return the values of a small JSON file, read by :func:`read_own`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or too deeply nested.
    """
    try:
        return json.loads(read_own(path, MOST_JSON))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def open_own_text(path: Path) -> IO[str]:
    """Open a text file for appending and reading, by :func:`open_own`."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    return open(descriptor, "a+", encoding="utf-8")


def regular_files(folder: Path) -> list[Path]:
    """Return the regular files of a folder, without links and without files in subfolders."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(found)]


@contextmanager
def folder_within(root: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """Create a folder below ``root`` if it is missing, and yield its descriptor.

    Args:
        root: folder that is created if missing; links among its parent folders are followed.
        parts: names of the folders on the path below ``root``; must not contain ``..``.

    Raises:
        OSError: a folder on the path is a link, or cannot be created.
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
    """Copy ``source`` into a file of the folder with this descriptor; an existing link is
    replaced."""
    part = f".{name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(part, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(open_own(part, flags, dir_fd=folder), "wb") as file:
        while block := source.read(2**20):
            file.write(block)
    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file atomically: readers find the complete new file or the old one, even if the
    process is killed.

    Args:
        path: file in an existing folder.
        content: complete content of the file.
        sync: whether to flush it to disk before the rename, so that it also survives a crash of the
            machine; needed for checkpoints, but not for files that can be made again.
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
