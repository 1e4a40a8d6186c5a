"""Verdicts of check functions from the last report, for commands that only read a study.

A ledger may name a check function that the user does not trust, so reading a study does not run it.
The report that was written at the end of a run has the verdict in ``figures.json``. It is used only
if the report has the same claim and the same metrics as the ledger, and is treated as untrusted
text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.config import ClaimConfig
from study.evidence.record import read_record, rows_of
from study.evidence.verdict import OUTCOMES, UNDECIDED, Verdict
from study.ledger.state import StudyState
from study.ledger.storage import REPORT
from study.results.summary import Summary
from study.tracking_uri import without_password

OPTION = "--run-checks"
"""Option of ``lns-study report`` that runs the check functions of claims."""
NOT_RUN = (
    f"its function is not run by reading the study, and no report has its verdict;"
    f" `report {OPTION}` runs it"
)


def kept(claim: ClaimConfig, state: StudyState, summary: Summary, folder: Path) -> Verdict:
    """Return the last report's verdict on a claim with a check function; ``undecided`` without one.

    Args:
        claim: a claim with ``check``.
        state: state of the study.
        summary: table of the study.
        folder: folder of the study.
    """
    figures: Any = {}
    if not (folder / REPORT).is_symlink():
        with suppress(OSError, ValueError):
            figures = read_record(folder / REPORT)
    if isinstance(figures, Mapping) and _is_of(figures, state, summary):
        listed = figures.get("claims")
        for values in listed if isinstance(listed, list) else []:
            if isinstance(values, Mapping) and _is_same(values, claim):
                return _verdict(claim, values)
    return Verdict(claim=claim, outcome=UNDECIDED, note=NOT_RUN)


def _is_of(figures: Mapping[str, Any], state: StudyState, summary: Summary) -> bool:
    """Return whether a report has the same study name and table rows as the ledger."""
    now = json.loads(json.dumps(rows_of(summary)))
    return figures.get("study") == state.config.name and repr(figures.get("rows")) == repr(now)


def _is_same(values: Mapping[str, Any], claim: ClaimConfig) -> bool:
    now = json.loads(json.dumps(Verdict(claim=claim, outcome=UNDECIDED).to_dict()))
    stated = ("name", "claim", "source", "kind", "published", "arguments")
    return all(values.get(key) == now[key] for key in stated)


def _verdict(claim: ClaimConfig, values: Mapping[str, Any]) -> Verdict:
    """Return a verdict from a report's JSON values; values of a wrong type are ignored."""
    numbers: dict[str, float] = {}
    for key in ("figure", "low", "high"):
        with suppress(OverflowError):
            value = values.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[key] = float(value)
    texts = {key: values.get(key) for key in ("outcome", "unit", "note", "shown")}
    unit, note, shown = (
        without_password(text) if isinstance(text := texts[key], str) else ""
        for key in ("unit", "note", "shown")
    )
    runs = values.get("runs")
    return Verdict(
        claim=claim, outcome=next((o for o in OUTCOMES if o == texts["outcome"]), UNDECIDED),
        **numbers, unit=unit, note=note, printed=shown,
        runs=runs if isinstance(runs, int) and not isinstance(runs, bool) else 0,
    )  # fmt: skip
