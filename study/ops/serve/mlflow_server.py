"""Server process of ``lns-study ui``, with and without ``--team``: MLflow behind our guard
(``python -m study.ops.serve.mlflow_server``).

It replaces ``mlflow server`` for two reasons. That command imports MLflow, creates or migrates the
database, and starts uvicorn in a second process, which imports MLflow again; here one process does
both, which saves seconds and memory. (With several workers this process creates the database, then
starts them.) And MLflow's routes are partly Flask's and partly FastAPI's, so only a middleware in
front of both sees every request (:class:`study.ops.serve.guard.Guard`).

MLflow's command configures the application through environment variables with private names. This
process sets them and first compares the names with MLflow's. It does not start if they or the
functions called here have changed.

Standard input and output are not used. The listening socket is inherited (``--fd``): it exists
before the server starts, so no other process can take the port. The database's address comes from
``MLFLOW_BACKEND_STORE_URI``, the token from :data:`TOKEN`.
"""

from __future__ import annotations

import argparse
import hmac
import os
import socket
import sys
from pathlib import Path
from typing import Any

from study._compat import MLFLOW_SERVED_BY, MLFLOW_SERVER_VARIABLES, is_login, is_remembered_login
from study.ops.serve.bad_requests import answer_mistakes
from study.ops.serve.confined import confine
from study.ops.serve.guard import Guard, allow_many_connections
from study.ops.serve.logins import FileSet, Logins
from study.ops.serve.routes import is_allowed
from study.ops.serve.team_guard import check
from study.tracking.database_file import watch_engines
from study.tracking.sqlite import prepare, write_statistics

TOKEN = "LNS_STUDY_UI_TOKEN"
"""Environment variable with the token that visitors must present."""
STORE = "MLFLOW_BACKEND_STORE_URI"
"""Environment variable with the database's address."""
HOSTS = "MLFLOW_SERVER_ALLOWED_HOSTS"
LOGINS = "MLFLOW_AUTH_CONFIG_PATH"
"""Environment variable with the path of MLflow's login settings; set for a team's server."""
SECRET = "MLFLOW_FLASK_SERVER_SECRET_KEY"
"""Environment variable with the secret key of a team's server; its processes share it."""
KNOWN = "known"
"""Folder beside the login settings with digests of logins that were valid."""
DESTINATION = MLFLOW_SERVER_VARIABLES["ARTIFACTS_DESTINATION_ENV_VAR"]
"""Environment variable with the folder or address where the server stores artifacts."""
ROOT = "mlflow-artifacts:/"
"""Artifact root of new experiments: the server serves their artifacts."""


def application() -> Guard:
    """Return MLflow's application behind the guard, configured by environment variables.

    It rejects artifact locations outside the server's own, whether they come from a client or from
    the database.

    Raises:
        ImportError, AttributeError: this version of MLflow lacks a name that is used here.
    """
    from mlflow.server import app as pages
    from mlflow.server import handlers

    watch_engines()
    confine(os.environ[STORE], os.environ[DESTINATION])
    served: Any
    if LOGINS in os.environ:
        from mlflow.server.auth import create_app

        served = create_app(pages)  # calls team_guard.authenticate for every request
    else:
        from mlflow.server import fastapi_app

        served = fastapi_app.app
        pages.before_request(handlers.catch_mlflow_exception(check))
    answer_mistakes(pages, served)
    return Guard(
        served,
        is_allowed,
        os.environ[HOSTS].split(","),
        token=os.environ.pop(TOKEN, ""),
        logins=_logins() if LOGINS in os.environ else None,
        command="lns-study ui",
    )


def _logins() -> Logins:
    """Return what checks the logins of a team; its processes know each other's valid logins."""
    key = hmac.digest(os.environ[SECRET].encode(), b"known logins", "sha256")
    known = FileSet(Path(os.environ[LOGINS]).parent / KNOWN)
    return Logins(is_login, is_remembered_login, known=known, key=key)


def _make_database(uri: str) -> None:
    """Create or migrate the database's tables, including the user tables of a team.

    Raises:
        ImportError, AttributeError: this version of MLflow lacks a name that is used here.
    """
    from mlflow.server import constants, handlers

    for known, name in MLFLOW_SERVER_VARIABLES.items():
        if getattr(constants, known) != name:
            raise AttributeError(f"{known} is {getattr(constants, known)}, not {name}")
    prepare(uri)
    handlers.initialize_backend_stores(uri, uri, ROOT)
    if LOGINS in os.environ:
        from mlflow.server.auth import bootstrap_admin_user

        bootstrap_admin_user()
    write_statistics(uri)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m study.ops.serve.mlflow_server")
    parser.add_argument("--fd", type=int, required=True, help="a socket that listens")
    parser.add_argument("--artifacts", required=True)
    parser.add_argument("--allowed-hosts", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--open",
        action="store_true",
        help="let everybody in who reaches the port: for tests and benchmarks",
    )
    options = parser.parse_args()
    if options.open or LOGINS in os.environ:
        os.environ.pop(TOKEN, None)
    elif not os.environ.get(TOKEN):
        parser.error(f"{TOKEN} is not set; start it with `lns-study ui`, which makes one")
    return options


def main() -> None:
    """Run the server; see the module docstring."""
    options = _options()
    uri = os.environ[STORE]
    if LOGINS in os.environ:
        os.umask(0o077)  # a database file contains password hashes
    os.environ |= {HOSTS: options.allowed_hosts, MLFLOW_SERVED_BY: "uvicorn"}
    os.environ |= dict(
        zip(
            MLFLOW_SERVER_VARIABLES.values(),
            (uri, uri, ROOT, options.artifacts, "true"),
            strict=True,
        )
    )
    import uvicorn  # MLflow enables its protection of servers if this module is loaded
    from uvicorn.supervisors import Multiprocess

    try:
        _make_database(uri)
        served = application()
    except (ImportError, AttributeError) as error:
        sys.exit(
            f"lns-study: error: {error}: lns-study does not support this version of MLflow; pip"
            " install 'mlflow>=3.17,<3.18'"
        )
    allow_many_connections()
    listening = [socket.socket(fileno=options.fd)]
    if options.workers == 1:
        uvicorn.Server(uvicorn.Config(served, log_level="warning")).run(sockets=listening)
        return
    config = uvicorn.Config(
        "study.ops.serve.mlflow_server:application",
        factory=True,
        workers=options.workers,
        log_level="warning",
    )
    Multiprocess(config, sockets=listening).run()


if __name__ == "__main__":
    main()
