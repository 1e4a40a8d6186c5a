"""ASGI middleware that guards our web servers: MLflow's (single-user and team) and the dashboard.

**Token.** Every local user can connect to 127.0.0.1, so a single-user server asks for a token. A
cookie would leak it: browsers send cookies to every port of a host, so also to servers of other
users on the same machine. The token is the first part of the path instead, ``/TOKEN/``, which the
browser sends to this server only. The page behind the printed link ``/TOKEN`` saves it in the
browser's local storage, which is separate for each host *and* port. From there the page at ``/``
reads it, for links without the token such as those in a report. MLflow's clients send it as
``MLFLOW_TRACKING_TOKEN``.

**Origin.** Browsers send a saved login of a team's server with every request, no matter which page
makes it. So the guard rejects requests from pages of another origin (scheme, host and port),
including other ports of 127.0.0.1, which MLflow 3.17 would accept. A proxy must keep ``Host`` and
set ``X-Forwarded-Proto`` if it speaks https. The guard checks the host name because of DNS
rebinding: anybody can make a name of their own resolve to this server.

**Untrusted pages.** MLflow shows HTML artifacts, which may be malicious, in a frame without our
origin. So addresses with the token are not sent in referrers (``Referrer-Policy``), and pages
cannot contact other servers (:data:`POLICY`).

**Login.** MLflow itself reads a request's body before it checks the login, and serves some routes
(its version, static files) without a login. The guard checks the login first, within the limits of
:mod:`study.ops.serve.logins`. A request other than an artifact upload may have a body of at most
:data:`MOST_BYTES`.

**Uploads.** Before it receives an upload, MLflow looks up its user's rights, which blocks the
process for about 8 ms. So the guard rejects further uploads of a user who has :data:`MOST_UPLOADS`
at once, and gives up a body that sends nothing for :data:`BODY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from study.ops.serve.logins import WRONG_SECONDS, Logins, TooManyLoginsError
from study.ops.serve.routes import refuse_name

HEALTH = "/health"
"""Path of the health check, which needs no token or login."""
MOST_BYTES = 32 * 2**20
"""Maximum size of a request body in bytes, except for artifacts, which MLflow streams to disk."""
MOST_UPLOADS = 32
"""Maximum number of artifact uploads of one user that a process receives at once."""
BODY_SECONDS = 60.0
"""Seconds without data after which the rest of a request's body is given up."""
UPLOAD = re.compile(r"/(?:ajax-)?api/2\.0/mlflow-artifacts/artifacts/.+")
POLICY = (
    "default-src 'self' blob: data: 'unsafe-inline' 'unsafe-eval'; object-src 'none';"
    " form-action 'self'; base-uri 'self'; frame-ancestors 'self'"
)
"""Content security policy. MLflow's page needs inline scripts and ``eval``; both are limited to
content from this server. Pages in its frames have the same policy."""
HEADERS = {
    "Referrer-Policy": "same-origin",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}
"""Headers of every response. Other sites can neither embed nor read it, nor learn its address."""
GATE = """<!doctype html><title>lns-study</title><p>{text}</p><script>
const here = location.pathname.slice(1);
if (here) localStorage.setItem("lns-study", here);
const token = localStorage.getItem("lns-study");
if (token) location.replace("/" + token + "/" + location.hash);
</script>
"""
"""Page at ``/`` and, with the correct token, at ``/TOKEN``; it saves or reads the token."""

RETRY_AFTER = f"{WRONG_SECONDS / 2:.0f}"
"""Seconds after which a client whose login cannot be checked now should ask again."""
BUSY = (
    "Too many logins are being checked, or too many passwords were wrong for this user name; ask"
    f" again in {RETRY_AFTER} s."
)
FULL = f"You have {MOST_UPLOADS} uploads here; wait for one to end, then send this one again."
REFUSED_BODIES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (
        f"A call of this server has at most {MOST_BYTES:,} bytes; send fewer."
    ),
    HTTPStatus.REQUEST_TIMEOUT: (
        f"Nothing of this call's body came for {BODY_SECONDS:g} s; send it again without a pause."
    ),
}
"""Answers to calls whose body is too large or does not come."""
PORTS = {"http": ":80", "https": ":443"}
"""Default ports, which browsers leave out of an origin."""

