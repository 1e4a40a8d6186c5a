"""The report's numbers as data: ``figures.json`` beside the page.

Other pages, MLflow and ``lns-study report --verify`` read this file. It has the digest of the
study's statement, the mean, standard deviation and interval of each row as numbers and as printed,
and the verdict on each claim.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from study.config import Metric
from study.evidence.statement import stated
from study.evidence.verdict import Verdict
from study.ledger.state import StudyState
from study.results.statistics import interval
from study.results.summary import Row, Summary, test_figures
from study.text import printable_json
from trainers.files import read_own_json, write_whole

FILE = "figures.json"
SAME = "before the first trial"


def record(state: StudyState, summary: Summary, verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the contents of ``figures.json`` as JSON values."""
    said = stated(state)
    changed = said.claims if said else {}
    return {
        "study": state.config.name,
        "metric": summary.metric.test_name,
        "stated": said and {"digest": said.digest, "time": said.time, "changed": said.changed},
        "rows": rows_of(summary),
        "claims": [
            verdict.to_dict() | {"stated": changed.get(verdict.claim.name, SAME)}
            for verdict in verdicts
        ],
    }


def rows_of(summary: Summary) -> list[dict[str, Any]]:
    """Return the numbers of a study's table rows as JSON values."""
    return [_row(row, summary.metric) for row in summary.rows]


def write_record(values: dict[str, Any], folder: Path) -> None:
    """Write ``figures.json`` into a report's folder."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    write_whole(folder / FILE, f"{printable_json(text)}\n".encode())


def read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of ``figures.json`` in ``folder``; empty if the file does not exist.

    Raises:
        ValueError: the file is not JSON.
    """
    try:
        found: dict[str, Any] = read_own_json(folder / FILE)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{folder / FILE}: is not JSON ({error}); write it again with `lns-study report"
            f" {folder.parent.name}`"
        ) from None
    return found


def interval_of(row: Row, metric: Metric) -> tuple[float, float] | None:
    """Return the 95 % interval of a row's mean (Student's t over seeds).

    None if seeds of the row have not finished, or if there is no interval.
    """
    half = interval(test_figures(row.trials, metric))
    if half is None or row.mean is None or row.finished < row.seeds:
        return None
    return row.mean - half, row.mean + half


def _row(row: Row, metric: Metric) -> dict[str, Any]:
    ends = interval_of(row, metric)
    return {
        "label": row.label, "trials": [trial.id for trial in row.trials],
        "finished": row.finished, "mean": row.mean, "sd": row.sd, "interval": ends,
        "printed": {
            "mean": "-" if row.mean is None else metric.mean(row.mean, row.sd),
            "interval": " to ".join(map(metric.figure, ends)) if ends else "-",
        },
    }  # fmt: skip
