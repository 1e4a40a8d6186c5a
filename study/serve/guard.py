"""The guard before our web servers: MLflow's (one user's and a team's) and the dashboard.

Every user of the machine reaches 127.0.0.1, so a server for one user asks for a token. A cookie
would be no place for it: browsers send cookies to every port of a host, so to the server of any
other user of the machine whose page is visited. The token is the first part of the path instead,
``/TOKEN/``: the browser shows it to this server alone. The printed link ``/TOKEN`` leaves it in the
browser's local storage, which belongs to host *and* port, and from there ``/`` finds it for links
that do not have it, such as a report's. MLflow's clients send it as ``MLFLOW_TRACKING_TOKEN``.

Browsers log in to a team's server by themselves, whatever page asks. So requests that another page
makes are refused, also where that page comes from another port: MLflow 3.17 would answer those of
every port of 127.0.0.1. Names under which the server may be called are checked because a stranger's
name can be made to lead here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

HEALTH = "/health"
"""Path that is open to all and tells whether the server answers."""
HEADERS = {
    "Referrer-Policy": "same-origin",  # the address has the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}
"""Headers of every answer: other pages neither embed nor see it, nor learn its address."""
GATE = """<!doctype html><title>lns-study</title><p>{text}</p><script>
const here = location.pathname.slice(1);
if (here) localStorage.setItem("lns-study", here);
const token = localStorage.getItem("lns-study");
if (token) location.replace("/" + token + "/" + location.hash);
</script>
"""
"""Page at ``/`` and, where the token is right, at ``/TOKEN``."""

Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]


def with_port(names: Iterable[str], port: int) -> list[str]:
    """Return the names by which a server at a port may be called."""
    return [form for name in names for form in (name, f"{name}:{port}")]


def link(host: str, port: int, token: str) -> str:
    """Return the address that lets a browser in."""
    return f"http://{host}:{port}/{quote(token, safe='')}"


class Guard:
    """An ASGI application before another.

    Args:
        application: application to guard.
        is_allowed: tells of a method and a decoded path whether they are answered.
        hosts: names, with and without port, by which the server may be called.
        friends: those of them whose pages may call the server by another of its names, as a proxy
            does.
        token: the secret; "" if the application asks for logins itself, or is open to all.
        command: command that prints the link with the token.
    """

    def __init__(
        self,
        application: Any,
        is_allowed: Callable[[str, str], bool],
        hosts: Iterable[str],
        *,
        friends: Iterable[str] = (),
        token: str = "",
        command: str = "",
    ) -> None:
        self._application, self._token, self._is_allowed = application, token, is_allowed
        self._hosts, self._friends = frozenset(hosts), frozenset(friends)
        self._text = (
            f"Open the link that `{command}` has printed, with its token; MLflow's clients, at this"
            " address without a path: MLFLOW_TRACKING_TOKEN."
        )

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._answer(scope, receive, _with_headers(send))

    async def _answer(self, scope: Scope, receive: Any, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path == HEALTH and method in ("GET", "HEAD"):
            await _say(send, 200, "OK")
            return
        if refusal := self._refuse_strangers(scope["headers"]):
            await _say(send, 403, refusal)
            return
        if self._token:
            if path == f"/{self._token}" and method in ("GET", "HEAD"):
                onward = f'<a href="{quote(self._token, safe="")}/">Open the page</a>'
                await _say(send, 200, GATE.format(text=onward), "text/html")
                return
            inside = self._inside(path)
            if inside is None and not any(map(self._is_token, _secrets(scope))):
                await self._ask(method, path, send)
                return
            path = path if inside is None else inside
        if not self._is_allowed(method, path):
            text = "This server answers what browsing and logging of studies need, and not this."
            await _say(send, 404, text)
            return
        scope = {**scope, "path": path, "raw_path": quote(path).encode()}
        await self._application(scope, receive, send)

    def _refuse_strangers(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return why a request's host or the page that made it is refused, or ""."""
        hosts, origins = (
            {value.decode("latin-1").lower() for name, value in headers if name == wanted}
            for wanted in (b"host", b"origin")
        )
        if len(hosts) != 1 or not hosts <= self._hosts:
            return "This server is not called by this name; see --allow-host of `lns-study ui`."
        names = hosts | self._friends
        own = {f"{kind}://{name}" for kind in ("http", "https") for name in names}
        return "" if origins <= own else "This page may not ask here."

    def _inside(self, path: str) -> str | None:
        """Return what follows the token in a path; None without it.

        MLflow's pages use ``/ajax-api``. ``/api`` is for its clients, whose address would be kept
        with the token in it.
        """
        end = 1 + len(self._token)
        if not self._is_token(path[1:end]) or path[end : end + 1] != "/":
            return None
        return None if path[end:].startswith("/api/") else path[end:]

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _ask(self, method: str, path: str, send: Send) -> None:
        """Answer a request without the token; a browser at ``/`` may have it."""
        if path == "/" and method == "GET":
            await _say(send, 401, GATE.format(text=self._text), "text/html")
        else:
            await _say(send, 401, self._text)


def _secrets(scope: Scope) -> Iterator[str]:
    """Yield the passwords and bearer tokens in a request's headers."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, secret = value.decode("latin-1").partition(" ")
            yield _password(secret) if kind.lower() == "basic" else secret


def _password(secret: str) -> str:
    """Return the password of HTTP's basic authentication; "" if the header is malformed."""
    try:
        return base64.b64decode(secret).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _with_headers(send: Send) -> Send:
    """Return what sends a response with :data:`HEADERS`."""

    async def sends(message: Scope) -> None:
        if message["type"] == "http.response.start":
            ours = {name.lower().encode(): value.encode() for name, value in HEADERS.items()}
            left = [pair for pair in message.get("headers", []) if pair[0].lower() not in ours]
            message = {**message, "headers": [*left, *ours.items()]}
        await send(message)

    return sends


async def _say(send: Send, status: int, text: str, kind: str = "text/plain") -> None:
    """Send a whole response."""
    fields = {"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-store"}
    if status == HTTPStatus.UNAUTHORIZED:
        fields["WWW-Authenticate"] = "Bearer"
    encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
