"""Slots in a ledger, compared with brute force and by hand, and in sentences."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.cli import main
from study.config import StudyConfig
from study.errors import UserError
from study.ledger.slots import Run
from study.ledger.state import StudyState, fold
from study.lifecycle import _say_unused_gpus, run_study
from study.plan.plan import make_plan
from study.results.idle_time import BEFORE, FEW, STARTS, TAIL, remark, sentences, what_held
from study.results.utilisation import (
    epochs_a_second,
    first_epoch,
    line,
    slots_in_use,
    speed,
    utilisation,
)
from tests.study.conftest import SilentView, made_up_events
from tests.study.made_up_slots import BEGAN, Held, events_of, run_of, runs_of, with_slots

Tiny = Callable[..., StudyConfig]


# --------------------------------------------------------------------------------------------------


@st.composite
def made_up(draw: st.DrawFn) -> tuple[list[Held], Run]:
    """Up to five slots, each held by trials one after the other, at whole seconds; the resources
    change and always suffice."""
    count = draw(st.integers(1, 5))
    gpus = draw(st.sampled_from([0.0, 0.25]))
    held = []
    for slot in range(count):
        times = sorted(draw(st.sets(st.integers(1, 60), max_size=8)))
        for begin, until in list(pairwise(times))[::2]:
            one = Held(
                trial=f"{slot}-{begin}",
                begin=begin,
                end=until,
                slots=[slot],
                cpus=draw(st.integers(1, 3)),
                gpus=gpus,
                reports=sorted(draw(st.sets(st.integers(begin + 1, until), max_size=4))),
                how=draw(st.sampled_from(["finished", "stopped", "failed", "restarted"])),
                added=draw(st.none() | st.integers(0, begin)),
            )
            took = [b - a for a, b in pairwise([begin, *one.reports])]
            held.append(replace(one, seconds=took))
    end = max((each.end or 0 for each in held), default=1) + draw(st.integers(0, 5))
    steps = {0, *draw(st.sets(st.integers(1, int(end)), max_size=3))}
    capacity = [
        (at, 3 * count + draw(st.integers(0, 4)), 0.25 * count + draw(st.integers(0, 2)))
        for at in sorted(steps)
    ]
    return held, run_of(held, capacity, end, draw(st.none() | st.integers(1, 5)))


def brute_force(run: Run, begin: float, end: float, resource: str) -> float:
    """Return a share, from a sample in the middle of every second."""
    moments = [begin + 0.5 + second for second in range(int(end - begin))]
    held = sum(
        getattr(each, resource)
        for at in moments
        for each in run.intervals
        if each.begin <= at < (each.end or 0)
    )
    had = sum(
        getattr([step for step in run.capacity if step.time <= at][-1], resource) for at in moments
    )
    return float(held / had)


@given(made_up())
def test_utilisation_is_what_samples_say(made: tuple[list[Held], Run]) -> None:
    _, run = made
    use = utilisation(run)
    if use is None:
        assert not run.intervals
        return
    assert 0 <= use.share <= 1
    assert 0 <= use.training <= 1
    assert all(
        share == pytest.approx(brute_force(run, run.begin, run.end, name))
        for name, share in use.shares.items()
    )
    assert use.share == max(use.shares.values())
    window = run.intervals[0].begin, max(interval.end or 0.0 for interval in run.intervals)
    assert use.training == pytest.approx(brute_force(run, *window, use.resource))


@given(made_up())
def test_what_held_accounts_for_all_that_was_idle(made: tuple[list[Held], Run]) -> None:
    _, run = made
    found, use = what_held(run), utilisation(run)
    if use is None:
        assert found == {}
        return
    assert 0 <= found.pop(STARTS, 0.0) <= use.share + 1e-9
    assert min(found.values(), default=0.0) >= 0
    assert sum(found.values()) + use.share == pytest.approx(1)


@given(made_up())
def test_epochs_alone_are_those_during_which_no_other_trial_ran(
    made: tuple[list[Held], Run],
) -> None:
    held, run = made
    for interval in run.intervals:
        mine = next(each for each in held if each.trial == interval.trial)
        others = [each for each in held if each is not mine]
        alone = [
            b - a
            for a, b in list(pairwise(mine.reports))[:-1]
            if all((each.end or 0) < a or each.begin >= b for each in others)
        ]
        assert (interval.alone, interval.alone_seconds) == (len(alone), sum(alone))
        assert interval.epochs == len(mine.reports)


# --------------------------------------------------------------------------------------------------

TWO = [
    Held(trial="a", begin=10, end=50, slots=[0], reports=[20, 32, 42, 50], seconds=[10, 12, 8, 9]),
    Held(trial="b", begin=10, end=30, slots=[1], reports=[30], seconds=[15]),
]
"""Two trials with one CPU each: both run from 10 to 30, one of them alone from 30 to 50."""


def test_two_trials_by_hand() -> None:
    run = run_of(TWO, [(5, 4, 0)], 100)
    use = utilisation(run)
    assert use is not None
    assert (use.resource, use.share, use.training, use.shares) == (
        "cpus",
        60 / 400,
        60 / 160,
        {"cpus": 60 / 400},
    )
    assert epochs_a_second(run) == 5 / 40
    # a's third epoch is timed alone, by its process; the last one also tests
    assert speed(run, lambda trial: trial) == (4 * 8 / 40, 1)
    assert speed(run, lambda trial: "like") == (5 * 8 / 60, 2)
    assert slots_in_use(run) == (0, 4)
    assert what_held(run) == pytest.approx(
        {BEFORE: 40 / 400, FEW: 180 / 400, TAIL: 120 / 400, STARTS: 10 / 400}
    )  # an epoch takes 10 s on average


def test_the_resource_that_binds_is_the_one_with_the_higher_share() -> None:
    held = [Held(trial=f"{slot}", begin=0, end=10, slots=[slot], gpus=0.5) for slot in range(3)]
    use = utilisation(run_of(held, [(0, 16, 2)], 10))
    assert use is not None
    assert use.resource == "gpus"
    assert use.shares == {"cpus": 3 / 16, "gpus": 1.5 / 2}


def test_a_gang_holds_several_slots_and_a_machine_that_joins_brings_more() -> None:
    held = [
        Held(trial="gang", begin=0, end=20, slots=[0, 1], cpus=2.0),
        Held(trial="late", begin=10, end=None, slots=[2, 3], cpus=2.0),
    ]
    run = run_of(held, [(0, 2, 0), (10, 6, 0)], None)
    use = utilisation(run, BEGAN + 30)
    assert use is not None
    assert use.share == (40 + 40) / (20 + 120)
    assert slots_in_use(run) == (2, 6)


def test_without_an_epoch_alone_there_is_no_speed() -> None:
    held = [
        Held(trial=f"{slot}", begin=0, end=30, slots=[slot], reports=[10, 20, 30])
        for slot in range(2)
    ]
    assert speed(run_of(held, [(0, 2, 0)], 30), lambda trial: "like") is None


@pytest.mark.parametrize(
    ("reports", "seconds"),
    [
        ([10, 30, 30, 31, 50], [10, 10, 10, 10, 9]),  # the driver gets two epochs at once
        ([10, 20, 30, 31, 50], [10, 10, 10, 1, 9]),  # of the one at 30, like the other's end
        ([10, 31, 31.5, 50], [10, 10, 10, 9]),  # it started before the other one ended
        ([10, 31, 31.5, 50], [10, 10, 0.0, 9]),
        ([10, 31, 31.5, 50], [10, 10, None, 9]),
        ([10, 31, 31.5, 50], None),
        ([10, 20, 31, 31.5], [10, 10, 10, 0.5]),  # the last one also tests
    ],
)
def test_an_epoch_of_which_it_is_not_sure_that_it_ran_alone_is_not_timed(
    reports: list[float], seconds: list[float | None] | None
) -> None:
    """Two seconds pass between the end of one neighbour and the start of the next."""
    held = [
        Held(trial="a", begin=0, end=60, slots=[0], reports=reports, seconds=seconds),
        Held(trial="b", begin=0, end=30, slots=[1]),
        Held(trial="c", begin=32, end=60, slots=[1]),
    ]
    assert speed(run_of(held, [(0, 2, 0)], 60), lambda trial: "like") is None


def test_where_none_ran_alone_the_epochs_of_earlier_runs_count() -> None:
    """On the same machine with the same software; a's epoch alone takes 8 s there."""
    held = [
        Held(trial=trial, begin=1000, end=1080, slots=[slot], reports=[1020, 1040, 1060, 1080])
        for slot, trial in enumerate("ab")
    ]
    events = [*events_of(TWO, [(0, 2, 0)], 100), *events_of(held, [(1000, 2, 0)], 1100)]
    before, run = runs_of(events)
    assert speed(run, lambda trial: trial) is None
    assert speed(run, lambda trial: trial, [before]) == (4 * 8 / 80, 1)
    assert speed(run, lambda trial: "like", [before]) == (8 * 8 / 160, 2)
    assert speed(run, lambda trial: trial, [replace(before, software={"commit": "other"})]) is None
    for interval in before.intervals:
        interval.hosts = ["elsewhere"]
    assert speed(run, lambda trial: trial, [before]) is None


