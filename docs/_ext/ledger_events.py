"""Makes the reference page of ledger events from the list in ``study.ledger.log`` and the calls
that write them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from study.ledger import lines, log, state

ROOT = Path(__file__).parents[2]
INDENT = 4
"""Spaces before an entry of the list; what continues an entry has more."""


class Entry(NamedTuple):
    """An event of the list: its name, its meaning, and the keys of its line."""

    event: str
    meaning: str
    keys: str


def listed() -> list[Entry]:
    """Return the events that the docstring of ``study.ledger.log`` lists."""
    _, _, text = (log.__doc__ or "").partition("(seconds since 1970)::\n\n")
    rows: list[list[str]] = []
    for line in text.split("\n\n")[0].splitlines():
        cells = re.split(r" {2,}", line.strip())
        if len(line) - len(line.lstrip()) == INDENT:
            rows.append([*cells, "", ""][:3])
        else:  # the rest of the last cell
            rows[-1][2 if rows[-1][2] else 1] += f" {cells[0]}"
    return [Entry(*row) for row in rows]


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the events that an expression may be: its strings, and the constants of the ledger."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and isinstance(getattr(state, part.id, None), str):
            yield getattr(state, part.id)


def written(tree: ast.AST) -> Iterator[str]:
    """Yield the events that a file writes: ``{"event": ...}`` and ``ledger.append(...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "event":
                    yield from strings(value)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func) in ("ledger.append", "self._ledger.append")
        ):
            yield from strings(node.args[0])


def writers() -> dict[str, list[str]]:
    """Return the files that write each event, by the event's name."""
    found: dict[str, set[str]] = defaultdict(set)
    names = {entry.event for entry in listed()} | {lines.HEADER}
    for path in sorted((ROOT / "study").rglob("*.py")):
        for event in written(ast.parse(path.read_text())):
            if event in names:
                found[event].add(path.relative_to(ROOT).as_posix())
    return {event: sorted(files) for event, files in found.items()}


def cell(text: str) -> str:
    """Return text that may stand in a table's cell."""
    return text.replace("|", r"\|")


def page() -> str:
    """Return the page of ledger events."""
    files = writers()
    rows = [
        f"| `{event}` | {cell(meaning)} | {cell(keys)} |"
        f" {', '.join(f'`{name}`' for name in files.get(event, []))} |"
        for event, meaning, keys in listed()
    ]
    return "\n".join(
        [
            "# Ledger events",
            "Each line of `ledger.jsonl` is one JSON object; lines are in the order of events.",
            "Every line has `event`, `time` (seconds since 1970), its number `n` and a `check`sum;"
            " the first line is a header, `ledger`, with the version and the ledger's id"
            " (`study/ledger/lines.py`).",
            "",
            "| event | meaning | keys | written by |",
            "|---|---|---|---|",
            *rows,
            "",
            "`study/manage/extend.py` and `study/manage/repair.py` copy events of other runs and"
            " restore lost lines; these name their `source`, or where they were `recovered`.",
            "",
        ]
    )
