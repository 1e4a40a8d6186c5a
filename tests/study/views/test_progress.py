"""The live view and the log lines, drawn on a made-up terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from study.config import Metric, StudyConfig
from study.ledger.state import StudyState, fold
from study.lifecycle import StepView
from study.plan.plan import make_plan
from study.text import duration, percent
from study.views.progress import RECENT, Clock, LiveView, PlainView, describe, render
from tests.study.conftest import made_up_events
from trainers.telemetry.tally import Moment

pytestmark = pytest.mark.unit

Tiny = Callable[..., StudyConfig]


def test_the_live_view_shows_rows_epochs_and_errors(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    events = made_up_events(tiny("progress"))
    state = fold(events[:5])
    view = LiveView(console)
    view.start(state)
    for event in events[1:5]:
        view.listen(event)
    view.stop()
    console.print(render(state, Clock()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(part in text for part in ("float32", "lns matmul", "3/3", "6.67 %", "3 of 6 epochs"))


def test_the_log_has_a_line_an_epoch_with_the_time_left(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=200)
    events = made_up_events(tiny("progress"))
    state = fold(events[:1])
    view = PlainView(console)
    view.start(state)
    for event in events[1:]:
        state.apply(event)
        view.listen(event)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("validation error" in line for line in lines) == 6
    assert "epoch 1/3, validation error 20.00 % | 5 s left" in "\n".join(lines)
    assert sum("finished, test error 2.00 %" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("takes", "between", "times"), [(0.01, 0.1, [0.1, 0.31, 0.52]), (3.0, 4.0, [4.0, 15.0, 26.0])]
)
def test_an_estimate_that_takes_long_is_not_made_for_every_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, takes: float, between: float, times: list[float]
) -> None:
    """It takes a twentieth of the time, as with thousands of trials, or is ten seconds old."""
    now, made = [0.0], []

    def left(self: Clock, state: StudyState) -> float:
        made.append(now[0])
        now[0] += takes
        return 60.0

    monkeypatch.setattr(Clock, "left", left)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    events = made_up_events(tiny("progress"))
    state, view = fold(events[:1]), PlainView(console)
    view.start(state)
    for event in (event for event in events[1:] if event["event"] == "report"):
        now[0] += between
        state.apply(event)
        view.listen(event)
    lines = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    assert len(lines) == 6
    assert all(line.endswith("| 60 s left") for line in lines)
    assert made == pytest.approx(times)


def test_too_many_trials_for_a_screen_are_summed_up(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(
        render(fold(made_up_events(tiny("progress", f"seeds={list(range(30))}"))), Clock())
    )
    assert "and 36 more" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_narrow_terminal_cuts_no_id_and_no_row_off(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=50)
    state = fold(made_up_events(tiny("progress")))
    console.print(render(state, Clock()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(trial.id in text for trial in state.trials)
    assert "…" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42, "42 s"), (180, "3 min"), (3900, "65 min"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent_has_two_decimals() -> None:
    assert percent(0.021449) == "2.14 %"


def test_a_damaged_checkpoint_is_said(tiny: Tiny) -> None:
    trial = fold(made_up_events(tiny("progress"))).trials[0]
    event = {"event": "damaged", "trial": trial.id, "error": "no digest"}
    assert describe(event, trial, Metric(name="validation/error")).startswith(
        "float32, seed 0: a checkpoint is damaged"
    )


def timed(clock: Clock, state: StudyState, *events: tuple[float, str, int]) -> None:
    """Apply events of trials, each a time, a kind and the trial's number."""
    for at, kind, number in events:
        trial = state.trials[number]
        event: Any = {"event": kind, "trial": trial.id, "time": at, "metrics": {}}
        if kind == "report":
            event["epoch"] = trial.epoch + 1
        state.apply(event)
        clock.hear(event, trial)


def test_the_time_left_is_shared_by_the_trials_that_run(tiny: Tiny) -> None:
    events = made_up_events(tiny("progress", "seeds=[0,1,2,3]"))
    for numbers in ([0], [0, 1]):
        state, clock = fold(events[:1]), Clock()
        for at in range(3):
            timed(clock, state, *((at, "report" if at else "started", n) for n in numbers))
        todo = sum(trial.epochs - trial.epoch for trial in state.trials)
        assert clock.left(state) == pytest.approx(todo / len(numbers))


