"""A real study whose ledger is damaged, cut or gone: it is refused and repaired, and then ends as
if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from study.cli import main
from study.config import StudyConfig
from study.config.compose import change, load
from study.errors import UserError
from study.evidence.rerun import differences
from study.ledger.lines import HEADER, seal, unseal
from study.ledger.lock import LOCK
from study.ledger.log import FILE, Ledger, make_header, open_ledger, read_ledger
from study.ledger.state import FINISHED, StudyState, fold
from study.lifecycle import run_study
from study.ops.repair.ledger import repair
from study.plan.checkpoints import checkpoints_of
from study.report.tables import render_text
from study.tracking.reconcile import reconcile
from tests.study.conftest import TINY, SilentView


@dataclasses.dataclass(frozen=True, repr=False)
class Done:
    """A finished study, which no test changes."""

    study: StudyConfig
    folder: Path
    state: StudyState

    @property
    def lines(self) -> list[bytes]:
        return (self.folder / FILE).read_bytes().splitlines(keepends=True)

    def copy(self, storage: Path) -> StudyConfig:
        """A copy in another storage, for damage, as if it had run there."""
        shutil.copytree(self.folder.parent, storage)
        return dataclasses.replace(self.study, storage=str(storage))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two trials of three epochs, with their runs in MLflow."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "tiny.yaml").write_text(TINY)
    study = load(str(folder / "tiny.yaml"), [f"storage={folder / 'studies'}"])
    run(study)
    return Done(study, study.folder, fold(read_ledger(study.folder)))


def run(study: StudyConfig) -> None:
    assert run_study(study, SilentView(), lambda line: None).tracking_error == ""


def at(lines: list[bytes], kind: str, which: int = 0) -> int:
    """The position of the n-th line of a kind."""
    return [
        place
        for place, line in enumerate(lines)
        if (event := unseal(line.rstrip(b"\n"))[1]) and event["event"] == kind
    ][which]


def damage(line: bytes) -> bytes:
    middle = len(line) // 2
    return line[:middle] + bytes([line[middle] ^ 1]) + line[middle + 1 :]


def table(state: StudyState) -> str:
    """The study's table and answer, without its trials' times."""
    return re.sub(r"about \S+ \S+ of trial time", "", render_text(state))


def assert_as_if_nothing_had_been(study: StudyConfig, done: Done) -> None:
    """Every trial has finished once; figures and table equal the undamaged study's."""
    events = read_ledger(study.folder)
    assert open_ledger(study.folder).damage == []
    state = fold(events)
    assert [trial.id for trial in state.trials] == [trial.id for trial in done.state.trials]
    for trial, other in zip(state.trials, done.state.trials, strict=True):
        assert trial.status == FINISHED
        assert sorted(trial.reports) == sorted(other.reports)
        assert differences(trial, other) == []
    assert set(
        Counter(event["trial"] for event in events if event["event"] == "finished").values()
    ) == {1}
    assert table(state) == table(done.state)


