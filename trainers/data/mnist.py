"""Finding, downloading, checking and reading the IDX files of MNIST, and of Fashion-MNIST and
KMNIST, which have the same names and sizes.

The four files are searched in ``root``, else in ``$LNS_STUDY_DATA`` (the folder itself or its
``mnist/``). A folder given in one of these ways must contain all files; a missing file is an error.
If neither is given, they are searched in ``./data/mnist``, then in the download cache
``~/.cache/lns-study/mnist``; if they are not found, they are downloaded there. Files may be gzipped
or plain. Every file is checked (magic number, size, SHA-256 of its content) before it is used.

Format: http://yann.lecun.com/exdb/mnist/; H. Xiao et al. 2017 (arXiv:1708.07747), Fashion-MNIST; T.
Clanuwat et al. 2018 (arXiv:1812.01718), KMNIST.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainers.data.download import (
    DATA_VARIABLE,
    DownloadError,
    cache_folder,
    file_in,
    mirror_of,
    read_url,
    remove_left,
    scratch_in,
)
from trainers.data.split import PIXELS, Split, scaled

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"


class _File(NamedTuple):
    """One of the four files: magic number, number of items, and SHA-256 of the uncompressed content
    ("" to skip the check)."""

    magic: int
    items: int
    sha256: str


FILES = {
    "train-images-idx3-ubyte": _File(
        2051, 60_000, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
    ),
    "train-labels-idx1-ubyte": _File(
        2049, 60_000, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    "t10k-images-idx3-ubyte": _File(
        2051, 10_000, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
    ),
    "t10k-labels-idx1-ubyte": _File(
        2049, 10_000, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
    ),
}


def _content(path: Path) -> bytes:
    """Return the bytes of a file, uncompressed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from None
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: not a whole gzip file ({error}); delete it and download it again"
        ) from None


def read_idx(path: Path, expected: _File) -> NDArray[np.uint8]:
    """Return the items of an IDX file, ``[N]`` labels or ``[N, 784]`` pixels.

    Raises:
        ValueError: the magic number, the size or the content differs from MNIST's file.
    """
    content = _content(path)
    is_images = expected.magic == 2051
    header = 16 if is_images else 8
    size = header + expected.items * (PIXELS if is_images else 1)
    magic = struct.unpack(">i", content[:4])[0] if len(content) >= 4 else None
    if magic != expected.magic:
        raise ValueError(
            f"{path}: magic number {magic}, must be {expected.magic} for this file; it is not the"
            " MNIST file of that name, download it again"
        )
    if len(content) != size:
        raise ValueError(
            f"{path}: {len(content)} bytes, must be {size} for {expected.items} items; truncated?"
            " download it again"
        )
    digest = hashlib.sha256(content).hexdigest()
    if not expected.sha256 and digest in {file.sha256 for file in FILES.values()}:
        raise ValueError(
            f"{path}: is MNIST's file of that name, not the data set's that is asked for; use"
            " data.name=mnist, or put the other file there"
        )
    if expected.sha256 and digest != expected.sha256:
        raise ValueError(
            f"{path}: SHA-256 {digest[:16]}..., must be {expected.sha256[:16]}...; the file is"
            " corrupt, download it again"
        )
    items = np.frombuffer(content, np.uint8, offset=header)
    return items.reshape(-1, PIXELS) if is_images else items


def _missing_in(folder: Path) -> list[str]:
    """Return the names of MNIST's files that ``folder`` lacks."""
    return [name for name in FILES if file_in(folder, name) is None]


def find_mnist(root: str | None) -> Path | None:
    """Return the folder with the four files; None if it is not in the usual places.

    Raises:
        ValueError: ``root``, or else ``$LNS_STUDY_DATA``, is a folder that lacks files.
    """
    named = os.environ.get(DATA_VARIABLE)
    if root is not None:
        return _mnist_in("data.root", root, "leave it out to download")
    if named:
        return _mnist_in(DATA_VARIABLE, named, "unset it to download")
    return next(
        (folder for folder in (Path("data") / "mnist", cache_folder()) if not _missing_in(folder)),
        None,
    )


def _mnist_in(key: str, value: str, remedy: str) -> Path:
    """Return ``value`` or its ``mnist/``, whichever contains the four files.

    Raises:
        ValueError: neither does; the message lists the missing files of the more complete one.
    """
    folders = [Path(value), Path(value) / "mnist"]
    best = min(folders, key=lambda folder: len(_missing_in(folder)))
    if missing := _missing_in(best):
        where = "" if best == folders[0] else " in mnist/"
        raise ValueError(
            f"{key}={value!r}: must hold MNIST's four IDX files (plain or .gz) and lacks"
            f" {', '.join(missing)}{where}; point it to the folder that holds them, {remedy}, or"
            " use data.name=digits"
        )
    return best


def download_mnist(folder: Path) -> None:
    """Download the four files into ``folder``; each is moved there only after it was checked.

    ``$LNS_STUDY_MNIST_URL`` sets another mirror.

    Raises:
        DownloadError: the mirror does not answer, or sends something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_left(folder)
    for name in _missing_in(folder):
        url = f"{_mirror()}/{name}.gz"
        with scratch_in(folder) as scratch:
            part = scratch / f"{name}.gz"
            remedy = (
                "put MNIST's four files in a folder and set LNS_STUDY_DATA to it, or use"
                " data.name=digits"
            )
            part.write_bytes(read_url(url, remedy))
            try:
                read_idx(part, FILES[name])
            except ValueError as error:
                raise DownloadError(
                    f"{url}: sent something else ({error}); name another mirror with"
                    f" LNS_STUDY_MNIST_URL, {remedy}"
                ) from None
            part.replace(folder / part.name)


def _mirror() -> str:
    """Return the address that MNIST is downloaded from."""
    return mirror_of("mnist", MIRROR)


def describe_download() -> str:
    """Describe what :func:`download_mnist` would download: files, address and folder."""
    return (
        f"{', '.join(f'{name}.gz' for name in _missing_in(cache_folder()))} from {_mirror()}/ to"
        f" {cache_folder()}"
    )


@lru_cache(maxsize=2)
def mnist_arrays(root: str, name: str = "mnist") -> tuple[NDArray[np.uint8], ...]:
    """Return training pixels, training labels, test pixels and test labels of the files in
    ``root``.

    Args:
        root: folder of the files.
        name: ``mnist``, ``fashion_mnist`` or ``kmnist``.

    Raises:
        ValueError: a file is missing or corrupt.
    """
    folder = Path(root)
    arrays = []
    for file, expected in FILES.items():
        path = file_in(folder, file)
        if path is None:
            raise ValueError(
                f"{folder}: lacks {file}, must hold all four files: {', '.join(FILES)}; put them"
                " there, or use data.name=digits"
            )
        own = expected if name == "mnist" else expected._replace(sha256="")
        arrays.append(read_idx(path, own))
    return tuple(arrays)


def load_mnist(root: str, name: str = "mnist") -> tuple[Split, Split]:
    """Return the training examples and the test examples of the files in ``root``."""
    train_x, train_y, test_x, test_y = mnist_arrays(root, name)
    return scaled(train_x, train_y, 255), scaled(test_x, test_y, 255)
