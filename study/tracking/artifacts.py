"""Checked writing of artifacts to a store.

MLflow's client writes a run's artifacts to any address that the store gives for the run: a folder
of the user, or a web server, which also receives the login of the tracking server. The store may be
untrusted, for example a database in the storage of somebody else's study. Therefore
:meth:`Artifacts.check` checks each address before anything is written. Allowed are the storage's
folder ``artifacts``, a folder ``artifacts`` beside a database that the user has named, and the
artifact store of a server that the user has named (``mlflow-artifacts:``).

MLflow's client would also follow symbolic links. Therefore this module writes local files itself,
without following links, and uploads to a server with MLflow's repository at the checked address.

A database contains absolute paths, which are wrong after it was moved or copied with its storage;
:meth:`Artifacts.follow` corrects them.

Limit: a server that sends its clients to buckets (``mlflow server --no-serve-artifacts``) is not
supported; nothing is sent to it.
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
    """An artifact address that is not allowed."""


def real_root(root: Path) -> Path:
    """Return a folder's path with the links in its parent folders resolved."""
    return Path(os.path.realpath(root.parent)) / root.name


def roots_of(uri: str, root: Path) -> list[Path]:
    """Return the allowed local artifact folders: the storage's, and for a database in a file the
    folder ``artifacts`` beside it."""
    beside = [Path(uri.removeprefix(FILE)).parent / "artifacts"] if uri.startswith(FILE) else []
    return list(dict.fromkeys(real_root(folder) for folder in (root, *beside)))


def local_place(location: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """Return the allowed folder that contains an address, and the path within it.

    Returns None if the address is outside of ``roots``, with links resolved.

    Args:
        location: address of artifacts, parsed as MLflow does.
        roots: allowed folders, see :func:`real_root`.
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
        """Artifact folder of new experiments; None if the server chooses it.

        With a database in a file it is the folder beside it, because several storages may share
        the database.
        """
        return None if is_server(self._uri) else self._roots[-1]

    def follow(self) -> None:
        """Correct the artifact paths of a database that was moved or copied with its storage.

        Addresses that do not end in the artifact folder's name are left unchanged.
        """
        if self._uri.startswith(FILE) and len(self._roots) == 1:
            with suppress(sqlite3.Error):  # a later use of the database reports the error
                rename_folder(
                    self._uri, self._roots[0], lambda place: local_place(place, self._roots) is None
                )

    def check(self, location: str, of: str) -> None:
        """Check that an artifact address is in an allowed folder or on the named server.

        Args:
            location: the address.
            of: owner of the address for messages, such as ``run ID``.

        Raises:
            PlaceError: it is not.
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
            location: artifact address of a run or a model.
            of: owner of the address for messages, such as ``run ID``.
            files: regular files, which keep their names.
            folder: folder within the artifacts.

        Raises:
            PlaceError: the address is not allowed.
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
        """Write texts, given by file name, to an address; see :meth:`put`."""
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in texts.items():
                (Path(scratch) / name).write_text(text, encoding="utf-8")
            self.put(location, of, [Path(scratch) / name for name in texts])

    def _is_served(self, location: str) -> bool:
        """Return whether an address is in the named server's own artifact store."""
        parts = urllib.parse.urlparse(location)
        return is_server(self._uri) and parts.scheme == SERVED and not parts.netloc
