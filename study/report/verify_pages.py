"""Verification of the files of a report: every line and cell made again from the ledger's events.

The figures that count are computed again by other code (:mod:`study.report.verify`); here every
text of ``report.md`` and ``report.html`` and all of ``configurations.csv`` and ``figures.json`` is
compared with what this version writes from the same ledger, in order. So a sentence, a cell or a
remark that was altered, exchanged with another, added or taken out is told.

Limits: pictures are not read, nor addresses and colours; a report of another version may say the
same in other words, and differs then.
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

from study.ledger.state import StudyState
from study.report.html import render_html
from study.report.interactive import explore_data, explore_text
from study.report.pictures import TITLES, Links, Parts, caption, tables
from study.report.tables import render_csv, render_markdown
from study.results.summary import Summary
from study.results.utilisation import sentences

LIKE = 1e-9
"""Relative difference of two computations of a figure that is rounding."""
LINKS = {"All runs in MLflow", "All runs in MLflow (while lns-study ui runs)"}
"""Texts of a page whose study has runs to link to."""
FIGURE = re.compile(r"<figure>.*?</figure>", re.DOTALL)
EXPLORE = re.compile(r'<section id="explore".*?</section>', re.DOTALL)
"""Part of a page that a machine without plotly does not write."""
SILENT = ("style", "script")
"""Elements whose texts nobody reads."""
SHOWN = 80
"""Characters of a text that a sentence shows."""
NOT_MADE = "could not be made ("
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
    wanted = render_markdown(state, summary, use, claims).splitlines()
    found = (folder / "report.md").read_text(encoding="utf-8").splitlines()
    yield from _differences("report.md", wanted, found, ())
    if (folder / "report.html").exists():
        yield from _page(state, summary, use, claims, folder)
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
) -> Iterator[str]:
    made = Parts(pictures=[], tables=tables(state), explore=None, failed=[])
    page = (folder / "report.html").read_text(encoding="utf-8")
    wanted = render_html(state, summary, made, Links(), claims)
    titles = {caption(name, summary.metric)[0] for name in TITLES}
    of_pictures = titles | {" ".join(use)} | LINKS
    whole = FIGURE.sub("", page)
    shown = EXPLORE.sub("", whole, count=1)
    yield from _differences("report.html", texts(wanted), texts(shown), of_pictures)
    data = explore_data(state)
    if shown != whole and data and explore_text(data) not in page:
        yield "report.html: the figures of the plots to explore are not the ledger's"


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
        """Begin to leave texts out where nobody reads them."""
        self._silent = self._silent or tag in SILENT

    def handle_endtag(self, tag: str) -> None:
        """End leaving texts out."""
        self._silent = self._silent and tag not in SILENT

    def handle_data(self, data: str) -> None:
        """Collect a text."""
        if not self._silent and (text := " ".join(data.split())):
            self.found.append(text)


def _differences(
    file: str, wanted: Sequence[str], found: Sequence[str], also: Collection[str]
) -> Iterator[str]:
    """Say where the texts of a file differ; texts ``also`` may be added."""
    known = set(wanted)
    kept = [text for text in found if text in known or not (text in also or NOT_MADE in text)]
    if kept == list(wanted):
        return
    for what, a, b, c, d in SequenceMatcher(None, wanted, kept, autojunk=False).get_opcodes():
        if what != "equal":
            ours, theirs = ("; ".join(each)[:SHOWN] for each in (kept[c:d], wanted[a:b]))
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
