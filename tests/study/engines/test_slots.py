"""A study fills its slots: as many trials as slots run at once, from the start to the end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.engines.control import Control
from study.engines.loop import Loop
from study.ledger.log import Ledger, read_ledger
from study.ledger.state import FAILED, FINISHED, StudyState, fold
from study.lifecycle import run_study
from study.plan.plan import make_plan
from study.results.objectives import objective
from study.search.agenda import Agenda
from tests.study.conftest import SilentView
from tests.study.sleeping import FAILS_ONCE, WAITS_FOR_ANOTHER, executor, most_at_once
from trainers.workers.messages import BEGAN, DIED, DONE, ENDED, REPORT, Beginning, Message

Make = Callable[..., StudyConfig]


def test_as_many_trials_run_at_once_as_there_are_slots(tiny: Make) -> None:
    """Each sleeps a second; one after another they would take 48 s."""
    study = tiny(
        "slots",
        "cpus=16",
        "rows=[{label: a}]",
        "baseline=null",
        f"seeds={list(range(48))}",
        "trial.optimizer.lr=1.0",
        "trial.epochs=1",
    )
    with executor():
        outcome = run_study(study, SilentView(), lambda line: None)
    events = read_ledger(study.folder)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    assert most_at_once(events) == 16
    assert len({event["pid"] for event in events if event["event"] == "report"}) == 16
    started = [event for event in events if event["event"] == "started"]
    assert {slot for event in started for slot in event["slots"]} == set(range(16))
    assert {event["cpus"] for event in started} == {1.0}
    (capacity,) = [event for event in events if event["event"] == "capacity"]
    assert (capacity["cpus"], capacity["gpus"], capacity["nodes"]) == (16, 0, 1)


def test_rows_of_different_shapes_share_the_slots(tiny: Make) -> None:
    rows = (
        "rows=[{label: one}, {label: two, overrides: {workers: 2}}, {label: four threads,"
        " overrides: {threads: 4}}]"
    )
    study = tiny(
        "shapes",
        "cpus=4",
        rows,
        "baseline=null",
        "seeds=[0,1,2,3]",
        "trial.optimizer.lr=0.2",
        "trial.epochs=2",
    )
    with executor():
        outcome = run_study(study, SilentView(), lambda line: None)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    held = 0.0
    for event in read_ledger(study.folder):
        if event["event"] == "started":
            held += event["cpus"]
        elif event["event"] == "finished":
            trial = outcome.state.known[event["trial"]]
            held -= trial.config["workers"] * trial.config["threads"]
        assert 0 <= held <= 4


def test_one_that_fails_in_a_shared_process_is_told_of_all_that_it_takes_along(tiny: Make) -> None:
    rows, seeds = "rows=[{label: a}]", f"seeds={list(range(8))}"
    study = tiny(
        "shared",
        "cpus=8",
        "executor=packed",
        rows,
        "baseline=null",
        seeds,
        "trial.optimizer.lr=0.5",
        "trial.epochs=3",
    )
    with executor(FAILS_ONCE):
        outcome = run_study(study, SilentView(), lambda line: None)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    assert [trial.restarts for trial in outcome.state.trials] == [1] * 8
    events = read_ledger(study.folder)
    assert sum(event["event"] == "finished" for event in events) == 8
    assert {event["error"] for event in events if event["event"] == "restarted"} == {
        "the network is away",
        "its process ended with another trial's: the network is away",
    }


def test_a_trial_that_begins_again_counts_once_in_a_limit(tiny: Make) -> None:
    some = ["rows=[{label: a}]", "baseline=null", "trial.optimizer.lr=0.1", "trial.epochs=2"]
    study = tiny("limited-again", "cpus=1", "seeds=[0,1]", "limits.trials=1", *some)
    with executor(FAILS_ONCE):
        outcome = run_study(study, SilentView(), lambda line: None)
    first, second = outcome.state.trials
    assert (first.status, first.restarts) == (FINISHED, 1)
    assert second.status != FINISHED


def test_a_proposed_trial_that_is_larger_than_the_machine_fails_with_the_reason(tiny: Make) -> None:
    space = [
        "space={workers: {choice: [1, 4]}, optimizer.lr: {uniform: [0.01, 0.02]}}",
        "search={algorithm: tpe, num_samples: 6}",
    ]
    study = tiny("large", "cpus=2", "rows=[{label: a}]", "baseline=null", "trial.epochs=1", *space)
    with executor():
        outcome = run_study(study, SilentView(), lambda line: None)
    by_workers = {
        workers: [t for t in outcome.state.trials if t.config["workers"] == workers]
        for workers in (1, 4)
    }
    assert all(trial.status == FINISHED for trial in by_workers[1])
    assert by_workers[4]
    for trial in by_workers[4]:
        assert trial.status == FAILED
        assert trial.error.startswith(
            "needs 4 workers of 1 CPU each, and this study has 2 CPUs and 0 GPUs on 1 machine;"
        )


def test_max_concurrent_holds_trials_back(tiny: Make) -> None:
    study = tiny(
        "few",
        "cpus=8",
        "max_concurrent=3",
        "rows=[{label: a}]",
        "baseline=null",
        "seeds=[0,1,2,3,4,5]",
        "trial.optimizer.lr=0.3",
    )
    with executor():
        run_study(study, SilentView(), lambda line: None)
    assert most_at_once(read_ledger(study.folder)) == 3


def test_a_gang_does_not_starve_behind_small_trials_and_short_ones_use_what_it_leaves(
    tiny: Make,
) -> None:
    """A trial with forty epochs of half a second holds one of four slots until a short one has
    started beside it; a gang of four waits for it. Trials of 0.1 s fill the other three slots once
    their duration is known, and none starts that would delay the gang."""
    rows = (
        "rows=[{label: short, overrides: {optimizer.lr: 0.05}}, {label: long, overrides:"
        " {optimizer.lr: 0.5, epochs: 40}}, {label: gang, overrides: {workers: 4, optimizer.lr:"
        " 0.02, batch_size: 64}}]"
    )
    study = tiny(
        "gangs", "cpus=4", rows, "baseline=null", f"seeds={list(range(6))}", "trial.epochs=2"
    )
    with executor(WAITS_FOR_ANOTHER):
        outcome = run_study(study, SilentView(), lambda line: None)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    events = [
        event for event in read_ledger(study.folder) if event["event"] in ("started", "finished")
    ]
    row = {trial.id: trial.row for trial in outcome.state.trials}
    order = [row[event["trial"]] for event in events if event["event"] == "started"]
    assert order[:2] == ["short", "long"]
    gang = order.index("gang")
    assert set(order[2:gang]) == {"short"}
    assert order.count("gang") == 6


def test_a_search_proposes_what_fills_the_slots_that_a_waiting_gang_leaves(tiny: Make) -> None:
    study = tiny(
        "search",
        "cpus=4",
        "rows=[{label: a}]",
        "baseline=null",
        "seeds=[0]",
        "space={epochs: {choice: [2, 30]}, workers: {choice: [1, 4]},"
        " optimizer.lr: {uniform: [0.03, 0.06]}}",
        "search={algorithm: tpe, num_samples: 24}",
    )
    with executor():
        outcome = run_study(study, SilentView(), lambda line: None)
    trials = outcome.state.trials
    assert [trial.status for trial in trials] == [FINISHED] * 24
    events = read_ledger(study.folder)
    place = {
        (event["event"], event.get("trial") or event["planned"]["id"]): number
        for number, event in enumerate(events)
        if event["event"] in ("added", "started")
    }
    gangs = [trial.id for trial in trials if trial.config["workers"] == 4]
    assert any(
        place["added", gang] < place["added", trial.id] < place["started", trial.id]
        and place["started", trial.id] < place["started", gang]
        for gang in gangs
        for trial in trials
    )


@pytest.fixture
def course(tiny: Make, tmp_path: Path) -> tuple[Loop, StudyState, Ledger]:
    """A runner of two trials with made-up processes, its state, and its ledger."""
    study = tiny("course", f"storage={tmp_path}", "max_failures=1")
    plan, state, ledger = make_plan(study), StudyState(), Ledger(study.folder)
    ledger.listen(state.apply)
    ledger.append({**plan.to_event("x"), "data": []})
    agenda = Agenda(plan, state, lambda trial: None)
    for _ in plan.trials:
        agenda.next()
    control = Control(study.folder, state, study.limits)
    run = Loop(study, agenda, ledger, state, control, None)  # type: ignore[arg-type]
    return run, state, ledger


def metrics(epoch: int, **more: Any) -> dict[str, Any]:
    return {
        "epoch": float(epoch),
        "train/loss": 1 / epoch,
        "validation/error": 0.5,
        "done": False,
        "pid": 7,
        "host": "here",
        "seconds": 0.25,
        **more,
    }


def test_epochs_that_the_ledger_lacks_are_taken_from_where_a_trial_began_once(
    course: tuple[Loop, StudyState, Ledger],
) -> None:
    run, state, _ = course
    trial = state.trials[0].id
    began = Beginning(damaged="one was", history=[metrics(1), metrics(2)])
    last = {**metrics(3), "test/loss": 0.1, "done": True}
    run.take_in([Message(REPORT, trial, metrics(1))])
    run.take_in(
        [
            Message(BEGAN, trial, began),
            Message(REPORT, trial, last),
            Message(ENDED, trial, {"how": DONE, "text": "", "retire": ""}),
        ]
    )
    events = read_ledger(run._study.folder)
    assert [event["epoch"] for event in events if event["event"] == "report"] == [1, 2, 3]
    assert (run._study.folder / "ledger.jsonl").read_text().count('"report"') == 3
    assert [event["error"] for event in events if event["event"] == "damaged"] == ["one was"]
    assert events[-1]["event"] == "finished"
    assert events[-1]["metrics"] == {"test/loss": 0.1}
    assert "test/loss" not in state.known[trial].reports[3]["metrics"]


def test_epochs_taken_from_a_checkpoint_have_no_seconds_that_nobody_measured(
    course: tuple[Loop, StudyState, Ledger],
) -> None:
    """Otherwise they would have the seconds from the restart until the checkpoint was read."""
    run, state, _ = course
    trial = state.known[state.trials[0].id]
    run.take_in([Message(BEGAN, trial.id, Beginning(history=[metrics(1), metrics(2)]))])
    run.take_in([Message(REPORT, trial.id, metrics(3))])
    assert sorted(trial.reports) == [1, 2, 3]
    assert list(trial.took) == [3]
    assert objective(trial, "seconds") is None


def test_an_epochs_seconds_are_its_processs_whenever_the_driver_hears_of_it(
    course: tuple[Loop, StudyState, Ledger],
) -> None:
    """A driver that waited for its storage gets several reports at once."""
    run, state, _ = course
    trial = state.known[state.trials[0].id]
    run.take_in([Message(REPORT, trial.id, metrics(n, seconds=float(n))) for n in (1, 2, 3)])
    assert trial.took == {1: 1.0, 2: 2.0, 3: 3.0}
    assert objective(trial, "seconds") == 6.0
    assert "seconds" not in trial.reports[1]["metrics"]


def test_a_trial_is_tried_again_as_often_as_it_may(course: tuple[Loop, StudyState, Ledger]) -> None:
    run, state, _ = course
    trial = state.trials[0].id
    run.take_in([Message(DIED, trial, "SIGKILL")])
    assert state.known[trial].restarts == 1
    again = run._agenda.next()
    assert again is not None
    assert again.id == trial
    run.take_in(
        [Message(ENDED, trial, {"how": "failed", "text": "the network is away", "retire": "so"})]
    )
    assert (state.known[trial].status, state.known[trial].error) == (FAILED, "the network is away")
    assert run._agenda.next() is None


def test_losses_of_machines_count_since_a_trials_last_new_epoch(
    course: tuple[Loop, StudyState, Ledger],
) -> None:
    """On spot machines a long trial is lost more often than ``max_failures``, but makes
    progress."""
    run, state, _ = course
    trial = state.known[state.trials[0].id]
    gone = Message(DIED, trial.id, "the node spot-7 is gone")
    for epoch in range(1, 5):  # in one round, and in two
        progress = [Message(REPORT, trial.id, metrics(epoch))]
        run.take_in([*progress, gone] if epoch % 2 else progress)
        run.take_in([] if epoch % 2 else [gone])
    run.take_in([Message(BEGAN, trial.id, Beginning(history=[metrics(5)])), gone])
    assert (trial.restarts, trial.error) == (5, "the node spot-7 is gone")
    run.take_in([Message(REPORT, trial.id, metrics(5)), gone])  # no epoch that did not exist
    assert (trial.status, trial.restarts) == (FAILED, 5)


def test_a_full_storage_ends_the_study_and_fails_no_trial(
    course: tuple[Loop, StudyState, Ledger],
) -> None:
    run, state, _ = course
    run.take_in(
        [
            Message(
                ENDED,
                state.trials[0].id,
                {"how": "failed", "text": "[Errno 28] No space left on device", "retire": "so"},
            )
        ]
    )
    assert state.known[state.trials[0].id].status not in (FAILED, FINISHED)
    assert "No space left" in run._control.storage_error


def test_a_killed_study_goes_on_where_it_was(tiny: Make) -> None:
    """The driver dies while all slots are in use (SIGKILL); the same command runs the rest, nothing
    twice."""
    study = tiny(
        "full house",
        "cpus=8",
        "rows=[{label: a}]",
        "baseline=null",
        f"seeds={list(range(24))}",
        "trial.optimizer.lr=0.5",
        "trial.epochs=1",
    )
    code = (
        "import sys, json; from study.config import StudyConfig; from study.lifecycle import"
        " run_study\nfrom tests.study.conftest import SilentView; from tests.study.sleeping import"
        " executor\nwith executor(): run_study(StudyConfig.from_dict(json.loads(sys.argv[1])),"
        " SilentView(), lambda line: None)"
    )

    words = [sys.executable, "-c", code, json.dumps(study.to_dict())]
    process = subprocess.Popen(words)
    path = study.folder / "ledger.jsonl"
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b'"finished"') >= 9):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    finished = {
        event["trial"] for event in read_ledger(study.folder) if event["event"] == "finished"
    }
    assert subprocess.run(words).returncode == 0
    events = read_ledger(study.folder)
    assert all(trial.status == FINISHED for trial in fold(events).trials)
    assert sum(event["event"] == "finished" for event in events) == 24
    begun = [event["trial"] for event in events if event["event"] == "started"]
    assert not [trial for trial in finished if begun.count(trial) > 1]
