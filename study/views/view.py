"""What a progress display of a study has, and the one for where its output goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from study.ledger.events import Event
from study.ledger.state import StudyState

if TYPE_CHECKING:
    from rich.console import Console

    from trainers.telemetry.tally import Moment


class View(Protocol):
    """Progress display of a running study; see :mod:`study.views.progress`."""

    def start(self, state: StudyState) -> None:
        """Start to show ``state``; the caller keeps it up to date."""

    def listen(self, event: Event) -> None:
        """Show an event; ``state`` already includes it."""

    def stop(self) -> None:
        """Show the last state and release the terminal."""


@runtime_checkable
class StepView(View, Protocol):
    """A view that also shows where trials are within an epoch."""

    def step(self, trial: str, moment: Moment) -> None:
        """Show where a trial is, about once a second."""


def make_view(console: Console, plain: bool = False) -> View:
    """Return a study's progress display for a notebook, a terminal, or a log (plain lines)."""
    from study.views.progress import LiveView, PlainView

    if console.is_jupyter:
        from study.views.notebook import NotebookView  # loads matplotlib

        return NotebookView()
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)
