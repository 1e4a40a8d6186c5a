"""The live view and the log lines, drawn on a made-up terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from study.config import Metric, StudyConfig
from study.ledger.state import StudyState, fold
from study.text import duration, percent
from study.views.progress import Clock, LiveView, PlainView, describe, render
from tests.study.conftest import made_up_events

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
