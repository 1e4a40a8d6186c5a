"""The live view and the log lines, drawn on a made-up terminal."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from study.cli.progress import Clock, LiveView, PlainView, describe, render
from study.config import Metric, StudyConfig
from study.ledger.state import fold
from study.text import duration, percent
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]


def test_the_live_view_shows_rows_epochs_and_errors(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    events = made_up_events(tiny("progress"))
    state = fold(events[:5])
    view = LiveView(console, concurrent=2)
    view.start(state)
    for event in events[1:5]:
        view.listen(event)
    view.stop()
    console.print(render(state, Clock(), 2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(part in text for part in ("float32", "lns matmul", "3/3", "6.67 %", "3 of 6 epochs"))


def test_the_log_has_a_line_an_epoch_with_the_time_left(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=200)
    events = made_up_events(tiny("progress"))
    state = fold(events[:1])
    view = PlainView(console, concurrent=1)
    view.start(state)
    for event in events[1:]:
        state.apply(event)
        view.listen(event)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum("validation error" in line for line in lines) == 6
    assert "epoch 1/3, validation error 20.00 % | 5 s left" in "\n".join(lines)
    assert sum("finished, test error 2.00 %" in line for line in lines) == 2


def test_too_many_trials_for_a_screen_are_summed_up(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(
        render(fold(made_up_events(tiny("progress", f"seeds={list(range(30))}"))), Clock(), 2)
    )
    assert "and 36 more" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_narrow_terminal_cuts_no_id_and_no_row_off(tiny: Tiny) -> None:
    console = Console(file=io.StringIO(), width=50)
    state = fold(made_up_events(tiny("progress")))
    console.print(render(state, Clock(), 2))
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
