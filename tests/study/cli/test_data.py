"""``lns-study data``: the list, and downloads with their errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from study.cli import main
from trainers.config.data import DATA
from trainers.data import cache_folder


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
    assert re.search(r"50,000 \+ 10,000 +3 x 32 x 32 +- +lns-study data fetch cifar10", cifar)
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
