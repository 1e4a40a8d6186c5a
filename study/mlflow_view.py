"""The prepared view: what a user sees first in MLflow's interface, and the link that opens it.

A saved view of MLflow 3.17 is a tag of the experiment, ``mlflow.sharedViewState.KEY``, holding ``{"name", "createdAt", "updatedAt",
"state"}`` with ``state`` = ``deflate;`` + base64 of the zlib-compressed JSON of the runs page: columns, sort, charts. The format is
internal to MLflow, hence the pin in ``pyproject.toml`` and the browser test; where it is not understood MLflow shows its plain
table. ``workflowType`` keeps MLflow from opening its overview for GenAI, which has no columns.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
import zlib
from collections.abc import Mapping
from typing import Any

from study.mlflow_names import sanitise, settings_of
from study.state import flatten

TAG = "mlflow.sharedViewState."
SECTION = "study"
ERROR = "validation/error"
MOST_PARAMS = 6
LOSSES = ("validation/error", "validation/loss", "train/loss")


def view_key(plan: Mapping[str, Any]) -> str:
    """The key of a ledger's view."""
    return f"lns-study-{plan['ledger']}"


def page(experiment: str, view: str) -> str:
    """The address of a saved view within MLflow's interface."""
    query = urllib.parse.urlencode({"viewStateShareKey": view, "workflowType": "machine_learning"})
    return f"#/experiments/{experiment}/runs?{query}"


def view_tag(plan: Mapping[str, Any], view: str) -> tuple[str, str]:
    """Name and value of the experiment tag that holds the study's view."""
    state = "deflate;" + base64.b64encode(zlib.compress(json.dumps(view_state(plan)).encode())).decode()
    when = int(plan["time"] * 1000)
    return TAG + view, json.dumps({"name": plan["study"]["name"][:100], "createdAt": when, "updatedAt": when, "state": state})


def read_view(value: str) -> dict[str, Any]:
    """The state that the tag's value holds."""
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(json.loads(value)["state"].removeprefix("deflate;"))))
    return state


def view_state(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Columns, sort and charts for a study: what differs between its trials beside their errors."""
    metric, mode = next(iter(plan["study"]["search"]["objectives"].items()))
    metric = metric if "/" in metric else ERROR
    varied = varied_keys(plan)
    bytes_ = ["bytes/parameter_step"] if any(trial["config"]["workers"] > 1 for trial in plan["trials"]) else []
    columns = [_column("tags", name) for name in ("row", "format", "layout")]
    columns += [_column("params", sanitise(key)) for key in dict.fromkeys([*varied, "seed"])]
    columns += [_column("metrics", name) for name in dict.fromkeys([metric, "test/error", ERROR, "bits", "seconds", *bytes_])]
    return {
        "searchFilter": "",
        "orderByKey": _column("metrics", metric),
        "orderByAsc": mode == "min",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOWALL",
        "compareRunSections": _sections(),
        "compareRunCharts": _charts(plan, metric, varied),
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def varied_keys(plan: Mapping[str, Any]) -> list[str]:
    """Config keys with more than one value among the trials, those of the space first; seeds and what follows from others left out."""
    values: dict[str, set[str]] = {}
    for trial in plan["trials"]:
        for key, value in flatten(trial["config"]).items():
            values.setdefault(key, set()).add(json.dumps(value))
    space = [key for key in flatten_space(plan["study"]["space"]) if key in values]
    others = [key for key, found in values.items() if len(found) > 1 and key not in ("seed", "data.root", "gpus")]
    return list(dict.fromkeys([*space, *others]))[:MOST_PARAMS]


def flatten_space(space: Mapping[str, Any]) -> list[str]:
    """The keys of a space, dotted."""
    from study.space import parse_space

    return [domain.key for domain in parse_space(space).domains]


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _sections() -> list[dict[str, Any]]:
    titles = {SECTION: "Study", "model": "Model metrics", "system": "System metrics"}
    return [
        {"uuid": key, "name": title, "display": True, "isReordered": False, "deleted": False, "isGenerated": key != SECTION}
        for key, title in titles.items()
    ]


def _charts(plan: Mapping[str, Any], metric: str, varied: list[str]) -> list[dict[str, Any]]:
    numeric = settings_of(plan["trials"][0]["config"]) if plan["trials"] else {}
    params = [sanitise(key) for key in varied] or ["precision.format"]
    charts = [
        _chart("parallel", "PARALLEL", "settings and error", 100) | {
            "selectedParams": params, "selectedMetrics": [metric], "showAllRuns": False},
        *(_scatter(f"error-{x}", x, metric) for x in ("bits", "seconds")),
    ]  # fmt: skip
    charts += [_scatter(f"error-{key}", f"cfg/{key}", metric) for key in varied if f"cfg/{key}" in numeric][:2]
    for name in dict.fromkeys([metric, *LOSSES]):
        charts.append(_line(name))
    return charts


def _chart(key: str, kind: str, title: str, runs: int) -> dict[str, Any]:
    return {"uuid": key, "type": kind, "runsCountToCompare": runs, "metricSectionId": SECTION, "deleted": False, "isGenerated": False,
            "displayName": title}  # fmt: skip


def _scatter(key: str, x: str, y: str) -> dict[str, Any]:
    return _chart(key, "SCATTER", f"{y} over {x.removeprefix('cfg/')}", 100) | {
        "xaxis": {"type": "METRIC", "key": x}, "yaxis": {"type": "METRIC", "key": y}}  # fmt: skip


def _line(name: str) -> dict[str, Any]:
    return _chart(f"line-{name}", "LINE", name, 20) | {
        "metricKey": name, "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "log", "range": {}, "xAxisKey": "step",
        "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
        "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}  # fmt: skip