def test_every_end_frees_the_slots_and_a_run_that_was_killed_ends_with_its_last_event() -> None:
    hows = ["finished", "stopped", "failed", "restarted", "relieved"]
    held = [Held(trial=how, begin=0, end=5, slots=[slot], how=how) for slot, how in enumerate(hows)]
    held += [Held(trial="killed", begin=1, end=None, slots=[5], reports=[8])]
    first, second = events_of(held, [(0, 6, 0)], None), events_of([], [(0, 6, 0)], None)
    runs = runs_of([*first, *({**event, "time": event["time"] + 1000} for event in second)])
    assert [interval.how for interval in runs[0].intervals] == [*hows, "interrupted"]
    assert [(interval.end or 0) - BEGAN for interval in runs[0].intervals] == [5, 5, 5, 5, 5, 8]
    assert (runs[0].over, runs[0].end, runs[1].over) == (True, BEGAN + 8, False)


def test_what_came_from_another_study_was_no_work_of_this_run() -> None:
    events = events_of(TWO, [(0, 2, 0)], 50)
    copied = [{**event, "time": event["time"] + 500, "source": "elsewhere"} for event in events[1:]]
    assert runs_of([*events, *copied]) == runs_of(events)


def test_ledgers_of_before_have_no_figures(tiny: Tiny) -> None:
    events = made_up_events(tiny("old"))
    state = fold(events)
    assert state.run is None
    assert (line(state), line(state, BEGAN), sentences(state)) == ("", "", [])
    (run,) = runs_of(events)
    assert (utilisation(run), epochs_a_second(run), what_held(run), remark(run), remark(None)) == (
        None,
        None,
        {},
        "",
        "",
    )


