"""What delayed a run, in figures and sentences, during the run and at its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from study.config import StudyConfig
from study.ledger.events import Event
from study.ledger.log import read_ledger
from study.ledger.slots import Run, Waiting
from study.ledger.state import fold
from study.lifecycle import run_study
from study.results import idle_time as module
from study.results.idle_time import (
    BEFORE,
    DRIVER,
    FEW,
    LIMIT,
    RESULTS,
    STARTS,
    TAIL,
    remark,
    sentences,
    what_held,
)
from study.results.utilisation import line
from tests.study.conftest import SilentView, made_up_events
from tests.study.made_up_slots import BEGAN, Held, run_of, with_slots

Tiny = Callable[..., StudyConfig]


def of(count: int, seconds: float, begin: float = 0.0, **more: object) -> list[Held]:
    """Trials on separate slots, at the same time."""
    return [
        Held(trial=f"{begin}-{n}", begin=begin, end=begin + seconds, slots=[n], **more)
        for n in range(count)
    ]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "capacity", "most", "cause", "said"),
    [
        ([*of(4, 20, 80)], (4, 0), None, BEFORE, "idle: 80 % before the first trial started"),
        (
            [*of(1, 50), *of(1, 50, 50)],
            (4, 0),
            1,
            LIMIT,
            "idle: 38 % while max_concurrent=1 kept trials waiting",
        ),
        (
            [*of(1, 50, cpus=3.0), *of(1, 50, 50, cpus=3.0)],
            (8, 0),
            None,
            DRIVER,
            "idle: 31 % while trials waited that there was room for",
        ),
        (
            [*of(1, 50, cpus=3.0), *of(1, 10, 50, cpus=8.0)],
            (8, 0),
            None,
            "cpus",
            "while too few CPUs were free for the next trial",
        ),
        (
            [*of(3, 50, gpus=0.3), *of(1, 5, 50, gpus=0.3)],
            (4, 1),
            None,
            "gpus",
            "while too few GPUs were free for the next trial",
        ),
        (
            [*of(8, 5), *of(8, 5, 95, added=95)],
            (8, 0),
            None,
            RESULTS,
            "idle: 90 % while the search waited for results",
        ),
        ([*of(2, 100)], (8, 0), None, FEW, "idle: 75 % because there were fewer trials than slots"),
        (
            [*of(8, 10), *of(1, 90, 10)],
            (8, 0),
            None,
            TAIL,
            "idle: 79 % at the end, when no trial was left to start",
        ),
        ([*of(4, 40, reports=[30.0, 35.0])], (4, 0), None, STARTS, "25 % went into starts"),
    ],
)
def test_what_held_a_run_is_found_and_said(
    held: list[Held], capacity: tuple[float, float], most: int | None, cause: str, said: str
) -> None:
    run = run_of(held, [(0, *capacity)], 100, most)
    found = what_held(run)
    assert cause in found
    text = remark(run)
    assert said in text
    assert text.startswith("Trials trained for ")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_of(of(4, 49), [(0, 8, 0)], 59), "it took less than a minute"),
        (run_of(of(4, 100), [(0, 8, 0)], 100), "half was in use"),
        (run_of([Held(trial="a", begin=0, end=None)], [(0, 8, 0)], None), "it is not over"),
    ],
)
def test_of_other_runs_nothing_is_said(run: Run, why: str) -> None:
    assert remark(run) == "", why


def test_gpus_that_bind_are_told_with_the_cpus() -> None:
    run = run_of(of(1, 100, gpus=1.0), [(0, 16, 4)], 100)
    assert remark(run).startswith(
        "Trials trained for 25 % of the GPUs' time (of the CPUs 6 %); idle: 75 % because there"
        " were fewer"
    )


def test_the_figures_in_words(tiny: Tiny) -> None:
    state = fold(with_slots(made_up_events(tiny("words"))))
    assert sentences(state) == [
        (
            "Utilisation 2 % of the CPUs from the plan, 47 % from the first trial's start to the"
            " last one's end; 2 % from the plan without starts."
        ),
        (
            "0.316 epochs a second; 0.33 of the speed of a trial alone (of 2 of 2 trials: those"
            " like one that ran alone for an epoch; starts and tests count as time lost)."
        ),
        (
            "Trials trained for 2 % of the CPUs' time; idle: 97 % at the end, when no trial was"
            " left to start."
        ),
    ]
    assert line(state) == "last run: utilisation 2 % of the CPUs, 0.316 epochs/s"
    running = fold(with_slots(made_up_events(tiny("words")))[:3])
    began = running.runs[-1].begin
    assert line(running, began + 10) == "1 of 2 slots in use, utilisation 50 % of the CPUs"


@pytest.mark.slow
def test_a_run_that_used_little_says_so_at_its_end(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOW", 2.0)
    said: list[str] = []
    study = tiny("held", "trial.epochs=1")
    outcome = run_study(study, SilentView(), said.append)
    assert said[-1].startswith("Trials trained for ")
    (run,) = outcome.state.runs
    assert [interval.how for interval in run.intervals] == ["finished", "finished"]
    assert all(
        interval.epochs == 1 and interval.row in ("float32", "lns matmul")
        for interval in run.intervals
    )
    assert fold(read_ledger(study.folder)).runs == outcome.state.runs
    said.clear()
    run_study(study, SilentView(), said.append)
    assert not any(
        text.startswith("Trials trained") for text in said
    )  # there was nothing left to run


def again(events: list[Event], seconds: float) -> list[Event]:
    """The same run again, this many seconds later."""
    return [*events, *({**event, "time": event["time"] + seconds} for event in events)]


def test_of_several_runs_the_sentences_are_about_the_last(tiny: Tiny) -> None:
    events = with_slots(made_up_events(tiny("words")))
    assert sentences(fold(again(events, 1000)))[0].startswith("Last of 2 runs: utilisation 2 %")


WAITING = Waiting(trial="next", cpus=1.0)


@pytest.mark.parametrize(
    ("held", "most", "waiting", "said"),
    [
        (
            [Held(trial="long", begin=400, end=None)],
            1,
            WAITING,
            "trials trained for 25 % of the CPUs' time; idle: 75 % while max_concurrent=1 kept"
            " trials waiting.",
        ),
        (
            [*of(4, 100, 400), Held(trial="long", begin=500, end=None)],
            None,
            Waiting(),
            "trials trained for 38 % of the CPUs' time; idle: 62 % while the search waited for"
            " results.",
        ),
        (
            [Held(trial="long", begin=400, end=None)],
            None,
            Waiting(trial="next", cpus=4.0),
            "trials trained for 25 % of the CPUs' time; idle: 75 % while too few CPUs were free for"
            " the next trial.",
        ),
        (
            [Held(trial="long", begin=400, end=None)],
            None,
            None,
            "trials trained for 25 % of the CPUs' time; idle: 75 % because there were fewer trials"
            " than slots.",
        ),
        ([Held(trial="long", begin=400, end=None, cpus=2.0)], 1, WAITING, ""),
    ],
)
def test_a_run_that_goes_on_is_told_once_and_counted_from_its_first_start(
    held: list[Held],
    most: int | None,
    waiting: Waiting | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(held, [(350, 4, 0)], None, most)
    clock = [BEGAN + 400 + module.LOOK_SECONDS - 1]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "time", lambda: clock[0])
    watch = module.UseWatch()
    assert not watch.is_due(run)
    clock[0] += 1
    assert watch.is_due(run)
    whole = f"In the 10 min since the first start: {said}" if said else ""
    assert watch.look(run, waiting) == whole
    clock[0] += module.LOOK_SECONDS - 1
    assert not watch.is_due(run)
    clock[0] += 1
    assert watch.is_due(run) == (not said)


def test_the_driver_tells_it_while_trials_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_SECONDS", 0.0), ("LOOK_SECONDS", 0.0), ("LOW", 2.0)):
        monkeypatch.setattr(module, name, value)
    said: list[str] = []
    run_study(tiny("low", "trial.epochs=1", "max_concurrent=1"), SilentView(), said.append)
    (place,) = (n for n, text in enumerate(said) if text.startswith("In the "))
    assert "since the first start: trials trained for " in said[place]
    assert any(text.startswith("Writing the report") for text in said[place:])


@pytest.mark.parametrize("noted", [True, False])
def test_the_words_are_from_where_the_figures_are(tiny: Tiny, noted: bool) -> None:
    events = with_slots(made_up_events(tiny("words")))
    if noted:
        events[0]["prepared"] = 1000.0
    state = fold(events)
    began = "command" if noted else "plan"
    assert sentences(state)[0] == (
        f"Utilisation {1 if noted else 2} % of the CPUs from the {began}, 47 % from the first"
        f" trial's start to the last one's end; {1 if noted else 2} % from the {began} without"
        " starts."
    )
