"""The live page of a study: a real server, and its access control."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from study.config import StudyConfig
from study.ledger.log import Ledger
from study.ledger.studies import read
from study.ops.serve.dashboard import Page, make_app
from study.ops.serve.ui import listen
from study.report.write import write_report
from tests.study.cli.test_printing import CONTROLS
from tests.study.conftest import made_up_events, write_ledger
from tests.study.servers import connections, free_port, open_files

Tiny = Callable[..., StudyConfig]


@contextmanager
def live_page(study: StudyConfig) -> Iterator[Callable[..., tuple[int, str]]]:
    """The dashboard of a study as a function from path and headers to status and text."""
    with listen(0) as listening:
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            make_app(Page(study.folder, every=0.0), port, "secret"), lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()

        def ask(path: str = "/secret/", method: str = "GET", **headers: str) -> tuple[int, str]:
            there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            there.request(method, path, headers=headers)
            answer = there.getresponse()
            text = answer.read().decode()
            assert not {"Set-Cookie", "Location", "Access-Control-Allow-Origin"} & {
                name.title() for name in answer.headers
            }
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            there.close()
            return answer.status, text

        try:
            yield ask
        finally:
            server.should_exit = True
            thread.join(60)


def test_the_live_page_grows_with_the_ledger(tiny: Tiny) -> None:
    study = tiny("live")
    events = made_up_events(study)
    write_ledger(study, events[:6])
    with live_page(study) as ask:
        status, text = ask()
        assert (status, "1 of 2 trials have ended" in text) == (200, True)
        write_ledger(study, events)
        status, text = ask()
        assert "2 of 2 trials have ended" in text
        assert 'http-equiv="refresh"' not in text
        assert ask(method="HEAD") == (200, "")


def test_the_live_page_asks_for_its_token(tiny: Tiny) -> None:
    study = tiny("live guarded")
    write_ledger(study, made_up_events(study))
    cookies = {"Cookie": "lns_study_dashboard=secret; lns-study=secret"}
    with live_page(study) as ask:
        for path in (
            *("/", "/?token=secret", "/wrong/", "/secre/", "/secretx/", "//secret/", "/x/secret/"),
            *("/%E6%97%A5/", "/a%0D%0ALocation:%20x", "/%FF", "/?x=%0D%0A"),
        ):
            status, text = ask(path, **cookies)
            assert (status, "Open the link" in text) == (401, True), path
            assert "trials have ended" not in text
        assert ask("/secret")[0] == 200
        assert ask("/secret/x")[0] == ask(method="POST")[0] == 404
        assert ask(Host="evil.example")[0] == 403
        assert ask(Origin="http://127.0.0.1:1")[0] == 403


def test_the_live_page_has_the_verdicts_of_own_checks(tiny: Tiny, tmp_path: Path) -> None:
    """The functions of the study's report, which the run calls: the page runs none."""
    file = tmp_path / "own.py"
    file.write_text(
        "def trials(study):\n"
        "    return {'figure': len(study.state.trials), 'verdict': 'holds', 'unit': 'trials'}\n"
    )
    check = {"name": "c", "claim": "It is so.", "source": "a talk", "check": f"{file}:trials"}
    study = tiny("live claims", f"claims={json.dumps([check])}")
    write_ledger(study, made_up_events(study))
    write_report(read(study.folder), study.folder / "report", run_checks=True)
    file.unlink()
    with live_page(study) as ask:
        _, text = ask()
    assert "2.00 trials" in text
    assert "raised" not in text


def test_the_live_page_of_a_study_that_has_ended_is_not_running(tiny: Tiny) -> None:
    """Its last event is written while it still holds the lock."""
    study = tiny("live end")
    write_ledger(study, made_up_events(study))
    with live_page(study) as ask:
        with Ledger(study.folder):
            assert "running: 2 of 2 trials" in ask()[1]
        _, text = ask()
    assert "finished: 2 of 2 trials" in text
    assert 'http-equiv="refresh"' not in text


def test_texts_of_a_ledger_are_escaped_in_the_live_page(tiny: Tiny) -> None:
    """Also in its text about silent trials: their labels and hosts are a stranger's."""
    evil = "<img src=x onerror=alert(1)>\x1b[2J\x9b31m\u202e"
    study = tiny("live hostile", "rows=[{label: a}]", "baseline=null")
    planned, *events = made_up_events(study)
    planned["study"]["rows"][0]["label"] = planned["trials"][0]["row"] = evil
    planned["study"]["question"] = evil
    events = [
        event | {"pid": 1, "host": evil} if event["event"] == "report" else event
        for event in events
        if event["event"] in ("started", "report")
    ]
    write_ledger(study, [planned, *events])
    with live_page(study) as ask, Ledger(study.folder):
        _, text = ask()
    assert "nothing heard for" in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 3
    assert "<img src=x" not in text
    assert CONTROLS.search(text) is None


def test_connections_that_send_nothing_keep_nobody_out(tiny: Tiny) -> None:
    study, port = tiny("live held"), free_port()
    write_ledger(study, made_up_events(study))
    options = ["--serve", f"--port={port}"]
    words = [sys.executable, "-m", "study", "report", str(study.folder), *options]
    with open_files(512):
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        link = next(word for word in server.stdout.readline().split() if word.startswith("http"))
        urllib.request.urlopen(f"{link}/", timeout=60).close()
        with connections(port, 700):
            urllib.request.urlopen(f"{link}/", timeout=60).close()
    finally:
        server.terminate()
        server.communicate(timeout=60)
