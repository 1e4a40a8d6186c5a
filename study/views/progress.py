"""Progress of a study: a live table on a terminal, one line per epoch in a log.

The estimated time left is the seconds that the remaining trials need, one after the other, divided
by the mean number of trials that have run at a time. A row has its own seconds, because rows can
differ tenfold: of a first epoch, which includes the trial's start, and of the others. Both are
means of the latest epochs. The number of trials at a time is a mean since the first start, because
few large trials may run at a time where many small ones do.

Trials that an adaptive search will propose count as the known ones do on average. Of an epoch under
way only the rest counts. The estimate is available after the first epoch, or once the steps of a
first epoch show how long it takes.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from study.config import Metric
from study.config.space import describe as describe_params
from study.engines.silence import describe_silent, silence
from study.ledger.events import Event, trial_of
from study.ledger.state import (
    ENDED,
    FAILED,
    FINISHED,
    PLANNED,
    RUNNING,
    STOPPED,
    StudyState,
    TrialState,
    name_of,
)
from study.results.objectives import (
    diverged,
    infeasible,
    lacking,
    last_value,
    mean_objective,
    test_value,
)
from study.results.utilisation import bars
from study.results.utilisation import line as slots_line
from study.text import NAME, counted, cut, duration, one_line

if TYPE_CHECKING:  # imports torch
    from trainers.telemetry.tally import Moment

T = TypeVar("T")
STYLES = {
    PLANNED: "dim",
    RUNNING: "bold cyan",
    FINISHED: "green",
    FAILED: "bold red",
    STOPPED: "yellow",
}
MAX_ROWS = 24
RECENT = 40
"""Number of epochs of a row whose mean is expected of the next ones, as the machine is now."""
LEAST_SHARE = 0.05
"""Share of an epoch's steps after which they show how long the epoch takes."""
INTERRUPTED = "interrupted"
"""Status shown for trials that were running when their study was killed."""


class Clock:
    """Estimates the time left from the seconds of the epochs in this run, by row."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._first_epochs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._later_epochs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._last: dict[str, float] = {}
        self._running: set[str] = set()
        self._starting: set[str] = set()
        self._start: float | None = None
        self._now = self._trial_seconds = 0.0
        self._moments: dict[str, tuple[Moment, float]] = {}

    def note(self, trial: str, moment: Moment, now: float | None = None) -> None:
        """Record where a trial is within an epoch, at the Unix time ``now``."""
        self._moments[trial] = moment, time.time() if now is None else now

    def moment(self, trial: TrialState) -> Moment | None:
        """Return where a running trial is within its current epoch, or None if it is not known."""
        moment, _ = self._moments.get(trial.id, (None, 0.0))
        current = moment and trial.status == RUNNING and moment["epoch"] == trial.epoch + 1
        return moment if current else None

    def hear(self, event: Event, trial: TrialState | None) -> None:
        """Record the time of an event of ``trial``, whose state already includes it."""
        if trial is None:
            return
        ends = trial.id in self._running and trial.status != RUNNING
        if event["event"] not in ("started", "report") and not ends:
            return
        self._moments.pop(trial.id, None)
        now = event["time"]
        if self._start is None:
            self._start = self._now = now
        self._trial_seconds += len(self._running) * max(0.0, now - self._now)
        self._now = max(self._now, now)
        if event["event"] == "started":
            self._running.add(trial.id)
            self._starting.add(trial.id)
        elif event["event"] == "report":
            if trial.id in self._last:
                first = trial.id in self._starting
                seconds = self._first_epochs if first else self._later_epochs
                seconds[trial.row].append(max(0.0, now - self._last[trial.id]))
            self._starting.discard(trial.id)
        if ends:
            self._running.discard(trial.id)
        self._last[trial.id] = now

    def left(self, state: StudyState, now: float | None = None) -> float | None:
        """Return the estimated seconds until the study ends; None if nothing is known yet.

        Args:
            state: state of the study.
            now: current Unix time; None for that of the last event.
        """
        now = self._now if now is None else now
        first, later = _means(self._firsts(state, now)), _means(self._later_epochs)
        if not first and not later:
            return None
        todo = [
            self._seconds_left(trial, first, later) - self._seconds_gone(trial, first, later, now)
            for trial in state.trials
            if trial.status in (PLANNED, RUNNING)
        ]
        proposed = state.plan.get("size", 0) - len(state.trials) if state.plan else 0
        if proposed > 0 and state.trials:
            whole = [_whole(trial, first, later) for trial in state.trials]
            todo += [statistics.fmean(whole)] * proposed
        elapsed = self._now - (self._start or 0.0)
        at_once = self._trial_seconds / elapsed if elapsed > 0 else 0.0
        return max([sum(todo) / (at_once or 1.0), *todo], default=0.0)

    def _seconds_left(
        self, trial: TrialState, first: Mapping[str, float], later: Mapping[str, float]
    ) -> float:
        """Return the estimated seconds of a trial's remaining epochs, with mean seconds of the
        first and of a later epoch by row; ``""`` is any row."""
        start, each = _epoch_seconds(trial, first, later)
        starts = trial.status == PLANNED or trial.id in self._starting
        return (trial.epochs - trial.epoch - starts) * each + starts * start

    def _seconds_gone(
        self, trial: TrialState, first: Mapping[str, float], later: Mapping[str, float], now: float
    ) -> float:
        """Return how much of :meth:`_seconds_left` of a running trial's epoch has passed."""
        if trial.id not in self._running or trial.id not in self._last:
            return 0.0
        start, each = _epoch_seconds(trial, first, later)
        expected = start if trial.id in self._starting else each
        seconds = self._seconds_of_epoch(trial)
        if seconds is not None:  # its own steps know better than other epochs
            return expected - max(0.0, seconds - (now - self._last[trial.id]))
        return min(expected, max(0.0, now - self._last[trial.id]))

    def _seconds_of_epoch(self, trial: TrialState) -> float | None:
        """Return how long a running trial's epoch takes in all by its steps, or None if unknown."""
        moment = self.moment(trial)
        if moment is None or trial.id not in self._last:
            return None
        share = moment["step"] / max(1, moment["steps"])
        passed = self._moments[trial.id][1] - self._last[trial.id]
        return passed / share if share >= LEAST_SHARE and passed > 0 else None

    def _firsts(self, state: StudyState, now: float) -> Mapping[str, Collection[float]]:
        """Return the seconds of first epochs by row; before any has ended, by their steps."""
        if self._first_epochs or self._later_epochs:
            return self._first_epochs
        found: dict[str, list[float]] = defaultdict(list)
        for trial in state.trials:
            if trial.id in self._starting and (seconds := self._seconds_of_epoch(trial)):
                found[trial.row].append(max(seconds, now - self._last[trial.id]))
        return found


