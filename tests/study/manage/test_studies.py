"""Studies that there are: listed, shown, exported, extended, fed from each other; made-up ledgers,
the real command line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from study.cli import main
from study.config import LimitsConfig, StudyConfig
from study.execution.control import FILE as CONTROL
from study.execution.control import Control, Wish, ask, gpu_seconds, reached
from study.ledger.lines import Event
from study.ledger.log import Ledger, is_locked, read_ledger
from study.ledger.state import FAILED, FINISHED, PLANNED, StudyState, fold
from study.manage.export import export, write_csv
from study.manage.extend import continuations, extended, take_over
from study.manage.rerun import differences
from study.manage.studies import find_trial, overview, read
from study.plan.durations import seconds_an_epoch
from study.plan.estimate import describe_plan
from study.plan.identity import pace_key
from study.plan.plan import make_plan
from study.report.tables import render_csv, render_text
from study.results.objectives import objective
from study.results.statistics import best_of_budget, costs, entries
from tests.study.conftest import made_up_events
from tests.study.made_up_slots import with_slots

Tiny = Callable[..., StudyConfig]


def write(study: StudyConfig, events: list[Event]) -> Path:
    """A study's folder with that ledger."""
    study.folder.mkdir(parents=True)
    (study.folder / "ledger.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in events)
    )
    return study.folder


@pytest.fixture
def local(tiny: Tiny, tmp_path: Path) -> Callable[..., StudyConfig]:
    """A tiny study in a storage of the test's own."""
    return lambda name, *overrides: tiny(name, f"storage={tmp_path / 'own'}", *overrides)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_list_and_status_and_show(local: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    study = local("first", "seeds=[0,1]")
    events = made_up_events(study)
    write(study, events)
    write(local("second"), made_up_events(local("second"))[:4])
    storage = ["--storage", study.storage]
    assert main(["list", *storage]) == 0
    listed = lines(capsys)
    assert listed[0].split() == ["study", "condition", "trials", "best", "last", "heard", "of"]
    assert any(
        line.startswith("first")
        and "finished" in line
        and "4/4" in line
        and "validation/error 0.06667" in line
        for line in listed
    )
    assert any(
        line.startswith("second") and "interrupted" in line and "0/2" in line for line in listed
    )
    assert main(["status", "first", *storage]) == 0
    shown = "\n".join(lines(capsys))
    trial = fold(events).trials[0]
    assert "4 finished" in shown
    assert trial.id in shown
    assert main(["show", "first", trial.id[:6], *storage]) == 0
    shown = "\n".join(lines(capsys))
    assert "test error: 2.00 %" in shown
    assert "format: float32" in shown
    assert shown.splitlines()[-1].split()[0] == "3"


def test_status_tells_slots(local: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    study = local("slots")
    events = with_slots(made_up_events(study))
    arguments = ["status", "slots", "--storage", study.storage]
    folder = write(study, events)
    assert main(arguments) == 0
    assert "last run: utilisation 2 % of the CPUs, 0.316 epochs/s" in lines(capsys)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:4]))
    with Ledger(folder):
        assert main(arguments) == 0
    (shown,) = (line for line in lines(capsys) if "slots in use" in line)
    # of the 1000 s since it began
    assert shown.startswith("1 of 2 slots in use, utilisation 50 % of the CPUs, 0.00")


def test_a_spreadsheet_computes_nothing_of_what_is_exported(local: Tiny, tmp_path: Path) -> None:
    labels = [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(A1)",
        "-1.5e-3",
        "plain - text",
        "'quoted",
    ]
    rows = json.dumps(
        [
            {"label": label, "overrides": {"epochs": number + 1}}
            for number, label in enumerate(labels)
        ]
    )
    study = local("formulas", f"rows={rows}", "baseline=null")
    write(study, made_up_events(study))
    export(read(study.folder), tmp_path / "out.csv", "csv")
    found = [row["row"] for row in csv.DictReader((tmp_path / "out.csv").open())]
    assert found == [
        "'=1+1",
        "'+cmd|' /C calc'!A0",
        "'-2+3",
        "'@SUM(A1)",
        "-1.5e-3",
        "plain - text",
        "'quoted",
    ]
    buffer = io.StringIO()
    write_csv(buffer, ["@a"], [{"@a": "\t=1"}, {"@a": "\r=1"}, {"@a": -2}, {}])
    assert [*csv.reader(io.StringIO(buffer.getvalue(), newline=""))] == [
        ["'@a"],
        ["'\t=1"],
        ["'\r=1"],
        ["-2"],
        [""],
    ]


