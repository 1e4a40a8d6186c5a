"""Export of a study's trials or epochs as CSV, JSON, JSON lines or Parquet.

A metric with the name of a column of the trial, such as ``seed`` or ``config.epochs``, is in the
column ``metrics.seed`` (:func:`study.results.objectives.column_of`).
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from study.config.keys import flatten
from study.ledger.state import StudyState, TrialState
from study.results.objectives import SPENT, column_of, objective
from study.text import printable
from trainers.files import write_whole

EXPORTS = ("csv", "json", "jsonl", "parquet")
OWN = ("id", "row", "number", "seed", "status", "epoch", "bits", "seconds", "restarts", "error")
"""Columns for a trial's identity, status and last epoch; config columns have the prefix
:data:`CONFIG`."""
CONFIG = "config."
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of cells that spreadsheets compute, and may so run (OWASP, "CSV injection")."""


def export_rows(state: StudyState, *, epochs: bool = False) -> list[dict[str, Any]]:
    """Return one flat dict per trial of the last plan, or one per epoch.

    A row has identity, config under dotted keys, status and metrics.
    """
    rows: list[dict[str, Any]] = []
    for trial in state.trials:
        base = _identity(trial)
        if epochs:
            rows += [
                base | {"epoch": epoch, **_columns(event["metrics"])}
                for epoch, event in sorted(trial.reports.items())
            ]
        else:
            last = trial.reports[trial.epoch]["metrics"] if trial.reports else {}
            spent = {name: objective(trial, name) for name in SPENT if name in last}
            derived = {name: objective(trial, name) for name in ("bits", "seconds")}
            rows.append(
                base
                | {
                    "epoch": trial.epoch,
                    **_columns({**last, **trial.test, **spent}),
                    **derived,
                    "restarts": trial.restarts,
                    "error": trial.error,
                }
            )
    return rows


def _columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics by column name."""
    return {
        column_of(name, OWN, CONFIG): value for name, value in metrics.items() if name != "epoch"
    }


def _identity(trial: TrialState) -> dict[str, Any]:
    config = {f"{CONFIG}{key}": value for key, value in flatten(trial.config).items()}
    return {
        "id": trial.id,
        "row": trial.row,
        "number": trial.number,
        "seed": trial.seed,
        "status": trial.status,
        **config,
    }


def export(
    state: StudyState, path: Path | None, form: str, *, epochs: bool = False, named: bool = False
) -> int:
    """Write :func:`export_rows` to a file; return the number of rows.

    Args:
        state: state of the study.
        path: the file; None for standard output.
        form: csv, json (an array of objects), jsonl (one object per line) or parquet. In JSON,
            numbers that are not finite are null.
        epochs: whether to write one row per epoch.
        named: whether the user named the file; it may then be a link or a device. Otherwise an
            existing file is replaced.
    """
    rows = export_rows(state, epochs=epochs)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "parquet":
        content = _parquet(rows, names)
        if path is None:
            sys.stdout.buffer.write(content)
    else:
        text = _text(rows, names, form)
        if path is None:  # the line breaks of csv are \r\n
            getattr(sys.stdout, "stream", sys.stdout).write(text)
        content = text.encode()
    if path is not None:
        path.write_bytes(content) if named else write_whole(path, content)
    return len(rows)


def _parquet(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    pyarrow.parquet.write_table(table, buffer := io.BytesIO())
    return buffer.getvalue()


def _text(rows: Sequence[Mapping[str, Any]], names: Sequence[str], form: str) -> str:
    if form == "csv":
        write_csv(buffer := io.StringIO(newline=""), names, rows)
        return buffer.getvalue()
    lines = [json.dumps({name: _finite(value) for name, value in row.items()}) for row in rows]
    if form == "json":
        return "[\n" + ",\n".join(lines) + "\n]\n"
    return "".join(f"{line}\n" for line in lines)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_csv(file: TextIO, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under a heading, with cells that no spreadsheet reads as a formula."""
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in names])
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)


def _cell(value: Any) -> Any:
    """Return a value; a text has an apostrophe before it if it begins like a formula and is no
    number, has one line, and its control characters are escaped."""
    if not isinstance(value, str):
        return value
    text = printable(" ".join(value.splitlines()))
    if not value.startswith(FORMULA):
        return text
    try:
        float(value)
    except ValueError:
        return f"'{text}"
    return text