def _epoch_seconds(
    trial: TrialState, first: Mapping[str, float], later: Mapping[str, float]
) -> tuple[float, float]:
    """Return the expected seconds of a trial's first epoch and of each later one."""
    each = later.get(trial.row) or first.get(trial.row) or later.get("") or first.get("", 0.0)
    return first.get(trial.row) or first.get("", each), each


def _whole(trial: TrialState, first: Mapping[str, float], later: Mapping[str, float]) -> float:
    """Return the expected seconds of a trial from its start to its end."""
    start, each = _epoch_seconds(trial, first, later)
    return start + (trial.epochs - 1) * each


def _means(seconds: Mapping[str, Collection[float]]) -> dict[str, float]:
    """Return the mean of each row, and of all under ``""``; empty without any."""
    found = {row: statistics.fmean(values) for row, values in seconds.items()}
    every = [value for values in seconds.values() for value in values]
    return {**found, "": statistics.fmean(every)} if every else {}


class _Sparing(Generic[T]):
    """Caches the result of ``make`` if it is slow, so that it takes at most 5 % of the time.

    A call that took less than 1 ms is repeated every time. After a slower one (with thousands of
    trials) the result is reused for 20 times its duration, at most 10 s.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T
        self._next = -math.inf

    def __call__(self) -> T:
        began = time.monotonic()
        if began >= self._next:
            self._made = self._make()
            took = time.monotonic() - began
            self._next = began + min(20 * took, 10.0) if took >= 1e-3 else -math.inf
        return self._made


class LiveView:
    """A table of trials and a bar, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._state, self._clock = StudyState(), Clock()
        self._view = _Sparing(lambda: render(self._state, self._clock, time.time()))
        self._lock = threading.Lock()
        self._console = console
        self._live: Live | None = None

    def start(self, state: StudyState) -> None:
        """Start to draw ``state``."""
        self._state = state
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=2)
        self._live.start()

    def listen(self, event: Event) -> None:
        """Record an event's time."""
        with self._lock:
            self._clock.hear(event, self._state.known.get(trial_of(event)))

    def step(self, trial: str, moment: Moment) -> None:
        """Record where a trial is within an epoch."""
        with self._lock:
            self._clock.note(trial, moment)

    def stop(self) -> None:
        """Draw the last state, which stays on the terminal."""
        with self._lock:
            self._view = _Sparing(lambda: render(self._state, self._clock, time.time()))
        if self._live is not None:
            self._live.stop()

    def _render(self) -> RenderableType:
        with self._lock:
            return self._view()


