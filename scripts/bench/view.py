"""A view of a study for benchmarks, which shows nothing."""

from __future__ import annotations

import time

from study.ledger.lines import Event
from study.ledger.state import StudyState


class View:
    """A view that sees events go by and shows nothing.

    Attributes:
        events: when trials started and finished, with the CPU seconds of this process till then.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def start(self, state: StudyState) -> None:
        """Do nothing: there is nothing to show."""

    def listen(self, event: Event) -> None:
        """Keep those that tell times."""
        if event["event"] in ("started", "finished"):
            self.events.append({**event, "cpu": time.process_time()})

    def stop(self) -> None:
        """Do nothing: there is nothing to clear."""
