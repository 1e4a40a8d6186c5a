"""Which of the user's files are sent to a cluster, and their maximum size."""

from __future__ import annotations

from pathlib import Path

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.engines.preflight import preflight
from study.engines.user_files import (
    MOST_BYTES,
    check_user_files,
    collected_files,
    user_folders,
    user_modules,
)
from study.plan.plan import make_plan
from trainers.user_code import place_of_sent

STUDY = """
name: files
trainable: loop.py:train
trial: {trainable: {args: {x: 1}}, epochs: 1}
rows: [{label: a}, {label: b, overrides: {trainable.name: "more/loop.py:train"}}]
baseline: null
tracking_uri: none
storage: STORAGE
"""
LOOP = "def train(config):\n    pass\n"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with two loops, and with files that are not sent."""
    code = tmp_path / "code"
    for name in (
        "more",
        "parts",
        "studies/files",
        ".git",
        "__pycache__",
        "venv",
        "more/.cache",
        "done",
    ):
        (code / name).mkdir(parents=True)
        (code / name / "thing.txt").touch()
    (code / "venv" / "pyvenv.cfg").touch()
    (code / "done" / "ledger.jsonl").touch()
    (code / "loop.py").write_text(LOOP)
    (code / "more" / "loop.py").write_text(LOOP + "\n")
    (code / "study.yaml").write_text(STUDY.replace("STORAGE", str(code / "studies")))
    return code


def study_in(code: Path, *overrides: str) -> StudyConfig:
    return load(str(code / "study.yaml"), overrides)


def test_folders_of_named_files_are_sent_but_for_what_is_no_code(code: Path) -> None:
    study = study_in(code, "address=127.0.0.1:1")
    assert user_folders(study) == [code, code / "more"]
    with collected_files(study) as folder:
        assert folder is not None
        sent = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    whole, part = place_of_sent(code), place_of_sent(code / "more")
    names = ["loop.py", "more/loop.py", "more/thing.txt", "parts/thing.txt", "study.yaml"]
    expected = [f"{whole}/{name}" for name in names]
    assert sent == sorted([*expected, f"{part}/loop.py", f"{part}/thing.txt"])
    assert not folder.exists()


def test_packages_that_trials_name_are_those_that_a_node_must_have(code: Path) -> None:
    study = study_in(
        code,
        "rows=[{label: 'test:a'}, {label: b, overrides: {trainable.name: 'json.tool:main'}}]",
        "trial.trainable.args={x: 'csv:reader'}",
        "space={trainable.name: {choice: ['json.decoder:JSONDecoder', 'no_such_package:train']}}",
        "claims=[{name: c, claim: c, source: c, check: 'csv:reader'}]",
        "question='a: b, or c:d?'",
    )
    assert user_modules(study) == ["json.decoder:JSONDecoder", "json.tool:main"]


def test_nothing_is_sent_without_a_cluster_or_without_files(code: Path) -> None:
    with collected_files(study_in(code)) as folder:
        assert folder is None
    with collected_files(load("quickstart", ["address=127.0.0.1:1", "data=digits"])) as folder:
        assert folder is None


def test_too_much_is_refused_with_its_size_before_anything_starts(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("study.engines.preflight.check_address", lambda address: None)
    with (code / "parts" / "large.bin").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    said = r"code holds code .* have 100 MiB or more \(.*large.bin: 100\), of which 100 .* its own"
    with pytest.raises(ValueError, match=said):
        preflight(make_plan(study_in(code, "address=127.0.0.1:1")))
    preflight(make_plan(study_in(code)))


def test_what_launch_would_refuse_is_not_sent_either(code: Path) -> None:
    study = study_in(code, "address=127.0.0.1:1")
    check_user_files(study)
    (code / "key.txt").write_text("-----BEGIN PRIVATE KEY-----\nhunter2\n")
    with pytest.raises(ValueError, match=r"code/key.txt: holds a password or a secret") as told:
        check_user_files(study)
    assert "hunter2" not in str(told.value)
    (code / "key.txt").rename(code / ".git" / "key.txt")
    (code / "auth_token").write_text("0123456789abcdef" * 4)
    with pytest.raises(ValueError, match=r"code/auth_token: is a token or a key alone") as told:
        check_user_files(study)
    assert "0123456789abcdef" not in str(told.value)
    (code / "auth_token").unlink()
    check_user_files(study)
    (code / "parts" / "notes.txt").symlink_to(code / ".git" / "key.txt")
    with pytest.raises(ValueError, match=r"code/parts/notes.txt: is a link to .*, a hidden file"):
        check_user_files(study)
    check_user_files(study_in(code))


def test_code_that_a_file_imports_through_a_link_is_refused_as_it_is_not_sent(
    code: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "steps.py").touch()
    (code / "common").symlink_to(tmp_path / "shared")
    (code / "loop.py").write_text("from common import steps\n" + LOOP)
    preflight(make_plan(study_in(code)))
    study = study_in(code, "address=127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"common/steps\.py, which .*loop\.py:train imports, is not"
    ):
        check_user_files(study)
    (code / "common").unlink()
    (tmp_path / "shared").rename(code / "common")
    check_user_files(study)
