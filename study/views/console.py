"""The console of commands: texts are printable, and colours are the console's own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from study.text import printable


class PrintableConsole(Console):
    """A console of rich that prints the control characters of texts as ``\\x1b``."""

    def __init__(self, **options: Any) -> None:
        # what is printed past it goes through a stream that would escape its colours
        super().__init__(**{"file": getattr(sys.stdout, "stream", None), **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable."""
        for segment in super().render(renderable, options):
            own = segment.control is not None
            yield segment if own else segment._replace(text=printable(segment.text))
