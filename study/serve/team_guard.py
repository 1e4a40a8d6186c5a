"""Guards of our MLflow servers: a team's requires basic authentication, and none takes artifacts at
places that clients name.

MLflow lets whoever may make an experiment give it ``artifact_location=file:///any/folder`` and then
read and write there through the server, with the rights of the server's user. On our servers every
experiment's artifacts lie in the server's own root.

MLflow's server loads this module. A team's server calls :func:`authenticate` for every request
(``authorization_function``), a single user's :func:`refuse_places`. The request is read by MLflow's
own parser, so that the request that is checked is the one that MLflow executes.
"""

from __future__ import annotations

from typing import Any

from study._compat import request_message

CREATE = "/mlflow/experiments/create"


def authenticate() -> Any:
    """Return the authorization of flask's current request, or a response that asks for a login.

    Raises:
        MlflowException: the request makes an experiment with its own place for artifacts.
    """
    from flask import Response
    from mlflow.server.auth import authenticate_request_basic_auth

    found = authenticate_request_basic_auth()
    if not isinstance(found, Response):
        refuse_places()
    return found


def refuse_places() -> None:
    """Refuse flask's current request if it makes an experiment with its own place for artifacts.

    Raises:
        MlflowException: it does.
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
