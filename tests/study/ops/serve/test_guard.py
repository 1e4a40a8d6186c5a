"""The guard in front of a small application: which requests pass, and how they are changed."""

from __future__ import annotations

import asyncio
import base64
import threading
from typing import Any

import pytest

from study.ops.serve import guard
from study.ops.serve.guard import MOST_BYTES, MOST_UPLOADS, POLICY, RETRY_AFTER, Guard, with_port
from study.ops.serve.logins import CHECKS, MOST_OF_A_NAME, Logins

NAME, PORT = "mlflow.example.org", 5001
ADA = "Basic " + base64.b64encode(b"ada:secret").decode()
CALL, UPLOAD = "/api/2.0/mlflow/runs/create", "/api/2.0/mlflow-artifacts/artifacts/1/x/model.bin"


class Asked:
    """One request to a guarded application: its answer, and what the application received."""

    def __init__(self, guard: Guard, heard: list[Any]) -> None:
        self._guard, self.heard, self.read = guard, heard, 0
        self.leaves = self.pauses = False

    def __call__(self, *request: Any, **fields: Any) -> tuple[int, dict[str, str]]:
        """Return status and headers; ``read`` counts the parts of the body that are read."""
        return asyncio.run(self.answer(*request, **fields))

    async def answer(
        self,
        path: str = "/",
        method: str = "GET",
        body: list[bytes] | None = None,
        last: asyncio.Event | None = None,
        **fields: str,
    ) -> tuple[int, dict[str, str]]:
        """Return the same within a running loop; ``last`` holds up the last part of the body."""
        parts, sent = list(body or [b""]), list[Any]()
        self.read = 0

        async def receive() -> dict[str, Any]:
            if self.leaves and not parts:
                return {"type": "http.disconnect"}
            if not parts:
                await asyncio.Event().wait()  # as long as the client stays
            part = parts.pop(0)
            self.read += len(part)
            if last is not None and not parts:
                await last.wait()
            more = bool(parts) or self.pauses
            return {"type": "http.request", "body": part, "more_body": more}

        async def send(message: Any) -> None:
            sent.append(message)

        fields = {"host": f"{NAME}:{PORT}", **fields}
        headers = [(key.replace("_", "-").encode(), text.encode()) for key, text in fields.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self._guard(scope, receive, send)
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], answered


