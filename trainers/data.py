"""The data of a trial: MNIST from its four IDX files, or scikit-learn's handwritten digits, as tensors in memory.

MNIST is looked for in ``root``, else in ``$LNS_STUDY_DATA`` (either the folder itself or its ``mnist/``): who names one means it, so
it is an error if files are missing there. If neither is given, it is looked for in ``./data/mnist``, then in the download cache
``~/.cache/lns-study/mnist``; otherwise it is downloaded there. Files may be gzipped or plain. Every file is checked (magic number, size,
SHA-256 of its content) before it is used, wherever it came from.

Pixels are scaled to [0, 1], nothing else. Splits are by position, never shuffled: training first, the last ``validation_size`` of the
training set for validation, the test set as published (digits: the last 297).

The data order of an epoch is a permutation drawn from (seed, epoch) alone, so it is the same for any number of workers, before
and after a restart.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits"; E. Alpaydin, C. Kaynak 1998 (digits, UCI).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import struct
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.config import EPOCHS, DataConfig

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
DOWNLOAD_TIMEOUT_S = 20
DATA_VARIABLE = "LNS_STUDY_DATA"
PIXELS, CLASSES = 784, 10


class DownloadError(ValueError):
    """MNIST is nowhere to be found and cannot be downloaded: where ``data.name=auto`` turns to digits."""


class _File(NamedTuple):
    """One of the four files: expected magic number, items, and SHA-256 of the uncompressed content."""

    magic: int
    items: int
    sha256: str


FILES = {
    "train-images-idx3-ubyte": _File(2051, 60_000, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1-ubyte": _File(2049, 60_000, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3-ubyte": _File(2051, 10_000, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1-ubyte": _File(2049, 10_000, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}


class Split(NamedTuple):
    """Examples ``x`` [N, inputs] float32 in [0, 1] and classes ``y`` [N] int64."""

    x: Tensor
    y: Tensor


class Dataset(NamedTuple):
    """The three splits of a data set."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What a trial's data are: where from, and sizes in examples.

    Attributes:
        digest: sha256 of the examples that were chosen.
        files: sha256 of all there are to choose from, the same whatever was chosen.
    """

    name: str
    source: str
    digest: str
    files: str
    root: str | None
    train: int
    validation: int
    test: int
    inputs: int
    classes: int


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); delete it and download it again") from None


def read_idx(path: Path, expected: _File) -> NDArray[np.uint8]:
    """The items of an IDX file, ``[N]`` labels or ``[N, 784]`` pixels.

    Raises:
        ValueError: wrong magic number, wrong size, or content that is not MNIST's.
    """
    content = _content(path)
    is_images = expected.magic == 2051
    header = 16 if is_images else 8
    size = header + expected.items * (PIXELS if is_images else 1)
    magic = struct.unpack(">i", content[:4])[0] if len(content) >= 4 else None
    if magic != expected.magic:
        raise ValueError(
            f"{path}: magic number {magic}, must be {expected.magic} for this file; it is not the MNIST file of that name"
        )
    if len(content) != size:
        raise ValueError(f"{path}: {len(content)} bytes, must be {size} for {expected.items} items; truncated? download it again")
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected.sha256:
        raise ValueError(
            f"{path}: SHA-256 {digest[:16]}..., must be {expected.sha256[:16]}...; the file is corrupt, download it again"
        )
    items = np.frombuffer(content, np.uint8, offset=header)
    return items.reshape(-1, PIXELS) if is_images else items


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/lns-study/mnist`` or ``~/.cache/lns-study/mnist``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lns-study" / "mnist"


def _file_in(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _missing_in(folder: Path) -> list[str]:
    return [name for name in FILES if _file_in(folder, name) is None]


def find_mnist(root: str | None) -> Path | None:
    """The folder that holds the four files, or None where no usual place does.

    Raises:
        ValueError: ``root`` is given, or else ``$LNS_STUDY_DATA`` is set, and lacks some of them.
    """
    named = os.environ.get(DATA_VARIABLE)
    if root is not None:
        return _mnist_in("data.root", root, "leave it out to download")
    if named:
        return _mnist_in(DATA_VARIABLE, named, "unset it to download")
    return next((folder for folder in (Path("data") / "mnist", cache_folder()) if not _missing_in(folder)), None)


def _mnist_in(key: str, value: str, remedy: str) -> Path:
    """``value`` or its ``mnist/``, whichever holds the four files; the error names those missing in the one that holds more."""
    folders = [Path(value), Path(value) / "mnist"]
    best = min(folders, key=lambda folder: len(_missing_in(folder)))
    if missing := _missing_in(best):
        where = "" if best == folders[0] else " in mnist/"
        raise ValueError(
            f"{key}={value!r}: must hold MNIST's four IDX files (plain or .gz) and lacks {', '.join(missing)}{where}; point it to the "
            f"folder that holds them, {remedy}, or use data.name=digits"
        )
    return best


def download_mnist(folder: Path) -> None:
    """Download the four files into ``folder``, each checked before it appears there under its name.

    ``$LNS_STUDY_MNIST_URL`` names another mirror.

    Raises:
        DownloadError: the mirror does not answer, or sends something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _missing_in(folder):
        url = f"{_mirror()}/{name}.gz"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / f"{name}.gz"
            try:
                with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as reply:
                    part.write_bytes(reply.read())
            except (urllib.error.URLError, OSError) as error:
                raise DownloadError(
                    f"{url}: cannot be downloaded ({error}); put MNIST's four files in a folder and set LNS_STUDY_DATA to it, or use "
                    "data.name=digits"
                ) from None
            try:
                read_idx(part, FILES[name])
            except ValueError as error:
                raise DownloadError(
                    f"{url}: sent something else ({error}); name another mirror with LNS_STUDY_MNIST_URL, put MNIST's four files in a "
                    "folder and set LNS_STUDY_DATA to it, or use data.name=digits"
                ) from None
            part.replace(folder / part.name)


