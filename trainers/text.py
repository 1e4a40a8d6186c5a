"""Parts of error messages: suggestions for misspelled names, and errors of the user's code."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Sequence
from pathlib import Path

CLOSE = 0.6
"""Minimum similarity of a known name to be suggested."""
LENGTH = 300
"""Maximum number of characters quoted from an error of the user's code."""


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known name, or "" without a close match."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    return f" (did you mean {close[0]!r}?)" if close else ""


def describe_error(error: BaseException, *places: Path) -> str:
    """Describe an error, with the last line of the user's files in its traceback.

    Args:
        error: the error.
        places: the user's files and their folders.
    """
    place = str(places[0]) if places else ""
    if isinstance(error, SyntaxError):
        known = error.filename is not None and Path(error.filename).is_file()
        place = f"{error.filename if known else place}, line {error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if any(path == known or known in path.parents for known in places):
            place = f"{frame.filename}, line {frame.lineno}"
    text = " ".join(str(error).split())[:LENGTH]
    return f"{type(error).__name__}{f' in {place}' if place else ''}: {text}"