def guarded(**options: Any) -> Asked:
    heard: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                await send({"type": "http.response.start", "status": 499, "headers": []})
                return
            body, more = body + message["body"], message["more_body"]
        heard.append((scope, body))
        headers = [(b"access-control-allow-origin", b"*"), (b"x-other", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    names = with_port((NAME, "127.0.0.1"), PORT)
    return Asked(Guard(application, lambda method, path: True, names, **options), heard)


@pytest.mark.parametrize(
    ("origin", "fields"),
    [
        (f"http://{NAME}:{PORT}", {}),
        (f"http://{NAME}", {"host": NAME}),
        (f"https://{NAME}", {"host": NAME, "x_forwarded_proto": "https"}),
        (f"https://{NAME}", {"host": NAME, "x_forwarded_proto": "HTTPS"}),
        (f"http://127.0.0.1:{PORT}", {"host": f"127.0.0.1:{PORT}"}),
    ],
)
def test_a_page_of_the_servers_own_origin_is_answered(origin: str, fields: dict[str, str]) -> None:
    ask = guarded()
    status, headers = ask(origin=origin, **fields)
    assert status == 200
    assert "access-control-allow-origin" not in headers
    assert headers["x-other"] == "1"
    assert b"origin" not in dict(ask.heard[0][0]["headers"])


@pytest.mark.parametrize(
    ("origin", "fields"),
    [
        (f"http://{NAME}", {}),
        (f"https://{NAME}", {}),
        (f"https://{NAME}:{PORT}", {}),
        (f"http://{NAME}", {"host": NAME, "x_forwarded_proto": "https"}),
        (f"https://{NAME}", {"host": NAME}),
        (f"http://{NAME}:{PORT}", {"host": f"127.0.0.1:{PORT}"}),
        ("null", {}),
        ("", {}),
    ],
)
def test_a_page_of_the_same_name_at_another_port_or_scheme_is_refused(
    origin: str, fields: dict[str, str]
) -> None:
    ask = guarded()
    for method in ("GET", "POST", "OPTIONS"):
        status, headers = ask(CALL, method, origin=origin, **fields)
        assert status == 403
        assert not [name for name in headers if name.startswith("access-control")]
    assert ask.heard == []


def test_nobody_is_told_an_address_with_a_token_and_pages_stay_here() -> None:
    for options, policy in (({"token": "t"}, "no-referrer"), ({}, "same-origin")):
        _, headers = guarded(**options)("/t/" if options else "/")
        assert headers["referrer-policy"] == policy
        assert headers["content-security-policy"] == POLICY


def is_ada(user: str, password: str) -> bool:
    return (user, password) == ("ada", "secret")


@pytest.mark.parametrize("path", [CALL, UPLOAD])
@pytest.mark.parametrize("login", ["", "Basic !", "Bearer secret", ADA[:-4]])
@pytest.mark.parametrize("length", [{"content_length": "9"}, {"transfer_encoding": "chunked"}])
def test_no_body_is_read_before_a_login(path: str, login: str, length: dict[str, str]) -> None:
    ask = guarded(logins=Logins(is_ada))
    status, headers = ask(path, "POST", [b"x" * 9], authorization=login, **length)
    assert (status, headers["www-authenticate"]) == (401, 'Basic realm="mlflow"')
    assert (ask.read, ask.heard) == (0, [])
    assert ask(path, "POST", [b"x" * 9], authorization=ADA, **length)[0] == 200
    assert ask.heard[0][1] == b"x" * 9


def test_a_call_has_a_bounded_body_and_an_artifact_is_passed_on_as_it_comes() -> None:
    ask, part = guarded(logins=Logins(is_ada)), b"x" * 2**20
    parts = [part] * (MOST_BYTES // 2**20 + 1)
    whole = str(sum(map(len, parts)))
    assert ask(CALL, "POST", parts, authorization=ADA, content_length=whole)[0] == 413
    assert ask.read == 0
    assert ask(CALL, "POST", parts, authorization=ADA, transfer_encoding="chunked")[0] == 413
    assert ask.read <= MOST_BYTES + len(part)
    assert ask.heard == []
    assert ask(UPLOAD, "PUT", parts, authorization=ADA, content_length=whole)[0] == 200
    assert len(ask.heard[0][1]) == int(whole)


def test_a_user_has_few_uploads_at_once_and_others_are_not_held_up() -> None:
    """Uploads that send one byte and wait; they end when their clients leave."""
    ask = guarded(logins=Logins(lambda user, password: password == "secret"))
    ask.leaves = True
    gate = asyncio.Event()
    bob = "Basic " + base64.b64encode(b"bob:secret").decode()

    async def upload(login: str, held: bool = True) -> int:
        fields = {"authorization": login, "transfer_encoding": "chunked"}
        return (await ask.answer(UPLOAD, "PUT", [b"x"], gate if held else None, **fields))[0]

    async def scene() -> None:
        many = [asyncio.create_task(upload(ADA)) for _ in range(MOST_UPLOADS + 3)]
        done, held = await asyncio.wait(many, timeout=1)
        assert [task.result() for task in done] == [429] * 3
        assert await upload(bob, held=False) == 200
        gate.set()
        assert await asyncio.gather(*held) == [200] * MOST_UPLOADS
        assert await upload(ADA, held=False) == 200

    asyncio.run(scene())


@pytest.mark.parametrize("path", [CALL, UPLOAD])
def test_a_body_that_pauses_is_given_up(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)
    ask = guarded(logins=Logins(is_ada))
    ask.pauses = True
    status, _ = ask(path, "POST", [b"x"], authorization=ADA, content_length="9")
    assert status == (408 if path == CALL else 499)
    assert ask.heard == []


def test_without_a_login_only_health_is_answered() -> None:
    ask = guarded(logins=Logins(is_ada))
    for path in ("/", "/static-files/x.js", "/api/3.0/mlflow/server-info", "/version", "/health/"):
        for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
            assert ask(path, method)[0] == 401, path
    assert ask.heard == []
    assert ask("/health")[0] == 200
    assert ask("/version", authorization=ADA)[0] == 200


def test_who_gives_too_many_wrong_passwords_is_asked_to_wait() -> None:
    ask = guarded(logins=Logins(is_ada))
    wrong = [
        "Basic " + base64.b64encode(f"bob:{number}".encode()).decode()
        for number in range(MOST_OF_A_NAME + 1)
    ]
    statuses = [ask("/version", authorization=login) for login in wrong]
    assert [status for status, _ in statuses] == [401] * MOST_OF_A_NAME + [429]
    assert statuses[-1][1]["retry-after"] == RETRY_AFTER
    assert ask("/version", authorization=ADA)[0] == 200


def test_the_password_of_a_client_that_has_left_is_not_checked() -> None:
    """Two checks run until the client behind them has left, so its own check does not start."""
    gate, asked = threading.Event(), []

    def is_login(user: str, password: str) -> bool:
        asked.append(user)
        return gate.wait(60)

    logins = Logins(is_login)
    ask = guarded(logins=logins)

    async def scene() -> None:
        before = [asyncio.create_task(logins.check(f"{number}", "x")) for number in range(CHECKS)]
        await asyncio.sleep(0)
        ask.leaves = True
        status = await ask.answer(authorization=ADA)
        assert status[0] == 401
        gate.set()
        await asyncio.gather(*before)

    asyncio.run(scene())
    assert "ada" not in asked
    assert ask.heard == []
