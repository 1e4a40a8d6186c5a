"""What a stranger may put into a study's folder: links that lead elsewhere, pipes and devices, and
invalid values."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from study.cli.entry import main
from study.config import StudyConfig
from study.engines.control import FILE as CONTROL
from study.errors import UserError
from study.ledger import log
from study.ledger.lines import seal
from study.ledger.lock import LOCK, OF_TRIALS, OUTPUT, OWN_FOLDERS
from study.ledger.log import FILE, Ledger
from study.plan.plan import make_plan
from study.tracking.address import WHERE
from study.tracking.tensorboard_alerts import LOG, NOTES, Alerts
from study.tracking.writer import LOCK as TRACKING_LOCK
from study.tracking.writer import tracking_lock
from tests.study.conftest import TINY, made_up_events, write_ledger
from trainers import object_store
from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.checkpoint.manifest import STATE

Tiny = Callable[..., StudyConfig]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the reader's."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "file").write_text("the reader's")
    return folder


def untouched(victim: Path) -> bool:
    return {path.name: path.read_text() for path in victim.iterdir()} == {"file": "the reader's"}


def made_up(tiny: Tiny, name: str, tmp_path: Path) -> StudyConfig:
    study = tiny(name, f"storage={tmp_path}/studies")
    write_ledger(study, made_up_events(study))
    return study


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_report_that_is_a_link_is_refused(
    tiny: Tiny, tmp_path: Path, victim: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = made_up(tiny, "linked", tmp_path)
    made_up(tiny, "other", tmp_path)
    (study.folder / "report").symlink_to(victim)
    other = ["other"] if command == "compare" else []
    assert main([command, "linked", *other, "--storage", study.storage]) == 2
    said = capsys.readouterr().err
    assert f"{study.folder}/report: is a link to {victim}" in said
    assert "remove the link" in said
    assert untouched(victim)


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_a_folder_of_a_study_that_is_a_link_is_refused(
    tmp_path: Path, victim: Path, name: str
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / name).symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name}: is a link to {victim}"):
        Ledger(tmp_path / "study")
    assert untouched(victim)


@pytest.mark.parametrize("name", OF_TRIALS)
def test_a_folder_of_a_trial_that_is_a_link_is_refused(
    tmp_path: Path, victim: Path, name: str
) -> None:
    """Old checkpoints would be removed, and new ones written, at the link's target."""
    (tmp_path / "study" / name).mkdir(parents=True)
    (tmp_path / "study" / name / "0123").symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name}/0123: is a link to {victim}"):
        Ledger(tmp_path / "study")
    assert untouched(victim)


