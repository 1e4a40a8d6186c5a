"""What the loop of a study decides, told step by step: which trials start, continue, restart and
end. The engine and the clock are scripted, so nothing trains and nothing waits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.config import StudyConfig
from study.config.compose import load
from study.engines.control import GRACE_SECONDS, Wish, ask
from study.ledger.log import read_ledger
from study.ledger.state import FAILED, FINISHED, PLANNED, RUNNING, STOPPED
from tests.study.conftest import TINY
from tests.study.engines.loop.scripted import Course, ScriptedEngine
from trainers.telemetry.tally import Moment
from trainers.workers.messages import LEFT, MOMENT, OUT_OF_MEMORY, REFUSED, Within

pytestmark = pytest.mark.unit
Start = Callable[..., Course]

FOUR = "rows=[{label: a, overrides: {precision.format: lns12}}]", "baseline=null", "seeds=[0,1,2,3]"
"""Four trials of one row."""
ASHA = (
    "search={scheduler: asha, grace_period: 1, reduction_factor: 2}",
    "space={optimizer.lr: {grid: [0.1, 0.2, 0.3, 0.4]}}",
)
GANG_BESIDE_SMALL = (
    "rows=[{label: gang, overrides: {workers: 2}}, {label: small, overrides: {epochs: 1}}]",
    "baseline=null",
    "seeds=[0,1]",
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a study on an engine of two CPUs, whose first round has run:
    ``start("max_failures=1", cpus=1)``."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.time", lambda: clock[0])
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def make(*overrides: str, cpus: float = 2, gpus: int = 0) -> Course:
        study: StudyConfig = load(
            str(path), [f"storage={tmp_path}", "tracking_uri=none", *overrides]
        )
        course = Course(study, ScriptedEngine(cpus, gpus), clock)
        course.wait()
        return course

    return make


def events(course: Course, kind: str) -> list[Any]:
    """The ledger's events of one kind."""
    return [event for event in read_ledger(course.folder) if event["event"] == kind]


def statuses(course: Course) -> list[str]:
    return [trial.status for trial in course.state.trials]


def test_as_many_trials_run_as_there_are_cpus_in_the_order_of_the_plan(start: Start) -> None:
    course = start(*FOUR)
    planned = [trial.id for trial in course.state.trials]
    assert course.engine.running == planned[:2]
    assert course.loop.waits
    course.finish(planned[1])
    assert course.wait()
    assert course.engine.running == [planned[0], planned[2]]
    course.run()
    assert statuses(course) == [FINISHED] * 4
    assert [event["trial"] for event in events(course, "started")] == planned
    assert [event["slots"] for event in events(course, "started")] == [[0], [1], [1], [0]]


def test_max_concurrent_holds_trials_back(start: Start) -> None:
    course = start(*FOUR, "max_concurrent=1")
    assert len(course.engine.running) == 1
    course.run()
    assert statuses(course) == [FINISHED] * 4


def test_no_trial_overtakes_a_waiting_gang_that_it_could_delay(start: Start) -> None:
    """How long an epoch takes is not known yet, so no trial behind the gang may start."""
    course = start(*GANG_BESIDE_SMALL)
    assert course.rows == ["gang"]
    course.finish(course.engine.running[0])
    course.wait()
    assert course.rows == ["small"]  # of the first seed; the second gang waits for both CPUs
    course.finish(course.engine.running[0])
    course.wait()
    assert course.rows == ["gang"]


def test_a_trial_behind_a_waiting_gang_starts_if_it_ends_before_the_gang_can(start: Start) -> None:
    """EASY backfilling: the durations are those of this study's earlier trials."""
    rows = (
        "rows=[{label: long, overrides: {epochs: 9}}, {label: gang, overrides: {workers: 2}},"
        " {label: short, overrides: {epochs: 1}}, {label: longer, overrides: {epochs: 90}}]"
    )
    course = start(rows, "baseline=null")
    assert course.rows == ["long"]  # how long an epoch takes is not known yet
    for epoch in (1, 2):
        course.report(course.engine.running[0], epoch)
        course.wait(6.0)
    assert course.rows == ["long", "short"]
    course.finish(course.engine.running[1])
    course.wait(10.0)
    assert course.rows == ["long"]  # the longer one would delay the gang


def test_a_trial_larger_than_the_machine_fails_with_the_remedy_and_others_run(start: Start) -> None:
    course = start("rows=[{label: big, overrides: {workers: 8}}, {label: small}]", "baseline=null")
    big, small = course.state.trials
    assert big.status == FAILED
    assert big.error.startswith("needs 8 workers of 1 CPU each, and this study has 2 CPUs")
    assert big.error.endswith("; lower trial.workers or trial.threads, or raise cpus")
    assert course.engine.running == [small.id]


