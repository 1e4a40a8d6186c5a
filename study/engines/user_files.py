"""The user's files on a Ray cluster, whose nodes need not have them at the same path.

Ray sends them, as ``py_modules`` of the job's runtime environment: the folder of every file that
the study names, since a file may import and read its neighbours, but for hidden files, bytecode,
virtual environments, folders of studies and the study's storage; a secret, or a link out of the
folder, is refused (:func:`check_sent`), as by ``launch``. A node that has a file at its path, on a
shared file system for example, takes that; :func:`trainers.user_code.find_source` finds the others.
Packages named by ``package.module:name`` are not sent: a node that has not installed them as this
machine has is refused (:class:`study.engines.ray.hosts.Hosts`). Ray Train does not ask; there
such a trial fails.

Limits: what lies outside of these folders is not sent; a Ray session that exists already keeps its
own environment, as does a job that was submitted with ``py_modules`` of its own.

Source: Ray's page "Environment Dependencies", https://docs.ray.io/en/latest/ray-core/
handling-dependencies.html.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study._compat import RAY_JOB
from study.config import StudyConfig
from study.ledger.log import FILE
from study.tracking_uri import without_password
from trainers.object_store import local_folder
from trainers.user_code import MISSING, SENT, code_files, digest_package, names_code, place_of_sent

MOST_BYTES = 100 * 2**20
"""Most bytes of all folders together; the control store keeps them in memory."""
MIB = 2**20
KEY = re.compile(
    rb"""-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
      | secret[\s_-]*access[\s_-]*key
        [^a-z0-9/+]{1,20} (?:(?:str|value)[^a-z0-9/+]{1,9})? [a-z0-9/+]{40}
      | (?:AKIA|ASIA)[A-Z0-9]{16} [\s,;"']{1,9} [a-z0-9/+]{40}
      | refresh_token\\?["']\s*:\s*\\?["'][^"'\\]{20}""",
    re.IGNORECASE | re.VERBOSE,
)
"""Private keys in PEM form, and the secrets of object stores as tools, programs, notebooks and
images of containers write them."""
TOKEN = re.compile(
    rb"\s*(?=[^0-9\s]*[0-9])(?=[^a-z\s]*[a-z])[a-z0-9+/_-]{32,}={0,2}\s*", re.IGNORECASE
)
"""Whole content of a file with a token or a key alone, in hexadecimal digits or base64: Ray's
``auth_token``, the secrets of Docker Compose."""
LONGEST_TOKEN = 1024
"""Maximum size of a token file (bytes)."""
SECRETS = re.compile(r"(password|passwd|token|secret|(access|api)_?key)$", re.IGNORECASE)
"""Suffixes of names of variables with secret values."""
SHORTEST_SECRET = 8
"""Minimum length of a secret value that is searched for."""


def check_user_files(study: StudyConfig) -> None:
    """Refuse folders that are too large to be sent to a cluster's nodes, folders with secrets, and
    code outside of the files that are sent.

    Raises:
        ValueError: with the sizes or the files, the rule and the remedy.
    """
    if study.address is None:
        return
    total, largest, sent = 0, (0, Path()), dict[Path, set[Path]]()
    for folder in user_folders(study):
        sent[folder] = set()
        for path in _files_in(folder, study):
            sent[folder].add(path.resolve())
            size = path.stat().st_size
            total, largest = total + size, max(largest, (size, path))
            if total > MOST_BYTES:
                raise ValueError(
                    f"address={study.address!r}: {folder} holds code of this study, so it is sent"
                    f" to the cluster's nodes, and its files have {total / MIB:,.0f} MiB or more"
                    f" ({largest[1]}: {largest[0] / MIB:,.0f}), of which {MOST_BYTES // MIB} are"
                    " the limit; move the code, with what it imports and reads, to a folder of its"
                    " own"
                )
            check_sent(str(path), path, folder.resolve())
    for name in _named_files(study):
        folder = Path(name.rpartition(":")[0]).parent
        for path in code_files("name", name)[1]:
            if path.resolve() not in sent[folder]:
                raise ValueError(
                    f"address={study.address!r}: {path}, which {name} imports, is not sent to the"
                    f" cluster's nodes: of {folder} files are, without hidden ones and folders"
                    " behind links; put a copy there"
                )


def check_sent(name: str, path: Path, top: Path) -> None:
    """Refuse a file that must not be sent.

    Args:
        name: what the user knows it by.
        path: where it is.
        top: folder that is sent, without links in its path.

    Raises:
        ValueError: with the name, the rule and the remedy; never with the secret.
    """
    way = os.path.relpath(path.resolve(), top)
    hidden = any(part.startswith(".") and part != ".." for part in Path(way).parts)
    if hidden or way.startswith(".."):
        what = "a hidden file" if hidden else f"a file outside of {top}"
        raise ValueError(
            f"{name}: is a link to {way}, {what}, of which none travels to the cluster;"
            " remove the link, or put a copy of the file in its place"
        )
    content = path.read_bytes()
    text = content.decode(errors="replace")
    known = [each for each, value in own_secrets().items() if os.fsencode(value) in content]
    if len(content) <= LONGEST_TOKEN and TOKEN.fullmatch(content):
        what = "is a token or a key alone (else say on a second line what it is)"
    elif KEY.search(content) or without_password(text) != text or known:
        what = "holds a password or a secret key" + "".join(f", that of ${each}" for each in known)
    else:
        return
    raise ValueError(
        f"{name}: {what}, and would travel to the cluster; move it out of {top}, and give it to the"
        " nodes as a variable of their environment (docs/howto/cluster.md)"
    )


def own_secrets() -> dict[str, str]:
    """Return the variables of this process's environment whose names say that they are secret
    (``MLFLOW_TRACKING_PASSWORD``, ``AWS_SECRET_ACCESS_KEY``), with their values."""
    return {
        name: value
        for name, value in os.environ.items()
        if SECRETS.search(name) and len(value) >= SHORTEST_SECRET
    }


@contextmanager
def collected_files(study: StudyConfig) -> Iterator[Path | None]:
    """Provide a folder with copies of the user's files for Ray to send; None without files."""
    folders = user_folders(study)
    if study.address is None or not folders or "py_modules" in os.environ.get(RAY_JOB, ""):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="lns-study-") as scratch:
        for folder in folders:
            for path in _files_in(folder, study):
                copy = Path(scratch) / SENT / place_of_sent(folder) / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        yield Path(scratch) / SENT


