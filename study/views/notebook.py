"""A study in a notebook: one output that is renewed in place, and figures that show as pictures."""

from __future__ import annotations

import io
import time
from typing import Any

from study.ledger.lines import Event
from study.ledger.state import StudyState
from study.report.figures.style import png
from study.views.console import PrintableConsole
from study.views.progress import Clock, render

SECONDS = 1.0
"""Least time between two pictures of the state."""
WIDTH = 110


class NotebookView:
    """The table of trials as one output of a cell, renewed at most once a second.

    It is renewed by events, in the thread that runs the cell, and needs no event loop.
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
        """Note an event's time, and show the state if the last picture is old."""
        self._clock.hear(event, self._state.known.get(event.get("trial", "")))
        if time.monotonic() - self._shown > SECONDS:
            self._renew()

    def stop(self) -> None:
        """Show the last state."""
        self._renew()

    def _renew(self) -> None:
        if self._output is not None:
            self._output.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        """Return the state as Jupyter takes it, a text by MIME type."""
        self._shown = time.monotonic()
        text = io.StringIO()
        PrintableConsole(file=text, width=WIDTH, force_jupyter=False).print(
            render(self._state, self._clock, time.time())
        )
        return {"text/plain": text.getvalue().rstrip()}


def show_figures() -> None:
    """Have Jupyter show figures as PNG, unless it does already, as once pyplot is imported."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    from matplotlib.figure import Figure

    shell: Any = get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].type_printers.setdefault(Figure, png)
