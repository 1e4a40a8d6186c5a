"""Finding or downloading the data of a trial. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainers.config import DataConfig
from trainers.config.data import DATA
from trainers.data.download import REMOTES, DownloadError, cache_folder, download, find
from trainers.data.mnist import download_mnist, find_mnist
from trainers.user_code import DIGEST_LENGTH, names_code


def resolve(
    config: DataConfig, *, download: bool = True, say: Callable[[str], None] = lambda line: None
) -> DataConfig:
    """Return ``config`` with a concrete name, root and validation size.

    ``auto`` becomes ``mnist`` if the files are found or can be downloaded, otherwise ``digits``.

    Args:
        config: config of the data.
        download: whether to download MNIST if it is not found; if not, ``root`` stays None, and
            ``auto`` becomes ``mnist`` without a check that it can be downloaded.
        say: called with the reason if ``auto`` becomes ``digits``.

    Raises:
        ValueError: ``root`` or ``$LNS_STUDY_DATA`` is a folder that lacks files, or ``root`` is
            given for data without files.
        DownloadError: MNIST is requested by name and cannot be downloaded.
    """
    name, root = config.name, config.root
    if names_code(name):
        if root is not None:
            raise ValueError(
                f"data.root={root!r} with data.name={name!r}: a factory does not get data.root;"
                " give the folder in data.args, as a parameter of the factory"
            )
        return config
    if root is not None and name in DATA and not DATA[name].files:
        raise ValueError(
            f"data.root={root!r} with data.name={name}: these data are read from no files; leave"
            " data.root out, or name the data that it holds"
        )
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
        ValueError: they are not found, or the file has changed since the study was planned.
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
            " same command again to plan its trials again"
        )
    return replace(config, code=code)


def fetch(name: str) -> Path:
    """Download and check the files of a data set, and return its cache folder.

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
    """Return the place of a built-in data set's files, or the command that downloads them.

    Raises:
        ValueError: ``$LNS_STUDY_DATA`` is a folder that lacks files of MNIST.
    """
    if not DATA[name].files:
        return "needs none"
    try:
        place = find_mnist(None) if name == "mnist" else find(name, None)
    except DownloadError:
        place = None
    return str(place) if place else f"lns-study data fetch {name}"
