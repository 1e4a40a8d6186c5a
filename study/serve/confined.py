"""Artifacts of our MLflow servers are read and written in the servers' own folders only.

MLflow's server opens whatever address its database has for a run's artifacts: a file of the
server's user, which only they may read, or a web address. The database of a stranger's storage can
have any. So every repository of artifacts that this process makes is of an address in the place
where the server keeps artifacts, or beside its database, and follows no link out of it.
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
    """Have MLflow, in this process, open no artifacts elsewhere.

    Args:
        uri: address of the database.
        destination: folder or address in which the server keeps artifacts.
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
    """Return what makes a repository of an address below ``destination``."""

    def make(location: str, *args: Any, **options: Any) -> Any:
        inside = location == destination or location.startswith(f"{destination}/")
        if not destination or not inside or ".." in location.split("/"):
            raise _refusal(location)
        return kind(location, *args, **options)

    return make


def _confined(roots: list[Path]) -> type:
    """Return the class of repositories in folders below ``roots``."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    class Confined(LocalArtifactRepository):  # type: ignore[misc]
        """A repository that follows no link out of ``roots``."""

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