def test_nor_of_the_list_of_configurations(local: Tiny) -> None:
    study = local(
        "formulas", 'rows=[{label: "=1+1"}]', "baseline=null", "space={epochs: {grid: [1, 2]}}"
    )
    listed = csv.DictReader(io.StringIO(render_csv(fold(made_up_events(study)))))
    assert [line["row"] for line in listed] == ["'=1+1"] * 2


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_export(local: Tiny, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str) -> None:
    study = local("exported", "seeds=[0,1]")
    write(study, made_up_events(study, {"lns matmul": 3.0}))
    path = tmp_path / f"out.{form}"
    assert main(["export", "exported", "--storage", study.storage, "-o", str(path)]) == 0
    assert lines(capsys) == [f"4 trials in {path}"]
    readers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "csv": lambda: list(csv.DictReader(path.open())),
        "json": lambda: [json.loads(line) for line in path.read_text().splitlines()],
        "parquet": lambda: pandas.read_parquet(path).to_dict("records"),
    }
    rows = readers[form]()
    assert [row["row"] for row in rows] == ["float32", "lns matmul"] * 2
    assert [float(row["test/error"]) for row in rows] == pytest.approx([0.02, 0.03, 0.0201, 0.0301])
    assert [float(row["bits"]) for row in rows] == [32, 12, 32, 12]
    assert all(
        str(row["config.optimizer.lr"]) == "0.1" and row["status"] == "finished" for row in rows
    )
    assert (
        main(["export", "exported", "--storage", study.storage, "-o", str(path), "--epochs"]) == 0
    )
    assert lines(capsys) == [f"12 epochs in {path}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "nowhere"], "no such study"),
        (["show", "there", "zzz"], "0 trials match"),
        (["pause", "there"], "is not running; to go on with it: lns-study resume there"),
        (["edit", "there", "limits.trials=3"], "is not running"),
        (["extend", "there", "name=other"], "would be another study"),
        (["extend", "there", "trial.epoch=3"], "unknown key (did you mean 'trial.epochs'?)"),
        (["extend", "there", "model=mlp_128"], "set its keys instead"),
        (["import", "there", "nowhere"], "no such study"),
        (["export", "there", "-o", "x.xlsx"], "must be one of csv, json, parquet"),
        (["export", "there", "-o", "/nowhere/x.csv"], "cannot be written"),
        (["rerun", "there", "zzz"], "0 trials match"),
    ],
)
def test_what_cannot_be_done_says_why(
    local: Tiny, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    study = local("there")
    write(study, made_up_events(study))
    assert main([*arguments, "--storage", study.storage]) == 2
    assert said in capsys.readouterr().err


def test_a_running_study_is_told_not_touched(
    local: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    study = local("busy")
    folder = write(study, made_up_events(study)[:3])
    storage = ["--storage", study.storage]
    assert not is_locked(folder)
    with Ledger(folder) as ledger:
        assert is_locked(folder)
        edited: list[dict[str, Any]] = []
        control = Control(folder, fold(ledger.history), LimitsConfig(), edited.append)
        assert control.decide(fresh=True).wish == Wish.RUN
        for verb in ("pause", "stop", "cancel"):
            assert main([verb, "busy", *storage]) == 0
            assert control.decide(fresh=True).wish == Wish[verb.upper()]
        assert main(["resume", "busy", *storage]) == 0
        assert control.decide(fresh=True).wish == Wish.RUN
        assert main(["edit", "busy", *storage, "limits.trials=7", "limits.hours=2.5"]) == 0
        control.decide(fresh=True)
        assert edited == [
            {"trials": 7, "hours": 2.5, "gpu_hours": None, "joules": None, "failures": None}
        ]
        assert main(["retry", "busy", *storage]) == 2
        assert main(["edit", "busy", *storage, "seeds=[1]"]) == 2
        assert "only limits can be changed" in capsys.readouterr().err
    assert (folder / CONTROL).exists()


def test_wishes_of_an_earlier_run_are_forgotten(tmp_path: Path) -> None:
    ask(tmp_path, wish=Wish.CANCEL)
    assert Control(tmp_path, StudyState(), LimitsConfig()).decide().wish == Wish.RUN


@pytest.mark.parametrize(
    ("limits", "seconds", "said"),
    [
        ({"trials": 4}, 0, "limits.trials=4 reached"),
        ({"trials": 5}, 0, ""),
        ({"hours": 0.5}, 1799, ""),
        ({"hours": 0.5}, 1800, "limits.hours=0.5 reached"),
        ({"failures": 1}, 0, "limits.failures=1 reached"),
        ({"gpu_hours": 0.001}, 0, "limits.gpu_hours=0.001 reached"),
        ({"gpu_hours": 1.0}, 0, ""),
    ],
)
def test_limits(local: Tiny, limits: dict[str, Any], seconds: float, said: str) -> None:
    state = fold(made_up_events(local("limits", "seeds=[0,1]")))
    state.trials[0].status = FAILED
    for trial in state.trials:
        # 3 s each, so 6 s times a share of one half
        trial.config = trial.config | {"device": "cuda", "gpus": 0.5}
    assert reached(LimitsConfig(**limits), state, seconds) == said


def test_a_longer_trial_goes_on_from_a_shorter_one(local: Tiny) -> None:
    study = local("longer")
    events = made_up_events(study)
    checkpoint = study.folder / "checkpoint"
    short = fold(events).trials[0]
    events.append(
        {"event": "checkpoint", "time": 1.0, "trial": short.id, "epoch": 3, "path": str(checkpoint)}
    )
    write(study, events)
    checkpoint.mkdir()
    plan = make_plan(extended(read(study.folder), ["trial.epochs=5"]))
    with Ledger(study.folder) as ledger:
        state = fold(ledger.history)
        ledger.listen(state.apply)
        ledger.append("planned", **plan.to_event(), data=[], provenance={})
        assert continuations(ledger, state) == 1  # the other trial has no checkpoint left
        first, second = state.trials
        assert (first.status, first.epoch, first.checkpoints_left()) == (
            PLANNED,
            3,
            [str(checkpoint)],
        )
        assert (first.seconds, first.spent) == (pytest.approx(3.0), 0.0)
        assert first.took == short.took
        assert first.commits == ["c0ffee"]
        assert first.id != short.id
        assert second.epoch == 0
        assert continuations(ledger, state) == 0


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
    write(study, events)
    plan = make_plan(extended(read(study.folder), ["trial.epochs=5", change]))
    with Ledger(study.folder) as ledger:
        state = fold(ledger.history)
        ledger.listen(state.apply)
        ledger.append("planned", **plan.to_event(), data=[], provenance={})
        assert continuations(ledger, state) == 0


def test_finished_trials_are_taken_over_once(local: Tiny) -> None:
    ours, theirs = local("ours", "seeds=[0,1]"), local("theirs", "seeds=[1,2]")
    began = [made_up_events(ours)[0]]
    write(ours, began)
    write(theirs, made_up_events(theirs))
    assert take_over(ours.folder, theirs.folder) == (2, 2)
    assert take_over(ours.folder, theirs.folder) == (0, 2)
    state = read(ours.folder)
    done = [trial for trial in state.trials if trial.status == FINISHED]
    assert {trial.seed for trial in done} == {1}
    assert all(trial.epoch == 3 and trial.test for trial in done)
    assert all(event["source"] == str(theirs.folder) for event in read_ledger(ours.folder)[1:])


def test_what_is_taken_over_keeps_its_seconds_and_its_code(local: Tiny) -> None:
    """Seconds are an objective; they feed plans and fronts, and what this study spent is none of
    them."""
    ours, theirs = local("ours"), local("theirs")
    write(ours, made_up_events(ours)[:1])
    other = made_up_events(theirs)
    other[0]["provenance"] = other[0]["provenance"] | {"commit": "decade"}
    relieved = {
        "event": "relieved",
        "time": other[0]["time"],
        "trial": other[1]["trial"],
        "error": "boom",
        "relief": {"batch_size": 16},
    }
    # broken off for 100 s after the second epoch, on another day
    began = [
        event | {"time": event["time"] - 1e5 + 100 * (event.get("epoch") == 3)}
        for event in [other[0], relieved, *other[1:]]
    ]
    again = {"event": "started", "time": other[1]["time"] - 1e5 + 102, "trial": other[1]["trial"]}
    write(theirs, [*began[:5], again, *began[5:]])
    source = read(theirs.folder)
    assert take_over(ours.folder, theirs.folder) == (2, 0)
    state = read(ours.folder)
    for known, trial in zip(source.trials, state.trials, strict=True):
        assert objective(trial, "seconds") == objective(known, "seconds")
        assert (trial.started, trial.ended, trial.took) == (known.started, known.ended, known.took)
        assert trial.commits == known.commits == ["decade"]
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
    write(ours, made_up_events(ours)[:1])
    write(theirs, other)
    with pytest.raises(ValueError, match="the two studies saw different files"):
        take_over(ours.folder, theirs.folder)


def test_studies_that_choose_other_parts_of_the_same_data_can_be_mixed(local: Tiny) -> None:
    """Ledgers written before files had a digest have one of each choice."""
    rows = "rows=[{label: few, overrides: {data.train_size: 100}}, {label: all}]"
    ours, theirs = (local(name, rows, "baseline=null") for name in ("ours", "theirs"))
    first, second = made_up_events(ours), made_up_events(theirs)
    (entry,) = first[0]["data"]
    few, many = {**entry, "train": 100, "digest": "e" * 64}, {**entry, "train": 1200}
    first[0]["data"], second[0]["data"] = [few, many], [many, few]
    write(ours, first[:1])
    write(theirs, second)
    assert take_over(ours.folder, theirs.folder) == (2, 0)


def test_of_other_files_no_other_part_is_taken_either(local: Tiny) -> None:
    ours, theirs = local("ours"), local("theirs")
    first, second = made_up_events(ours), made_up_events(theirs)
    first[0]["data"] = [{**first[0]["data"][0], "files": "f" * 64}]
    second[0]["data"] = [{**second[0]["data"][0], "train": 7, "files": "e" * 64}]
    write(ours, first[:1])
    write(theirs, second)
    with pytest.raises(ValueError, match="the two studies saw different files"):
        take_over(ours.folder, theirs.folder)


def test_differences_are_of_figures_not_of_times(local: Tiny) -> None:
    state = fold(made_up_events(local("same")))
    trial = state.trials[0]
    again = dataclasses.replace(
        trial,
        reports={
            k: {**e, "metrics": {**e["metrics"], "samples_per_second": 1.0}}
            for k, e in trial.reports.items()
        },
    )
    assert differences(trial, again) == []
    again.reports[2] = {
        **again.reports[2],
        "metrics": {**again.reports[2]["metrics"], "train/loss": 0.4999},
    }
    assert differences(trial, again) == ["epoch 2: train/loss: 0.5 and 0.4999"]
    lost = dataclasses.replace(trial, status=FAILED, error="boom")
    assert differences(trial, lost) == ["the repetition failed: boom"]


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


def test_find_trial(local: Tiny) -> None:
    state = fold(made_up_events(local("find", "seeds=[0,1]")))
    assert find_trial(state, "float32, seed 1").seed == 1
    with pytest.raises(ValueError, match="4 trials match"):
        find_trial(state, "")


def test_a_plan_says_what_it_knows_of_time(local: Tiny) -> None:
    study = local("timed")
    text = "\n".join(describe_plan(make_plan(study)))
    assert "2 trials = 2 rows (float32, lns matmul) x 1 configuration x 1 seeds" in text
    assert "Expected time: unknown" in text
    write(study, made_up_events(study))
    longer = make_plan(local("timed", "trial.epochs=200", "trial.optimizer.lr=0.3", "seeds=[5]"))
    text = "\n".join(describe_plan(longer))
    assert "about 3 min" in text  # 200 epochs of the second that made-up epochs are apart
    assert (
        "Expected time: 3 min, 2 at a time (7 min of trial time), utilisation of the CPUs at most"
        " 100 %" in text
    )
    alone = make_plan(
        local(
            "timed", "trial.epochs=200", "trial.optimizer.lr=0.3", "seeds=[5]", "max_concurrent=1"
        )
    )
    assert (
        "Expected time: 7 min, 1 at a time (7 min of trial time), utilisation of the CPUs at most"
        " 50 %" in "\n".join(describe_plan(alone))
    )
