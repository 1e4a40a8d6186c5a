"""Verification of the files of a report: every line and cell made again from the ledger's events.

The figures that count are computed again by other code (:mod:`study.report.verify`); here every
text of ``report.md`` and ``report.html`` and all of ``configurations.csv`` and ``figures.json`` is
compared with what this version writes from the same ledger, in order. So a sentence, a cell or a
remark that was altered, exchanged with another, added or taken out is told.

A page says which parts it has: pictures by their descriptions, and the parts that could not be made
when it was written. It is compared with a page of the same parts, so that each text, descriptions
of pictures included, is in its place.

Limits: pictures are not read, nor addresses and colours, nor the reason for which a part could not
be made; a report of another version may say the same in other words, and differs then.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from study.claims.verdicts import LIKE
from study.ledger.state import StudyState
from study.report.html import render_html
from study.report.interactive import Interactive, explore_data, explore_text
from study.report.pictures import TITLES, Links, Parts, Picture, caption, tables
from study.report.tables import render_csv, render_markdown
from study.results.idle_time import sentences
from study.results.summary import Summary

LINKED = "All runs in MLflow"
"""Text of the link of a page whose study has runs in MLflow."""
LOCAL = f"{LINKED} (while lns-study ui runs)"
EXPLORE = '<section id="explore"'
"""Begin of the part of a page that a machine without plotly does not write."""
SILENT = ("style", "script")
"""Elements whose texts nobody reads."""
READ = ("alt", "title", "value", "placeholder", "label")
"""Attributes whose texts are read."""
SHOWN = 80
"""Characters of a text that a sentence shows."""
NOT_MADE = re.compile(
    r"The (picture (?P<picture>\w+)|further tables|plots to explore) could not be made"
    r" \([A-Za-z_.]+: .*\)\.",
    re.DOTALL,
)
"""What a report says of a part that failed, which may succeed now."""


def verify_pages(
    state: StudyState, summary: Summary, claims: Sequence[Mapping[str, Any]], folder: Path
) -> Iterator[str]:
    """Yield what the pages of a report say and the ledger does not, a sentence each.

    Args:
        state: state of the study, from its ledger.
        summary: its table.
        claims: its claims, judged again.
        folder: folder of the report.
    """
    use = sentences(state)
    found = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    lost = [line.removeprefix("- ") for line in found]
    lost = [line for line in lost if NOT_MADE.fullmatch(line)]
    wanted = render_markdown(state, summary, [*use, *lost], claims).splitlines()
    yield from _differences("report.md", wanted, found)
    if (folder / "report.html").exists():
        yield from _page(state, summary, use, claims, folder, lost)
    if state.config.space:
        table = folder / "configurations.csv"
        if not table.exists() or table.read_bytes() != render_csv(state).encode():
            yield "configurations.csv: it is not what the ledger gives"


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


def _page(
    state: StudyState,
    summary: Summary,
    use: list[str],
    claims: Sequence[Mapping[str, Any]],
    folder: Path,
    lost: list[str],
) -> Iterator[str]:
    """Compare ``report.html``; ``lost`` are the parts that report.md says could not be made."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    shown = texts(page)
    pictures = _pictures(summary, use, shown)
    said = [NOT_MADE.fullmatch(text) for text in lost]
    for name in {match["picture"] for match in said if match} & {p.file[:-4] for p in pictures}:
        yield f"report.html: it shows the picture {name}, of which it says that there is none"
    explore = EXPLORE in page
    made = Parts(
        pictures=pictures, tables=tables(state), failed=lost,
        explore=Interactive(policy="", plotly="", script="", data="") if explore else None,
    )  # fmt: skip
    where = Links(study=LINKED, local=LOCAL in shown) if {LINKED, LOCAL} & {*shown} else Links()
    yield from _differences(
        "report.html", texts(render_html(state, summary, made, where, claims)), shown
    )
    data = explore_data(state)
    if explore and data and explore_text(data) not in page:
        yield "report.html: the figures of the plots to explore are not the ledger's"


def _pictures(summary: Summary, use: list[str], shown: Collection[str]) -> list[Picture]:
    """Return the pictures that a page has by their descriptions, in their order, without bytes."""
    found = []
    for name in TITLES:
        title, alt = caption(name, summary.metric)
        if alt in shown:
            note = " ".join(use) if name == "slots" else ""
            found.append(
                Picture(file=f"{name}.png", title=title, alt=alt, light=b"", dark=b"", note=note)
            )
    return found


def texts(page: str) -> list[str]:
    """Return the texts of an HTML page in order, without spaces around them."""
    reader = _Texts()
    reader.feed(page)
    return reader.found


class _Texts(HTMLParser):
    """A reader that collects texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._silent = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin to leave texts out where nobody reads them; take those of attributes."""
        self._silent = self._silent or tag in SILENT
        if tag in SILENT:
            self.found.append(f"<{tag}>")  # one more than there should be is told
        for name, value in attrs:
            if name in READ and value:
                self.found.append(" ".join(value.split()))

    def handle_endtag(self, tag: str) -> None:
        """End leaving texts out."""
        self._silent = self._silent and tag not in SILENT

    def handle_data(self, data: str) -> None:
        """Collect a text."""
        if not self._silent and (text := " ".join(data.split())):
            self.found.append(text)


def _differences(file: str, wanted: Sequence[str], found: Sequence[str]) -> Iterator[str]:
    """Say where the texts of a file differ."""
    if list(found) == list(wanted):
        return
    for what, a, b, c, d in SequenceMatcher(None, wanted, found, autojunk=False).get_opcodes():
        if what != "equal":
            ours, theirs = ("; ".join(each)[:SHOWN] for each in (found[c:d], wanted[a:b]))
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
