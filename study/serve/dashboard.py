"""A live page: the study's report served by Flask (which MLflow brings along), written again every
few seconds while the ledger grows.

The page reloads itself while the study runs (a refresh in its head, no script). It listens on
127.0.0.1, answers only to that name and localhost, and only to browsers that have opened the
printed link with its token, and shows nothing that the report does not.
"""

from __future__ import annotations

import dataclasses
import hmac
import html
import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study.execution.silence import describe_silent
from study.ledger.lock import is_locked
from study.ledger.log import FILE
from study.ledger.state import ENDED, RUNNING, StudyState
from study.manage.studies import condition, read
from study.report.write import write_report
from study.tracking.address import HOST, WHERE

RELOAD = """<meta http-equiv="refresh" content="{seconds:g}">"""


class Page:
    """The newest report of the study in ``folder``.

    It is written into a temporary folder when the ledger has grown, or when the study has begun or
    ended: the last event is written while the study still holds the lock.
    """

    def __init__(self, folder: Path, every: float) -> None:
        self._folder, self._every = folder, every
        self._lock = threading.Lock()
        self._made: tuple[tuple[int, bool], float] = (-1, False), 0.0
        self._text, self._state = "", StudyState()

    def text(self) -> str:
        """Return the page: what is so at this moment above the newest report."""
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
            if (self._folder / WHERE).exists():
                shutil.copy(self._folder / WHERE, scratch)  # the links to MLflow are made from it
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
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in silent)
        reload = RELOAD.format(seconds=max(1.0, self._every)) if now == RUNNING else ""
        text = text.replace("<meta charset", f"{reload}<meta charset", 1)
        return text.replace(
            "<body>",
            f'<body>\n<p id="progress"><progress max="{len(trials)}"'
            f' value="{done}"></progress> {html.escape(head)}</p>{lines}',
            1,
        )


def make_app(page: Page, token: str, cookie: str = "lns_study_dashboard") -> Any:
    """Return the Flask application, guarded like MLflow's pages.

    See :class:`study.serve.mlflow_server.Guard`.
    """
    from flask import Flask, Response, abort, redirect, request

    app = Flask("lns-study")

    @app.before_request
    def _check_host() -> None:
        if request.host.partition(":")[0] not in (HOST, "localhost"):
            abort(403)

    @app.before_request
    def _check_token() -> Any:
        if hmac.compare_digest(request.args.get("token", "").encode(), token.encode()):
            answer = redirect("/", 303)
            answer.set_cookie(cookie, token, httponly=True, samesite="Lax")
            return answer
        if not hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            return Response(
                "Open the link that `lns-study dashboard` has printed, with its token.\n",
                401,
                mimetype="text/plain",
            )
        return None

    @app.get("/")
    def _page() -> Response:
        return Response(
            page.text(),
            mimetype="text/html",
            headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"},
        )

    return app


def serve(folder: Path, port: int, every: float, say: Callable[[str], None]) -> int:
    """Serve the page until Ctrl-C; return the exit code."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    token = secrets.token_urlsafe(24)
    server = make_server(
        HOST, port, make_app(Page(folder, every), token, f"lns_study_{port}"), threaded=True
    )
    say(
        f"The report of {folder.name}, renewed every {every:g} s:"
        f" http://{HOST}:{port}/?token={token} - Ctrl-C ends it."
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
