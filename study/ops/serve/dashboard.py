"""A live page (``lns-study report --serve``): the study's report, served by uvicorn (a dependency
of MLflow) and written again every few seconds while the ledger grows.

The page reloads itself while the study runs, with a refresh tag and no script. The server listens
on 127.0.0.1 behind the same guard as MLflow's pages (:mod:`study.ops.serve.guard`). The page shows
the report and the current progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study.engines.silence import describe_silent
from study.ledger.lock import is_locked
from study.ledger.log import FILE
from study.ledger.state import ENDED, RUNNING, StudyState
from study.ledger.studies import condition, read
from study.ops.serve.guard import Guard, allow_many_connections, link, with_port
from study.ops.serve.ui import listen
from study.report.write import write_report
from study.text import printable
from study.tracking.address import HOST, WHERE
from trainers.files import MOST_JSON, read_own

RELOAD = """<meta http-equiv="refresh" content="{seconds:g}">"""


class Page:
    """Latest report of the study in ``folder``.

    The report is written to a temporary folder when the ledger has grown or the study's lock has
    changed. The lock counts because the last event is written while the study still holds it.

    Args:
        folder: folder of the study.
        every: seconds between two reloads of the page; reports are written at most twice in it.
    """

    def __init__(self, folder: Path, every: float) -> None:
        self._folder, self._every = folder, every
        self._lock = threading.Lock()
        self._made: tuple[tuple[int, bool], float] = (-1, False), 0.0
        self._text, self._state = "", StudyState()

    def text(self) -> str:
        """Return the page as HTML: the current progress above the latest report."""
        with self._lock:
            now = (self._folder / FILE).stat().st_size, is_locked(self._folder)
            if now != self._made[0] and time.monotonic() - self._made[1] >= self._every / 2:
                self._state = read(self._folder)
                self._text = self._render(self._state)
                self._made = now, time.monotonic()
            return self._with_head(self._text, self._state)

    def _render(self, state: StudyState) -> str:
        shown = dataclasses.replace(state, outcome=state.outcome or condition(self._folder, state))
        with tempfile.TemporaryDirectory() as scratch:
            with contextlib.suppress(OSError):  # needed for the links to MLflow
                note = read_own(self._folder / WHERE, MOST_JSON)
                (Path(scratch) / WHERE).write_bytes(note)
            written = write_report(shown, Path(scratch) / "report", self._folder)
            return (written / "report.html").read_text(encoding="utf-8")

    def _with_head(self, text: str, state: StudyState) -> str:
        now, trials = condition(self._folder, state), state.trials
        done = sum(trial.status in ENDED for trial in trials)
        running = sum(trial.status == RUNNING for trial in trials) if now == RUNNING else 0
        head = (
            f"{now}: {done} of {len(trials)} trials have ended, {running} run;"
            f" {time.strftime('%H:%M:%S UTC', time.gmtime())}"
        )
        silent = describe_silent(state, time.time()) if now == RUNNING else []
        lines = "".join(f"<p>{html.escape(printable(line))}</p>" for line in silent)
        reload = RELOAD.format(seconds=max(1.0, self._every)) if now == RUNNING else ""
        text = text.replace("<meta charset", f"{reload}<meta charset", 1)
        return text.replace(
            "<body>",
            f'<body>\n<p id="progress"><progress max="{len(trials)}"'
            f' value="{done}"></progress> {html.escape(printable(head))}</p>{lines}',
            1,
        )


def make_app(page: Page, port: int, token: str) -> Guard:
    """Return the ASGI application: the page at ``/``, behind the guard."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        text = await asyncio.to_thread(page.text)
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else text.encode()
        await send({"type": "http.response.body", "body": body})

    return Guard(
        application,
        lambda method, path: method in ("GET", "HEAD") and path == "/",
        with_port((HOST, "localhost"), port),
        token=token,
        command="lns-study report --serve",
    )


def serve(folder: Path, port: int, every: float, say: Callable[[str], None]) -> int:
    """Serve the page until Ctrl-C; return the exit code."""
    import uvicorn

    token = secrets.token_urlsafe(24)
    allow_many_connections()
    with listen(port) as listening:
        say(
            f"The report of {folder.name}, renewed every {every:g} s:"
            f" {link(HOST, port, token)} - Ctrl-C ends it."
        )
        application = make_app(Page(folder, every), port, token)
        config = uvicorn.Config(application, log_level="error", lifespan="off")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
    return 0