DAMAGED = [
    (HEADER, 0),
    ("report", -1),
    *(
        pytest.param(*line, marks=pytest.mark.slow)
        for line in (
            ("planned", 0),
            ("ended", 0),
            ("started", 1),
            ("report", 0),
            ("checkpoint", -1),
            ("finished", 0),
        )
    ),
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
    with pytest.raises(
        UserError, match=rf"is damaged: line {place + 1}: is damaged .*doctor tiny --repair"
    ):
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


def test_a_repaired_ledger_has_no_password(done: Done, tmp_path: Path) -> None:
    """Earlier versions wrote it there; new ones no longer do."""
    study = done.copy(tmp_path / "studies")
    lines = done.lines
    place = at(lines, "planned")
    number, event = unseal(lines[place].rstrip(b"\n"))
    assert number is not None
    assert event is not None
    lines[place] = seal(
        event | {"study": event["study"] | {"tracking_uri": "https://ada:s3cret@host"}}, number
    )
    lines[at(lines, "checkpoint")] = damage(lines[at(lines, "checkpoint")])
    (study.folder / FILE).write_bytes(b"".join(lines))
    repair(study.folder, None)
    assert b"s3cret" not in (study.folder / FILE).read_bytes()
    assert b"https://ada:***@host" in (study.folder / FILE).read_bytes()


def place_only(done: Done, folder: Path, lines: list[bytes], *, checkpoints: bool = True) -> Path:
    """A study's folder with these lines as its ledger, and the checkpoints of the undamaged study,
    which are only read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(b"".join(lines))
    shutil.copy(done.folder / LOCK, folder / LOCK)
    if checkpoints:
        shutil.copytree(done.folder / "checkpoints", folder / "checkpoints")
    return folder


def assert_nothing_false(folder: Path, done: Done) -> StudyState:
    """The possible contents of a repaired ledger: complete and ordered; each epoch unchanged or
    missing; an end only if the whole trial is there."""
    contents = open_ledger(folder)
    assert contents.damage == []
    planned = next(event for event in read_ledger(done.folder) if event["event"] == "planned")
    events = contents.events + (
        [] if any(event["event"] == "planned" for event in contents.events) else [planned]
    )
    assert [event["time"] for event in contents.events] == sorted(
        event["time"] for event in contents.events
    )
    state = fold(events)
    for trial, real in zip(state.trials, done.state.trials, strict=True):
        for epoch, event in trial.reports.items():
            assert event["metrics"] == real.reports[epoch]["metrics"]
        assert sum(
            event["event"] == "finished" and event["trial"] == trial.id for event in events
        ) == (trial.status == FINISHED)
        if trial.status == FINISHED:
            assert (sorted(trial.reports), trial.test) == (sorted(real.reports), real.test)
    return state


def flip(lines: list[bytes], at: int, place: int) -> list[bytes]:
    place %= len(lines[at])
    return [
        *lines[:at],
        lines[at][:place] + bytes([lines[at][place] ^ 4]) + lines[at][place + 1 :],
        *lines[at + 1 :],
    ]


FAULTS = {
    "damaged": flip,
    "cut out": lambda lines, at, place: lines[:at] + lines[at + 1 :],
    "cut short": lambda lines, at, place: [
        *lines[:at],
        lines[at][: place % len(lines[at])] + b"\n",
        *lines[at + 1 :],
    ],
    "ended before": lambda lines, at, place: lines[:at],
    "doubled": lambda lines, at, place: [*lines, lines[at]],
    "swapped": lambda lines, at, place: [
        *lines[:at],
        *lines[at + 1 : at + 2],
        lines[at],
        *lines[at + 2 :],
    ],
}
FAULT = st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 10**6), st.integers(0, 10**6))


@settings(deadline=None)
@given(st.lists(FAULT, min_size=1, max_size=3), st.booleans())
def test_whatever_happens_to_lines_a_repaired_ledger_says_nothing_false(
    done: Done, faults: list[tuple[str, int, int]], checkpoints: bool
) -> None:
    lines = done.lines
    for fault, at, place in faults:
        lines = FAULTS[fault](lines, at % len(lines), place) if lines else lines
    with tempfile.TemporaryDirectory() as name:
        folder = place_only(done, Path(name) / "tiny", lines, checkpoints=checkpoints)
        # a fault may undo another, or have the effect of a crash
        if not open_ledger(folder).damage:
            assert_nothing_false(folder, done)
            return
        with pytest.raises(ValueError, match="is damaged"):
            Ledger(folder)
        before = (folder / FILE).read_bytes()
        done_ = repair(folder, None)
        assert done_.kept is not None
        assert done_.kept.read_bytes() == before
        state = assert_nothing_false(folder, done)
        if checkpoints:
            assert all(trial.status == FINISHED for trial in state.trials) or "edited" in str(
                done_.lost
            )
        with Ledger(folder) as ledger:
            assert len(ledger.history) == len(open_ledger(folder).events)


def test_any_line_of_version_1_that_is_no_json_is_named_and_repaired(
    done: Done, tmp_path: Path
) -> None:
    events = read_ledger(done.folder)
    for at in range(len(events)):
        lines = [
            json.dumps(event).encode() + b"\n" if place != at else b"{no line}\n"
            for place, event in enumerate(events)
        ]
        folder = place_only(done, tmp_path / str(at), lines)
        (folder / LOCK).write_text("4711")
        with pytest.raises(ValueError, match=f"is damaged: line {at + 1}: is damaged"):
            Ledger(folder)
        repair(folder, None)
        assert open_ledger(folder).id == open_ledger(done.folder).id
        assert all(trial.status == FINISHED for trial in assert_nothing_false(folder, done).trials)


@pytest.mark.parametrize(
    "events", [4, *(pytest.param(events, marks=pytest.mark.slow) for events in (1, 3, 6, 9))]
)
def test_a_writer_killed_between_two_events_leaves_a_study_that_ends_as_if_nothing_had_been(
    done: Done, tmp_path: Path, events: int
) -> None:
    study = done.copy(tmp_path / "studies")
    (study.folder / FILE).write_bytes(b"".join(done.lines[: 1 + events]))
    (study.folder / LOCK).write_text('{"pid": 1, "host": "gone"}')
    run(study)
    assert_as_if_nothing_had_been(study, done)


def test_a_ledger_that_is_gone_is_refused_and_made_again_from_its_checkpoints(
    done: Done, tmp_path: Path
) -> None:
    study = done.copy(tmp_path / "studies")
    id_ = open_ledger(done.folder).id
    (study.folder / FILE).unlink()
    (study.folder / LOCK).unlink()
    with pytest.raises(
        UserError,
        match=f"is a checkpoint of ledger {id_} .code: .*this study's is new.*doctor tiny --repair",
    ):
        run(study)
    assert (
        main(["doctor", "tiny", "--repair", "--tracking-uri", "none", "--storage", study.storage])
        == 0
    )
    assert open_ledger(study.folder).id == id_
    run(study)
    assert_as_if_nothing_had_been(study, done)
    for trial, real in zip(fold(read_ledger(study.folder)).trials, done.state.trials, strict=True):
        assert trial.commits == real.commits


def test_checkpoints_of_another_ledger_are_refused_before_any_work(
    done: Done, tmp_path: Path
) -> None:
    study = done.copy(tmp_path / "studies")
    lines = [seal(make_header("000000000000", 1.0), 1), *done.lines[1:2]]
    (study.folder / FILE).write_bytes(b"".join(lines))
    (study.folder / LOCK).unlink()
    with pytest.raises(
        UserError, match=r"is a checkpoint of ledger .*and this study's is 000000000000"
    ):
        run(study)
    assert (study.folder / FILE).read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    "overrides",
    [
        ["executor=packed"],
        ["trial.workers=2"],
        pytest.param(["gang=train", "trial.workers=2"], marks=pytest.mark.slow),
    ],
    ids=["packed", "gang", "Ray Train"],
)
def test_checkpoints_of_every_executor_name_their_ledger_and_code(
    done: Done, tmp_path: Path, overrides: list[str]
) -> None:
    study = change(
        done.study, [*overrides, "trial.epochs=1", f"storage={tmp_path}", "tracking_uri=none"]
    )
    run(study)
    found = [state["origin"] for _, _, state in checkpoints_of(study.folder)]
    assert sorted(origin["trial"]["row"] for origin in found) == ["float32", "lns matmul"]
    assert {(origin["ledger"], origin["code"]) for origin in found} == {
        (open_ledger(study.folder).id, done.state.trials[0].commits[0])
    }


def make_old(folder: Path) -> None:
    """Remove from a study's checkpoints what earlier versions did not write."""
    for path in (folder / "checkpoints").glob("*/*/state.json"):
        state = json.loads(path.read_text())
        path.write_text(
            json.dumps(
                {key: value for key, value in state.items() if key not in ("origin", "digest")}
            )
        )


def test_checkpoints_of_an_earlier_version_are_taken_where_their_ledger_is_there(
    done: Done, tmp_path: Path
) -> None:
    """Neither names its ledger; if the ledger is gone, it cannot be known."""
    study = done.copy(tmp_path / "studies")
    make_old(study.folder)
    old = [event for event in read_ledger(done.folder) if event["event"] != "finished"]
    (study.folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in old))
    (study.folder / LOCK).write_text("4711")
    run(study)
    assert_as_if_nothing_had_been(study, done)
    make_old(study.folder)
    (study.folder / FILE).unlink()
    (study.folder / LOCK).unlink()
    with pytest.raises(UserError, match="is a checkpoint of a ledger that is gone"):
        run(study)