def test_large_trials_that_run_alone_are_not_divided_by_small_ones_that_do_not(tiny: Tiny) -> None:
    """Four trials of a second at a time, then one of 30 s; each starts in 10 s."""
    rows = "rows=[{label: small}, {label: large, overrides: {model.hidden: [8]}}]"
    plan = made_up_events(tiny("progress", "baseline=null", rows, "seeds=[0,1,2,3,4,5]"))[:1]
    state, clock = fold(plan), Clock()
    small = [n for n, trial in enumerate(state.trials) if trial.row == "small"]
    large = [n for n, trial in enumerate(state.trials) if trial.row == "large"]
    epochs = state.trials[0].epochs
    assert epochs == 3
    timed(clock, state, *((0.0, "started", n) for n in small[:4]))
    for at in (10.0, 10.5, 11.0):
        timed(clock, state, *((at, "report", n) for n in small[:4]))
    timed(clock, state, *((11.0, "finished", n) for n in small[:4]))
    timed(clock, state, (11.0, "started", large[0]), (31.0, "report", large[0]))
    timed(clock, state, (41.0, "report", large[0]), (51.0, "report", large[0]))
    timed(clock, state, (51.0, "finished", large[0]))
    seconds = 2 * 11.0 + 5 * 40.0
    at_once = (4 * 11.0 + 40.0) / 51.0
    assert clock.left(state) == pytest.approx(seconds / at_once)


def test_the_steps_of_an_epoch_are_shown_and_shorten_the_time_left(tiny: Tiny) -> None:
    """Also before any epoch has ended: a tenth of its steps took a second."""
    events = made_up_events(tiny("progress", "seeds=[0]"))
    state, clock = fold(events[:1]), Clock()
    timed(clock, state, (0.0, "started", 0))
    assert clock.left(state, 0.9) is None
    moment: Moment = {"epoch": 1, "step": 5, "steps": 50, "loss": 0.4321}
    clock.note(state.trials[0].id, moment, 1.0)
    assert clock.left(state, 1.0) == pytest.approx(6 * 10.0 - 1.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(render(state, clock, 1.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 5/50, loss 0.432" in text
    timed(clock, state, (4.0, "report", 0))
    assert clock.moment(state.trials[0]) is None
    assert clock.left(state, 4.0) == pytest.approx(5 * 4.0)
    assert clock.left(state, 5.0) == pytest.approx(5 * 4.0 - 1.0)
    assert clock.left(state, 99.0) == pytest.approx(4 * 4.0)
    clock.note(state.trials[0].id, moment, 5.0)  # it was late: of the epoch before
    assert clock.moment(state.trials[0]) is None
    moment = {"epoch": 2, "step": 25, "steps": 50, "loss": None}
    clock.note(state.trials[0].id, moment, 7.0)
    assert clock.left(state, 7.0) == pytest.approx(3.0 + 4 * 4.0)


def test_trials_that_a_search_will_propose_are_left(tiny: Tiny) -> None:
    space = "space={optimizer.lr: {loguniform: [0.01, 1]}}"
    search = "search={algorithm: tpe, num_samples: 8}"
    study = tiny("progress", "rows=[{label: a}]", "baseline=null", space, search, "seeds=[0]")
    planned = make_plan(study).to_event("x")
    assert planned["size"] == 8
    first = made_up_events(tiny("progress", "rows=[{label: a}]", "baseline=null", "seeds=[0]"))[0]
    assert first["event"] == "planned"
    state, clock = fold([{**first, "size": 8}]), Clock()
    assert len(state.trials) == 1
    timed(clock, state, (0.0, "started", 0), *((2.0 * n, "report", 0) for n in (1, 2, 3)))
    timed(clock, state, (6.0, "finished", 0))
    assert clock.left(state, 6.0) == pytest.approx(7 * 6.0)


def test_the_mean_of_the_latest_epochs_counts(tiny: Tiny) -> None:
    """The machine has become ten times as slow."""
    state, clock = fold(made_up_events(tiny("progress", "trial.epochs=200"))[:1]), Clock()
    timed(clock, state, (0.0, "started", 0), *((float(n), "report", 0) for n in range(1, 101)))
    timed(clock, state, *((100.0 + 10 * n, "report", 0) for n in range(1, RECENT + 1)))
    todo = 60 * 10.0 + 1.0 + 199 * 10.0
    assert clock.left(state) == pytest.approx(todo)


def test_the_table_stays_on_the_terminal(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=50)
    events = made_up_events(tiny("progress"))
    state = fold(events[:1])
    view = LiveView(console)
    assert isinstance(view, StepView)
    assert not isinstance(PlainView(console), StepView)
    view.start(state)
    for event in events[1:-1]:
        state.apply(event)
        view.listen(event)
    view.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    last = text[text.rindex("trial ") :]
    assert "6 of 6 epochs" in last
    assert " left" not in last
    assert "\x1b[2K" not in last.partition("6 of 6 epochs")[2]  # nothing is erased after it


def test_epochs_that_took_no_time_leave_none(tiny: Tiny) -> None:
    """Two reports at the same time, of a trial whose start the view has not heard."""
    state, clock = fold(made_up_events(tiny("progress"))[:1]), Clock()
    timed(clock, state, (1.0, "report", 0), (1.0, "report", 0))
    assert clock.left(state) == 0.0


def test_what_was_running_when_a_study_was_killed_is_interrupted(tiny: Tiny) -> None:
    events = made_up_events(tiny("progress"))
    console = Console(file=io.StringIO(), width=120)
    console.print(render(fold(events[:3])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 interrupted" in text
    assert "running" not in text
