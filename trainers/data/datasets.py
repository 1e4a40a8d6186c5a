"""The data sets of a trial, as tensors in memory.

Files are found by :mod:`trainers.data.download` and read by the module of their format: CIFAR by
:mod:`trainers.data.cifar`, text and piano rolls by :mod:`trainers.data.windows`; what is made from
a seed by :mod:`trainers.data.generated`.

MNIST is read from its IDX files (:mod:`trainers.data.mnist` says where they are looked for), the
handwritten digits from scikit-learn.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainers.config import DataConfig
from trainers.config.data import DATA
from trainers.data.cifar import load_cifar
from trainers.data.digits import digits_table, load_digits
from trainers.data.download import REMOTES, DownloadError, cache_folder, download, file_in, find
from trainers.data.factory import VALIDATION_SHARE, load_own
from trainers.data.generated import load_addition, load_mnist1d, load_symbols
from trainers.data.mnist import FILES, download_mnist, find_mnist, load_mnist, mnist_arrays
from trainers.data.split import Dataset, DatasetInfo, Examples, Split
from trainers.data.windows import load_piano_rolls, load_text
from trainers.files import write_whole
from trainers.user_code import DIGEST_LENGTH, forget, names_code, without_folder

STREAMED_DIGEST = 100
"""Examples of a split that are hashed, with its size, where they are not in memory."""
HELD = 8
"""Data sets that stay in the memory of a process for its next trials."""


def resolve(
    config: DataConfig, *, download: bool = True, say: Callable[[str], None] = lambda line: None
) -> DataConfig:
    """Return ``config`` with a concrete name, root and validation size.

    ``auto`` becomes ``mnist`` where the files are found or can be downloaded, otherwise ``digits``.

    Args:
        config: the data asked for.
        download: whether MNIST is downloaded where it is not found; if not, ``root`` stays None,
            and ``auto`` becomes ``mnist`` without a check that it can be downloaded.
        say: called with the reason for which ``auto`` becomes ``digits``.

    Raises:
        ValueError: ``root`` or ``$LNS_STUDY_DATA`` names a folder that lacks files.
        DownloadError: MNIST is asked for by name and cannot be downloaded.
    """
    name, root = config.name, config.root
    if names_code(name):
        return config
    if name in REMOTES:
        config = _located(config)
        root = config.root
    elif name == "auto" or name == "mnist":
        try:
            folder = find_mnist(root) or (fetch("mnist") if download else None)
            name, root = "mnist", str(folder.resolve()) if folder else None
        except DownloadError as error:
            if name == "mnist":
                raise
            say(f"MNIST is not found, so data.name=auto takes scikit-learn's digits: {error}")
            name = "digits"
    size = config.validation_size or DATA[name].validation
    return replace(config, name=name, root=root, validation_size=size)


def _located(config: DataConfig) -> DataConfig:
    """Return ``config`` with the folder or file of its data, and the digest of a user's own file.

    Raises:
        ValueError: they are not to be found, or the file has changed since the study was planned.
    """
    collection = getattr(config.arguments, "collection", "")
    place = find(config.name, config.root, f"{collection}.mat" if collection else "")
    config = replace(config, root=str(place.resolve()))
    if not config.own_file:
        return config
    code = hashlib.sha256(place.read_bytes()).hexdigest()[:DIGEST_LENGTH]
    if config.code not in ("", code):
        raise ValueError(
            f"data.name={config.name}: {place} has changed since the study was planned; run the"
            " same command again, which plans its trials anew"
        )
    return replace(config, code=code)


@lru_cache(maxsize=HELD)
def load(config: DataConfig) -> Dataset:
    """Return the splits of ``config``, resolving it first.

    They stay in memory for the next trial of this process.

    Raises:
        ValueError: files are missing or corrupt, or split sizes do not fit.
    """
    config = resolve(config)
    whole, validation, test = _read(config)
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


def fetch(name: str) -> Path:
    """Download the files of a data set into its cache, checked, and return the folder.

    Raises:
        DownloadError: the mirror does not answer, or sends something else, or the cache cannot be
            written.
    """
    try:
        if name != "mnist":
            return download(name)
        download_mnist(cache_folder())
        return cache_folder()
    except OSError as error:
        raise DownloadError(
            f"{cache_folder(name)}: cannot be written ({error}); free some space, or set"
            " XDG_CACHE_HOME to another folder"
        ) from None


def describe_place(name: str) -> str:
    """Return where the files of one of our data sets are, or how to get them.

    Raises:
        ValueError: ``$LNS_STUDY_DATA`` names a folder that lacks files of MNIST.
    """
    if not DATA[name].files:
        return "needs none"
    try:
        place = find_mnist(None) if name == "mnist" else find(name, None)
    except DownloadError:
        place = None
    return str(place) if place else f"lns-study data fetch {name}"


def _read(config: DataConfig) -> tuple[Examples, Examples | None, Examples]:
    """Return all examples for training, for validation (None where they are the last of the
    former), and for testing."""
    if names_code(config.name):
        return load_own(config)
    name, args, root = config.name, config.arguments, Path(config.root or "")
    if name == "piano_rolls":
        return load_piano_rolls(root, args.context)
    if name == "digits":
        train, test = load_digits()
    elif name == "text":
        return load_text(root, args, config.validation_size)
    elif name in ("cifar10", "cifar100"):
        train, test = load_cifar(str(root), DATA[name].classes)
    elif name == "mnist1d":
        train, test = load_mnist1d(args)
    elif name == "addition":
        train, test = load_addition(args)
    elif name in ("copy", "sort"):
        train, test = load_symbols(args, ordered=name == "sort")
    else:
        train, test = load_mnist(str(root), name)
    return train, None, test


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
    if config.root and not names_code(config.name):
        with suppress(OSError):  # then the next command reads the files again
            _write_descriptions({**known, key: asdict(info)})
    return info


def _files_of(config: DataConfig) -> list[tuple[str, int, int]]:
    """Return path, size and time of change (ns) of each file that the data may be read from."""
    place = Path(config.root) if config.root else None
    paths: list[Path | None] = []
    if config.name == "mnist" and place:
        paths = [file_in(place, name) for name in FILES]
    elif config.name in REMOTES and place:
        needs = REMOTES[config.name].needs
        names = [name for choice in needs for name in choice]
        paths = [place] if config.own_file else [file_in(place, name) for name in names]
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
    named = values | {"name": without_folder(config.name)}
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
    if config.name in ("mnist", "digits"):
        mnist = config.name == "mnist"
        for array in mnist_arrays(str(config.root)) if mnist else [digits_table()]:
            files.update(array.tobytes())
    elif own:
        files.update(digest.digest())
    else:
        for part in filter(None, _read(config)):
            assert isinstance(part, Split)
            for tensor in part:
                files.update(tensor.numpy().tobytes())
    ours = DATA.get(config.name)
    where = f" in {config.root}" if config.root else ""
    source = f"{config.name} {config.args or ''} (code {config.code})"
    if config.name == "mnist":
        source = f"MNIST, IDX files in {config.root}"
    elif config.name == "digits":
        source = "scikit-learn's handwritten digits (1,797 images of 8 x 8)"
    elif ours is not None:
        source = f"{ours.about}{where} {config.args or ''}".rstrip()
    return DatasetInfo(
        name=config.name, source=source, digest=digest.hexdigest(),
        files=files.hexdigest(), root=config.root, train=data.train.size,
        validation=data.validation.size, test=data.test.size,
        inputs=data.train.head(1).x[0].numel(), classes=(ours and ours.classes) or data.outputs,
        identity=_identity(config) if own else "",
    )  # fmt: skip
