"""CIFAR-10 and CIFAR-100, read from their binary version or from their Python batches.

A record of the binary version has one byte for the class (CIFAR-100 has two, coarse and fine; the
fine one is used), then 3 x 1,024 bytes, the red, green and blue values, row by row. A Python batch
is a pickled dict with ``data``, uint8 ``[N, 3072]`` in the same order, and ``labels`` or
``fine_labels``. It is read by an unpickler that is limited to NumPy arrays, bytes and Python's
built-in containers, because pickle could otherwise run any code in the file.

Source: A. Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images";
https://www.cs.toronto.edu/~kriz/cifar.html has both formats.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.data.download import BATCHES
from trainers.data.split import Split

SHAPE = (3, 32, 32)
VALUES = 3 * 32 * 32
TRAIN, TEST = 50_000, 10_000
"""Number of images of the training and the test set."""
Table = tuple[NDArray[np.uint8], NDArray[np.int64]]


def load_cifar(root: str, classes: int) -> tuple[Split, Split]:
    """Return the training examples and the test examples of the files in ``root``.

    Images are float32 ``[N, 3, 32, 32]`` in [0, 1].

    Args:
        root: folder of the files.
        classes: 10 or 100.

    Raises:
        ValueError: a file has another format or number of images.
    """
    train, test = (BATCHES[:-1], BATCHES[-1:]) if classes == 10 else (("train",), ("test",))
    return (_split(Path(root), train, TRAIN, classes), _split(Path(root), test, TEST, classes))


def _split(folder: Path, names: tuple[str, ...], images: int, classes: int) -> Split:
    tables = [_read(folder, name, images // len(names), classes) for name in names]
    pixels_NV = np.concatenate([pixels for pixels, _ in tables])
    x = torch.from_numpy(pixels_NV.reshape(-1, *SHAPE)).float().div_(255)
    return Split(x, torch.from_numpy(np.concatenate([labels for _, labels in tables])))


def _read(folder: Path, name: str, images: int, classes: int) -> Table:
    """Return pixels and classes of a file, which must have the number of ``images``."""
    binary = folder / f"{name}.bin"
    path = binary if binary.is_file() else folder / name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); check its permissions"
        ) from None
    pixels, labels = read_binary(raw, path, classes) if path == binary else read_batch(raw, path)
    if len(pixels) != images or len(labels) != images or pixels.shape[1:] != (VALUES,):
        raise ValueError(
            f"{path}: has pixels {pixels.shape} and {len(labels)} classes, must have {images}"
            f" images of {VALUES} values; truncated? download it again"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(
            f"{path}: has classes {labels.min()} to {labels.max()}, must be 0 to {classes - 1}; it"
            " is another file, download it again"
        )
    return pixels, labels


def read_binary(raw: bytes, path: Path, classes: int) -> Table:
    """Return pixels ``[N, 3072]`` and classes ``[N]`` of a file of the binary version.

    Raises:
        ValueError: it does not consist of whole records.
    """
    labels = 1 if classes == 10 else 2
    if len(raw) % (VALUES + labels):
        raise ValueError(
            f"{path}: {len(raw)} bytes, must be a multiple of {VALUES + labels}, the bytes of an"
            " image; truncated? download it again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, VALUES + labels)
    return records[:, labels:], records[:, labels - 1].astype(np.int64)


def read_batch(raw: bytes, path: Path) -> Table:
    """Return pixels ``[N, 3072]`` and classes ``[N]`` of a Python batch.

    Raises:
        ValueError: it is not a pickle, contains other types than allowed, or is not such a dict.
    """
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"] if b"labels" in batch else batch[b"fine_labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a batch of CIFAR's Python version ({type(error).__name__}: {error});"
            " download it again"
        ) from None
    if pixels.dtype != np.uint8 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: has pixels of {pixels.dtype} and classes of {labels.dtype}, must be uint8 and"
            " whole numbers; download it again"
        )
    return pixels, labels.astype(np.int64)


def _encoded(text: str, encoding: str) -> bytes:
    """Return the bytes that a Python 2 pickle stored as latin-1 text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode("latin1")


_REBUILD: Any = np.empty(0).__reduce__()[0]
"""NumPy's function that reconstructs a pickled array."""


class _Unpickler(pickle.Unpickler):
    """Only reads NumPy arrays, bytes, and Python's built-in containers and numbers."""

    _known: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encoded,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few names that arrays need.

        Raises:
            pickle.UnpicklingError: the file refers to another name.
        """
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which is refused")
        return self._known[module, name]
