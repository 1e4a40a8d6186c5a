"""Verification of a report's files: recreates each from the ledger's events and compares.

The main figures are recomputed by independent code (:mod:`study.evidence.verify`). This module
compares every file of the report byte for byte, pictures and scripts included, with the file that
this version writes from the same ledger, and all values of ``figures.json``. It thereby detects
anything that was altered, swapped, added, hidden or removed.

A page lists the parts that could not be made when it was written, has no interactive plots if
plotly was missing, and links to MLflow if the study was sent there. It is compared with a page of
the same parts.

Limits: the addresses of links are not compared, nor the reasons why parts could not be made.
Reports of other versions of this program, matplotlib, Pillow or plotly may differ.
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

from study.evidence.judge import LIKE
from study.ledger.state import StudyState
from study.report.pictures import Links, Parts, parts
from study.report.write import PICTURES, render_files
from study.results.idle_time import sentences
from study.results.summary import Summary
from trainers.files import MOST_JSON, read_own

LINKED = ">All runs in MLflow"
"""Link text on the page of a study with runs in MLflow."""
LOCAL = f"{LINKED} (while lns-study ui runs)"
ADDRESS = re.compile(r'<a href="[^"]*"')
EXPLORE = '<section id="explore"'
"""Start of the page section that is only written if plotly is installed."""
SHOWN = 80
"""Number of characters of a differing text that a sentence quotes."""
BEFORE = 20
"""Number of quoted characters before the first difference."""
NOT_MADE = re.compile(
    r"The (picture (?P<picture>\w+)|(?P<tables>further tables)|plots to explore) could not be made"
    r" \([A-Za-z_.]+: .*\)\."
)
"""Matches a report's note about a part that could not be made; it may succeed now."""


def verify_pages(
    state: StudyState, summary: Summary, claims: Sequence[Mapping[str, Any]], folder: Path
) -> Iterator[str]:
    """Yield the differences between a report's files and the recreated ones, one sentence each.

    Args:
        state: state of the study, from its ledger.
        summary: summary of the study.
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
    """Yield the differing values of a record, one sentence each.

    Args:
        found: JSON values of the report.
        wanted: the recomputed values.
        place: path in the record, for the sentences.
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
    """Return whether a record has the same keys and value types as ``wanted``.

    Lists can have different lengths, numbers can be None, and the ``arguments`` of claims are not
    compared because they depend on the kind of claim.
    """
    if isinstance(wanted, Mapping):
        whole = isinstance(found, Mapping) and found.keys() >= wanted.keys()
        inner = wanted.keys() - {"arguments"}
        return whole and all(has_form_of(found[key], wanted[key]) for key in inner)
    if isinstance(wanted, list | tuple):
        listed = isinstance(found, list)
        return listed and all(map(has_form_of, found, cycle(wanted or ("",))))
    return isinstance(found, str if isinstance(wanted, str) else int | float | None)


def _parts_of(text: str, page: str, made: Parts) -> Parts:
    """Return the parts without the ones that the report lists as not made."""
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
    """Return placeholder links in the places where the page has links."""
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
    """Yield a sentence for each place where the lines of a file differ."""
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
    """Return an entry's ``label`` or ``name``, or else its position in the list."""
    named = entry if isinstance(entry, Mapping) else {}
    return str(named.get("label", named.get("name", number)))


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(found, float) and isinstance(wanted, int | float):
        both = math.isnan(found) and math.isnan(wanted)
        return both or math.isclose(found, wanted, rel_tol=LIKE, abs_tol=LIKE)
    return bool(found == wanted)
