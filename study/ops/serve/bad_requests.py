"""Answers 400, with a reason, to requests whose values MLflow cannot use.

MLflow (3.17) does not check the types of most values. It answers 500 with a traceback in its log
where a client sends a list in place of a number, JSON that is not an object, a character that UTF-8
cannot encode, or an artifact's name that no file can have. Clients repeat a request after 500.

So each request's texts are checked first (:func:`refuse_values`), and exceptions that such values
raise inside MLflow become 400 (:func:`answer_mistakes`). The log has one line for each of these.
Errors of the database and of the disk remain 500.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from study.ops.serve.guard import UPLOAD
from study.ops.serve.routes import PATHS, refuse_artifact

MISTAKES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that MLflow's handlers raise for values of a wrong type."""
OCCUPIED = (FileExistsError, IsADirectoryError, NotADirectoryError)
"""Exceptions for a file where an artifact's name needs a folder, or the reverse."""
MOST_SHOWN = 200
"""Maximum number of characters of an exception's text in an answer."""
DEEP = "The JSON of this request is nested too deeply; send flat values."

_logger = logging.getLogger(__name__)


def refuse_values() -> None:
    """Check the texts of flask's current request.

    Raises:
        MlflowException: the body is JSON but not an object, or a text cannot be used.
    """
    from flask import request
    from werkzeug.exceptions import ClientDisconnected

    body = None
    try:
        if not UPLOAD.fullmatch(request.path):
            with suppress(ClientDisconnected):  # a request of FastAPI's, which has no body here
                body = request.get_json(force=True, silent=True)
        texts = [*request.args.items(multi=True), *_texts("", body)]
    except RecursionError:
        raise _refusal(DEEP) from None
    if not isinstance(body, dict | str | None):
        raise _refusal(
            f"The body of this request is a JSON {type(body).__name__}; it must be an object,"
            ' {"name": value}'
        )
    for key, text in texts:
        if reason := _refuse_text(key, text):
            raise _refusal(reason)


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON value with their keys, and the keys themselves."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(key, each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield "", name
            yield from _texts(name, each)


def _refuse_text(key: str, text: str) -> str:
    if key in PATHS and text:
        return refuse_artifact(text)
    if key == "page_token" and not text.isascii():
        return f"page_token={text[:20]!r}...: must be a token that this server has returned"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        odd = text[error.start]
        return f"{key or 'text'}: has {odd!r}, which UTF-8 cannot encode; leave it out"
    return ""


def _refusal(text: str) -> Exception:
    from mlflow.exceptions import MlflowException

    refusal: Exception = MlflowException.invalid_parameter_value(text)
    return refusal


def answer_mistakes(pages: Any, served: Any) -> None:
    """Register handlers for exceptions that a request's values raise in MLflow.

    Args:
        pages: MLflow's flask application.
        served: the FastAPI application around it, which receives artifacts.
    """

    from graphql import GraphQLError

    def in_pages(error: Exception) -> Any:
        from flask import Response, request

        answer = _body(f"{request.method} {request.path}", error)
        return Response(answer, HTTPStatus.BAD_REQUEST, mimetype="application/json")

    async def in_served(request: Any, error: Exception) -> Any:
        from starlette.responses import Response

        answer = _body(f"{request.method} {request.url.path}", error)
        return Response(answer, HTTPStatus.BAD_REQUEST, media_type="application/json")

    for kind in (*MISTAKES, *OCCUPIED, GraphQLError):
        pages.register_error_handler(kind, in_pages)
        served.add_exception_handler(kind, in_served)


def _body(request: str, error: Exception) -> str:
    """Return the JSON answer to a request that raised an error, and log it."""
    _logger.warning("%r: answered 400: %r", request, error)
    if isinstance(error, OCCUPIED):
        text = (
            "artifact: a file has this name, or a part of it, where this request needs a folder, or"
            " the reverse; use another name"
        )
    elif isinstance(error, RecursionError):
        text = DEEP
    else:
        text = (
            f"MLflow cannot use the values of this request ({type(error).__name__}:"
            f" {str(error)[:MOST_SHOWN]}); give them the types of MLflow's REST API,"
            " https://mlflow.org/docs/latest/rest-api.html"
        )
    return str(_refusal(text).serialize_as_json())  # type: ignore[attr-defined]
