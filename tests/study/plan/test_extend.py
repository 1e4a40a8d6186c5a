"""Trials that continue shorter ones, and trials imported from another study."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from study.ledger.lines import seal, unseal
from study.ledger.log import Follower, Ledger, make_header, read_ledger
from study.ledger.state import FAILED, FINISHED, PLANNED, fold
from study.ledger.studies import read
from study.ops.repair.ledger import repair
from study.plan.durations import seconds_an_epoch
from study.plan.extend import continuations, extended, take_over
from study.plan.identity import pace_key
from study.plan.plan import make_plan
from study.report.documents import overview
from study.report.tables import render_text
from study.results.objectives import gpu_seconds, objective
from study.results.statistics import best_of_budget, costs, entries
from study.tracking.writer import sync
from tests.study.conftest import Tiny, made_up_events, write_ledger


def test_a_longer_trial_goes_on_from_a_shorter_one(local: Tiny) -> None:
    study = local("longer")
    events = made_up_events(study)
    events[0]["hardware"] = {"processor": "A", "cores": 2, "gpus": []}
    checkpoint = study.folder / "checkpoint"
    short = fold(events).trials[0]
    events.append(
        {"event": "checkpoint", "time": 1.0, "trial": short.id, "epoch": 3, "path": str(checkpoint)}
    )
    write_ledger(study, events)
    checkpoint.mkdir()
    plan = make_plan(extended(read(study.folder), ["trial.epochs=5"]))
    with Ledger(study.folder) as ledger:
        state = fold(ledger.history)
        ledger.listen(state.apply)
        ledger.append({"event": "planned", **plan.to_event(), "data": [], "provenance": {}})
        assert continuations(ledger, state) == 1  # the other trial's checkpoint is gone
        first, second = state.trials
        assert (first.status, first.epoch, first.checkpoints_left()) == (
            PLANNED,
            3,
            [str(checkpoint)],
        )
        assert (first.seconds, first.spent) == (pytest.approx(3.0), 0.0)
        assert first.took == short.took
        assert first.commits == ["c0ffee"]
        assert first.machines == [events[0]["hardware"]]
        assert first.id != short.id
        assert second.epoch == 0
        assert continuations(ledger, state) == 0


def test_a_study_that_was_moved_has_its_checkpoints(local: Tiny, tmp_path: Path) -> None:
    study = local("moved")
    events = made_up_events(study)
    trial = fold(events).trials[0].id
    own = study.folder / "checkpoints" / trial / "000003"
    imported = tmp_path / "elsewhere" / "checkpoints" / trial / "000002"
    checkpoint = {"event": "checkpoint", "time": 1.0, "trial": trial}
    events += [
        checkpoint | {"epoch": 2, "path": str(imported)},
        checkpoint | {"epoch": 3, "path": str(own)},
        checkpoint | {"epoch": 4, "path": str(own.with_name("000004"))},
    ]
    write_ledger(study, events)
    for folder in (own, imported):
        folder.mkdir(parents=True)
    moved = study.folder.rename(tmp_path / "moved")
    wanted = [str(moved / "checkpoints" / trial / "000003"), str(imported)]
    assert fold(read_ledger(moved)).known[trial].checkpoints_left() == wanted
    own.mkdir(parents=True)  # of another run of the same study, at the same place
    assert fold(read_ledger(moved)).known[trial].checkpoints_left() == wanted
    assert fold(Follower(moved).poll()).known[trial].checkpoints_left() == wanted


@pytest.mark.parametrize(
    "change", ["trial.workers=2", "trial.optimizer.lr=0.2", "trial.data.train_size=500"]
)
def test_other_trials_do_not_go_on(local: Tiny, change: str) -> None:
    study = local("others")
    events = made_up_events(study)
    events += [
        {
            "event": "checkpoint",
            "time": 1.0,
            "trial": trial.id,
            "epoch": 3,
            "path": str(study.folder),
        }
        for trial in fold(events).trials
    ]
    write_ledger(study, events)
    plan = make_plan(extended(read(study.folder), ["trial.epochs=5", change]))
    with Ledger(study.folder) as ledger:
        state = fold(ledger.history)
        ledger.listen(state.apply)
        ledger.append({"event": "planned", **plan.to_event(), "data": [], "provenance": {}})
        assert continuations(ledger, state) == 0


def test_finished_trials_are_taken_over_once(local: Tiny) -> None:
    ours, theirs = local("ours", "seeds=[0,1]"), local("theirs", "seeds=[1,2]")
    began = [made_up_events(ours)[0]]
    write_ledger(ours, began)
    write_ledger(theirs, made_up_events(theirs))
    assert take_over(ours.folder, theirs.folder) == (2, 2)
    assert take_over(ours.folder, theirs.folder) == (0, 2)
    state = read(ours.folder)
    done = [trial for trial in state.trials if trial.status == FINISHED]
    assert {trial.seed for trial in done} == {1}
    assert all(trial.epoch == 3 and trial.test for trial in done)
    assert all(event["source"] == str(theirs.folder) for event in read_ledger(ours.folder)[1:])


def test_what_is_taken_over_keeps_its_seconds_and_its_code(local: Tiny) -> None:
    """Seconds are an objective. They are used for plans and fronts, but this study did not spend
    them."""
    ours, theirs = local("ours"), local("theirs")
    write_ledger(ours, made_up_events(ours)[:1])
    other = made_up_events(theirs)
    other[0]["provenance"] = other[0]["provenance"] | {"commit": "decade"}
    other[0]["hardware"] = {"processor": "A", "cores": 16, "gpus": ["H100"]}
    relieved = {
        "event": "relieved",
        "time": other[0]["time"],
        "trial": other[1]["trial"],
        "error": "boom",
        "relief": {"batch_size": 16},
    }
    # interrupted for 100 s after the second epoch, on another day
    began = [
        event | {"time": event["time"] - 1e5 + 100 * (event.get("epoch") == 3)}
        for event in [other[0], relieved, *other[1:]]
    ]
    again = {"event": "started", "time": other[1]["time"] - 1e5 + 102, "trial": other[1]["trial"]}
    write_ledger(theirs, [*began[:5], again, *began[5:]])
    source = read(theirs.folder)
    assert take_over(ours.folder, theirs.folder) == (2, 0)
    state = read(ours.folder)
    for known, trial in zip(source.trials, state.trials, strict=True):
        assert objective(trial, "seconds") == objective(known, "seconds")
        assert (trial.started, trial.ended, trial.took) == (known.started, known.ended, known.took)
        assert trial.commits == known.commits == ["decade"]
        assert trial.machines == known.machines == [other[0]["hardware"]]
        assert trial.spent == 0.0
        assert trial.relief == known.relief
    assert state.trials[0].seconds == pytest.approx(3.0)
    assert gpu_seconds(state) == 0.0
    assert costs(state) == {"trials": 2.0, "epochs": 6.0}
    assert best_of_budget(state) == best_of_budget(source)
    assert overview(ours.folder)["time"] == read_ledger(ours.folder)[0]["time"]
    events = read_ledger(ours.folder)
    later = events[0] | {"time": time.time()}
    (missing,) = [
        event
        for event in events
        if event["event"] == "finished" and event["trial"] == state.trials[1].id
    ]
    more = {"event": "started", "time": later["time"], "trial": missing["trial"]}
    assert "MIXED CODE: trials ran at 2 commits: c0ffee, decade" in render_text(
        fold([*events, later, more])
    )


def test_an_import_of_an_earlier_version_says_what_it_does_not_know(local: Tiny) -> None:
    study = local("old")
    events = made_up_events(study)
    now = events[-1]["time"]
    for event in events:
        if event.get("trial") == events[1]["trial"]:
            event |= {"time": now, "source": "/elsewhere"}
    first, second = fold(events).trials
    assert (objective(first, "seconds"), objective(second, "seconds")) == (None, pytest.approx(3.0))
    assert first.commits == ["unknown, taken over from /elsewhere"]
    assert "bits" in entries(fold(events))[0].values
    assert "seconds" not in entries(fold(events))[0].values
    assert list(seconds_an_epoch([fold(events)])) == [pace_key(second.config)]


def test_studies_of_other_data_are_not_mixed(local: Tiny) -> None:
    ours, theirs = local("ours"), local("theirs")
    other = made_up_events(theirs)
    other[0]["data"] = [{**other[0]["data"][0], "digest": "e" * 64}]
    write_ledger(ours, made_up_events(ours)[:1])
    write_ledger(theirs, other)
    with pytest.raises(ValueError, match="the two studies saw different files"):
        take_over(ours.folder, theirs.folder)


def test_studies_that_choose_other_parts_of_the_same_data_can_be_mixed(local: Tiny) -> None:
    """Ledgers from before files had a digest have one of each choice."""
    rows = "rows=[{label: few, overrides: {data.train_size: 100}}, {label: all}]"
    ours, theirs = (local(name, rows, "baseline=null") for name in ("ours", "theirs"))
    first, second = made_up_events(ours), made_up_events(theirs)
    (entry,) = first[0]["data"]
    few, many = {**entry, "train": 100, "digest": "e" * 64}, {**entry, "train": 1200}
    first[0]["data"], second[0]["data"] = [few, many], [many, few]
    write_ledger(ours, first[:1])
    write_ledger(theirs, second)
    assert take_over(ours.folder, theirs.folder) == (2, 0)


def test_of_other_files_no_other_part_is_taken_either(local: Tiny) -> None:
    ours, theirs = local("ours"), local("theirs")
    first, second = made_up_events(ours), made_up_events(theirs)
    first[0]["data"] = [{**first[0]["data"][0], "files": "f" * 64}]
    second[0]["data"] = [{**second[0]["data"][0], "train": 7, "files": "e" * 64}]
    write_ledger(ours, first[:1])
    write_ledger(theirs, second)
    with pytest.raises(ValueError, match="the two studies saw different files"):
        take_over(ours.folder, theirs.folder)


def test_only_what_was_asked_for_is_tried_again(local: Tiny) -> None:
    events = made_up_events(local("failed"))
    trial = fold(events).trials[0]
    events = [
        event for event in events if event["event"] != "finished" or event["trial"] != trial.id
    ]
    events.append({"event": "failed", "time": 2.0, "trial": trial.id, "error": "boom"})
    for only, status in (("all", PLANNED), ("unfinished", FAILED), ("failed", PLANNED)):
        state = fold([*events, {**events[0], "only": only}])
        assert state.trials[0].status == status
        assert state.trials[1].status == FINISHED


def test_a_trial_that_goes_on_in_an_earlier_versions_ledger_has_its_seconds(local: Tiny) -> None:
    """The trial that it continues is in the same ledger."""
    events = made_up_events(local("longer"))
    short = fold(events).trials[0]
    plan = make_plan(local("longer", "trial.epochs=4"))
    trial, now = plan.trials[0].id, events[-1]["time"] + 50
    events.append(
        {
            "event": "planned",
            "time": now,
            **plan.to_event(),
            "data": [],
            "provenance": {"commit": "decade"},
        }
    )
    for epoch, report in short.reports.items():
        events.append(
            {
                "event": "report",
                "time": now,
                "trial": trial,
                "epoch": epoch,
                "metrics": report["metrics"],
                "source": short.id,
            }
        )
    events += [
        {"event": "started", "time": now + 1, "trial": trial},
        {
            "event": "report",
            "time": now + 3,
            "trial": trial,
            "epoch": 4,
            "metrics": short.reports[3]["metrics"],
        },
    ]
    longer = fold(events).known[trial]
    assert (longer.seconds, longer.spent) == (pytest.approx(5.0), pytest.approx(2.0))
    assert longer.commits == ["c0ffee", "decade"]


def damaged_import(local: Tiny, kinds: tuple[str, ...], *, commits: bool) -> tuple[Path, str]:
    """A study that imported its first trial, with an earlier version's record of the code or the
    full one, and with damage to the trial's lines of these kinds."""
    ours, theirs = local("ours"), local("theirs")
    mine = made_up_events(ours)
    mine[0]["provenance"] |= {"commit": "decade"}
    write_ledger(ours, mine[:1])
    write_ledger(theirs, made_up_events(theirs))
    take_over(ours.folder, theirs.folder)
    trial = mine[0]["trials"][0]["id"]
    lines = []
    for number, event in enumerate(read_ledger(ours.folder), 2):
        if not commits and event["event"] == "report":
            event.pop("commits", None)
        line = seal(event, number)
        if event.get("trial") == trial and event["event"] in kinds:
            line = line[:40] + bytes([line[40] ^ 1]) + line[41:]
        lines.append(line)
    header = seal(make_header("abc123", mine[0]["time"]), 1)
    (ours.folder / "ledger.jsonl").write_bytes(b"".join([header, *lines]))
    (ours.folder / "ledger.lock").unlink()
    return ours.folder, trial