def test_a_checkpoint_that_is_a_link_is_refused_before_its_trial_trains(
    tiny: Tiny, tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny("linked", f"storage={tmp_path}/studies", "seeds=[0]", "epochs=1")
    (first, *_) = make_plan(study).trials
    folder = study.folder / "checkpoints" / first.id
    folder.mkdir(parents=True)
    (folder / "000000").symlink_to(victim)
    keys = ["seeds=[0]", "epochs=1", "name=linked", "tracking_uri=none"]
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["run", str(tmp_path / "tiny.yaml"), *keys, f"storage={study.storage}", "--plain"]
    assert main(words) == 1
    assert f"000000: is a link to {victim}" in capsys.readouterr().out
    assert untouched(victim)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_of_trials_that_is_a_link_or_a_pipe_is_refused(
    tmp_path: Path, victim: Path, kind: str
) -> None:
    """The output of trials would go into another file; a pipe would block."""
    (tmp_path / "study").mkdir()
    log = tmp_path / "study" / OUTPUT
    if kind == "link":
        log.symlink_to(victim / "file")
    else:
        os.mkfifo(log)
    with pytest.raises(ValueError, match=f"{OUTPUT}: is .*it must be a regular file"):
        Ledger(tmp_path / "study")
    assert untouched(victim)


@pytest.mark.parametrize("name", [FILE, LOCK])
def test_a_ledger_or_lock_that_is_a_link_is_refused(
    tmp_path: Path, victim: Path, name: str
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / name).symlink_to(victim / "file")
    with pytest.raises((ValueError, OSError), match=f"is a link to {victim}/file"):
        Ledger(tmp_path / "study")
    assert untouched(victim)


def test_no_note_or_lock_is_written_over_a_link(tiny: Tiny, tmp_path: Path, victim: Path) -> None:
    study = made_up(tiny, "linked", tmp_path)
    for name in (NOTES, LOG, TRACKING_LOCK):
        (study.folder / name).symlink_to(victim / "file")
    with pytest.raises(OSError, match="is a link to"):
        Alerts(study.folder, study)
    (study.folder / NOTES).unlink()
    alerts = Alerts(study.folder, study)
    with pytest.raises(OSError, match="is a link to"):
        alerts._carry_out("key", "true", {})
    with pytest.raises(UserError, match="is a link to"), tracking_lock(study.folder, 0.0):
        pass
    assert untouched(victim)


def test_a_storage_and_a_folder_above_a_study_may_be_links(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "studies").symlink_to(tmp_path / "disk")
    study = made_up(tiny, "by a link", tmp_path)
    assert main(["report", study.slug, "--storage", study.storage]) == 0
    assert (tmp_path / "disk" / study.slug / "report" / "report.html").exists()


@pytest.mark.parametrize("links", ["one", "two"])
def test_a_storage_that_is_another_users_link_is_refused(
    tiny: Tiny, tmp_path: Path, links: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By every command, so that nothing is written where they choose; a link of the user's own, or
    of root's, is followed."""
    study = made_up(tiny, "linked", tmp_path)
    disk, link = Path(study.storage), tmp_path / "shared"
    link.symlink_to(disk)
    if links == "two":
        (tmp_path / "mine").symlink_to(link)
    place = tmp_path / "mine" if links == "two" else link
    before = sorted(disk.rglob("*"))
    uid = os.geteuid()
    monkeypatch.setattr(object_store, "owner_of_link", lambda path: 12345 if path == link else uid)
    (tmp_path / "tiny.yaml").write_text(TINY)
    there = ["--storage", str(place)]
    for words in (
        ["run", str(tmp_path / "tiny.yaml"), f"storage={place}", "epochs=1", "--plain"],
        *(["list", *there], ["ui", *there], ["doctor", *there]),
        ["mlflow", "sync", "linked", *there],
        *([command, "linked", *there] for command in ("status", "report", "export")),
    ):
        assert main(words) in (1, 2), words
        said = "".join(capsys.readouterr())
        assert f"{link} is a link of another user of the machine (uid 12345)" in said, words
        assert f"name {disk} itself" in said
    (disk / "theirs").symlink_to(study.folder)
    monkeypatch.setattr(
        object_store, "owner_of_link", lambda path: 12345 if path.name == "theirs" else uid
    )
    assert main(["report", str(disk / "theirs")]) == 2
    assert "is a link of another user" in capsys.readouterr().err
    (disk / "theirs").unlink()
    assert sorted(disk.rglob("*")) == before
    for owner in (uid, 0):
        monkeypatch.setattr(object_store, "owner_of_link", lambda path, owner=owner: owner)
        assert main(["status", "linked", *there]) == 0


# --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [FILE, LOCK, CONTROL, WHERE])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    tiny: Tiny, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = made_up(tiny, "piped", tmp_path)
    made_up(tiny, "sound", tmp_path)
    (study.folder / name).unlink(missing_ok=True)
    os.mkfifo(study.folder / name)
    there = ["--storage", study.storage]
    assert main(["list", *there]) == 0
    listed = capsys.readouterr().out
    assert "sound" in listed
    if name == FILE:
        assert "unreadable" in listed
        assert "must be a regular file" in listed
    assert main(["status", "piped", *there]) == (2 if name == FILE else 0)
    assert main(["status", "sound", *there]) == 0


def test_a_ledger_of_zeros_is_not_read(tiny: Tiny, tmp_path: Path) -> None:
    """200 GiB of them take no disk space."""
    study = made_up(tiny, "sparse", tmp_path)
    os.truncate(study.folder / FILE, 200 * 2**30)
    with pytest.raises(ValueError, match=r"cannot be read \(has 214,748,364,800 bytes, more than"):
        log.open_ledger(study.folder)


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


STRANGE: dict[str, Callable[[list[Any]], object]] = {
    "a figure of 10^400": lambda all_: report(all_)["metrics"].update(
        {"validation/error": 10**400}
    ),
    "an epoch of 10^400": lambda all_: report(all_).update(epoch=10**400),
    "the year 10^292": lambda all_: [event.update(time=1e300) for event in all_[1:]],
    "a time that is a text": lambda all_: report(all_).update(time="now"),
    "nested deeply": lambda all_: all_[0]["study"].update(question=deep(400)),
    "metrics as a list": lambda all_: report(all_).update(metrics=[1, 2]),
    "a figure that is a text": lambda all_: [
        event["metrics"].update({"validation/error": "a"})
        for event in all_
        if event["event"] == "report"
    ],
    "a million seeds": lambda all_: all_[0]["study"].update(seeds=list(range(10**6))),
    "a billion samples": lambda all_: all_[0]["study"]["search"].update(num_samples=10**9),
    "another type": lambda all_: all_[0]["study"].update(rows=7, search=[1]),
    "no trials": lambda all_: all_[0].pop("trials"),
}


def report(events: list[Any]) -> Any:
    return next(event for event in events if event["event"] == "report")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", STRANGE)
def test_a_ledger_of_strange_values_is_listed_beside_others(
    tiny: Tiny, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = made_up(tiny, "strange", tmp_path)
    made_up(tiny, "sound", tmp_path)
    events = made_up_events(study)
    STRANGE[what](events)
    write_ledger(study, events)
    began = time.monotonic()
    assert main(["list", "--plain", "--storage", study.storage]) == 0
    lines = {line.split("\t")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "finished" in lines["sound"]
    assert "unreadable" in lines["strange"] or "damaged" in lines["strange"]
    assert main(["status", "strange", "--storage", study.storage]) in (0, 2)
    assert time.monotonic() - began < 30


@pytest.mark.timeout(60)
def test_a_line_nested_200000_deep_or_of_a_huge_number_is_damage(tmp_path: Path) -> None:
    line = b'{"event": "x", "time": 1, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
    (tmp_path / FILE).write_bytes(line)
    assert len(log.open_ledger(tmp_path).damage) == 1
    (tmp_path / FILE).write_bytes(seal({"event": "x", "time": 1}, 10**12))
    (tmp_path / LOCK).write_text(json.dumps({"lines": 10**400}))
    assert 0 < len(log.open_ledger(tmp_path).damage) < 20_000


def test_a_note_without_a_view_is_no_link(tiny: Tiny, tmp_path: Path) -> None:
    study = made_up(tiny, "no view", tmp_path)
    for note in ({"uri": "http://h", "experiment": "1"}, {"uri": 7, "view": 1}, [1], "x"):
        (study.folder / WHERE).write_text(json.dumps(note))
        assert main(["report", study.slug, "--storage", study.storage]) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["state.json", "tensors"])
@pytest.mark.parametrize("command", ["doctor", "mlflow sync"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(
    tiny: Tiny, tmp_path: Path, name: str, command: str
) -> None:
    study = made_up(tiny, "piped", tmp_path)
    events = made_up_events(study)
    first = events[0]["trials"][0]["id"]
    folder = study.folder / "checkpoints" / first / "epoch-3"
    folder.parent.mkdir(parents=True)
    save_checkpoint(folder, {"w": torch.zeros(2)}, {"epoch": 3})
    place = {"event": "checkpoint", "trial": first, "epoch": 3, "path": str(folder), "time": 1.0}
    write_ledger(study, [*events[:-1], place | {"checkpoint": str(folder)}, events[-1]])
    file = folder / STATE if name == STATE else next(folder.glob("*.safetensors"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises((ValueError, OSError)):
        load_checkpoint(folder)
    to = ["--tracking-uri", f"sqlite:///{tmp_path}/own.db"] if command != "doctor" else []
    assert main([*command.split(), "piped", *to, "--storage", study.storage]) == (
        command == "doctor"
    )


@pytest.mark.timeout(60)
def test_a_tracking_lock_that_is_a_link_is_named(
    tiny: Tiny, tmp_path: Path, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = made_up(tiny, "linked", tmp_path)
    (study.folder / TRACKING_LOCK).symlink_to(victim / "file")
    to = ["--tracking-uri", f"sqlite:///{tmp_path}/own.db", "--storage", study.storage]
    for command in (["report"], ["mlflow", "sync"], ["mlflow", "verify", "--repair"]):
        with suppress(UserError):
            assert main([*command, "linked", *to]) == 2
        said = capsys.readouterr()
        assert "is a link to" in said.err
    assert untouched(victim)


def test_an_export_takes_no_name_from_the_ledger_and_replaces_nothing(
    tiny: Tiny, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    study = made_up(tiny, "mine", tmp_path)
    events = made_up_events(study)
    events[0]["study"]["name"] = "thesis"
    write_ledger(study, events)
    monkeypatch.chdir(victim)
    (victim / "thesis.csv").symlink_to(victim / "file")
    there = ["export", str(study.folder), "--storage", study.storage]
    assert main(there) == 0
    assert (victim / "mine.csv").read_text().startswith("id,")
    (victim / "mine.csv").unlink()
    (victim / "thesis.csv").rename(victim / "mine.csv")
    for form in ("csv", "json", "parquet"):
        (victim / f"mine.{form}").unlink(missing_ok=True)
        (victim / f"mine.{form}").symlink_to(victim / "file")
        assert main([*there, "--format", form]) == 2
        assert "exists; give `--output" in capsys.readouterr().err
        (victim / f"mine.{form}").unlink()
    assert untouched(victim)
    (victim / "x.csv").write_text("earlier")
    assert main([*there, "-o", "x.csv"]) == 0
    assert (victim / "x.csv").read_text().startswith("id,")


@pytest.mark.parametrize("form", ["csv", "parquet", "latex"])
def test_a_table_in_a_report_is_written_over_no_link(
    tiny: Tiny, tmp_path: Path, victim: Path, form: str
) -> None:
    study = made_up(tiny, "tables", tmp_path)
    (study.folder / "report").mkdir()
    for name in ("trials.csv", "trials.parquet", "table.tex"):
        (study.folder / "report" / name).symlink_to(victim / "file")
    there = ["--storage", study.storage]
    assert main(["report", "tables", "--format", form, *there]) == 0
    assert untouched(victim)
