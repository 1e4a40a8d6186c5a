"""Allowlist of MLflow's routes on our servers: those for browsing and logging.

MLflow has routes that are dangerous on a shared machine: the assistant of 3.17 runs shell commands
for every client from 127.0.0.1, others start jobs, request addresses chosen by the client, or read
files of the server. A blocklist would miss routes that a new version adds.
``tests/study/ops/serve/test_routes.py`` compares the installed MLflow with this list, and fails for
routes that are neither allowed here nor listed there as forbidden.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs

MOST_OF_A_PART = 255
"""Maximum length of a file's or folder's name in bytes, on Linux."""
MOST_OF_A_NAME = 1024
"""Maximum length of an artifact's name with its folders in bytes, as in S3."""
MOST_SHOWN = 60
_ARTIFACT = re.compile(
    r"(?s)/(?:ajax-)?api/2\.0/mlflow-artifacts/(?:artifacts|presigned|mpu/[a-z]+)/(.+)"
)
PATHS = frozenset({"path", "artifact_path", "artifact_file_path", "artifact_directory_path"})
"""Parameters with the name of an artifact."""

ALLOWED = """
GET     /
GET     /version
GET     /static-files/<path:path>
GET     /get-artifact
POST    /graphql
GET     /{api}/3.0/mlflow/server-info

GET     /{api}/2.0/mlflow/experiments/get
GET     /{api}/2.0/mlflow/experiments/get-by-name
GET     /{api}/2.0/mlflow/experiments/search
POST    /{api}/2.0/mlflow/experiments/search
POST    /{api}/2.0/mlflow/experiments/create
POST    /{api}/2.0/mlflow/experiments/update
POST    /{api}/2.0/mlflow/experiments/delete
POST    /{api}/2.0/mlflow/experiments/restore
POST    /{api}/2.0/mlflow/experiments/set-experiment-tag
POST    /{api}/2.0/mlflow/experiments/delete-experiment-tag
POST    /ajax-api/2.0/mlflow/experiments/search-datasets

GET     /{api}/2.0/mlflow/runs/get
POST    /{api}/2.0/mlflow/runs/search
POST    /{api}/2.0/mlflow/runs/create
POST    /{api}/2.0/mlflow/runs/update
POST    /{api}/2.0/mlflow/runs/delete
POST    /{api}/2.0/mlflow/runs/restore
POST    /{api}/2.0/mlflow/runs/set-tag
POST    /{api}/2.0/mlflow/runs/delete-tag
POST    /{api}/2.0/mlflow/runs/log-batch
POST    /{api}/2.0/mlflow/runs/log-inputs
POST    /{api}/2.0/mlflow/runs/log-metric
POST    /{api}/2.0/mlflow/runs/log-model
POST    /{api}/2.0/mlflow/runs/log-parameter
POST    /{api}/2.0/mlflow/runs/outputs

GET     /{api}/2.0/mlflow/metrics/get-history
GET     /{api}/2.0/mlflow/metrics/get-history-bulk-interval
GET     /ajax-api/2.0/mlflow/metrics/get-history-bulk

GET     /{api}/2.0/mlflow/artifacts/list
POST    /{api}/2.0/mlflow/artifacts/presigned-download-url
POST    /{api}/2.0/mlflow/artifacts/presigned-upload-url
GET     /{api}/2.0/mlflow-artifacts/artifacts
GET     /{api}/2.0/mlflow-artifacts/artifacts/<path:path>
PUT     /{api}/2.0/mlflow-artifacts/artifacts/<path:path>
DELETE  /{api}/2.0/mlflow-artifacts/artifacts/<path:path>
GET     /{api}/2.0/mlflow-artifacts/presigned/<path:path>
POST    /{api}/2.0/mlflow-artifacts/mpu/create/<path:path>
POST    /{api}/2.0/mlflow-artifacts/mpu/complete/<path:path>
POST    /{api}/2.0/mlflow-artifacts/mpu/abort/<path:path>

POST    /{api}/2.0/mlflow/logged-models
POST    /{api}/2.0/mlflow/logged-models/search
GET     /{api}/2.0/mlflow/logged-models/<id>
PATCH   /{api}/2.0/mlflow/logged-models/<id>
DELETE  /{api}/2.0/mlflow/logged-models/<id>
POST    /{api}/2.0/mlflow/logged-models/<id>/params
PATCH   /{api}/2.0/mlflow/logged-models/<id>/tags
DELETE  /{api}/2.0/mlflow/logged-models/<id>/tags/<key>
GET     /{api}/2.0/mlflow/logged-models/<id>/artifacts/directories
GET     /ajax-api/2.0/mlflow/logged-models/<id>/artifacts/files

GET     /signup
POST    /api/2.0/mlflow/users/create-ui
POST    /{api}/2.0/mlflow/users/create
GET     /{api}/2.0/mlflow/users/get
GET     /{api}/2.0/mlflow/users/list
GET     /{api}/2.0/mlflow/users/current
PATCH   /{api}/2.0/mlflow/users/update-password
PATCH   /{api}/2.0/mlflow/users/update-admin
DELETE  /{api}/2.0/mlflow/users/delete
GET     /{api}/3.0/mlflow/users/current/permissions
GET     /{api}/3.0/mlflow/users/permissions/get
GET     /{api}/3.0/mlflow/users/permissions/list
POST    /{api}/3.0/mlflow/users/permissions/grant
POST    /{api}/3.0/mlflow/users/permissions/revoke
GET     /{api}/3.0/mlflow/users/roles/list
POST    /{api}/3.0/mlflow/roles/create
GET     /{api}/3.0/mlflow/roles/get
GET     /{api}/3.0/mlflow/roles/list
PATCH   /{api}/3.0/mlflow/roles/update
DELETE  /{api}/3.0/mlflow/roles/delete
POST    /{api}/3.0/mlflow/roles/permissions/add
GET     /{api}/3.0/mlflow/roles/permissions/list
PATCH   /{api}/3.0/mlflow/roles/permissions/update
DELETE  /{api}/3.0/mlflow/roles/permissions/remove
POST    /{api}/3.0/mlflow/roles/assign
DELETE  /{api}/3.0/mlflow/roles/unassign
GET     /{api}/3.0/mlflow/roles/users/list
"""
"""Method and path, one per line. ``{api}`` matches ``api`` and ``ajax-api``; ``<path:path>``
matches slashes too, other names in ``<>`` do not."""

