"""Makes the reference page of ledger events from their types and the places that write them."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from study.ledger import events, state

ROOT = Path(__file__).parents[2]


class Entry(NamedTuple):
    """An event: its name, what has happened, and the keys of its line."""

    event: str
    meaning: str
    keys: str


def entry(kind: Any) -> Entry:
    """Return the entry of a typed dict."""
    (event,) = get_args(kind.__annotations__["event"])
    own = [
        key for key in kind.__annotations__ if key not in {"event", *events.Common.__annotations__}
    ]
    optional = ", ".join(key for key in own if key in kind.__optional_keys__)
    keys = ", ".join(key for key in own if key in kind.__required_keys__)
    return Entry(
        event, inspect.getdoc(kind) or "", keys + (f"; optional {optional}" if optional else "")
    )


def listed() -> list[Entry]:
    """Return the events of a ledger."""
    return [entry(kind) for kind in get_args(events.Event)]


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the events that an expression may be: its strings, and the constants of the ledger."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and isinstance(getattr(state, part.id, None), str):
            yield getattr(state, part.id)


def written(tree: ast.AST) -> Iterator[str]:
    """Yield the events that a file writes: ``{"event": ...}``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "event":
                    yield from strings(value)


def writers() -> dict[str, list[str]]:
    """Return the files that write each event, by the event's name."""
    found: dict[str, set[str]] = defaultdict(set)
    names = {found.event for found in listed()}
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
        f"| `{event}` | {cell(' '.join(meaning.split()))} | {cell(keys)} |"
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
            "`study/plan/extend.py` and `study/ops/repair/ledger.py` copy events of other runs and"
            " restore lost lines; these name their `source`, or where they were `recovered`.",
            "",
        ]
    )