Scope = MutableMapping[str, Any]
Send = Callable[[Scope], Awaitable[None]]


def allow_many_connections() -> None:
    """Raise this process's limit on open files to its hard limit.

    Each connection is an open file, also one that sends nothing. At the usual limit, 1,024, any
    local user could keep everybody else out by holding that many connections.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # macOS has no such limit, and takes no such value
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def with_port(names: Iterable[str], port: int) -> list[str]:
    """Return the values of ``Host`` for a server: each name with and without the port."""
    return [form for name in names for form in (name, f"{name}:{port}")]


def link(host: str, port: int, token: str) -> str:
    """Return the address that gives a browser access."""
    return f"http://{host}:{port}/{quote(token, safe='')}"


class Guard:
    """ASGI middleware that checks every request before it reaches the application.

    Args:
        application: ASGI application to guard.
        is_allowed: returns whether a method and a decoded path are served.
        hosts: allowed values of ``Host``, with and without port.
        token: the secret; "" if the application uses logins, or is open to everybody.
        logins: checks user names and passwords; None without logins.
        command: command that prints the link with the token.
    """

    def __init__(
        self,
        application: Any,
        is_allowed: Callable[[str, str], bool],
        hosts: Iterable[str],
        *,
        token: str = "",
        logins: Logins | None = None,
        command: str = "",
    ) -> None:
        self._application, self._token, self._is_allowed = application, token, is_allowed
        self._hosts, self._logins = frozenset(hosts), logins
        self._uploads = Counter[str]()
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
        if self._logins is not None:
            try:
                logged_in, receive = await _logs_in(self._logins, scope, receive)
            except TooManyLoginsError:
                await _say(send, 429, BUSY, more={"Retry-After": RETRY_AFTER})
                return
            if not logged_in:
                await _say(send, 401, "Log in first.", ask="Basic")
                return
        await self._pass_on(scope, path, receive, send)

    async def _pass_on(self, scope: Scope, path: str, receive: Any, send: Send) -> None:
        """Let the application answer a request of somebody who may ask."""
        method = scope["method"]
        if refusal := refuse_name(path, scope.get("query_string", b"")):
            await _say(send, 400, refusal)
            return
        if not self._is_allowed(method, path):
            text = "This server answers what browsing and logging of studies need, and not this."
            await _say(send, 404, text)
            return
        # the origin has been checked; MLflow's own check would also allow a list of other origins
        headers = [pair for pair in scope["headers"] if pair[0] != b"origin"]
        scope = {**scope, "path": path, "raw_path": quote(path).encode(), "headers": headers}
        if not _has_body(scope):
            await self._application(scope, receive, send)
        elif UPLOAD.fullmatch(path):
            await self._take_upload(scope, _give_up_pauses(receive), send)
        else:
            body = await _read_body(scope, _give_up_pauses(receive))
            if isinstance(body, HTTPStatus):
                await _say(send, body, REFUSED_BODIES[body])
                return
            await self._application(scope, _replay(body, receive), send)

    async def _take_upload(self, scope: Scope, receive: Any, send: Send) -> None:
        """Let the application receive an upload, if its user has not too many."""
        user, _ = _login(scope) or ("", "")
        if self._uploads[user] >= MOST_UPLOADS:
            await _say(send, 429, FULL, more={"Retry-After": RETRY_AFTER})
            return
        self._uploads[user] += 1
        try:
            await self._application(scope, receive, send)
        finally:
            self._uploads[user] -= 1
            if not self._uploads[user]:
                del self._uploads[user]

    def _refuse_strangers(self, headers: list[tuple[bytes, bytes]]) -> str:
        """Return why a request's host or origin is rejected, or "" if both are allowed."""
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
        """Return the rest of a path after the token; None if the token is missing.

        Also None for ``/TOKEN/api``: MLflow's pages use ``/ajax-api``, and its clients would store
        an address with the token in it.
        """
        end = 1 + len(self._token)
        if not self._is_token(path[1:end]) or path[end : end + 1] != "/":
            return None
        return None if path[end:].startswith("/api/") else path[end:]

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    async def _ask(self, method: str, path: str, send: Send) -> None:
        """Respond to a request without the token; at ``/`` the browser may have it saved."""
        if path == "/" and method == "GET":
            await _say(send, 401, GATE.format(text=self._text), "text/html")
        else:
            await _say(send, 401, self._text)


