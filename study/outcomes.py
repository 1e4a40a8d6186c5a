"""What an executor says of a trial in its results, beside metrics. Loads nothing, see :mod:`study.trial`."""

from __future__ import annotations

REFUSED = "refused"
"""In a trial's last result: why it cannot work. It failed, and is not tried again."""
OUT_OF_MEMORY = "out_of_memory"
"""In a trial's last result: what the allocator said."""
DAMAGED = "damaged"
"""In a trial's first result: which checkpoints it could not continue from, and why."""


def last_line(text: str) -> str:
    """The last line of an error's text that says something, at most 500 characters; "" if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