class PlainView:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state, self._clock = StudyState(), Clock()
        self._left = _Sparing(lambda: self._clock.left(self._state))
        self._metric: Metric  # set by start()

    def start(self, state: StudyState) -> None:
        """Print the number of trials and epochs."""
        self._state, self._metric = state, state.config.primary_metric
        epochs = sum(trial.epochs for trial in state.trials)
        more = "so far; the search proposes more" if state.config.search.adaptive else "in all"
        trials, all_epochs = counted(len(state.trials), "trial"), counted(epochs, "epoch")
        self._line(f"{state.config.name}: {trials}, {all_epochs} {more}")

    def listen(self, event: Event) -> None:
        """Print an event, if the user needs to know it."""
        trial = self._state.known.get(trial_of(event))
        self._clock.hear(event, trial)
        text = describe(event, trial, self._metric)
        if text:
            left = self._left() if event["event"] == "report" else None
            self._line(text + (f" | {duration(left)} left" if left else ""))

    def stop(self) -> None:
        """Do nothing; printed lines stay."""

    def _line(self, text: str) -> None:
        self._console.print(
            f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True
        )


def describe(event: Event, trial: TrialState | None, metric: Metric) -> str:
    """Describe an event as a phrase; "" for events that are not printed."""
    if trial is None or "source" in event:  # taken over from another trial
        return ""
    name = name_of(trial)
    if event["event"] == "report":
        shown = _shown(event["metrics"], metric.name, metric.words, metric)
        return f"{name}: epoch {event['epoch']}/{trial.epochs}, {shown}"
    if event["event"] == "relieved":
        return (
            f"{name}: out of memory, once more with {describe_params(event['relief'])}"
            f" ({event['error']})"
        )
    if event["event"] == "finished":
        shown = _shown(event["metrics"], metric.test_name, metric.test_words, metric)
        return f"{name}: finished, {shown}"
    phrases = {
        "restarted": "starts again from its last checkpoint",
        "damaged": (
            "a checkpoint is damaged, continuing from an earlier one or from the start; the result"
            " is the same"
        ),
        "failed": "FAILED",
        "started": f"started{f' ({describe_params(trial.params)})' if trial.params else ''}",
    }
    text = phrases.get(event["event"], "")
    if event["event"] == "stopped":
        text = f"ended early by {event['by']} after epoch {trial.epoch}"
    error = event["error"] if event["event"] in ("restarted", "damaged", "failed") else ""
    return f"{name}: {text}{f' ({error})' if error else ''}" if text else ""


def _shown(reported: Mapping[str, float], name: str, words: str, metric: Metric) -> str:
    """Return a metric with its value, or ``no NAME`` if it was not reported."""
    return f"{words} {metric.said(reported[name])}" if name in reported else f"no {name}"


def render(
    state: StudyState, clock: Clock | None = None, now: float | None = None
) -> RenderableType:
    """Return the live view of a state: trials, a summary, slots and a bar.

    Args:
        state: state of the study.
        clock: seconds per epoch so far; adds a bar with the time left for a study that runs in
            this process.
        now: current Unix time while the study runs; None shows running trials as interrupted.
    """
    table, metric = Table(box=None, pad_edge=False), state.config.primary_metric
    for heading in ("trial", "seed", "state", "epoch", metric.words, metric.final_words, "id"):
        table.add_column(
            Text(one_line(heading, NAME)),
            justify="left" if heading in ("trial", "state", "id") else "right",
            no_wrap=heading == "id",  # `lns-study show` needs complete ids
            overflow="fold",
        )
    shown = _most_interesting(list(state.trials))
    for trial in shown:
        constraints = state.config.search.constraints if state.plan else {}
        quiet = silence(trial, now, state.config.checkpoint_every) if now else 0.0
        moment = clock.moment(trial) if clock else None
        cells = _cells(trial, metric, constraints, now, quiet, moment)
        # Text, because rich would interpret tags such as [bold] in a str
        table.add_row(*map(Text, cells), style=STYLES[trial.status])
    hidden, drawn = len(state.trials) - len(shown), "" if clock else bars(state, now)
    lines: list[RenderableType] = [
        table,
        *([Text(f"and {hidden} more", style="dim")] if hidden else []),
        Text(cut(summary(state, running=now is not None))),
        *(Text(cut(sentence), style="yellow") for sentence in lacking(state)),
        # a study in this process has printed these sentences above, once
        *(
            Text(cut(sentence), style="yellow")
            for sentence in (describe_silent(state, now) if now and not clock else [])
        ),
        *([Text(slots)] if (slots := slots_line(state, now)) else []),
        *([Text(f"slots over time: [{drawn}]")] if drawn else []),
        *([_bar(state, clock, now)] if clock else []),
    ]
    return Group(*lines)