def test_the_run_of_a_study_is_the_last_that_had_something_to_do(tiny: Tiny) -> None:
    events = with_slots(made_up_events(tiny("again")))
    again = [
        {**events[0], "time": events[-1]["time"] + 10},
        {**events[-1], "time": events[-1]["time"] + 11},
    ]
    state = fold([*events, *again])
    assert state.run is state.runs[0]
    assert len(state.runs) == 2
    assert remark(state.runs[-1]) == ""


# --------------------------------------------------------------------------------------------------


def test_a_run_says_that_gpus_are_not_in_use(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "study.lifecycle.hardware", lambda: {"gpus": ["NVIDIA H100", "NVIDIA H100"]}
    )
    said: list[str] = []
    run_study(tiny("unused", "trial.epochs=1"), SilentView(), said.append)
    line = "2 GPUs (NVIDIA H100) not in use: trial.device=cuda takes GPUs."
    assert said.count(line) == 1
    run_study(tiny("unused", "trial.epochs=1"), SilentView(), said.append)
    assert said.count(line) == 1  # nothing was left to run


def test_no_run_says_so_of_gpus_that_device_auto_takes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("study.lifecycle.hardware", lambda: {"gpus": ["NVIDIA H100"]})
    monkeypatch.setattr("study.plan.trials._auto_device", lambda *_: "cuda")
    said: list[str] = []
    plan = make_plan(tiny("used", "trial.device=auto"))
    assert {trial.config.device for trial in plan.trials} == {"cuda"}
    _say_unused_gpus(plan, StudyState(), said.append)
    assert said == []


