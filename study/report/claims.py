"""Claims and verdicts as tables, from the figures of a report (:mod:`study.evidence.record`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from study.config.claims import BOUNDS
from study.evidence.record import SAME
from study.text import NAME, one_line

VERDICT = "verdict"
HEADINGS = ("claim", VERDICT, "ours (95 %)", "published", "runs", "source", "remark")


def claim_cells(claim: Mapping[str, Any]) -> list[str]:
    """Return a claim's cells in the table of claims."""
    published = "-" if claim["published"] is None else f"{claim['published']:g}"
    late = "" if claim["stated"] == SAME else f"NOT AS STATED: {claim['stated']}"
    remark = "; ".join(part for part in (late, _bound(claim["arguments"]), claim["note"]) if part)
    return [
        f"{claim['name']}: {claim['claim']}",
        claim["outcome"],
        claim["shown"],
        published,
        str(claim["runs"]),
        claim["source"],
        remark or "-",
    ]


def _bound(arguments: Mapping[str, Any]) -> str:
    """Describe the bound of a claim, as ``at most 2.5``; "" without one."""
    for key in BOUNDS:
        if (bound := arguments.get(key)) is not None:
            ends = bound if isinstance(bound, list) else [bound]
            return f"{key.replace('_', ' ')} {' to '.join(f'{end:g}' for end in ends)}"
    return f"by {arguments['by']:g}" if arguments.get("by") else ""


def claims_text(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdicts for a terminal, one line each; "" without claims."""
    if not claims:
        return ""
    names = [one_line(claim["name"], NAME) for claim in claims]
    width = max(map(len, names))
    lines = ["Claims"]
    for name, claim in zip(names, claims, strict=True):
        _, outcome, ours, published, *_, remark = claim_cells(claim)
        beside = f"; published {published}" if published != "-" else ""
        why = f" ({remark})" if remark != "-" else ""
        lines.append(f"  {outcome:<9}  {name:<{width}}  {one_line(f'{ours}{beside}{why}')}")
    return "\n".join(lines)


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines in Markdown."""
    table = [list(headings), ["---"] * len(headings), *map(list, lines)]
    return [f"| {' | '.join(map(markdown_cell, line))} |" for line in table]


def markdown_cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table: as :func:`markdown_text`, and bars escaped."""
    return markdown_text(text).replace("|", "\\|")


_ADDRESS = re.compile(r"(www\.|:(?=//)|@)(?=\S)", re.IGNORECASE)
_LIVE = re.compile(r"(\\*)(\](?=\s*[(:\[])|<(?=[A-Za-z/!?]))")


def markdown_text(text: str) -> str:
    """Return a text in one line, with Markdown links, images and HTML disabled.

    Brackets are escaped, and a space is inserted into texts that viewers turn into links. Names and
    labels can come from untrusted configs: an image would let its author track readers of the
    report, and an extra line would look like part of the report.
    """
    broken = _ADDRESS.sub(lambda found: f"{found[0]} ", one_line(text))
    return _LIVE.sub(lambda found: f"{2 * found[1]}\\{found[2]}", broken)


def claims_markdown(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of claims in Markdown, with a heading; empty without claims."""
    if not claims:
        return []
    return ["## Claims", "", *markdown_table(HEADINGS, [claim_cells(each) for each in claims]), ""]