def _mirror() -> str:
    return os.environ.get("LNS_STUDY_MNIST_URL", MIRROR).rstrip("/")


def describe_download() -> str:
    """What :func:`resolve` would download, from where and where to."""
    return f"{', '.join(f'{name}.gz' for name in _missing_in(cache_folder()))} from {_mirror()}/ to {cache_folder()}"


def resolve(config: DataConfig, *, download: bool = True) -> DataConfig:
    """``config`` with a concrete name, root and validation size.

    ``auto`` becomes ``mnist`` where the files are found or can be downloaded, otherwise ``digits``.

    Args:
        config: the data asked for.
        download: where MNIST has to be downloaded, do so; otherwise ``root`` stays None, and ``auto`` becomes ``mnist`` on trust.

    Raises:
        ValueError: ``root`` or ``$LNS_STUDY_DATA`` names a folder that lacks files.
        DownloadError: MNIST is asked for by name and cannot be downloaded.
    """
    name, root = config.name, config.root
    if name != "digits":
        try:
            folder = find_mnist(root) or (_download() if download else None)
            name, root = "mnist", str(folder.resolve()) if folder else None
        except DownloadError:
            if name == "mnist":
                raise
            name = "digits"
    size = config.validation_size or {"mnist": 10_000, "digits": 300}[name]
    return replace(config, name=name, root=root, validation_size=size)


def _download() -> Path:
    download_mnist(cache_folder())
    return cache_folder()


@lru_cache(maxsize=2)
def _mnist_arrays(root: str) -> tuple[NDArray[np.uint8], ...]:
    folder = Path(root)
    arrays = []
    for name, expected in FILES.items():
        path = _file_in(folder, name)
        if path is None:
            raise ValueError(f"{folder}: lacks {name}; MNIST needs all four files: {', '.join(FILES)}")
        arrays.append(read_idx(path, expected))
    return tuple(arrays)


def _mnist(root: str) -> tuple[Split, Split]:
    train_x, train_y, test_x, test_y = _mnist_arrays(root)
    return _scaled(train_x, train_y, 255), _scaled(test_x, test_y, 255)


def _digits() -> tuple[Split, Split]:
    table = _digits_table()
    pixels, labels = table[:, :-1], table[:, -1]
    return _scaled(pixels[:1500], labels[:1500], 16), _scaled(pixels[1500:], labels[1500:], 16)


