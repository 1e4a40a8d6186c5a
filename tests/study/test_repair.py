"""A real study whose ledger is damaged, cut or gone: refused, repaired, and then it ends as if nothing had been."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest

from study.cli import main
from study.config import StudyConfig
from study.engine import run_study
from study.errors import UserError
from study.ledger import FILE, open_ledger, read_ledger
from study.lines import HEADER, unseal
from study.manage import differences
from study.report import render_text
from study.state import FINISHED, StudyState, fold
from tests.study.conftest import TINY, SilentView


@dataclasses.dataclass(frozen=True)
class Done:
    """A study that has run to its end, which nobody changes."""

    study: StudyConfig
    folder: Path
    state: StudyState

    @property
    def lines(self) -> list[bytes]:
        return (self.folder / FILE).read_bytes().splitlines(keepends=True)

    def copy(self, storage: Path) -> StudyConfig:
        """The same in another storage, to be damaged."""
        shutil.copytree(self.folder.parent, storage)
        return dataclasses.replace(self.study, storage=str(storage))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two trials of three epochs, with their runs in MLflow."""
    from study.compose import load

    folder = tmp_path_factory.mktemp("done")
    (folder / "tiny.yaml").write_text(TINY)
    study = load(str(folder / "tiny.yaml"), [f"storage={folder / 'studies'}"])
    run(study)
    return Done(study, study.folder, fold(read_ledger(study.folder)))


def run(study: StudyConfig) -> None:
    run_study(study, SilentView(), lambda line: None)


def at(lines: list[bytes], kind: str, which: int = 0) -> int:
    """The place of the so-manieth line of a kind."""
    return [place for place, line in enumerate(lines) if (event := unseal(line.rstrip(b"\n"))[1]) and event["event"] == kind][
        which
    ]


def damage(line: bytes) -> bytes:
    middle = len(line) // 2
    return line[:middle] + bytes([line[middle] ^ 1]) + line[middle + 1 :]


def assert_as_if_nothing_had_been(study: StudyConfig, done: Done) -> None:
    """Every trial has finished once, its figures and the table are those of the undamaged study."""
    events = read_ledger(study.folder)
    assert open_ledger(study.folder).damage == []
    state = fold(events)
    assert [trial.id for trial in state.trials] == [trial.id for trial in done.state.trials]
    for trial, other in zip(state.trials, done.state.trials, strict=True):
        assert trial.status == FINISHED
        assert sorted(trial.reports) == sorted(other.reports)
        assert differences(trial, other) == []
    assert set(Counter(event["trial"] for event in events if event["event"] == "finished").values()) == {1}
    assert render_text(state) == render_text(done.state)


DAMAGED = [
    (HEADER, 0),
    ("planned", 0),
    ("started", 1),
    ("report", 0),
    ("report", -1),
    ("checkpoint", -1),
    ("finished", 0),
    ("ended", 0),
]


@pytest.mark.parametrize(("kind", "which"), DAMAGED)
def test_a_damaged_line_is_refused_repaired_and_the_study_ends_with_the_same_table(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, which: int
) -> None:
    study = done.copy(tmp_path / "studies")
    lines = done.lines
    place = at(lines, kind, which)
    lines[place] = damage(lines[place])
    (study.folder / FILE).write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=rf"is damaged: line {place + 1}: is damaged .*doctor tiny --repair"):
        run(study)
    assert (study.folder / FILE).read_bytes() == b"".join(lines)
    assert main(["doctor", "tiny", "--storage", study.storage]) == 1
    main(["doctor", "tiny", "--repair", "--storage", study.storage])
    (kept,) = study.folder.glob(f"{FILE}.damaged-*")
    assert kept.read_bytes() == b"".join(lines)
    assert main(["doctor", "tiny", "--storage", study.storage]) == 0, capsys.readouterr()
    assert open_ledger(study.folder).id == open_ledger(done.folder).id
    run(study)
    assert_as_if_nothing_had_been(study, done)
