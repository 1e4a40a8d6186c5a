"""Which commit is ours: the checkout's, and not another repository's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from study.ledger import provenance as module
from study.ledger.provenance import different_data, provenance

PROJECT = '[project]\nname = "lns-study"\n'


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the package be imported from ``folder/study``."""
    (folder / "study" / "ledger").mkdir(parents=True)
    shutil.copy(module.__file__, folder / "study" / "ledger")
    monkeypatch.setattr(module, "HERE", folder / "study" / "ledger" / "provenance.py")
    provenance.cache_clear()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "theirs.txt").write_text("x")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "theirs")
    return tmp_path


@pytest.fixture(autouse=True)
def _forget() -> None:
    provenance.cache_clear()


def test_a_checkout_has_its_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, repository)
    (repository / "pyproject.toml").write_text(PROJECT)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "ours")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in another repository's hook
    assert provenance()["commit"] == module._run_git("rev-parse", "HEAD")
    assert provenance()["dirty"] is False
    (repository / "study" / "ledger" / "provenance.py").write_text("changed")
    provenance.cache_clear()
    assert provenance()["dirty"] is True


@pytest.mark.parametrize("place", [".venv/lib/python3.11/site-packages", "."])
@pytest.mark.parametrize("commit", [False, True], ids=["untracked", "committed"])
@pytest.mark.parametrize("project", [None, '[project]\nname = "theirs"\n', "["])
def test_a_copy_in_a_foreign_repository_has_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch, place: str, commit: bool, project: str | None
) -> None:
    install(monkeypatch, repository / place)
    if project:
        (repository / "pyproject.toml").write_text(project)
    if commit:
        git(repository, "add", "-f", ".")
        git(repository, "commit", "-qm", "vendored")
    assert (provenance()["commit"], provenance()["dirty"]) == (None, None)


def test_an_untracked_copy_of_the_source_has_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, repository)
    (repository / "pyproject.toml").write_text(PROJECT)
    assert provenance()["commit"] is None


def data(file: str, files: str, **changes: object) -> dict[str, object]:
    """Return a data set as a plan has it."""
    entry = {"name": "piano_rolls", "identity": "", "root": f"/data/{file}", "files": files}
    return entry | {"digest": files, "train": 10, "validation": 2} | changes


def test_data_sets_of_one_name_are_told_apart_by_their_bytes() -> None:
    jsb, muse = data("JSB.mat", "1"), data("Muse.mat", "2")
    assert different_data([jsb, muse], [muse, jsb]) is None
    assert different_data([muse], [jsb, muse]) is None
    assert different_data([data("JSB.mat", "1", root="/moved/JSB.mat")], [muse, jsb]) is None
    changed = data("Muse.mat", "3", root="/moved/Muse.mat")
    assert different_data([jsb, changed], [jsb, muse]) == (changed, muse)
    assert different_data([jsb], [muse | {"name": "text"}]) is None


def test_data_sets_that_a_study_did_not_have_are_no_changed_ones() -> None:
    jsb = data("JSB.mat", "1", args={"context": 64})
    assert different_data([jsb, data("Muse.mat", "2", args={"context": 64})], [jsb]) is None
    assert different_data([jsb, data("JSB.mat", "3", args={"context": 32})], [jsb]) is None
    changed = data("JSB.mat", "3", args={"context": 64})
    assert different_data([changed], [jsb]) == (changed, jsb)
    text = data("a.txt", "1", name="text", args={"context": 64, "stride": 8})
    assert different_data([text | {"files": "2", "validation": 3}], [text]) is None
    assert different_data([text | {"files": "2"}], [text]) == (text | {"files": "2"}, text)
    mnist = data("mnist", "1", name="mnist", args={})
    changed = mnist | {"files": "2", "root": "/elsewhere"}
    assert different_data([changed], [mnist]) == (changed, mnist)


def test_an_old_ledger_without_files_is_compared_where_equally_many_were_chosen() -> None:
    old = {key: value for key, value in data("JSB.mat", "1").items() if key != "files"}
    assert different_data([data("JSB.mat", "3", digest="1")], [old]) is None
    assert different_data([data("JSB.mat", "3", digest="1", train=9)], [old]) is None
    changed = data("JSB.mat", "1", digest="3")
    assert different_data([changed], [old]) == (changed, old)
