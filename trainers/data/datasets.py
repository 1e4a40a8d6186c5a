"""The data sets of a trial, as tensors in memory.

MNIST is read from its four IDX files, the handwritten digits from scikit-learn. The IDX files are
looked for in ``root``, else in ``$LNS_STUDY_DATA`` (either the folder itself or its ``mnist/``). A
folder that is named in one of these ways must hold all files; a missing file is an error. If
neither is given, they are looked for in ``./data/mnist``, then in the download cache
``~/.cache/lns-study/mnist``; otherwise they are downloaded there. Files may be gzipped or plain.
Every file is checked (magic number, size, SHA-256 of its content) before it is used, wherever it
came from.

Pixels are scaled to [0, 1], nothing else. Splits are by position, never shuffled: training first,
the last ``validation_size`` of the training set for validation, the test set as published (digits:
the last 297).

The data order of an epoch is a permutation drawn from (seed, epoch) alone, so it is the same for
any number of workers, before and after a restart.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits"; E. Alpaydin, C.
Kaynak 1998 (digits, UCI).
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainers.config import DataConfig
from trainers.data.digits import digits_table, load_digits
from trainers.data.factory import VALIDATION_SHARE, load_own
from trainers.data.mnist import (
    FILES,
    DownloadError,
    cache_folder,
    download_mnist,
    file_in,
    find_mnist,
    load_mnist,
    mnist_arrays,
)
from trainers.data.split import CLASSES, Dataset, DatasetInfo, Examples, Split
from trainers.files import write_whole
from trainers.user_code import forget, names_code

STREAMED_DIGEST = 100
"""Examples of a split that are hashed, with its size, where they are not in memory."""


def resolve(config: DataConfig, *, download: bool = True) -> DataConfig:
    """Return ``config`` with a concrete name, root and validation size.

    ``auto`` becomes ``mnist`` where the files are found or can be downloaded, otherwise ``digits``.

    Args:
        config: the data asked for.
        download: whether MNIST is downloaded where it is not found; if not, ``root`` stays None,
            and ``auto`` becomes ``mnist`` without a check that it can be downloaded.

    Raises:
        ValueError: ``root`` or ``$LNS_STUDY_DATA`` names a folder that lacks files.
        DownloadError: MNIST is asked for by name and cannot be downloaded.
    """
    name, root = config.name, config.root
    if names_code(name):
        return config
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
    """Download MNIST into the cache and return the cache's folder."""
    download_mnist(cache_folder())
    return cache_folder()


@lru_cache(maxsize=4)
def load(config: DataConfig) -> Dataset:
    """Return the splits of ``config``, resolving it first.

    They stay in memory for the next trial of this process.

    Raises:
        ValueError: files are missing or corrupt, or split sizes do not fit.
    """
    config = resolve(config)
    whole: Examples
    test: Examples
    validation: Examples | None = None
    if names_code(config.name):
        whole, validation, test = load_own(config)
    else:
        whole, test = load_digits() if config.name == "digits" else load_mnist(str(config.root))
    size = config.validation_size or max(1, whole.size // VALIDATION_SHARE)
    available = whole.size - (size if validation is None else 0)
    wanted = available if config.train_size is None else config.train_size
    if available < 1:
        raise ValueError(
            f"data.validation_size={size}: must leave some of"
            f" {config.name}'s {whole.size} training examples for training; use less, or leave it"
            " out for the usual size"
        )
    if wanted > available:
        raise ValueError(
            f"data.train_size={wanted}: must be at most the {available} examples that validation"
            f" leaves; use {available}, or null for all"
        )
    if validation is None:
        validation = whole.part(slice(available, None))
    return Dataset(whole.part(slice(wanted)), validation, test)


def prepare(config: DataConfig) -> DatasetInfo:
    """Resolve, check and describe the data of ``config``, downloading them if need be.

    Files that have not changed (by path, size and time of change) since they were described are not
    read again.

    Raises:
        ValueError: see :func:`load`.
    """
    config = resolve(config)
    known, key = _known_descriptions(), json.dumps([asdict(config), *_files_of(config)])
    if key in known:
        with suppress(TypeError):  # a description by another version
            return DatasetInfo(**known[key])
    info = _describe(config)
    if config.name == "mnist":
        with suppress(OSError):  # then the next command reads the files again
            _write_descriptions({**known, key: asdict(info)})
    return info


def _files_of(config: DataConfig) -> list[tuple[str, int, int]]:
    """Return path, size and time of change (ns) of each MNIST file; an empty list for digits."""
    paths = (
        [file_in(Path(config.root), name) for name in FILES]
        if config.name == "mnist" and config.root
        else []
    )
    return [
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path is not None
    ]


def _descriptions() -> Path:
    """Return the path of the file that keeps the descriptions of data sets."""
    return cache_folder().parent / "datasets.json"


def _known_descriptions() -> dict[str, dict[str, Any]]:
    """Return the descriptions kept so far, by config and files; empty where there are none."""
    try:
        known = json.loads(_descriptions().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_descriptions(known: dict[str, dict[str, Any]]) -> None:
    """Replace the kept descriptions in one step."""
    path = _descriptions()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(known).encode())


def _identity(config: DataConfig) -> str:
    """Return what decides the examples of a user's factory, in a line."""
    values = asdict(config)
    named = values | {"name": config.name.rpartition("/")[2]}
    return json.dumps(named, sort_keys=True, default=repr)


def _describe(config: DataConfig) -> DatasetInfo:
    """Read the data of ``config`` and describe them, with digests and sizes."""
    own = names_code(config.name)
    if own:
        forget()  # what the factory reads may have changed
        load.cache_clear()
    data = load(config)
    digest = hashlib.sha256()
    for split in data:
        known = split if isinstance(split, Split) else split.head(STREAMED_DIGEST)
        digest.update(b"" if known is split else str(split.size).encode())
        digest.update(known.x.numpy().tobytes())
        digest.update(known.y.numpy().tobytes())
    files = hashlib.sha256()
    if own:
        files.update(digest.digest())
    else:
        mnist = config.name == "mnist"
        for array in mnist_arrays(str(config.root)) if mnist else [digits_table()]:
            files.update(array.tobytes())
    sources = {
        config.name: f"{config.name} {config.args or ''} (code {config.code})",
        "mnist": f"MNIST, IDX files in {config.root}",
        "digits": "scikit-learn's handwritten digits (1,797 images of 8 x 8)",
    }
    return DatasetInfo(
        name=config.name, source=sources[config.name], digest=digest.hexdigest(),
        files=files.hexdigest(), root=config.root, train=data.train.size,
        validation=data.validation.size, test=data.test.size,
        inputs=data.train.head(1).x[0].numel(), classes=data.outputs if own else CLASSES,
        identity=_identity(config) if own else "",
    )  # fmt: skip
