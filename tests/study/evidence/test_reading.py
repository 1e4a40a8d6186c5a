"""Reading a study runs no code that its ledger names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import study
from study.cli.entry import main
from study.config import StudyConfig
from study.evidence.judge import judge
from study.evidence.kept_verdicts import NOT_RUN
from study.evidence.record import FILE, read_record
from study.ledger.state import fold
from study.ledger.studies import read
from study.ops.serve.dashboard import Page
from study.report.write import write_report
from tests.study.conftest import made_up_events, write_ledger
from tests.study.evidence.test_verdicts import claim

Tiny = Callable[..., StudyConfig]


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that exists once the function of the claim has run."""
    return tmp_path / "ran"


@pytest.fixture
def stored(tiny: Tiny, tmp_path: Path, ran: Path) -> StudyConfig:
    """A study with a claim whose function leaves a trace, and a ledger from somebody else."""
    (tmp_path / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "def one(study):\n    return {'figure': 1, 'low': 0.5, 'high': 2, 'unit': 'points'}\n"
    )
    checks = json.dumps([claim("own", check=f"{tmp_path}/own.py:one", at_most=5)])
    config = tiny("stored", f"storage={tmp_path}/studies", f"claims={checks}")
    write_ledger(config, made_up_events(config))
    return config


def verdict_of(folder: Path) -> dict[str, Any]:
    (found,) = read_record(folder / "report")["claims"]
    return dict(found)


@pytest.mark.parametrize("command", ["report", "report --verify", "status", "export", "compare"])
def test_reading_a_study_runs_no_function_of_its_claims(
    stored: StudyConfig, ran: Path, command: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if "--verify" in command:
        main(["report", "stored", "--storage", stored.storage])
    word, *options = command.split()
    other = ["stored"] if word == "compare" else []
    main([word, "stored", *other, *options, "--storage", stored.storage])
    assert not ran.exists()
    if word == "report":
        assert verdict_of(stored.folder)["outcome"] == "undecided"
        assert "--run-checks" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["mlflow", "sync"], ["mlflow", "verify", "--repair"]])
def test_sending_a_study_runs_no_function_of_its_claims(
    stored: StudyConfig, ran: Path, tmp_path: Path, command: list[str]
) -> None:
    write_report(read(stored.folder), stored.folder / "report")
    to = ["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    assert main([*command, "stored", *to, "--storage", stored.storage]) == 0
    assert not ran.exists()


def test_no_page_and_no_loaded_study_runs_a_function_of_its_claims(
    stored: StudyConfig, ran: Path
) -> None:
    assert "is not run by reading" in Page(stored.folder, 1.0).text()
    loaded = study.load("stored", stored.storage)
    assert list(loaded.claims["outcome"]) == ["undecided"]
    loaded.report()
    assert not ran.exists()


def test_who_asks_for_it_has_the_function_run(stored: StudyConfig, ran: Path) -> None:
    main(["report", "stored", "--run-checks", "--storage", stored.storage])
    assert ran.exists()
    assert verdict_of(stored.folder)["outcome"] == "holds"
    assert main(["report", "stored", "--verify", "--run-checks", "--storage", stored.storage]) == 0


def test_the_verdict_of_the_last_report_is_kept(
    stored: StudyConfig, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = read(stored.folder)
    write_report(state, stored.folder / "report", run_checks=True)
    before = (stored.folder / "report" / "report.md").read_bytes()
    ran.unlink()
    assert main(["report", "stored", "--storage", stored.storage]) == 0
    found = verdict_of(stored.folder)
    assert (found["outcome"], found["shown"]) == ("holds", "1.00 (0.50 to 2.00) points")
    assert (stored.folder / "report" / "report.md").read_bytes() == before
    assert main(["report", "stored", "--verify", "--storage", stored.storage]) == 0
    assert "not judged again" in capsys.readouterr().out
    assert not ran.exists()


def test_a_verdict_of_other_figures_or_another_claim_is_not_kept(stored: StudyConfig) -> None:
    events = made_up_events(stored)
    write_report(fold(events), stored.folder / "report", run_checks=True)
    (found,) = judge(fold(events), stored.folder)
    assert found.outcome == "holds"
    for other in (made_up_events(stored, {"float32": 5.0}), json.loads(
        json.dumps(events).replace('"at_most": 5', '"at_most": 4')
    )):  # fmt: skip
        (found,) = judge(fold(other), stored.folder)
        assert (found.outcome, found.note) == ("undecided", NOT_RUN)


@pytest.mark.parametrize("text", ["[]", "{", "[[[", '{"claims": 1}', "link"])
def test_a_report_that_is_none_has_no_verdict(
    stored: StudyConfig, tmp_path: Path, text: str
) -> None:
    write_report(read(stored.folder), stored.folder / "report", run_checks=True)
    file = stored.folder / "report" / FILE
    if text == "link":
        file.rename(tmp_path / FILE)
        file.symlink_to(tmp_path / FILE)
    else:
        file.write_text(text)
    (found,) = judge(read(stored.folder), stored.folder)
    assert (found.outcome, found.note) == ("undecided", NOT_RUN)


def test_a_kept_verdict_is_text_and_numbers(stored: StudyConfig) -> None:
    write_report(read(stored.folder), stored.folder / "report", run_checks=True)
    file = stored.folder / "report" / FILE
    values = json.loads(file.read_text())
    values["claims"][0] |= {
        "outcome": ["holds"], "figure": 10**400, "low": "1", "high": True, "unit": 3,
        "note": "http://ada:pa-ss@h", "runs": "many", "shown": None,
    }  # fmt: skip
    file.write_text(json.dumps(values))
    (found,) = judge(read(stored.folder), stored.folder)
    assert (found.outcome, found.shown, found.runs) == ("undecided", "-", 0)
    assert found.note == "http://ada:***@h"


def test_a_page_of_claims_runs_no_code_of_other_studies(
    stored: StudyConfig, tiny: Tiny, tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a claim's function, nor a Python file that is named as a study."""
    own = json.dumps([claim("own", value={"row": "float32", "at_most": 5})])
    mine = tiny("mine", f"storage={stored.storage}", f"claims={own}")
    write_ledger(mine, made_up_events(mine))
    events = made_up_events(stored)
    events[0]["study"]["name"] = "own.py"
    write_ledger(stored, events)
    (tmp_path / "mine.yaml").write_text(
        (tmp_path / "tiny.yaml").read_text().replace("name: tiny", f"name: mine\nclaims: {own}")
    )
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", str(tmp_path / "mine.yaml"), "--page-only", "--storage", stored.storage]
    assert main(words) == 0
    assert "is not run by reading" in (Path(stored.storage) / "claims" / "claims.md").read_text()
    assert not ran.exists()


@pytest.mark.timeout(60)
def test_a_huge_file_in_the_place_of_code_is_not_read(stored: StudyConfig, tmp_path: Path) -> None:
    """200 GiB of zeros take no disk space."""
    write_report(read(stored.folder), stored.folder / "report")
    os.truncate(tmp_path / "own.py", 200 * 2**30)
    assert main(["report", "stored", "--storage", stored.storage]) == 0
