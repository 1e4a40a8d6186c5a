"""``lns-study init``: a study to start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from study.cli import main
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold


def test_a_new_study_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its comments, which a shorter one may lose."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.yaml"]) == 0
    assert "run it with: lns-study run mine.yaml" in capsys.readouterr().out
    assert (tmp_path / "mine.yaml").read_text().count("#") >= 8
    assert main(["plan", "mine.yaml"]) == 0
    assert "mine: 6 trials = 2 rows (float32, lns12)" in capsys.readouterr().out
    words = ["seeds=[0]", "epochs=1", "tracking_uri=none", "cpus=2"]
    assert main(["run", "mine.yaml", *words]) == 0, capsys.readouterr()
    trials = fold(read_ledger(tmp_path / "studies" / "mine")).trials
    assert [trial.status for trial in trials] == [FINISHED] * 2
    assert all(trial.test["test/error"] < 0.5 for trial in trials)


def test_the_lines_to_uncomment_are_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    text = (tmp_path / "mine.yaml").read_text()
    text = text.replace("# space:", "space:").replace("# search:", "search:")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["plan", "mine.yaml"]) == 0
    assert "proposed by tpe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.yaml", "mine.py: exists; choose another name"),
        ("a b.yaml", "letters, digits, - and _ only"),
        ("nowhere/new.yaml", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("mine")
    assert main(["init", name]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