def test_what_checkpoints_have_lost_mlflow_gives_back(done: Done, tmp_path: Path) -> None:
    """With the times at which it was sent, so that its runs equal the ledger as before; the
    seconds, too."""
    study = done.copy(tmp_path / "studies")
    shutil.rmtree(study.folder / "checkpoints")
    lines = done.lines
    lost = [at(lines, "report", 1), at(lines, "finished", 1)]
    (study.folder / FILE).write_bytes(
        b"".join(damage(line) if n in lost else line for n, line in enumerate(lines))
    )
    assert main(["doctor", "tiny", "--repair", "--storage", study.storage]) == 0
    assert_as_if_nothing_had_been(study, done)
    before, _ = reconcile(study.folder, study.tracking, tmp_path / "artifacts")
    assert before.equal, list(before.differences())
    assert [trial.seconds for trial in fold(read_ledger(study.folder)).trials] == pytest.approx(
        [trial.seconds for trial in done.state.trials], abs=0.002
    )  # MLflow has milliseconds


def test_an_epoch_that_nobody_knows_is_trained_again(done: Done, tmp_path: Path) -> None:
    study = done.copy(tmp_path / "studies")
    shutil.rmtree(study.folder / "checkpoints")
    lines = done.lines
    place = at(lines, "report", 1)
    (study.folder / FILE).write_bytes(
        b"".join([*lines[:place], damage(lines[place]), *lines[place + 1 :]])
    )
    assert (
        main(["doctor", "tiny", "--repair", "--tracking-uri", "none", "--storage", study.storage])
        == 1
    )
    run(study)
    assert_as_if_nothing_had_been(study, done)


