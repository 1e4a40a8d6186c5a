"""Verification of the files of a report: each made again from the ledger's events and compared.

The figures that count are computed again by other code (:mod:`study.report.verify`); here every
file of the report is compared, byte for byte, with what this version writes from the same ledger,
pictures and scripts included, and all values of ``figures.json``. So whatever was altered,
exchanged with another, added, hidden or taken out is told.

A page says which parts could not be made when it was written, has no plots to explore where plotly
was missing, and links to MLflow where the study was sent there. It is compared with a page of the
same parts.

Limits: the addresses of links are not read, nor the reason for which a part could not be made; a
report of other versions of this program, matplotlib, Pillow or plotly may differ.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

from study.claims.verdicts import LIKE
from study.ledger.state import StudyState
from study.report.pictures import Links, Parts, parts
from study.report.write import PICTURES, render_files
from study.results.idle_time import sentences
from study.results.summary import Summary
from trainers.files import MOST_JSON, read_own

LINKED = ">All runs in MLflow"
"""Text of the link of a page whose study has runs in MLflow."""
LOCAL = f"{LINKED} (while lns-study ui runs)"
ADDRESS = re.compile(r'<a href="[^"]*"')
EXPLORE = '<section id="explore"'
"""Begin of the part of a page that a machine without plotly does not write."""
SHOWN = 80
"""Characters of a text that a sentence shows."""
BEFORE = 20
"""Of them, those before the first that differs."""
NOT_MADE = re.compile(
    r"The (picture (?P<picture>\w+)|(?P<tables>further tables)|plots to explore) could not be made"
    r" \([A-Za-z_.]+: .*\)\."
)
"""What a report says of a part that failed, which may succeed now."""


def verify_pages(
    state: StudyState, summary: Summary, claims: Sequence[Mapping[str, Any]], folder: Path
) -> Iterator[str]:
    """Yield what the files of a report have and the ledger does not give, a sentence each.

    Args:
        state: state of the study, from its ledger.
        summary: its table.
        claims: its claims, judged again.
        folder: folder of the report.
    """
    names = ("report.md", "report.html", "configurations.csv", *PICTURES)
    found = {
        name: read_own(folder / name, MOST_JSON) for name in names if (folder / name).is_file()
    }
    text, page = (_text(found.get(name, b"")) for name in names[:2])
    made = _parts_of(text, page, parts(state, summary, sentences(state)))
    wanted = render_files(state, summary, made, _links_of(page, state), claims)
    for name in names:
        if name not in found and name in wanted:
            yield f"{name}: it is missing"
        elif name in found and name not in wanted:
            yield f"{name}: the ledger gives no such file"
        elif name.endswith((".md", ".html")):
            yield from _differences(name, _text(wanted[name]), _text(found[name]))
        elif found.get(name) != wanted.get(name):
            yield f"{name}: it is not what the ledger gives"


def verify_record(found: Any, wanted: Any, place: str = "figures.json") -> Iterator[str]:
    """Yield the values of a record that are not those wanted, a sentence each.

    Args:
        found: JSON values of the report.
        wanted: the same, computed again.
        place: name of the place in the record.
    """
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*found, *wanted]):
            yield from verify_record(found.get(key), wanted.get(key), f"{place}: {key}")
    elif isinstance(found, list) and isinstance(wanted, list | tuple) and len(found) == len(wanted):
        for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            yield from verify_record(ours, theirs, f"{place} {_name(theirs, number)}")
    elif not _alike(found, wanted):
        ours, theirs = (json.dumps(each, default=str)[:SHOWN] for each in (found, wanted))
        yield f"{place}: the report has {ours}, computed again it is {theirs}"


def has_form_of(found: Any, wanted: Any) -> bool:
    """Tell whether a record has the keys and the types of values of another one, whatever they are
    and however many entries a list has; a number may be None, and each kind of claim has arguments
    of its own."""
    if isinstance(wanted, Mapping):
        whole = isinstance(found, Mapping) and found.keys() >= wanted.keys()
        inner = wanted.keys() - {"arguments"}
        return whole and all(has_form_of(found[key], wanted[key]) for key in inner)
    if isinstance(wanted, list | tuple):
        listed = isinstance(found, list)
        return listed and all(map(has_form_of, found, cycle(wanted or ("",))))
    return isinstance(found, str if isinstance(wanted, str) else int | float | None)


def _parts_of(text: str, page: str, made: Parts) -> Parts:
    """Return of the parts of a page those that the report has: without what it says could not be
    made."""
    said = [NOT_MADE.fullmatch(line.removeprefix("- ")) for line in text.split("\n")]
    lost = [match for match in said if match]
    files = {f"{match['picture']}.png" for match in lost}
    return replace(
        made,
        pictures=[picture for picture in made.pictures if picture.file not in files],
        tables=[] if any(match["tables"] for match in lost) else made.tables,
        explore=made.explore if EXPLORE in page else None,
        failed=[match[0] for match in lost],
    )


def _links_of(page: str, state: StudyState) -> Links:
    """Return links where a page has them, whatever their addresses."""
    if LINKED not in page:
        return Links()
    trials = dict.fromkeys((trial.id for trial in state.trials), "-")
    return Links(
        study="-", local=LOCAL in page, rows=dict.fromkeys(state.rows(), "-"), trials=trials
    )


def _text(content: bytes) -> str:
    """Return a page's text without the addresses of its links."""
    return ADDRESS.sub("<a", content.decode(errors="replace"))


def _differences(file: str, wanted: str, found: str) -> Iterator[str]:
    """Say where the lines of a file differ."""
    if found == wanted:
        return
    lines = wanted.splitlines(keepends=True), found.splitlines(keepends=True)
    for what, a, b, c, d in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if what != "equal":
            theirs, ours = "".join(lines[0][a:b]), "".join(lines[1][c:d])
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
            start = max(0, sum(1 for _ in alike) - BEFORE)
            ours, theirs = (each[start : start + SHOWN] for each in (ours, theirs))
            yield (
                f"{file}: it says {ours or 'nothing'!r} where the ledger gives"
                f" {theirs or 'nothing'!r}"
            )


def _name(entry: Any, number: int) -> str:
    """Return the name by which an entry of a list is known."""
    named = entry if isinstance(entry, Mapping) else {}
    return str(named.get("label", named.get("name", number)))


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        both = math.isnan(found) and math.isnan(wanted)
        return both or math.isclose(found, wanted, rel_tol=LIKE, abs_tol=LIKE)
    return bool(found == wanted)