def _digits_table() -> NDArray[np.float64]:
    """64 pixels (0 to 16) and the label of each of scikit-learn's digits, ``[1797, 65]``.

    From the file in its package where that is in its place: importing scikit-learn takes every process of a study seconds.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])


def _scaled(pixels: NDArray[np.generic], labels: NDArray[np.generic], largest: int) -> Split:
    return Split(torch.from_numpy(pixels.astype(np.float32)) / largest, torch.from_numpy(labels.astype(np.int64)))


@lru_cache(maxsize=4)
def load(config: DataConfig) -> Dataset:
    """The splits of ``config`` (resolved first), kept in memory for the next trial of this process.

    Raises:
        ValueError: files missing or corrupt, or split sizes that do not fit.
    """
    config = resolve(config)
    whole, test = _digits() if config.name == "digits" else _mnist(str(config.root))
    assert config.validation_size is not None
    available = len(whole.y) - config.validation_size
    wanted = available if config.train_size is None else config.train_size
    if available < 1:
        raise ValueError(
            f"data.validation_size={config.validation_size}: {config.name} has {len(whole.y)} training examples; leave some for training"
        )
    if wanted > available:
        raise ValueError(
            f"data.train_size={wanted}: {available} examples are left after validation; use at most {available} or null for all"
        )
    validation = Split(whole.x[available:], whole.y[available:])
    return Dataset(Split(whole.x[:wanted], whole.y[:wanted]), validation, test)


def prepare(config: DataConfig) -> DatasetInfo:
    """Resolve, check and describe the data of ``config``, downloading them if need be.

    Files that have not changed (by path, size and time of change) since they were described are not read again.

    Raises:
        ValueError: see :func:`load`.
    """
    config = resolve(config)
    known, key = _known_descriptions(), json.dumps([asdict(config), *_files_of(config)])
    if key in known:
        with suppress(TypeError):  # of another version
            return DatasetInfo(**known[key])
    info = _describe(config)
    if config.name == "mnist":
        with suppress(OSError):  # the next command reads the files again
            _write_descriptions({**known, key: asdict(info)})
    return info


def _files_of(config: DataConfig) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file."""
    paths = [_file_in(Path(config.root), name) for name in FILES] if config.name == "mnist" and config.root else []
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path is not None]


def _descriptions() -> Path:
    return cache_folder().parent / "datasets.json"


def _known_descriptions() -> dict[str, dict[str, Any]]:
    try:
        known = json.loads(_descriptions().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_descriptions(known: dict[str, dict[str, Any]]) -> None:
    path = _descriptions()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(known), encoding="utf-8")
    part.replace(path)


def _describe(config: DataConfig) -> DatasetInfo:
    data = load(config)
    digest = hashlib.sha256()
    for split in data:
        digest.update(split.x.numpy().tobytes())
        digest.update(split.y.numpy().tobytes())
    files = hashlib.sha256()
    for array in _mnist_arrays(str(config.root)) if config.name == "mnist" else [_digits_table()]:
        files.update(array.tobytes())
    sources = {
        "mnist": f"MNIST, IDX files in {config.root}",
        "digits": "scikit-learn's handwritten digits (1,797 images of 8 x 8)",
    }
    return DatasetInfo(
        name=config.name, source=sources[config.name], digest=digest.hexdigest(), files=files.hexdigest(), root=config.root,
        train=len(data.train.y), validation=len(data.validation.y), test=len(data.test.y),
        inputs=data.train.x.shape[1], classes=CLASSES,
    )  # fmt: skip


def epoch_order(examples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits its examples: a permutation of (seed, epoch) alone, int64 on the CPU."""
    return torch.randperm(examples, generator=torch.Generator().manual_seed(seed * EPOCHS + epoch))


def share(split: Split, order: Tensor, *, batch_size: int, step: int, part: int, parts: int) -> Split:
    """The ``part``-th of ``parts`` contiguous parts of batch ``step`` in ``order``."""
    size = batch_size // parts
    start = step * batch_size + part * size
    chosen = order[start : start + size]
    return Split(split.x[chosen], split.y[chosen])


def batches(split: Split, *, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1) -> Iterator[Split]:
    """The batches of one epoch in the order of (seed, epoch); the last, incomplete one is left out.

    Rank ``r`` gets the ``r``-th contiguous part of every batch, ``batch_size / world_size`` examples.
    """
    order = epoch_order(len(split.y), seed, epoch)
    for step in range(len(order) // batch_size):
        yield share(split, order, batch_size=batch_size, step=step, part=rank, parts=world_size)
