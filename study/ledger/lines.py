"""A ledger's lines: numbered and checked, so that one that is damaged, cut out, swapped or doubled
is seen, and named.

Version 2. Every line is a JSON object whose last two keys are ``n``, the line's running number from
1, and ``check``, eight hex digits of the CRC-32 of all bytes before ``, "check"``. The first line
is a header, ``{"event": "ledger", "version": 2, "id": ...}``; ``id`` is random and stays with the
ledger for ever. A ledger is a concatenation of such lines: each can be checked alone, and a part of
one may begin with a header of its own that names the same id and goes on with the numbers.

Version 1 had neither. Its lines count by their place in the file, up to the first that is checked;
its id is what the first plan was stamped with. A crash then left torn lines in the middle, each
followed by the next run's plan: those are no damage.

Limits: the CRC finds accidents, not forgery. A file cut between two lines is whole as far as the
lines tell; the writer's note of how many there are (:mod:`study.ledger.log`) tells more. In version
1 only a line that is no JSON is seen.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

VERSION = 2
HEADER = "ledger"
MARK = b', "check": "'
SEAL = len(MARK) + 8 + len(b'"}')
"""Bytes of a line from :data:`MARK` to its end."""

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A place where a ledger is not as it was written.

    Attributes:
        line: in the file, from 1.
        number: of the event that is lost; None if none is.
        text: what is wrong.
        hints: what can still be read of the lost event: ``event``, ``trial``, ``epoch``.
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
    """Takes the lines of a ledger in the file's order.

    Attributes:
        id: the ledger's; "" until a line tells.
        number: the highest so far.
        checked: whether lines have checks by now.
        damage: what is wrong so far; lines that cannot be read are in it once the next whole one
            has come, or :meth:`end`.
    """

    def __init__(self) -> None:
        self.id, self.number, self.checked = "", 0, False
        self.damage: list[Damage] = []
        self._line = 0
        self._broken: list[tuple[int, bytes]] = []
        self._missing: dict[int, Damage] = {}

    def read(self, line: bytes) -> tuple[int, Event] | None:
        """The event of the next line and its number; None where there is none, or it has been read
        already."""
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
        """Nothing comes any more; there should be so many lines at least."""
        last = self.number + len(self._broken)
        self._resolve(last + 1, "")
        self._lose(range(last + 1, events + 1), self._line + 1)
        self.number = max(last, events)

    def _enter(self, number: int, event: Event) -> tuple[int, Event] | None:
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

    def _late(self, number: int, event: Event) -> tuple[int, Event] | None:
        """A line whose number has been passed: the file has it twice, or in a wrong place."""
        missed = self._missing.pop(number, None)
        self._note(
            f"is a second line {number}" if missed is None else f"is out of its place, {number}"
        )
        if missed is None:
            return None
        self.damage.remove(missed)
        return None if event["event"] == HEADER else (number, event)

    def _resolve(self, number: int, kind: str) -> None:
        """The next whole line has this number: what the broken ones before it were, and what is
        missing."""
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
                text="is damaged" if lost else "is no line of this ledger",
                hints=hints(text),
            )
            self.damage.append(entry)
            if lost:
                self._missing[lost] = entry
                expected += 1
        self._lose(range(expected, number), self._line)

    def _lose(self, numbers: range, line: int) -> None:
        for number in numbers:
            entry = Damage(
                line=line, number=number, text=f"number {number} is missing here", hints={}
            )
            self.damage.append(entry)
            self._missing[number] = entry

    def _note(self, text: str) -> None:
        self.damage.append(Damage(line=self._line, number=None, text=text, hints={}))


def seal(event: Event, number: int) -> bytes:
    """The line of an event, its end included."""
    body = json.dumps({**event, "n": number})[:-1].encode()
    return body + MARK + b'%08x"}\n' % zlib.crc32(body)


def unseal(line: bytes) -> tuple[int | None, Event | None]:
    """Number and event of a line; no number for one of version 1, and no event for one that is torn
    or damaged."""
    body, end = line[:-SEAL], line[-SEAL:]
    sealed = end.startswith(MARK)
    if sealed and end != MARK + b'%08x"}' % zlib.crc32(body):
        return None, None
    try:
        event = json.loads(body + b"}" if sealed else line)
    except ValueError:
        return None, None
    if not isinstance(event, dict) or "event" not in event or "time" not in event:
        return None, None
    if sealed:
        return int(event.pop("n")), event
    return (None, None) if event["event"] == HEADER or "n" in event else (None, event)


def hints(line: bytes) -> dict[str, str]:
    """What can be read of a damaged line: ``event``, ``trial`` and ``epoch``, as far as they are
    there."""
    text = line.decode(errors="replace")
    patterns = {
        "event": r'"event": "(\w+)"',
        "trial": r'"(?:trial": |planned": \{"id": )"(\w+)"',
        "epoch": r'"epoch": (\d+)\b',
    }
    return {
        key: found[1] for key, pattern in patterns.items() if (found := re.search(pattern, text))
    }
