"""Where a store's artifacts may lie, and how they get there.

MLflow's client writes a run's artifacts to the address that the store has for the run, whatever it
is: a folder of the user's, or a web server, which is sent the login of the tracking server. But a
store may be a stranger's: its database lies in the storage of a study that somebody else wrote. So
an address is checked before anything is written (:meth:`Artifacts.check`): artifacts lie in the
folder ``artifacts`` of the storage, or beside a database that the user has named, or the server
that the user has named keeps them (``mlflow-artifacts:``).

MLflow's client would follow links as well. So files in the storage are written here, from folder to
folder without a link, and a server is sent them by MLflow's repository at the checked address.

A database names whole paths. One that was moved or copied with its storage would name the folder
where the storage was: :meth:`Artifacts.follow` has it name the one where it is.

Limits: servers that name buckets to their clients (``mlflow server --no-serve-artifacts``) get no
artifacts, and so nothing.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from study.tracking.address import FILE, is_server
from study.tracking.sqlite import rename_folder
from study.tracking_uri import reveal, without_password
from trainers.files import folder_within, open_own, write_at

SERVED = "mlflow-artifacts"


class PlaceError(ValueError):
    """An address of artifacts at which nothing is written."""


def real_root(root: Path) -> Path:
    """Return a folder of artifacts without the links among the folders that lead to it."""
    return Path(os.path.realpath(root.parent)) / root.name


def roots_of(uri: str, root: Path) -> list[Path]:
    """Return the folders in which a store's artifacts may lie: the storage's, and the one beside a
    database that the user has named."""
    beside = [Path(uri.removeprefix(FILE)).parent / "artifacts"] if uri.startswith(FILE) else []
    return list(dict.fromkeys(real_root(folder) for folder in (root, *beside)))


def local_place(location: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """Return the one of ``roots`` in which the folder of an address lies, and its path there; None
    if it lies elsewhere, or a link leads out.

    Args:
        location: address of artifacts, read as MLflow reads it.
        roots: see :func:`real_root`.
    """
    parts = urllib.parse.urlparse(location)
    if parts.scheme not in ("", "file") or parts.netloc:
        return None
    path = urllib.request.url2pathname(parts.path if parts.scheme else location)
    if not path.startswith("/") or ".." in Path(path).parts or "\0" in path:
        return None
    real = Path(os.path.realpath(path))
    within = [(root, real.relative_to(root)) for root in roots if real.is_relative_to(root)]
    return within[0] if within else None


class Artifacts:
    """The artifacts of one store.

    Args:
        uri: tracking URI of the store.
        root: the storage's folder of artifacts.
    """

    def __init__(self, uri: str, root: Path) -> None:
        self._uri, self._root, self._roots = uri, root, roots_of(uri, root)

    @property
    def for_experiments(self) -> Path | None:
        """Folder in which new experiments get theirs: beside a database in a file, which studies of
        other storages may use too; None where the server chooses."""
        return None if is_server(self._uri) else self._roots[-1]

    def follow(self) -> None:
        """Have a database in the storage, which was moved or copied with it, name the folder of
        artifacts where it is now; what it names of another shape stays."""
        if self._uri.startswith(FILE) and len(self._roots) == 1:
            with suppress(sqlite3.Error):  # whoever uses the database tells of its faults
                rename_folder(
                    self._uri, self._roots[0], lambda place: local_place(place, self._roots) is None
                )

    def check(self, location: str, of: str) -> None:
        """Refuse an address of artifacts that is neither in the storage nor the named server's.

        Args:
            location: the address.
            of: what has it, in words.

        Raises:
            PlaceError: it is elsewhere.
        """
        if self._is_served(location) or local_place(location, self._roots) is not None:
            return
        allowed = f"in {' or '.join(map(str, self._roots))}, with no link on the way"
        if is_server(self._uri):
            remedy = "have the server keep them (mlflow server --serve-artifacts, or lns-study ui)"
            allowed = f"{SERVED}:/..., which the server keeps, or {allowed}"
        else:
            remedy = (
                "name another store with --tracking-uri, or rename the database, and `lns-study"
                " sync` makes a new one"
            )
        raise PlaceError(
            f"artifact_uri={without_password(location)!r} of {of}: artifacts must lie {allowed};"
            f" nothing was written there; {remedy}"
        )

    def put(self, location: str, of: str, files: Sequence[Path], folder: str = "") -> None:
        """Copy files to an address.

        Args:
            location: address of the artifacts of a run or a model.
            of: what has it, in words.
            files: regular files, which keep their names.
            folder: folder among the artifacts.

        Raises:
            PlaceError: the address is none that is written to.
            OSError: a file is a link, or cannot be read or written.
        """
        self.check(location, of)
        if not files:
            return
        if (inside := local_place(location, self._roots)) is not None:
            root, place = inside
            with folder_within(root, (*place.parts, *Path(folder).parts)) as at:
                for file in files:
                    with open(open_own(file, os.O_RDONLY), "rb") as source:
                        write_at(at, file.name, source)
            return
        from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

        with tempfile.TemporaryDirectory() as scratch:
            for file in files:
                with (
                    open(open_own(file, os.O_RDONLY), "rb") as source,
                    (Path(scratch) / file.name).open("wb") as copy,
                ):
                    shutil.copyfileobj(source, copy)
            served = MlflowArtifactsRepository(location, tracking_uri=reveal(self._uri))
            served.log_artifacts(scratch, folder or None)

    def put_texts(self, location: str, of: str, texts: dict[str, str]) -> None:
        """Write texts, by the names of their files, to an address; see :meth:`put`."""
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in texts.items():
                (Path(scratch) / name).write_text(text, encoding="utf-8")
            self.put(location, of, [Path(scratch) / name for name in texts])

    def _is_served(self, location: str) -> bool:
        """Tell whether the named server keeps what lies at an address."""
        parts = urllib.parse.urlparse(location)
        return is_server(self._uri) and parts.scheme == SERVED and not parts.netloc