async def _logs_in(logins: Logins, scope: Scope, receive: Any) -> tuple[bool, Any]:
    """Return whether a request has the name and password of a user, and its ``receive`` function.

    Raises:
        TooManyLoginsError: the login cannot be checked now.
    """
    if (login := _login(scope)) is None:
        return False, receive
    if logins.is_remembered(*login):
        return True, receive
    if _has_body(scope):  # to notice that the client leaves, its body would be read
        return await logins.check(*login), receive
    check = asyncio.ensure_future(logins.check(*login))
    return await _unless_left(check, receive), _replay(b"", receive)


def _login(scope: Scope) -> tuple[str, str] | None:
    """Return the user name and password of a request, unchecked; None without basic login."""
    for name, value in scope["headers"]:
        kind, _, secret = value.decode("latin-1").partition(" ")
        if name == b"authorization" and kind.lower() == "basic":
            user, _, password = _decoded(secret).partition(":")
            return user, password
    return None


async def _unless_left(check: asyncio.Future[bool], receive: Any) -> bool:
    """Return the result of a check; cancel it and return False if the client disconnects.

    The request must not have a body: its one message, an empty body, is taken.
    """

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    left = asyncio.ensure_future(leaves())
    try:
        either: set[asyncio.Future[Any]] = {check, left}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return check.done() and check.result()
    finally:
        left.cancel()
        check.cancel()
        await asyncio.gather(check, left, return_exceptions=True)


def _secrets(scope: Scope) -> Iterator[str]:
    """Yield the passwords and bearer tokens in a request's headers."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, secret = value.decode("latin-1").partition(" ")
            yield _decoded(secret).partition(":")[2] if kind.lower() == "basic" else secret


def _has_body(scope: Scope) -> bool:
    """Return whether a request may have a body."""
    fields = dict(scope["headers"])
    return fields.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in fields


async def _read_body(scope: Scope, receive: Any) -> bytes | HTTPStatus:
    """Return a request's body, or the status of the answer if it is too large or incomplete."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MOST_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return HTTPStatus.REQUEST_TIMEOUT
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > MOST_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return b"".join(parts)


def _give_up_pauses(receive: Any) -> Any:
    """Return a ``receive`` function that reports a disconnect if a body pauses for too long."""
    more = True

    async def receives() -> Any:
        nonlocal more
        try:
            message = await asyncio.wait_for(receive(), BODY_SECONDS if more else None)
        except TimeoutError:
            message = {"type": "http.disconnect"}
        more = message.get("more_body", False)
        return message

    return receives


def _replay(body: bytes, receive: Any) -> Any:
    """Return a ``receive`` function that replays a body that was read, then continues as usual."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receives() -> Any:
        return left.pop() if left else await receive()

    return receives


def _decoded(secret: str) -> str:
    """Return ``user:password`` from HTTP basic authentication; "" if it is malformed."""
    try:
        return base64.b64decode(secret).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return a ``send`` function that adds our headers and removes CORS headers."""

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
    send: Send,
    status: int,
    text: str,
    kind: str = "text/plain",
    ask: str = "Bearer",
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Send a complete response.

    Args:
        send: the ASGI ``send`` function.
        status: HTTP status.
        text: the body.
        kind: the body's media type.
        ask: authentication scheme for status 401.
        more: additional headers.
    """
    fields = {"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-store", **more}
    if status == HTTPStatus.UNAUTHORIZED:
        fields["WWW-Authenticate"] = ask if ask == "Bearer" else f'{ask} realm="mlflow"'
    encoded = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
