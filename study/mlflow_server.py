"""The process behind ``lns-study ui``: MLflow's server for one user, ``python -m study.mlflow_server``.

``mlflow server`` imports MLflow, makes or migrates the database, and starts uvicorn in a second process, which imports MLflow again:
seconds and memory twice. Here one process does both. What MLflow's command tells that second process, it tells by environment variables
whose names are its own affair; they are set here and compared with MLflow's before anything is served. Where they or the functions
called here are not what they were, ``mlflow server`` takes over, as slow as it is.

Standard input and output are not used; the database's address comes in ``MLFLOW_BACKEND_STORE_URI``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from study.sqlite import use_write_ahead_log, write_statistics

ROOT = "mlflow-artifacts:/"
"""Of new experiments: the server hands their artifacts out."""


def _variables(uri: str, artifacts: str) -> dict[str, tuple[str, str]]:
    """Variables that the application reads when it is imported or called: name in :mod:`mlflow.server.constants`, name, value."""
    return {
        "BACKEND_STORE_URI_ENV_VAR": ("_MLFLOW_SERVER_FILE_STORE", uri),
        "REGISTRY_STORE_URI_ENV_VAR": ("_MLFLOW_SERVER_REGISTRY_STORE", uri),
        "ARTIFACT_ROOT_ENV_VAR": ("_MLFLOW_SERVER_ARTIFACT_ROOT", ROOT),
        "ARTIFACTS_DESTINATION_ENV_VAR": ("_MLFLOW_SERVER_ARTIFACT_DESTINATION", artifacts),
        "SERVE_ARTIFACTS_ENV_VAR": ("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true"),
    }


def mlflow_command(artifacts: str, host: str, port: int, workers: int, hosts: str, more: list[str], options: str) -> list[str]:
    """``mlflow server`` as a command line.

    Args:
        artifacts: folder or address for artifacts of new experiments.
        host: to listen on.
        port: likewise.
        workers: processes that answer requests.
        hosts: names that it may be called by, with commas.
        more: further arguments.
        options: of uvicorn.
    """
    where = ["--host", host, "--port", str(port), "--workers", str(workers), "--allowed-hosts", hosts]
    return [
        *(sys.executable, "-m", "mlflow", "server", *where, *more),
        *("--artifacts-destination", artifacts, "--uvicorn-opts", options),
    ]


def _application(uri: str, artifacts: str) -> Any:
    """MLflow's ASGI application over a database that is up to date.

    Raises:
        ImportError, AttributeError: MLflow has other parts than this knows.
    """
    import uvicorn  # noqa: F401 (by its presence MLflow knows that it serves, and protects itself)
    from mlflow.server import constants, handlers
    from mlflow.server.fastapi_app import app

    for known, (name, _) in _variables(uri, artifacts).items():
        if getattr(constants, known) != name:
            raise AttributeError(f"{known} is {getattr(constants, known)}, not {name}")
    use_write_ahead_log(uri)
    handlers.initialize_backend_stores(uri, uri, ROOT)
    write_statistics(uri)
    return app


def main() -> None:
    """The process; see the module."""
    parser = argparse.ArgumentParser(prog="python -m study.mlflow_server")
    parser.add_argument("--artifacts", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--allowed-hosts", required=True)
    options = parser.parse_args()
    before = dict(os.environ)
    uri = os.environ["MLFLOW_BACKEND_STORE_URI"]
    os.environ |= {"MLFLOW_SERVER_ALLOWED_HOSTS": options.allowed_hosts, "_MLFLOW_SGI_NAME": "uvicorn"}
    os.environ |= dict(_variables(uri, options.artifacts).values())
    try:
        application = _application(uri, options.artifacts)
    except (ImportError, AttributeError) as error:
        print(f"lns-study: warning: {error}; starting `mlflow server` instead", file=sys.stderr, flush=True)
        words = mlflow_command(options.artifacts, options.host, options.port, 1, options.allowed_hosts, [], "--log-level warning")
        os.execve(words[0], words, before)
    import uvicorn

    uvicorn.run(application, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
