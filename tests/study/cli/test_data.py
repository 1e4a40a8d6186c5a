"""``lns-study data``: the list, and downloads with their errors."""

from __future__ import annotations

import hashlib
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from study.cli import main
from trainers.config.data import DATA
from trainers.data import cache_folder
from trainers.data.download import REMOTES, Remote


@pytest.fixture(autouse=True)
def _nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LNS_STUDY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_the_list_says_what_there_is_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    cache_folder("text").mkdir(parents=True)
    (cache_folder("text") / "input.txt").write_text("abc")
    assert main(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in DATA:
        assert sum(line.split()[0] == name for line in lines) == 1
    (cifar,) = (line for line in lines if line.startswith("cifar10 "))
    words = r"50,000 \+ 10,000 +3 x 32 x 32 +augment=none +lns-study data fetch cifar10"
    assert re.search(words, cifar)
    assert any(str(cache_folder("text") / "input.txt") in line for line in lines)
    assert any("seed=0, examples=4000" in line for line in lines)


@pytest.mark.parametrize("name", ["mnist", "kmnist", "cifar100", "piano_rolls"])
def test_a_mirror_that_does_not_answer_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"LNS_STUDY_{name.upper()}_URL", "http://127.0.0.1:9")
    assert main(["data", "fetch", name]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["fetch", "digits"], "must name a data set that is read from files; use one of mnist,"),
    (["fetch"], "data fetch : must name"),
    (["list", "mnist"], "takes no name"),
])  # fmt: skip
def test_wrong_names_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 2
    assert said in capsys.readouterr().err


CONTENT = {"one": b"1" * 1000, "two": b"2" * 1000}
"""The files of a small data set."""


class Mirror(http.server.BaseHTTPRequestHandler):
    """A mirror whose connections break in the middle of the files in ``torn``."""

    torn: ClassVar[set[str]] = set()
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        content = CONTENT[self.path.rpartition("/")[2]]
        self.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        torn = self.path.rpartition("/")[2] in self.torn
        self.wfile.write(content[: len(content) // 2 if torn else None])

    def log_message(self, *arguments: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Mirror]]:
    """A real HTTP server on loopback; ``text`` is a data set of two files from it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    digests = {name: f"sha256:{hashlib.sha256(text).hexdigest()}" for name, text in CONTENT.items()}
    remote = Remote(mirror="http://127.0.0.1", files=digests, needs=(tuple(CONTENT),))
    monkeypatch.setitem(REMOTES, "text", remote)
    monkeypatch.setenv("LNS_STUDY_TEXT_URL", f"http://127.0.0.1:{server.server_port}/a folder/é")
    monkeypatch.setattr(Mirror, "torn", set())
    monkeypatch.setattr(Mirror, "asked", [])
    yield Mirror
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_download_that_breaks_off_is_said_and_goes_on(
    mirror: type[Mirror], capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.torn.add("two")
    assert main(["data", "fetch", "text"]) == 2
    said = capsys.readouterr().err
    assert "IncompleteRead(500 bytes read, 500 more expected)" in said
    assert "LNS_STUDY_TEXT_URL" in said
    assert [path.name for path in cache_folder("text").iterdir()] == ["one"]
    mirror.torn.clear()
    mirror.asked.clear()
    assert main(["data", "fetch", "text"]) == 0
    assert mirror.asked == ["/a%20folder/%C3%A9/two"]
    assert {path.name: path.read_bytes() for path in cache_folder("text").iterdir()} == CONTENT


KILLED = """
import os, signal, sys
from pathlib import Path
from trainers.data.download import scratch_in
with scratch_in(Path(sys.argv[1])) as scratch:
    (scratch / "part").write_bytes(b"half")
    print(scratch, flush=True)
    input()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_fetch_left_is_removed_and_nothing_of_a_live_one(
    mirror: type[Mirror],
) -> None:
    folder = cache_folder("text")
    folder.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    scratch = Path(process.stdout.readline().strip())
    assert main(["data", "fetch", "text"]) == 0
    assert (scratch / "part").read_bytes() == b"half"
    process.communicate("\n")
    assert (scratch / "part").exists()
    assert main(["data", "fetch", "text"]) == 0
    assert {path.name for path in folder.iterdir()} == set(CONTENT)


@pytest.mark.parametrize("url", ["no address", "http://127.0.0.1:port", "http://[", "ftp2://x"])
def test_an_address_that_is_none_is_refused(
    url: str,
    mirror: type[Mirror],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LNS_STUDY_TEXT_URL", url)
    assert main(["data", "fetch", "text"]) == 2
    assert "name another mirror with LNS_STUDY_TEXT_URL" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_named(
    mirror: type[Mirror],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for name in ("text", "mnist"):
        assert main(["data", "fetch", name]) == 2
        assert "set XDG_CACHE_HOME to another folder" in capsys.readouterr().err
