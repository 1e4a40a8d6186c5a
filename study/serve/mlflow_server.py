"""The server process of ``lns-study ui``: MLflow for one user, ``python -m
study.serve.mlflow_server``.

``mlflow server`` imports MLflow, makes or migrates the database, and starts uvicorn in a second
process, which imports MLflow again: seconds and memory twice. Here one process does both. MLflow's
command configures that second process by environment variables with private names; they are set
here and compared with MLflow's before anything is served. If they, or the functions called here,
have changed, nothing is served.

Every user of the machine reaches 127.0.0.1, so :class:`Guard` admits only those with the token of
``lns-study ui``: a browser by the printed link, which leaves a cookie, and MLflow's clients by
``MLFLOW_TRACKING_TOKEN``.

Standard input and output are not used; the database's address comes in
``MLFLOW_BACKEND_STORE_URI``, the token in :data:`TOKEN`.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hmac
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

from study._compat import MLFLOW_SERVED_BY, MLFLOW_SERVER_VARIABLES
from study.program import module_command
from study.serve.team_guard import refuse_places
from study.tracking.sqlite import prepare, write_statistics

TOKEN = "LNS_STUDY_UI_TOKEN"
"""Environment variable with the token that visitors must present."""
HEALTH = "/health"
"""Path that is open to all and tells whether the server answers."""
ROOT = "mlflow-artifacts:/"
"""Artifact root of new experiments: the server serves their artifacts."""


def mlflow_command(
    artifacts: str, host: str, port: int, workers: int, hosts: str, more: list[str], options: str
) -> list[str]:
    """Return the command line of ``mlflow server``.

    Args:
        artifacts: folder or address for artifacts of new experiments.
        host: host to listen on.
        port: port to listen on.
        workers: number of processes that answer requests.
        hosts: names by which the server may be called, separated by commas.
        more: further arguments.
        options: options of uvicorn.
    """
    listening = [
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        str(workers),
        "--allowed-hosts",
        hosts,
    ]
    return [
        *(*module_command("mlflow"), "server", *listening, *more),
        *("--artifacts-destination", artifacts, "--uvicorn-opts", options),
    ]


Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]


class Guard:
    """An ASGI application before another: a request without the token gets 401.

    The token is taken from the query ``?token=``, which is answered with a cookie and a redirect to
    the page without it, from that cookie, as password of HTTP's basic authentication, or as its
    bearer token.

    Args:
        application: application to guard.
        token: the secret.
        port: port that is served; it is part of the cookie's name, since cookies are a host's,
            whatever the port.
    """

    def __init__(self, application: Any, token: str, port: int) -> None:
        self._application, self._token, self._cookie = application, token, f"lns_study_{port}"

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan" or scope["path"] == HEALTH:
            await self._application(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["type"] == "http" and any(
            self._is_token(given) for given in query.pop("token", [])
        ):
            left = f"?{urlencode(query, doseq=True)}" if query else ""
            place = "/" + scope["path"].lstrip("/")  # //host would lead elsewhere
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
            await _answer(send, 303, "", {"Location": place + left, "Set-Cookie": cookie})
        elif any(self._is_token(given) for given in self._given(scope)):
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            text = (
                "Open the link that `lns-study ui` has printed, with its token; MLflow's clients:"
                f" MLFLOW_TRACKING_TOKEN or {TOKEN}.\n"
            )
            await _answer(send, 401, text, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _given(self, scope: Scope) -> Iterator[str]:
        """Yield the secrets in a request's headers, any of which may be the token."""
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"cookie":
                try:
                    cookies = SimpleCookie(text)
                except CookieError:
                    continue
                yield from (entry.value for key, entry in cookies.items() if key == self._cookie)
            elif name == b"authorization":
                kind, _, secret = text.partition(" ")
                yield _password(secret) if kind.lower() == "basic" else secret


def _password(secret: str) -> str:
    """Return the password of HTTP's basic authentication; "" if the header is malformed."""
    try:
        return base64.b64decode(secret).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


async def _answer(send: Send, status: int, text: str, headers: dict[str, str]) -> None:
    fields = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store", **headers}
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})


def _application(uri: str) -> Any:
    """Return MLflow's ASGI application over an up-to-date database.

    It refuses artifacts at places that clients name.

    Raises:
        ImportError, AttributeError: this version of MLflow has other parts.
    """
    import uvicorn  # noqa: F401 (by its presence MLflow knows that it serves, and protects itself)
    from mlflow.server import app as pages
    from mlflow.server import constants, handlers
    from mlflow.server.fastapi_app import app

    for known, name in MLFLOW_SERVER_VARIABLES.items():
        if getattr(constants, known) != name:
            raise AttributeError(f"{known} is {getattr(constants, known)}, not {name}")
    pages.before_request(handlers.catch_mlflow_exception(refuse_places))
    prepare(uri)
    handlers.initialize_backend_stores(uri, uri, ROOT)
    write_statistics(uri)
    return app


def main() -> None:
    """Run the process; see the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m study.serve.mlflow_server")
    parser.add_argument("--artifacts", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--allowed-hosts", required=True)
    parser.add_argument(
        "--open",
        action="store_true",
        help="let everybody in who reaches the port: for tests and benchmarks",
    )
    options = parser.parse_args()
    token = os.environ.pop(TOKEN, "")
    if not token and not options.open:
        parser.error(f"{TOKEN} is not set; start it with `lns-study ui`, which makes one")
    uri = os.environ["MLFLOW_BACKEND_STORE_URI"]
    os.environ |= {
        "MLFLOW_SERVER_ALLOWED_HOSTS": options.allowed_hosts,
        MLFLOW_SERVED_BY: "uvicorn",
    }
    os.environ |= dict(
        zip(
            MLFLOW_SERVER_VARIABLES.values(),
            (uri, uri, ROOT, options.artifacts, "true"),
            strict=True,
        )
    )
    try:
        application = _application(uri)
    except (ImportError, AttributeError) as error:
        sys.exit(
            f"lns-study: error: {error}: this MLflow is none that lns-study knows; pip install"
            " 'mlflow>=3.17,<3.18'"
        )
    import uvicorn

    guarded = application if options.open else Guard(application, token, options.port)
    uvicorn.run(guarded, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
