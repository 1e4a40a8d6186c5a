"""The process behind ``lns-study ui``: MLflow's server for one user, ``python -m
study.serve.mlflow_server``.

``mlflow server`` imports MLflow, makes or migrates the database, and starts uvicorn in a second
process, which imports MLflow again: seconds and memory twice. Here one process does both. What
MLflow's command tells that second process, it tells by environment variables whose names are its
own affair; they are set here and compared with MLflow's before anything is served. Where they or
the functions called here are not what they were, nothing is served.

127.0.0.1 is every user's of the machine, so :class:`Guard` lets in only who has the token of
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
from study.serve.team_guard import refuse_places
from study.tracking.sqlite import use_write_ahead_log, write_statistics

TOKEN = "LNS_STUDY_UI_TOKEN"
"""Variable with what a visitor must know."""
HEALTH = "/health"
"""Open to all: whether the server answers."""
ROOT = "mlflow-artifacts:/"
"""Of new experiments: the server hands their artifacts out."""


def mlflow_command(
    artifacts: str, host: str, port: int, workers: int, hosts: str, more: list[str], options: str
) -> list[str]:
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
    where = [
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
        *(sys.executable, "-m", "mlflow", "server", *where, *more),
        *("--artifacts-destination", artifacts, "--uvicorn-opts", options),
    ]


Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]


class Guard:
    """An ASGI application before another: who does not know the token gets 401.

    It is taken from the query ``?token=``, which is answered with a cookie and a redirect to the
    page without it, from that cookie, as password of HTTP's basic authentication, or as its bearer
    token.

    Args:
        application: what is guarded.
        token: the secret.
        port: that is served; cookies are a host's, whatever the port, so it is part of the cookie's
            name.
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
            says = (
                "Open the link that `lns-study ui` has printed, with its token; MLflow's clients:"
                f" MLFLOW_TRACKING_TOKEN or {TOKEN}.\n"
            )
            await _answer(send, 401, says, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _given(self, scope: Scope) -> Iterator[str]:
        """What a request shows instead of the token."""
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
    """The password of HTTP's basic authentication; "" if that is none."""
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
    """MLflow's ASGI application over a database that is up to date, without artifacts at places
    that clients name.

    Raises:
        ImportError, AttributeError: MLflow has other parts than this knows.
    """
    import uvicorn  # noqa: F401 (by its presence MLflow knows that it serves, and protects itself)
    from mlflow.server import app as pages
    from mlflow.server import constants, handlers
    from mlflow.server.fastapi_app import app

    for known, name in MLFLOW_SERVER_VARIABLES.items():
        if getattr(constants, known) != name:
            raise AttributeError(f"{known} is {getattr(constants, known)}, not {name}")
    pages.before_request(handlers.catch_mlflow_exception(refuse_places))
    use_write_ahead_log(uri)
    handlers.initialize_backend_stores(uri, uri, ROOT)
    write_statistics(uri)
    return app


def main() -> None:
    """The process; see the module."""
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