_PARTS = {"{api}": "(?:ajax-)?api", "<path:": ".+", "<": "[^/]+"}


def _expression(line: str) -> str:
    """Return the regular expression of a line of :data:`ALLOWED`."""
    method, path = line.split()
    parts = re.split(r"(\{api\}|<path:|<)[^/]*", path)
    # re.split gives the text between parameters and, at odd places, their kind
    text = "".join(_PARTS[part] if at % 2 else re.escape(part) for at, part in enumerate(parts))
    return f"{method} {text}"


_ALLOWED = re.compile("|".join(_expression(line) for line in ALLOWED.splitlines() if line))


def is_allowed(method: str, path: str) -> bool:
    """Return whether our servers serve a request.

    Args:
        method: HTTP method; HEAD is treated as GET.
        path: decoded path, as passed to MLflow's application.
    """
    return bool(_ALLOWED.fullmatch(f"{'GET' if method == 'HEAD' else method} {path}"))


def refuse_name(path: str, query: bytes) -> str:
    """Return why a request's artifact has an impossible name, or "".

    MLflow answers 500 to most of these names, with a traceback in its log.

    Args:
        path: decoded path, with U+FFFD in the place of bytes that are not UTF-8.
        query: query string.
    """
    if found := _ARTIFACT.fullmatch(path):
        odd = {"", ".", ".."} & set(found[1].split("/"))
        return refuse_artifact(found[1]) or (
            f"{_short(found[1])}: a part is {min(odd)!r}; use another name" if odd else ""
        )
    values = parse_qs(query.decode("latin-1"), errors="replace")
    names = [name for key in PATHS & values.keys() for name in values[key]]
    return next(filter(None, map(refuse_artifact, names)), "")


def refuse_artifact(name: str) -> str:
    """Return why an artifact cannot have a name, or ""."""
    if re.search("[\ufffd\ud800-\udfff]", name):
        return f"{_short(name)}: an artifact's name must be UTF-8"
    if re.search(r"[\x00-\x1f\x7f]", name):
        return f"{_short(name)}: an artifact's name must not have a control character"
    size, longest = len(name.encode()), max(len(part.encode()) for part in name.split("/"))
    if longest > MOST_OF_A_PART:
        return (
            f"{_short(name)}: a part of an artifact's name has {longest:,} bytes, and the maximum"
            f" is {MOST_OF_A_PART}; use a shorter name"
        )
    if size > MOST_OF_A_NAME:
        return (
            f"{_short(name)}: an artifact's name has {size:,} bytes, and the maximum is"
            f" {MOST_OF_A_NAME:,}; use a shorter name"
        )
    return ""


def _short(name: str) -> str:
    return f"artifact {name!r}" if len(name) <= MOST_SHOWN else f"artifact {name[:MOST_SHOWN]!r}..."
