"""A study's view for benchmarks: it records times and shows nothing."""

from __future__ import annotations

import time

from study.ledger.events import Event
from study.ledger.state import StudyState


class View:
    """A view that records when trials start and finish, and shows nothing.

    Attributes:
        events: ``started`` and ``finished`` events, with this process's CPU time so far as ``cpu``.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def start(self, state: StudyState) -> None:
        """Do nothing: there is nothing to show."""

    def listen(self, event: Event) -> None:
        """Record starts and ends of trials."""
        if event["event"] in ("started", "finished"):
            self.events.append({**event, "cpu": time.process_time()})

    def stop(self) -> None:
        """Do nothing: there is nothing to clear."""
