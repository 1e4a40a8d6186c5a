"""Lines of a ledger, numbered and with a checksum, so that damaged, lost, swapped or repeated lines
are found and named.

Version 2. Every line is a JSON object whose last two keys are ``n``, the line's running number from
1, and ``check``, eight hex digits of the CRC-32 of all bytes before ``, "check"``. The first line
is a header, ``{"event": "ledger", "version": 2, "id": ...}``; ``id`` is random and never changes. A
ledger is a concatenation of such lines: each can be checked alone, and a part of one may begin with
a header of its own that names the same id and continues the numbers.

Version 1 had neither. Its lines are numbered by their place in the file, up to the first line with
a checksum; its id is the one in the first plan. A crash then left torn lines in the middle, each
followed by the next run's plan; they do not count as damage.

Limits: the CRC detects accidents, not forgery. A file that was cut between two lines looks
complete; the number of lines that the writer recorded (:mod:`study.ledger.log`) reveals the cut. In
version 1 only lines that are not JSON are detected.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any, Final

from study.ledger.events import Event, Line

VERSION = 2
HEADER: Final = "ledger"
MARK = b', "check": "'
SEAL = len(MARK) + 8 + len(b'"}')
"""Number of bytes of a line from :data:`MARK` to its end."""

MOST_BYTES, LATEST, DEEPEST = 2**26, 1e11, 100
"""Bounds of an event: bytes of its line, its time in seconds since 1970, and its nesting."""
HINTED = 2**16
"""Bytes of a damaged line that are searched for what it was."""
MOST_LOST = 10_000
"""Most missing lines that are named each."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG = re.compile(rb"\d{19}")


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged place of a ledger.

    Attributes:
        line: line of the file, from 1.
        number: number of the lost event, or None.
        text: description of the damage.
        hints: readable parts of the lost event: ``event``, ``trial``, ``epoch``.
    """

    line: int
    number: int | None
    text: str
    hints: dict[str, str]

    def __str__(self) -> str:
        known = [
            self.hints[key] if key == "event" else f"{key} {self.hints[key]}"
            for key in ("event", "trial", "epoch")
            if key in self.hints
        ]
        return f"line {self.line}: {self.text}" + (f" ({', '.join(known)})" if known else "")


class Lines:
    """A reader that takes the lines of a ledger in the file's order.

    Attributes:
        id: id of the ledger; "" before a line has named it.
        number: highest number so far.
        checked: whether a line with a checksum has come.
        damage: damage found so far; unreadable lines are added once the next whole line has come,
            or at :meth:`end`.
    """

    def __init__(self) -> None:
        self.id, self.number, self.checked = "", 0, False
        self.damage: list[Damage] = []
        self._line = 0
        self._broken: list[tuple[int, bytes]] = []
        self._missing: dict[int, Damage] = {}

    def read(self, line: bytes) -> tuple[int, Event] | None:
        """Return the number and event of the next line.

        Returns None for a line without an event, and for one that has been read before.
        """
        self._line += 1
        if not line.strip():
            return None
        number, event = unseal(line)
        if event is None or (self.checked and number is None):
            self._broken.append((self._line, line))
            return None
        if number is None:
            number = self.number + len(self._broken) + 1
        elif not self.checked:
            self.checked = True
        return self._enter(number, event)

    def end(self, events: int = 0) -> None:
        """Close the reader; lines are missing if there were fewer than ``events``."""
        last = self.number + len(self._broken)
        self._resolve(last + 1, "")
        self._lose(range(last + 1, events + 1), self._line + 1)
        self.number = max(last, events)

    def _enter(self, number: int, event: Line) -> tuple[int, Event] | None:
        if number <= self.number:
            return self._late(number, event)
        self._resolve(number, event["event"])
        self.number = number
        if event["event"] == HEADER:
            if self.id and event.get("id") != self.id:
                self._note(f"begins another ledger, {event.get('id')}")
            self.id = self.id or str(event.get("id", ""))
            return None
        self.id = self.id or str(event.get("ledger", ""))
        return number, event

    def _late(self, number: int, event: Line) -> tuple[int, Event] | None:
        """Note a line whose number has been passed: a repetition, or a line out of its place."""
        missed = self._missing.pop(number, None)
        self._note(
            f"is a second line {number}" if missed is None else f"is out of its place, {number}"
        )
        if missed is None:
            return None
        self.damage.remove(missed)
        return None if event["event"] == HEADER else (number, event)

    def _resolve(self, number: int, kind: str) -> None:
        """Note the broken and missing lines before the next whole line, which has ``number``."""
        broken, self._broken = self._broken, []
        if (
            not self.checked
            and kind in ("planned", HEADER)
            and len(broken) == 1
            and not broken[0][1].rstrip().endswith(b"}")
        ):
            return  # a crash of version 1
        expected = self.number + 1
        for line, text in broken:
            lost = expected if expected < number else None
            entry = Damage(
                line=line,
                number=lost,
                text="is damaged" if lost else "does not belong to this ledger",
                hints=hints(text),
            )
            self.damage.append(entry)
            if lost:
                self._missing[lost] = entry
                expected += 1
        self._lose(range(expected, number), self._line)

    def _lose(self, numbers: range, line: int) -> None:
        for number in numbers[:MOST_LOST]:
            text = f"number {number} is missing here"
            if number == numbers[MOST_LOST - 1 : MOST_LOST].start and len(numbers) > MOST_LOST:
                text = f"numbers {number} to {numbers[-1]} are missing here"
            entry = Damage(line=line, number=number, text=text, hints={})
            self.damage.append(entry)
            self._missing[number] = entry

    def _note(self, text: str) -> None:
        self.damage.append(Damage(line=self._line, number=None, text=text, hints={}))


def encodable(event: Event) -> Event:
    """Return an event whose strings can be encoded in UTF-8.

    Names and errors of the user's code may contain lone surrogates, for example from undecodable
    bytes. They are replaced by question marks.
    """
    text = json.dumps(event, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        found: Event = json.loads(text.encode(errors="replace"))
        return found
    return event


def seal(event: Line, number: int) -> bytes:
    """Return the line of an event, its line break included."""
    body = json.dumps({**event, "n": number})[:-1].encode()
    return body + MARK + b'%08x"}\n' % zlib.crc32(body)


def unseal(line: bytes) -> tuple[int | None, Line | None]:
    """Return the number and event of a line.

    A line of version 1 has no number; a torn or damaged one has no event.
    """
    body, end = line[:-SEAL], line[-SEAL:]
    sealed = end.startswith(MARK)
    if sealed and end != MARK + b'%08x"}' % zlib.crc32(body):
        return None, None
    if len(line) > MOST_BYTES:
        return None, None
    try:
        event = json.loads(body + b"}" if sealed else line)
    except (ValueError, RecursionError):
        return None, None
    if not _is_event(event, line):
        return None, None
    if b"\\ud" in line.lower() or b"\xed" in line:
        event = _without_surrogates(event)
    if sealed:
        number = event.pop("n", None)
        return (number, event) if isinstance(number, int) else (None, None)
    return (None, None) if event["event"] == HEADER or "n" in event else (None, event)


def _without_surrogates(value: Any) -> Any:
    """Return a value with U+FFFD in place of lone surrogates, which cannot be printed or written.
    The checksum is of the original line."""
    if isinstance(value, str):
        return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(kept) for key, kept in value.items()}
    return [_without_surrogates(kept) for kept in value] if isinstance(value, list) else value


def _is_event(event: Any, line: bytes) -> bool:
    """Tell whether the values of a line have the form of an event, in bounds that every study keeps
    and that no figure or date of ours overflows."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    if not (isinstance(event.get("time"), int | float) and 0 <= event["time"] < LATEST):
        return False
    forms = {"trial": str, "epoch": int, "metrics": dict}
    if not all(isinstance(event[key], kind) for key, kind in forms.items() if key in event):
        return False
    figures = event.get("metrics", {}).values()
    if not all(value is None or isinstance(value, int | float) for value in figures):
        return False
    # what follows looks at every value, which only an odd line needs
    odd = _LONG.search(line) or line.count(b"[") + line.count(b"{") > DEEPEST
    return not odd or _is_bounded(event)


def _is_bounded(values: Any) -> bool:
    """Return whether values are nested at most :data:`DEEPEST` deep, with integers below 2^63."""
    level = [values]
    for _ in range(DEEPEST):
        inner = [
            value
            for each in level
            for value in (each.values() if isinstance(each, dict) else each)
            if isinstance(value, dict | list | int)
        ]
        if any(isinstance(value, int) and abs(value) >= 2**63 for value in inner):
            return False
        level = [value for value in inner if not isinstance(value, int)]
        if not level:
            return True
    return False


def hints(line: bytes) -> dict[str, str]:
    """Return the readable parts of a damaged line: ``event``, ``trial`` and ``epoch``, if there."""
    text = line[:HINTED].decode(errors="replace")
    patterns = {
        "event": r'"event": "(\w+)"',
        "trial": r'"(?:trial": |planned": \{"id": )"(\w+)"',
        "epoch": r'"epoch": (\d+)\b',
    }
    return {
        key: found[1] for key, pattern in patterns.items() if (found := re.search(pattern, text))
    }
