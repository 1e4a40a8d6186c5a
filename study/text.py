"""Formatting of numbers and texts for people."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, TextIO

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    r"\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000110bd\U000110cd"
    r"\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that control terminals, change the direction of text or are invisible.

These are Unicode's categories Cc and Cf except tabs and line breaks, the line and paragraph
separators, and the property Default_Ignorable_Code_Point. Unpaired surrogates are included too,
because they cannot be encoded as UTF-8.
"""


def printable(text: str) -> str:
    """Return a text with escaped control characters (``\\x1b``); tabs and line breaks stay.

    Labels, questions and errors in a ledger may come from an untrusted source.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


NAME, CELL, LINE = 80, 300, 2000
"""Maximum number of characters that are shown of a name, of a table's cell and of a sentence."""


def cut(text: str, most: int = LINE) -> str:
    """Return a text of at most ``most`` characters, with ``...`` in its middle if it is longer.

    Texts in a ledger may come from an untrusted source, and have any length. The end stays, because
    names often differ there, and errors have their remedy there.
    """
    end = most // 3
    return text if len(text) <= most else f"{text[: most - end - 3]}...{text[-end:]}"


def one_line(text: str, most: int = LINE) -> str:
    """Return a text of at most ``most`` characters with spaces for line breaks, so that a label
    cannot imitate another line."""
    return cut(" ".join(text.splitlines()), most)


def printable_json(text: str) -> str:
    """Return JSON with the same values and escaped control characters (``\\u001b``)."""
    # JSON escapes are UTF-16: two of them for a character beyond U+FFFF
    return _CONTROLS.sub(
        lambda found: re.sub(
            "....", r"\\u\g<0>", found[0].encode("utf-16-be", errors="surrogatepass").hex()
        ),
        text,
    )


class PrintableStream:
    """A text stream that passes everything it writes through :func:`printable`.

    Other attributes are those of the wrapped stream.

    Args:
        stream: the stream to wrap.

    Attributes:
        stream: the wrapped stream, for code that must write control characters.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text; return its number of characters."""
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def layout_of(config: Mapping[str, Any]) -> str:
    """Describe a trial's parallelism: ``1 worker``, ``dp 2``, ``dp 2 x pp 2``, ``dp 2 sharded``."""
    layout = config.get("layout", {})
    workers, pp, tp = int(config["workers"]), int(layout.get("pp") or 1), int(layout.get("tp") or 1)
    if workers == 1:
        return "1 worker"
    degrees = {"dp": workers // (pp * tp), "pp": pp, "tp": tp}
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return " x ".join(parts) + (" sharded" if layout.get("fsdp") else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 trial``, ``3 trials``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(fraction: float) -> str:
    """Return a fraction as per cent with two decimals."""
    return f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    """Return a duration in seconds as text: ``42 s``, ``3 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def when(seconds: float) -> str:
    """Return a Unix time in seconds as date and time in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