def test_the_way_to_the_first_epoch_by_stage() -> None:
    held = [
        Held(trial="a", begin=4.0, end=30.0, reports=(9.0, 12.0)),
        Held(trial="b", begin=4.5, end=30.0, slots=(1,), reports=(8.5,)),
    ]
    assert first_epoch(run_of(held, [(1.5, 2, 0)], 30.0)) == (
        "first epoch 8.5 s after the plan: 1.5 s until the machines were up, 2.5 s until a trial"
        " started, 4.5 s until one reported"
    )
    unheard = [Held(trial="a", begin=4.0, end=None)]
    assert first_epoch(run_of(unheard, [(1.5, 2, 0)], None)) == ""
    assert first_epoch(None) == ""


def test_what_passed_from_the_command_to_the_plan_counts() -> None:
    """Both trials of :data:`TWO` hold one of four CPUs for 60 s in all; 30 s passed before."""
    run = run_of(TWO, [(5, 4, 0)], 100, prepared=30.0)
    use = utilisation(run)
    assert use is not None
    assert (use.share, use.training) == (60 / (4 * 130), 60 / 160)
    assert what_held(run)[BEFORE] == pytest.approx(4 * 40 / (4 * 130))
    assert first_epoch(run) == (
        "first epoch 50.0 s after the command: 30.0 s until it was planned, 5.0 s until the"
        " machines were up, 5.0 s until a trial started, 10.0 s until one reported"
    )


@pytest.mark.parametrize(
    ("reports", "seconds", "start"),
    [
        ([90.0], [10.0], 80.0),  # its process says how long the epoch took
        ([90.0, 100.0], [85.0, None], 80.0),  # Ray Train's includes all time since its start
        ([90.0, 100.0], None, 80.0),  # an earlier ledger
        ([90.0, 95.0], [10.0, 5.0], 85.0),  # the first epoch compiles
        ([90.0], [None], 0.0),  # not known
    ],
)
def test_a_start_is_what_is_left_of_the_time_to_the_first_report(
    reports: list[float], seconds: list[float | None] | None, start: float
) -> None:
    """A gang has both CPUs from the first moment to the last."""
    held = [
        Held(trial="a", begin=0, end=100, slots=[0, 1], cpus=2.0, reports=reports, seconds=seconds)
    ]
    run = run_of(held, [(0, 2, 0)], 100)
    use = utilisation(run)
    assert use is not None
    assert (use.share, use.training) == (1.0, 1.0)
    assert use.trained["cpus"] == pytest.approx(1 - start / 100)
    assert remark(run) == (
        f"Trials trained for {100 - start:.0f} % of the CPUs' time; {start:.0f} % went into starts."
        if start
        else ""
    )


@pytest.mark.parametrize(("own_loop", "trained"), [(True, 1.0), (False, 2 / 34)])
def test_of_an_own_loop_an_epoch_lasts_as_long_as_it_says(own_loop: bool, trained: float) -> None:
    """Its epochs may differ: the first may be the long one."""
    held = [
        Held(
            trial=f"{slot}", begin=0, end=34, slots=[slot],
            reports=[33, 34], seconds=[33, 1], own_loop=own_loop,
        )
        for slot in range(4)
    ]  # fmt: skip
    use = utilisation(run_of(held, [(0, 4, 0)], 34))
    assert use is not None
    assert use.trained["cpus"] == pytest.approx(trained)


def test_a_run_notes_when_its_command_began(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic() - 1000
    outcome = run_study(tiny("noted", "trial.epochs=1"), SilentView(), print, began=began)
    (run,) = outcome.state.runs
    assert run.from_command
    assert run.planned - run.begin >= 1000

    def refuse(*arguments: object) -> None:
        said.append(arguments[-2])  # before job
        raise UserError("seen")

    said: list[object] = []
    monkeypatch.setattr("study.lifecycle.run_study", refuse)
    words = ["run", str(tmp_path / "tiny.yaml"), "name=other", f"storage={tmp_path}"]
    before = time.monotonic()
    assert main(words) == 2
    (called,) = said
    assert isinstance(called, float)
    assert before <= called <= time.monotonic()
