"""Interactive plots of a report: plotly and the data are embedded, so the page works offline.

plotly.js has 4.8 MB; as gzip in base64 it takes 1.9 MB, which the browser unpacks
(``DecompressionStream``). The page's content security policy allows two scripts by their hashes,
plotly and our own, so text from a study cannot run as a script. The data are JSON with ``<``
written as ``\\u003c``.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.util
import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from study.config import Metric
from study.config.keys import flatten, is_number
from study.ledger.state import StudyState, TrialState, name_of
from study.report.figures.style import COLOURS
from study.results.objectives import column_of, curve, test_value
from study.results.statistics import METRIC, labels, measure
from study.text import cut, printable

MOST_TRIALS = 2000
MOST_CURVES = 300
MOST_SETTINGS = 12


@dataclass(frozen=True, kw_only=True)
class Interactive:
    """Values for the template; ``policy`` is the content security policy's script-src."""

    policy: str
    plotly: str
    script: str
    data: str


def interactive(state: StudyState) -> Interactive | None:
    """Return the interactive part of a study's page.

    Returns None before a trial has reported, or if plotly is not installed.
    """
    data = explore_data(state)
    if data is None or importlib.util.find_spec("plotly") is None:
        return None
    packed, plotly_hash = _plotly()
    script = files("study.report").joinpath("templates/report.js").read_text(encoding="utf-8")
    return Interactive(
        policy=f"'sha256-{plotly_hash}' 'sha256-{_sha256(script)}'",
        plotly=packed,
        script=script,
        data=explore_text(data),
    )


def explore_text(data: dict[str, Any]) -> str:
    """Serialise :func:`explore_data` for the page, with control characters escaped."""
    return json.dumps(_shown(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _shown(value: Any) -> Any:
    """Cut long texts and keys of a JSON value, and escape their control characters."""
    if isinstance(value, str):
        return printable(cut(value))
    if isinstance(value, dict):
        return {printable(cut(name)): _shown(each) for name, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, list) else value


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js as gzip in base64, and the SHA-256 of the unpacked text."""
    from plotly.offline import get_plotlyjs

    text = get_plotlyjs()
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode(), _sha256(text)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def explore_data(state: StudyState) -> dict[str, Any] | None:
    """Return the trials with their curves and the values that can be chosen as axes.

    Returns None before a trial has reported.
    """
    trials = [trial for trial in state.trials if trial.reports][:MOST_TRIALS]
    if not trials:
        return None
    rows, metric = list(state.rows()), state.config.primary_metric
    keys = _settings(trials)
    measures = {name: column_of(label, keys) for name, label in labels(metric).items()}
    test = column_of(metric.heading(metric.test_words), keys)
    lines = [
        _line(trial, rows, keys, metric, measures, test, with_curve=place < MOST_CURVES)
        for place, trial in enumerate(trials)
    ]
    names = [
        name
        for name in dict.fromkeys([*measures.values(), test, *keys])
        if any(line["values"].get(name) is not None for line in lines)
    ]
    x = keys[0] if keys else next((name for name in names if name != measures[METRIC]), names[0])
    return {
        "rows": rows,
        "names": names,
        "trials": lines,
        "colours": COLOURS,
        "x": x,
        "y": measures[METRIC],
        "log": metric.logarithmic(
            value for line in lines for value in line.get("curve", [[], []])[1]
        ),
    }


def scatter(state: StudyState, x: str = "", y: str = "") -> Any:
    """Return a plotly figure of a study's trials, one dot per trial, one colour per row.

    Args:
        state: state of the study.
        x, y: names of the axes, as in the page's menus; "" for the page's default.

    Raises:
        ValueError: no trial has reported, or the axis does not exist.
    """
    from plotly import graph_objects

    data = explore_data(state)
    if data is None:
        raise ValueError("plot: no trial has reported yet; run the study first")
    x, y = x or data["x"], y or data["y"]
    for axis in (x, y):
        if axis not in data["names"]:
            raise ValueError(f"plot: axis {axis!r}: must be one of {', '.join(data['names'])}")
    dots = []
    for number, row in enumerate(data["rows"]):
        mine = [line for line in data["trials"] if line["row"] == number]
        dots.append(
            graph_objects.Scatter(
                name=html.escape(row),
                mode="markers", marker={"color": COLOURS[number % len(COLOURS)]},
                x=[line["values"].get(x) for line in mine],
                y=[line["values"].get(y) for line in mine],
                text=[html.escape(line["name"]) for line in mine],
            )
        )  # fmt: skip
    return graph_objects.Figure(dots, {"xaxis": {"title": x}, "yaxis": {"title": y}})


def _settings(trials: list[TrialState]) -> list[str]:
    """Return the numeric config keys with more than one value, sampled ones first."""
    sampled = list(
        dict.fromkeys(
            key
            for trial in trials
            for key, value in trial.params.items()
            if isinstance(value, int | float)
        )
    )
    values: dict[str, set[Any]] = {}
    for trial in trials:
        for key, value in flatten(trial.config).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    return list(
        dict.fromkeys([*sampled, *(key for key, found in values.items() if len(found) > 1)])
    )[:MOST_SETTINGS]


def _line(
    trial: TrialState, rows: list[str], keys: list[str], metric: Metric,
    measures: dict[str, str], test: str, *, with_curve: bool,
) -> dict[str, Any]:  # fmt: skip
    config = flatten(trial.config)
    values: dict[str, Any] = {
        label: _finite(measure(trial, name, metric)) for name, label in measures.items()
    }
    values[test] = _finite(test_value(trial, metric))
    values |= {key: _finite(config.get(key)) for key in keys}
    line: dict[str, Any] = {
        "row": rows.index(trial.row),
        "name": f"{name_of(trial)} ({trial.id})",
        "values": values,
    }
    if with_curve:
        reported = {
            epoch: value for epoch, value in curve(trial, metric).items() if math.isfinite(value)
        }
        line["curve"] = [list(reported), [metric.rounded(value) for value in reported.values()]]
    return line


def _finite(value: Any) -> float | None:
    """Round a finite number to six digits; return None for any other value (JSON has no NaN)."""
    return float(f"{value:.6g}") if is_number(value) else None