def summary(state: StudyState, *, running: bool) -> str:
    """Describe the trials by status, and the best value so far.

    ``3 running, 12 finished; best validation/error 4.33 % (lns #14)``
    """
    counted = state.counts()
    words = {STOPPED: "ended early"} | ({} if running else {RUNNING: INTERRUPTED})
    text = ", ".join(
        f"{counted[status]} {words.get(status, status)}" for status in STYLES if status in counted
    )
    if not state.plan:
        return text
    search = state.config.search
    metric = search.first
    values = {
        trial.id: value
        for trial in state.trials
        if math.isfinite(value := mean_objective([trial], metric.name))
        and not (trial.status in ENDED and infeasible(trial, search.constraints))
    }
    broken = sum(
        trial.status in ENDED and infeasible(trial, search.constraints) for trial in state.trials
    )
    text += f", {broken} infeasible" if broken else ""
    lost = sum(diverged(trial, metric.name) for trial in state.trials)
    text += f", {lost} diverged" if lost else ""
    if not values:
        return text
    best = min(values, key=lambda key: metric.sign * values[key])
    said = metric.said(values[best])
    return f"{text}; best {metric.name} {said} ({name_of(state.known[best])})"


def _most_interesting(trials: list[TrialState]) -> list[TrialState]:
    """Return the trials to show, in order: all, or up to :data:`MAX_ROWS` that matter most.

    Running trials come first, then failed, planned, stopped and finished ones.
    """
    if len(trials) <= MAX_ROWS:
        return trials
    rank = {RUNNING: 0, FAILED: 1, PLANNED: 2, STOPPED: 3, FINISHED: 4}
    chosen = {trial.id for trial in sorted(trials, key=lambda trial: rank[trial.status])[:MAX_ROWS]}
    return [trial for trial in trials if trial.id in chosen]


def _cells(
    trial: TrialState,
    metric: Metric,
    constraints: Mapping[str, str],
    now: float | None,
    quiet: float,
    moment: Moment | None,
) -> list[str]:
    values = last_value(trial, metric), test_value(trial, metric) if trial.test else None
    last, test = (
        "" if value is None else f"{metric.figure(value)}{metric.unit}" for value in values
    )
    status = INTERRUPTED if trial.status == RUNNING and now is None else trial.status
    if moment is not None:
        loss = moment["loss"]
        status = f"step {moment['step']}/{moment['steps']}"
        status += "" if loss is None else f", loss {loss:.3g}"
    elif quiet:
        status += f", silent for {duration(quiet)}"
    status += f" (restarted {trial.restarts}x)" if trial.restarts else ""
    if trial.status in ENDED and infeasible(trial, constraints):
        status += ", infeasible"
    status += ", diverged" if diverged(trial, metric.name) else ""
    row = one_line(trial.row, NAME) + ("" if trial.number is None else f" #{trial.number}")
    return [row, str(trial.seed), status, f"{trial.epoch}/{trial.epochs}", last, test, trial.id]


def _bar(state: StudyState, clock: Clock, now: float | None) -> RenderableType:
    total = sum(trial.epochs for trial in state.trials)
    done = sum(trial.epochs if trial.status in ENDED else trial.epoch for trial in state.trials)
    moments = [moment for trial in state.trials if (moment := clock.moment(trial)) is not None]
    part = sum(moment["step"] / max(1, moment["steps"]) for moment in moments)
    left = clock.left(state, now) if done < total else 0.0
    line = Table.grid(padding=(0, 1))
    estimate = "starting ..." if left is None else f"{duration(left)} left"
    line.add_row(
        ProgressBar(total=max(total, 1), completed=done + part, width=32),
        f"{done} of {total} epochs,",
        f"{duration(time.monotonic() - clock.began)}{',' if done < total else ''}",
        estimate if done < total else "",
    )
    return line
