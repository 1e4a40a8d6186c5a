"""The prepared view: the page that a user sees first in MLflow's interface, and the link that opens
it.

A saved view of MLflow 3.17 is a tag of the experiment, ``mlflow.sharedViewState.KEY``, holding
``{"name", "createdAt", "updatedAt", "state"}`` with ``state`` = ``deflate;`` + base64 of the
zlib-compressed JSON of the runs page: columns, sort, charts. The format is internal to MLflow,
hence the pin in ``pyproject.toml`` and the browser test; if MLflow does not understand it, it shows
its plain table. ``workflowType`` keeps MLflow from opening its overview for GenAI, which has no
columns.

MLflow adds a chart for every metric that has none, in sections by the part of its name before the
last ``/``, and sorts the sections by name unless they count as reordered
(``isAccordionReordered``). So our section is listed first, and the sections of settings and of rows
are listed too, closed: a closed section draws nothing.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from study.config import OUTSIDE, Metric, StudyConfig
from study.config.keys import flatten
from study.config.space import parse_space
from study.tracking.names import SETTING, of_row, sanitise, settings_of

TAG = "mlflow.sharedViewState."
SECTION = "study"
MOST_PARAMS = 6
MOST_AXES = 3
"""Number of axes of the parallel coordinates; more overlap in MLflow's card."""
LOSSES = ("validation/loss", "train/loss")


def view_key(plan: Mapping[str, Any]) -> str:
    """Return the key of a ledger's view."""
    return f"lns-study-{plan['ledger']}"


def view_tag(plan: Mapping[str, Any], view: str) -> tuple[str, str]:
    """Return name and value of the experiment tag that holds the study's view."""
    state = (
        "deflate;" + base64.b64encode(zlib.compress(json.dumps(view_state(plan)).encode())).decode()
    )
    when = int(plan["time"] * 1000)
    return TAG + view, json.dumps(
        {"name": plan["study"]["name"][:100], "createdAt": when, "updatedAt": when, "state": state}
    )


def view_state(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns, sort and charts for a study: what differs between its trials, and its metric.

    Runs are sorted by the first objective; by the metric if that is no reported figure.
    """
    study = StudyConfig.from_dict(plan["study"])
    metric, shown = study.primary_metric, study.search.first
    shown = shown if "/" in shown.name else metric
    varied = varied_keys(plan)
    bytes_ = (
        ["bytes/parameter_step"] if any(config["workers"] > 1 for config in _configs(plan)) else []
    )
    columns = [_column("tags", name) for name in ("row", "format", "layout")]
    columns += [_column("params", sanitise(key)) for key in dict.fromkeys([*varied, "seed"])]
    columns += [
        _column("metrics", sanitise(name))
        for name in dict.fromkeys(
            [shown.name, metric.test_name, metric.name, "bits", "seconds", *bytes_]
        )
    ]
    return {
        "searchFilter": "",
        "orderByKey": _column("metrics", sanitise(shown.name)),
        "orderByAsc": shown.mode == "min",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": _sections(plan, metric),
        "compareRunCharts": _charts(plan, shown, metric, varied),
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
    }


def varied_keys(plan: Mapping[str, Any]) -> list[str]:
    """Return the config keys with more than one value among the trials, keys of the space first.

    Seeds and keys that change no result are left out. A search that learns from results has no
    trials yet when it is planned: the keys of its space count, and those that its rows override.
    """
    values: dict[str, set[str]] = {}
    for config in _configs(plan):
        for key, value in flatten(config).items():
            values.setdefault(key, set()).add(json.dumps(value))
    space = [key for key in space_keys(plan["study"]["space"]) if key in values]
    if plan["trials"]:
        others = [key for key, found in values.items() if len(found) > 1]
    else:
        others = [
            key
            for row in plan["study"]["rows"]
            for key in flatten(row["overrides"])
            if key in values
        ]
    return [key for key in dict.fromkeys([*space, *others]) if key not in ("seed", *OUTSIDE)][
        :MOST_PARAMS
    ]


def _configs(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configs of the trials, or the base trial's if there are none yet."""
    return [trial["config"] for trial in plan["trials"]] or [plan["study"]["trial"]]


def space_keys(space: Mapping[str, Any]) -> list[str]:
    """Return the dotted config keys of a space; a choice among mappings varies the keys in them."""
    keys: list[str] = []
    for domain in parse_space(space).domains:
        inner = [
            f"{domain.key}.{key}"
            for value in domain.values
            if isinstance(value, Mapping)
            for key in flatten(dict(value))
        ]
        keys += inner or [domain.key]
    return list(dict.fromkeys(keys))


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _sections(plan: Mapping[str, Any], metric: Metric) -> list[dict[str, Any]]:
    """Return our section, those of metrics as MLflow names them, and closed ones.

    The closed ones are those of settings and of rows.
    """
    shown = {SECTION: "Study", "train": "train", "test": "test", "model": "Model metrics"}
    rows = {
        f"row-{place}": sanitise(f"{row['label']}{of_row(metric)}").rpartition("/")[0]
        for place, row in enumerate(plan["study"]["rows"])
    }
    closed = {"cfg": SETTING.rstrip("/"), **rows}
    return [
        {
            "uuid": key,
            "name": title,
            "display": key in shown,
            "isReordered": False,
            "deleted": False,
            "isGenerated": key != SECTION,
        }
        for key, title in {**shown, **closed}.items()
    ]


def _charts(
    plan: Mapping[str, Any], shown: Metric, metric: Metric, varied: list[str]
) -> list[dict[str, Any]]:
    numeric = settings_of(_configs(plan)[0])
    figure = sanitise(shown.name)
    params = [sanitise(key) for key in varied[:MOST_AXES]] or ["precision.format"]
    charts = [
        _chart("parallel", "PARALLEL", f"settings and {shown.short}", 100) | {
            "selectedParams": params, "selectedMetrics": [figure], "showAllRuns": False},
        *(_scatter(f"error-{x}", x, figure) for x in ("bits", "seconds")),
    ]  # fmt: skip
    charts += [
        _scatter(f"error-{key}", f"{SETTING}{key}", figure)
        for key in varied
        if f"{SETTING}{key}" in numeric
    ][:2]
    for name in dict.fromkeys([shown.name, metric.name, *LOSSES]):
        charts.append(_line(sanitise(name)))
    return charts


def _chart(key: str, kind: str, title: str, runs: int) -> dict[str, Any]:
    return {
        "uuid": key,
        "type": kind,
        "runsCountToCompare": runs,
        "metricSectionId": SECTION,
        "deleted": False,
        "isGenerated": False,
        "displayName": title,
    }


def _scatter(key: str, x: str, y: str) -> dict[str, Any]:
    return _chart(key, "SCATTER", f"{y} over {x.removeprefix(SETTING)}", 100) | {
        "xaxis": {"type": "METRIC", "key": x}, "yaxis": {"type": "METRIC", "key": y}}  # fmt: skip


def _line(name: str) -> dict[str, Any]:
    return _chart(f"line-{name}", "LINE", name, 20) | {
        "metricKey": name, "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "log",
        "range": {}, "xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric",
        "yAxisExpressions": [], "ignoreOutliers": False,
        "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}  # fmt: skip