def test_a_dead_trial_restarts_until_it_has_died_too_often(start: Start) -> None:
    course = start(*FOUR, "max_failures=2")
    trial = course.engine.running[0]
    for _ in range(3):
        assert course.state.known[trial].status == RUNNING
        course.die(trial, "killed by a test")
        course.wait()
    assert course.state.known[trial].status == FAILED
    assert course.state.known[trial].error == "killed by a test"
    assert [event["trial"] for event in events(course, "restarted")] == [trial] * 2


def test_a_new_epoch_forgives_earlier_deaths_and_a_repeated_one_does_not(start: Start) -> None:
    course = start(*FOUR, "max_failures=1")
    trial, other = course.engine.running
    course.report(trial, 1)
    course.die(trial)
    course.wait()
    course.report(trial, 1)  # from a checkpoint before it
    course.report(trial, 2)
    course.die(trial)
    course.wait()
    assert course.state.known[trial].status == RUNNING
    course.report(trial, 2)
    course.die(trial)
    course.wait()
    assert course.state.known[trial].status == FAILED
    assert course.state.known[other].status == RUNNING


def test_an_error_that_a_retry_would_repeat_fails_at_once(start: Start) -> None:
    course = start(*FOUR, "max_failures=5")
    trial = course.engine.running[0]
    course.end(trial, REFUSED, "ValueError: it cannot work")
    assert course.state.known[trial].error == "ValueError: it cannot work"
    assert statuses(course)[0] == FAILED
    assert not events(course, "restarted")


def test_a_trial_that_ends_without_test_figures_has_failed(start: Start) -> None:
    course = start(*FOUR)
    trial = course.engine.running[0]
    course.report(trial, 1)
    course.end(trial)
    assert course.state.known[trial].error == "the trial ended without test figures"


def test_a_trial_without_memory_runs_again_with_less_and_fails_the_second_time(
    start: Start,
) -> None:
    course = start(*FOUR, "trial.device=auto")
    trial = course.engine.running[0]
    course.end(trial, OUT_OF_MEMORY, "CUDA out of memory")
    (relieved,) = events(course, "relieved")
    course.wait()
    plan = course.engine.plans[trial]
    assert relieved["relief"]
    for key, value in relieved["relief"].items():
        assert functools.reduce(dict.get, key.split("."), plan["config"]) == value
    course.end(trial, OUT_OF_MEMORY, "CUDA out of memory")
    assert course.state.known[trial].error == "out of memory: CUDA out of memory"
    assert len(events(course, "relieved")) == 1


def test_a_trial_that_is_silent_beyond_the_heartbeat_is_killed_and_restarts(start: Start) -> None:
    course = start(*FOUR, "heartbeat=30")
    silent, lively = course.engine.running
    for epoch in (1, 2):
        course.wait(20.0)
        course.report(lively, epoch)
    assert course.engine.killed == {
        silent: "no report for 30 s, so its process was killed (heartbeat)"
    }
    course.die(silent, course.engine.killed[silent])
    course.wait()
    assert silent in course.engine.running
    assert course.state.known[silent].restarts == 1


def test_where_a_trial_is_within_an_epoch_is_shown_only_and_no_sign_of_life(start: Start) -> None:
    course = start(*FOUR, "heartbeat=30")
    trial, _ = course.engine.running
    assert not course.engine.plans[trial]["moments"]
    seen: list[Any] = []
    course.loop._moment = lambda trial, moment: seen.append((trial, moment))
    lines = len(read_ledger(course.folder))
    moment: Moment = {"epoch": 1, "step": 2, "steps": 9, "loss": None}
    for _ in range(3):
        course.wait(9.0)
        course.hear(Within(MOMENT, trial, moment))
    assert seen == [(trial, moment)] * 3
    assert len(read_ledger(course.folder)) == lines
    course.wait(9.0)
    assert trial in course.engine.killed


def test_time_in_which_the_driver_itself_stood_still_is_no_silence(start: Start) -> None:
    """As after Ctrl-Z and ``fg``."""
    course = start(*FOUR, "heartbeat=30")
    course.clock[0] += 300.0
    course.wait(20.0)
    assert not course.engine.killed
    course.wait(15.0)
    assert len(course.engine.killed) == 2


def test_without_a_heartbeat_a_silent_trial_is_named_once_and_lives(start: Start) -> None:
    course = start(*FOUR, "heartbeat=null")
    course.wait(1300.0)
    told = [line for line in course.said if "nothing heard for" in line]
    assert len(told) == 2
    assert "run it again with heartbeat=600" in told[0]
    assert not course.engine.killed
    course.report(course.engine.running[0], 1)
    assert course.said[-1].endswith("was heard of again")


def test_a_cancelled_study_waits_for_its_trials_to_leave_and_counts_no_failure(
    start: Start,
) -> None:
    course = start(*FOUR, "max_failures=0")
    first, second = course.engine.running
    course.control.interrupted = True
    assert course.wait()
    assert set(course.engine.left) == {first, second}
    assert course.said[-1].startswith("Ending: 2 trials may finish the epoch under way")
    course.end(first, LEFT)
    assert course.wait()
    course.die(second, "its process was killed")  # it could not leave in time
    assert not course.wait()
    assert statuses(course) == [RUNNING, RUNNING, PLANNED, PLANNED]
    assert not events(course, "failed")
    assert not events(course, "restarted")


