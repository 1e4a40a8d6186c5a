"""Restricts our MLflow servers to artifacts in their own folders.

MLflow's server opens any artifact address that its database has for a run, also a private file of
the server's user or a web address. The database of a storage from somebody else may contain any
address. So this process only creates artifact repositories for addresses below the server's
artifact location or beside its database, and these do not follow links to other places.
"""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study.tracking.artifacts import local_place, roots_of


def confine(uri: str, destination: str) -> None:
    """Restrict MLflow, in this process, to artifacts of the server.

    Replaces MLflow's registered artifact repositories.

    Args:
        uri: address of the database.
        destination: folder or address where the server stores artifacts.
    """
    from mlflow.store.artifact.artifact_repository_registry import (
        get_registered_artifact_repositories,
    )

    local = urllib.parse.urlparse(destination).scheme in ("", "file")
    folder = urllib.request.url2pathname(urllib.parse.urlparse(destination).path)
    roots = roots_of(uri, Path(folder)) if local else []
    kinds = get_registered_artifact_repositories()
    for scheme, kind in list(kinds.items()):
        if scheme in ("", "file"):
            kinds[scheme] = _confined(roots)
        else:
            kinds[scheme] = _within(kind, destination.rstrip("/") if not local else "")


def _refusal(location: str) -> Exception:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

    refusal: Exception = MlflowException(
        f"artifact_uri={location!r}: this server reads and writes artifacts in its own place only;"
        " move them there, or leave them out",
        error_code=PERMISSION_DENIED,
    )
    return refusal


def _within(kind: Callable[..., Any], destination: str) -> Callable[..., Any]:
    """Return a factory of repositories of type ``kind`` for addresses below ``destination``.

    The factory raises an MlflowException for other addresses.
    """

    def make(location: str, *args: Any, **options: Any) -> Any:
        inside = location == destination or location.startswith(f"{destination}/")
        if not destination or not inside or ".." in location.split("/"):
            raise _refusal(location)
        return kind(location, *args, **options)

    return make


def _confined(roots: list[Path]) -> type:
    """Return a class of repositories in folders below ``roots``."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    class Confined(LocalArtifactRepository):  # type: ignore[misc]
        """Repository that does not follow links out of ``roots``."""

        def __init__(self, location: str, *args: Any, **options: Any) -> None:
            if local_place(location, roots) is None:
                raise _refusal(location)
            super().__init__(location, *args, **options)

        def _check(self, path: str | None) -> None:
            real = Path(os.path.realpath(os.path.join(self.artifact_dir, path or "")))
            if not any(real.is_relative_to(root) for root in roots):
                raise _refusal(str(path))

        def get_local_path(self, artifact_path: str) -> str:
            self._check(artifact_path)
            return str(super().get_local_path(artifact_path))

        def _download_file(self, remote_file_path: str, local_path: str) -> None:
            self._check(remote_file_path)
            super()._download_file(remote_file_path, local_path)

        def _get_or_create_artifact_dir(self, artifact_path: str | None = None) -> str:
            self._check(artifact_path)
            return str(super()._get_or_create_artifact_dir(artifact_path))

        def list_artifacts(self, path: str | None = None) -> Any:
            self._check(path)
            return super().list_artifacts(path)

        def delete_artifacts(self, artifact_path: str | None = None) -> None:
            self._check(artifact_path)
            super().delete_artifacts(artifact_path)

    return Confined