def test_a_damaged_study_is_shown_and_says_so(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = done.copy(tmp_path / "studies")
    lines = done.lines
    place = at(lines, "finished")
    (study.folder / FILE).write_bytes(
        b"".join([*lines[:place], damage(lines[place]), *lines[place + 1 :]])
    )
    assert main(["status", "tiny", "--storage", study.storage]) == 0
    shown = capsys.readouterr()
    assert "the ledger is damaged: line" in shown.err
    assert "tiny: damaged" in shown.out
    assert main(["list", "--plain", "--storage", study.storage]) == 0
    assert "\tdamaged\t" in capsys.readouterr().out
    assert main(["report", "tiny", "--storage", study.storage]) == 0
    assert "DAMAGED: the ledger is damaged: line" in capsys.readouterr().out
    for command in (
        ["mlflow", "sync", "tiny"],
        ["mlflow", "verify", "--repair", "tiny"],
        ["import", "tiny", "tiny"],
        ["run", "--resume", "tiny", "--plain"],
    ):
        assert main([*command, "--storage", study.storage]) == 2  # a loss must not spread
        assert "--repair" in capsys.readouterr().err


def test_a_clock_that_is_set_changes_no_seconds_and_reaches_no_limit(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    jump = [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])

    def react(event: dict[str, Any]) -> None:
        jump[0] += {"report": 86400.0, "started": -7200.0}.get(event["event"], 0.0)

    study = dataclasses.replace(
        done.study,
        storage=str(tmp_path),
        tracking_uri="none",
        limits=dataclasses.replace(done.study.limits, hours=1.0),
    )
    run_study(study, SilentView(react), lambda line: None)
    state = fold(read_ledger(study.folder))
    assert [trial.status for trial in state.trials] == [FINISHED, FINISHED]
    assert all(0 < trial.seconds < 3600 for trial in state.trials)


PLAIN = """
from trainers import report


def train(config):
    for epoch in range(3):
        report({"quality": config["x"] + epoch, "seen" if epoch else "first": 1.0})
    return {"size": 7.0 + config["x"]}
"""
PLAIN_STUDY = """
name: plain
trainable: plain.py:train
trial: {trainable: {args: {x: 0.5}}, epochs: 4}
rows: [{label: a}, {label: b, overrides: {trainable.args.x: 0.25}}]
baseline: null
metric: quality
mode: max
"""


@pytest.mark.slow
def test_figures_of_no_split_and_of_some_epochs_are_restored_too(tmp_path: Path) -> None:
    """From MLflow, for a loop without checkpoints."""
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "plain.yaml").write_text(PLAIN_STUDY)
    study = load(str(tmp_path / "plain.yaml"), [f"storage={tmp_path / 'studies'}"])
    run(study)
    done = Done(study, study.folder, fold(read_ledger(study.folder)))
    lines = done.lines
    for kind, which in (("report", 0), ("report", 3), ("finished", 0), ("finished", 1)):
        copy, place = done.copy(tmp_path / f"{kind}-{which}"), at(lines, kind, which)
        (copy.folder / FILE).write_bytes(
            b"".join([*lines[:place], damage(lines[place]), *lines[place + 1 :]])
        )
        repaired = repair(copy.folder, copy.tracking)
        assert [event["event"] for event in repaired.recovered] == [kind]
        assert repaired.lost == []
        assert_as_if_nothing_had_been(copy, done)
        before, _ = reconcile(copy.folder, copy.tracking, tmp_path / "artifacts")
        assert before.equal, list(before.differences())
