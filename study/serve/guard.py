"""The guard before our web servers: MLflow's (one user's and a team's) and the dashboard.

Every user of the machine reaches 127.0.0.1, so a server for one user asks for a token. A cookie
would be no place for it: browsers send cookies to every port of a host, so to the server of any
other user of the machine whose page is visited. The token is the first part of the path instead,
``/TOKEN/``: the browser shows it to this server alone. The printed link ``/TOKEN`` leaves it in the
browser's local storage, which belongs to host *and* port, and from there ``/`` finds it for links
that do not have it, such as a report's. MLflow's clients send it as ``MLFLOW_TRACKING_TOKEN``.

Browsers log in to a team's server by themselves, whatever page asks. So requests that another page
makes are refused, also where that page comes from another port: MLflow 3.17 would answer those of
every port of 127.0.0.1. Such a page is one whose origin is not the scheme, name and port that the
request itself is for; a proxy keeps ``Host`` and says by ``X-Forwarded-Proto`` that it speaks
https. Names under which the server may be called are checked because a stranger's name can be made
to lead here.

A page may be a stranger's though it comes from here: MLflow shows artifacts of HTML, in a frame
without our origin. So no address with the token is told to anybody (``Referrer-Policy``), and pages
send nothing to, and load nothing from, other servers (:data:`POLICY`).

Where MLflow asks for logins, it reads a request's body first, and answers some routes (its version,
the files of its page) without one. Here the login is checked before anything else is answered or
the body is read, and a call that is no upload of an artifact has at most :data:`MOST_BYTES`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

HEALTH = "/health"
"""Path that is open to all and tells whether the server answers."""
MOST_BYTES = 32 * 2**20
"""Largest body of a request, but for artifacts, which MLflow writes to disk as they come."""
UPLOAD = re.compile(r"/(?:ajax-)?api/2\.0/mlflow-artifacts/artifacts/.+")
POLICY = (
    "default-src 'self' blob: data: 'unsafe-inline' 'unsafe-eval'; object-src 'none';"
    " form-action 'self'; base-uri 'self'; frame-ancestors 'self'"
)
"""Content security policy: MLflow's page runs scripts in it and makes code, of its own server's
texts only; a page that is shown in it has the same policy."""
HEADERS = {
    "Referrer-Policy": "same-origin",
    "Content-Security-Policy": POLICY,
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

PORTS = {"http": ":80", "https": ":443"}
"""Ports that browsers leave out."""

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
        token: the secret; "" if the application asks for logins itself, or is open to all.
        is_login: tells whether a user has a password; None if the application asks for none.
        command: command that prints the link with the token.
    """

    def __init__(
        self,
        application: Any,
        is_allowed: Callable[[str, str], bool],
        hosts: Iterable[str],
        *,
        token: str = "",
        is_login: Callable[[str, str], bool] | None = None,
        command: str = "",
    ) -> None:
        self._application, self._token, self._is_allowed = application, token, is_allowed
        self._hosts, self._is_login = frozenset(hosts), is_login
        self._headers = HEADERS | ({"Referrer-Policy": "no-referrer"} if token else {})
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
            await self._answer(scope, receive, _with_headers(send, self._headers))

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
        if self._is_login is not None and not await self._logs_in(scope):
            await _say(send, 401, "Log in first.", ask="Basic")
            return
        if not self._is_allowed(method, path):
            text = "This server answers what browsing and logging of studies need, and not this."
            await _say(send, 404, text)
            return
        if _has_body(scope) and not UPLOAD.fullmatch(path):
            body = await _read_body(scope, receive)
            if body is None:
                text = f"A call of this server has at most {MOST_BYTES:,} bytes; send fewer."
                await _say(send, 413, text)
                return
            receive = _replay(body, receive)
        # it has been judged; MLflow would judge it by a list, and answer to pages of that
        headers = [pair for pair in scope["headers"] if pair[0] != b"origin"]
        scope = {**scope, "path": path, "raw_path": quote(path).encode(), "headers": headers}
        await self._application(scope, receive, send)

    async def _logs_in(self, scope: Scope) -> bool:
        """Tell whether a request has the name and the password of a user."""
        assert self._is_login is not None
        for name, value in scope["headers"]:
            kind, _, secret = value.decode("latin-1").partition(" ")
            if name == b"authorization" and kind.lower() == "basic":
                user, _, password = _decoded(secret).partition(":")
                return await asyncio.to_thread(self._is_login, user, password)
        return False

    def _refuse_strangers(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return why a request's host or the page that made it is refused, or ""."""
        hosts, origins, schemes = (
            {value.decode("latin-1").lower() for name, value in headers if name == wanted}
            for wanted in (b"host", b"origin", b"x-forwarded-proto")
        )
        if len(hosts) != 1 or not hosts <= self._hosts:
            return "This server is not called by this name; see --allow-host of `lns-study ui`."
        scheme = "https" if schemes == {"https"} else "http"  # no page can send this header
        own = {f"{scheme}://{host.removesuffix(PORTS[scheme])}" for host in hosts}
        if origins <= own:
            return ""
        return (
            "This page may not ask here: it is of another origin; a proxy must keep Host, and say"
            " X-Forwarded-Proto: https if it speaks that."
        )

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
            yield _decoded(secret).partition(":")[2] if kind.lower() == "basic" else secret


def _has_body(scope: Scope) -> bool:
    """Tell whether a request may have a body."""
    fields = dict(scope["headers"])
    return fields.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in fields


async def _read_body(scope: Scope, receive: Any) -> bytes | None:
    """Return a request's body; None if it is too large, or breaks off."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MOST_BYTES:
        return None
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > MOST_BYTES:
            return None
    return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    """Return what gives an application a body that has been read, then what comes after it."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receives() -> Any:
        return left.pop() if left else await receive()

    return receives


def _decoded(secret: str) -> str:
    """Return user and password of HTTP's basic authentication; "" if it is malformed."""
    try:
        return base64.b64decode(secret).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return what sends a response with our headers, and without those that let other pages in."""

    async def sends(message: Scope) -> None:
        if message["type"] == "http.response.start":
            ours = {name.lower().encode(): value.encode() for name, value in headers.items()}
            left = [
                pair
                for pair in message.get("headers", [])
                if pair[0].lower() not in ours
                and not pair[0].lower().startswith(b"access-control-")
            ]
            message = {**message, "headers": [*left, *ours.items()]}
        await send(message)

    return sends


async def _say(
    send: Send, status: int, text: str, kind: str = "text/plain", ask: str = "Bearer"
) -> None:
    """Send a whole response; ``ask`` is how one may log in."""
    fields = {"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-store"}
    if status == HTTPStatus.UNAUTHORIZED:
        fields["WWW-Authenticate"] = ask if ask == "Bearer" else f'{ask} realm="mlflow"'
    encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