def test_a_cancelled_study_ends_after_its_grace_time_or_with_the_second_ctrl_c(
    start: Start,
) -> None:
    course = start(*FOUR)
    course.control.interrupted = True
    assert course.wait(GRACE_SECONDS)
    assert not course.wait(1.0)
    hurried = start(*FOUR, "name=hurried")
    hurried.control.interrupted = True
    assert hurried.wait()
    hurried.control.hurried = True
    assert not hurried.wait()


def test_without_grace_time_a_cancelled_study_ends_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LNS_STUDY_GRACE_SECONDS", "0")
    course = start(*FOUR)
    course.control.interrupted = True
    assert not course.wait()
    assert not course.engine.left


def test_a_paused_study_starts_nothing_and_goes_on_when_asked(start: Start) -> None:
    course = start(*FOUR)
    folder = course.folder
    ask(folder, wish=Wish.PAUSE)
    course.wait(2.0)
    course.finish(course.engine.running[0])
    course.finish(course.engine.running[0])
    assert course.wait(5.0)
    assert course.engine.running == []
    ask(folder, wish=Wish.RUN)
    course.wait(2.0)
    assert len(course.engine.running) == 2


def test_a_stopped_study_lets_its_trials_finish_and_starts_no_more(start: Start) -> None:
    course = start(*FOUR)
    ask(course.folder, wish=Wish.STOP)
    assert course.wait(2.0)
    course.finish(course.engine.running[0])
    assert course.wait()
    course.finish(course.engine.running[0])
    assert not course.wait()
    assert statuses(course) == [FINISHED, FINISHED, PLANNED, PLANNED]


@pytest.mark.parametrize(
    ("limit", "finished"), [("trials: 3", 3), ("hours: 0.001", 2), ("failures: 1", 2)]
)
def test_a_limit_that_is_reached_stops_the_study(start: Start, limit: str, finished: int) -> None:
    course = start(*FOUR, f"limits={{{limit}}}", "max_failures=0")
    if "failures" in limit:
        course.die(course.engine.running[0])
        course.wait()
        finished = 1
    if "hours" in limit:
        course.wait(5.0)
    course.run()
    assert statuses(course).count(FINISHED) == finished
    assert not course.engine.running


def test_a_full_storage_ends_the_study_without_a_failed_trial(start: Start) -> None:
    course = start(*FOUR)
    trial = course.engine.running[0]
    course.die(trial, "OSError: [Errno 28] No space left on device")
    assert not course.wait()
    assert course.control.decide().reason.startswith("storage: OSError: [Errno 28]")
    assert course.state.known[trial].status == RUNNING


def test_a_ledger_that_rejects_a_report_ends_the_study_before_it_is_acted_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = start(*FOUR, *ASHA, "trial.epochs=4")

    def full(events: list[Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(course.ledger, "append_all", full)
    course.report(course.engine.running[0], 1)
    assert not course.engine.answers
    assert not course.wait()


def test_asha_ends_the_worse_trial_and_lets_the_better_go_on(start: Start) -> None:
    course = start(*FOUR[:2], *ASHA, "seeds=[0]", "trial.epochs=8", cpus=4)
    trials = course.engine.running
    for trial, error in zip(trials, (0.1, 0.2, 0.8, 0.9), strict=True):
        course.report(trial, 1, error)
    ended = [trial for trial, go in course.engine.answers if not go]
    assert ended
    assert trials[0] not in ended
    assert trials[3] in ended
    for trial in ended:
        course.end(trial, "stopped")
        assert course.state.known[trial].status == STOPPED
    assert {event["by"] for event in events(course, "stopped")} == {"asha"}


def test_a_drained_trial_leaves_and_starts_again_without_counting_a_failure(start: Start) -> None:
    course = start(*FOUR, "max_failures=0")
    trial = course.engine.running[0]
    course.engine.moving = [trial]
    course.wait()
    assert course.engine.left == [trial]
    course.end(trial, LEFT)
    course.engine.moving = []
    course.wait()
    assert trial in course.engine.running
    (restarted,) = events(course, "restarted")
    assert restarted["error"] == "its node is drained"


def test_a_search_proposes_one_trial_beyond_those_that_run(start: Start) -> None:
    """So each proposal knows the results of the trials before the last two."""
    search = "search={algorithm: tpe, num_samples: 5}"
    space = "space={optimizer.lr: {loguniform: [0.001, 0.1]}}"
    course = start(search, space, "rows=[{label: a}]", "baseline=null", cpus=1)
    course.run()
    assert statuses(course) == [FINISHED] * 5
    kinds = [event["event"] for event in read_ledger(course.folder)]
    open_trials = list(
        itertools.accumulate({"added": 1, "finished": -1}.get(kind, 0) for kind in kinds)
    )
    assert max(open_trials) == 2
    assert open_trials[-1] == 0
