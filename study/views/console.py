"""The console of commands: it escapes control characters in texts but keeps its own colours."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from study.text import printable


class PrintableConsole(Console):
    """A rich console that prints control characters in texts in escaped form, such as ``\\x1b``."""

    def __init__(self, **options: Any) -> None:
        # sys.stdout may be a PrintableStream, which would escape this console's colours
        super().__init__(**{"file": getattr(sys.stdout, "stream", None), **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable."""
        for segment in super().render(renderable, options):
            own = segment.control is not None
            yield segment if own else segment._replace(text=printable(segment.text))
