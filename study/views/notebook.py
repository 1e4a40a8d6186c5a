"""Notebook views: one output cell that is updated in place, and figures shown as pictures."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from study.ledger.events import Event, trial_of
from study.ledger.state import StudyState
from study.report.figures.style import png
from study.views.console import PrintableConsole
from study.views.progress import Clock, render

if TYPE_CHECKING:  # imports torch
    from trainers.telemetry.tally import Moment

SECONDS = 1.0
"""Minimum time between two updates, in seconds."""
WIDTH = 110


class NotebookView:
    """The table of trials in one output cell, updated at most once a second.

    Events trigger the updates, in the thread that runs the cell; no event loop is needed.
    """

    def __init__(self) -> None:
        self._state, self._clock = StudyState(), Clock()
        self._shown, self._output = 0.0, None

    def start(self, state: StudyState) -> None:
        """Show ``state``."""
        from IPython.display import display

        self._state = state
        self._output = display(self._bundle(), raw=True, display_id=True)

    def listen(self, event: Event) -> None:
        """Record an event's time, and update the output if the last update is old enough."""
        self._clock.hear(event, self._state.known.get(trial_of(event)))
        if time.monotonic() - self._shown > SECONDS:
            self._renew()

    def step(self, trial: str, moment: Moment) -> None:
        """Record where a trial is, and update the output if the last update is old enough."""
        self._clock.note(trial, moment)
        if time.monotonic() - self._shown > SECONDS:
            self._renew()

    def stop(self) -> None:
        """Show the last state."""
        self._renew()

    def _renew(self) -> None:
        if self._output is not None:
            self._output.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """Return the state as a MIME bundle for Jupyter."""
        self._shown = time.monotonic()
        text = io.StringIO()
        PrintableConsole(file=text, width=WIDTH, force_jupyter=False).print(
            render(self._state, self._clock, time.time())
        )
        return {"text/plain": text.getvalue().rstrip()}


def show_figures() -> None:
    """Register a PNG formatter for figures in Jupyter, unless it has one (pyplot adds one)."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    from matplotlib.figure import Figure

    shell: Any = get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].type_printers.setdefault(Figure, png)