@pytest.mark.parametrize("commits", [True, False])
def test_a_repair_does_not_take_the_code_of_what_was_taken_over_for_ours(
    local: Tiny, commits: bool
) -> None:
    folder, trial = damaged_import(local, ("started",), commits=commits)
    done = repair(folder, None)
    state = fold(read_ledger(folder))
    source = str(folder.parent / "theirs")
    wanted = "c0ffee" if commits else f"unknown, taken over from {source}"
    assert state.known[trial].commits == [wanted]
    assert state.known[trial].started is not None
    assert [event["event"] for event in done.recovered] == ["started"]
    assert any("commit" in line and trial in line for line in done.lost) != commits
    with Ledger(folder) as ledger:
        assert len(ledger.history) == 12


def test_epochs_that_mlflow_gives_back_to_what_was_taken_over_are_not_of_our_code(
    local: Tiny,
) -> None:
    """Their seconds were not spent here, either."""
    folder, trial = damaged_import(local, (), commits=True)
    study = read(folder).config
    uri = f"sqlite:///{folder.parent / 'mlflow.db'}"
    assert sync(folder, uri, folder.parent / "artifacts", None, lambda said: None) == ""
    assert study.name == "ours"
    folder, trial = damaged_again(folder, trial)
    done = repair(folder, uri)
    known = fold(read_ledger(folder)).known[trial]
    assert sorted(known.reports) == [1, 2, 3]
    assert known.commits == [f"unknown, taken over from {folder.parent / 'theirs'}"]
    assert known.spent == 0
    assert any("commit" in line and trial in line for line in done.lost)


def damaged_again(folder: Path, trial: str) -> tuple[Path, str]:
    """Damage all lines of the trial except its last."""
    path = folder / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        event = unseal(line.rstrip(b"\n"))[1] or {}
        if event.get("trial") == trial and event["event"] in ("started", "report"):
            lines[place] = line[:40] + bytes([line[40] ^ 1]) + line[41:]
    path.write_bytes(b"".join(lines))
    return folder, trial