def user_folders(study: StudyConfig) -> list[Path]:
    """Return the folders of the files of code that the study's config names."""
    return sorted({path.parent for path in user_files(study)})


def user_files(study: StudyConfig) -> list[Path]:
    """Return the files of code that the study's config names, rows and space included."""
    return sorted({Path(name.rpartition(":")[0]) for name in _named_files(study)})


def _named_files(study: StudyConfig) -> set[str]:
    """Return every ``file.py:name`` of the study's config."""
    named = {text for _, text in _texts(study.to_dict()) if names_code(text)}
    places = {name: Path(name.rpartition(":")[0]) for name in named}
    return {
        name
        for name, path in places.items()
        if path.suffix == ".py" and path.is_absolute() and path.is_file()
    }


def user_modules(study: StudyConfig) -> list[str]:
    """Return the code of installed packages that the study's trials name, as
    ``package.module:name``. Code that only claims name is left out: it runs on this machine."""
    values = study.to_dict()
    named = {
        text
        for keys, text in _texts([values[key] for key in ("trial", "rows", "space")])
        if "name" in keys and "args" not in keys and names_code(text) and ".py:" not in text
    }
    return sorted(name for name in named if digest_package(name) != MISSING)


def _texts(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every text in a config, with the keys that lead to it."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _texts(entry, (*keys, *str(key).split(".")))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry, keys)


def _files_in(folder: Path, study: StudyConfig) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders that are sent."""
    storage = local_folder(study.storage)
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__pycache__"))
            and not any((Path(place, name) / file).exists() for file in ("pyvenv.cfg", FILE))
            and Path(place, name).resolve() != storage
        )
        for name in sorted(files):
            path = Path(place, name)
            if not name.startswith(".") and path.suffix != ".pyc" and path.is_file():
                yield path
