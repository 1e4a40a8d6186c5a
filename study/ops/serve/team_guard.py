"""Request checks that run inside MLflow: basic authentication on a team's server, and, on any
server, no artifact locations chosen by clients and no values that MLflow cannot use.

In MLflow, a user who may create an experiment can set ``artifact_location=file:///any/folder`` and
then read and write there through the server, with the permissions of the server's user. On our
servers all artifacts are in the server's own root.

MLflow's server loads this module. A team's server calls :func:`authenticate` for every request
(``authorization_function``), a single-user server calls :func:`check`. Requests are parsed
by MLflow's own parser, so the checked request is the one that MLflow executes.
"""

from __future__ import annotations

from typing import Any

from study._compat import request_message
from study.ops.serve.bad_requests import refuse_values

CREATE = "/mlflow/experiments/create"


def authenticate() -> Any:
    """Return the authorization of flask's current request, or a response that asks for a login.

    Raises:
        MlflowException: :func:`check` refuses the request.
    """
    from flask import Response
    from mlflow.server.auth import authenticate_request_basic_auth

    found = authenticate_request_basic_auth()
    if not isinstance(found, Response):
        check()
    return found


def check() -> None:
    """Check the values and the artifact location of flask's current request.

    Raises:
        MlflowException: a value cannot be used, or the request chooses an artifact location.
    """
    refuse_values()
    refuse_places()


def refuse_places() -> None:
    """Check that flask's current request does not choose an artifact location.

    Raises:
        MlflowException: the request creates an experiment with its own artifact location.
    """
    from flask import request
    from mlflow.exceptions import MlflowException
    from mlflow.protos.service_pb2 import CreateExperiment

    if not request.path.endswith(CREATE):
        return
    location = request_message(CreateExperiment()).artifact_location
    if location:
        raise MlflowException.invalid_parameter_value(
            f"artifact_location={location!r}: this server keeps artifacts in its own place; leave"
            " artifact_location out"
        )
