"""What clients may do on our servers: on a team's, MLflow's basic authentication; on all, no
artifacts at places that clients name.

MLflow lets whoever may make an experiment give it ``artifact_location=file:///any/folder`` and then
read and write there through the server, with the rights of the server's user. On our servers every
experiment's artifacts lie in the server's own root.

Loaded by MLflow's server, a team's calls :func:`authenticate` for every request
(``authorization_function``), a single user's :func:`refuse_places`; the request is read by MLflow's
own parser, so that what is refused here is what it would have taken.
"""

from __future__ import annotations

from typing import Any

from study._compat import request_message

CREATE = "/mlflow/experiments/create"


def authenticate() -> Any:
    """The authorization of flask's current request, or the response that asks for a login.

    Raises:
        MlflowException: the request makes an experiment with a place for artifacts of its own.
    """
    from flask import Response
    from mlflow.server.auth import authenticate_request_basic_auth

    found = authenticate_request_basic_auth()
    if not isinstance(found, Response):
        refuse_places()
    return found


def refuse_places() -> None:
    """Refuse flask's current request if it makes an experiment with a place for artifacts of its
    own.

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
