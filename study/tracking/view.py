"""The saved view of a study in MLflow's web interface: columns, sort order and charts.

A saved view of MLflow 3.17 is a tag of the experiment, ``mlflow.sharedViewState.KEY``, with
``{"name", "createdAt", "updatedAt", "state"}``, where ``state`` is ``deflate;`` and the base64 of
the zlib-compressed JSON of the runs page. The format is internal to MLflow, hence the pin in
``pyproject.toml`` and the browser test; if MLflow does not understand it, it shows its plain table.
``workflowType`` keeps MLflow from opening its GenAI overview, which has no columns.

MLflow adds a chart for every metric without one, in sections named by the part of the metric's name
before the last ``/``. It sorts the sections by name unless ``isAccordionReordered`` is set.
Therefore the view sets it and lists its own section first. The sections of rows are listed as
closed, so that MLflow does not draw them.

A scatter chart's axis may be a param, which MLflow places by its number.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from study.config import OUTSIDE, Metric, StudyConfig
from study.config.keys import flatten, is_number
from study.config.space import parse_space
from study.ledger.events import Planned
from study.tracking.names import BITS, SECONDS, of_row, sanitise

TAG = "mlflow.sharedViewState."
SECTION = "study"
MOST_PARAMS = 6
MOST_AXES = 3
"""Maximum number of axes of the parallel coordinates; more would overlap in MLflow's card."""
LOSSES = ("validation/loss", "train/loss")


def view_key(plan: Planned) -> str:
    """Return the key of a study's saved view."""
    return f"lns-study-{plan['ledger']}"


def view_tag(plan: Planned, view: str) -> tuple[str, str]:
    """Return name and value of the experiment tag with the study's view."""
    state = (
        "deflate;" + base64.b64encode(zlib.compress(json.dumps(view_state(plan)).encode())).decode()
    )
    when = int(plan["time"] * 1000)
    return TAG + view, json.dumps(
        {"name": plan["study"]["name"][:100], "createdAt": when, "updatedAt": when, "state": state}
    )


def view_state(plan: Planned) -> dict[str, Any]:
    """Return the view's JSON: columns, sort order and charts of the varied settings and the metric.

    Runs are sorted by the first objective, or by the metric if trials do not report the objective.
    """
    study = StudyConfig.from_dict(plan["study"])
    metric, shown = study.primary_metric, study.search.first
    shown = shown if "/" in shown.name else metric
    varied, grouped = varied_keys(plan), _grouped(study)
    bytes_ = (
        ["bytes/parameter_step"] if any(config["workers"] > 1 for config in _configs(plan)) else []
    )
    columns = [_column("tags", name) for name in ("row", "format", "layout")]
    columns += [_column("params", sanitise(key)) for key in dict.fromkeys([*varied, "seed", BITS])]
    columns += [
        _column("metrics", sanitise(name))
        for name in dict.fromkeys([shown.name, metric.test_name, metric.name, SECONDS, *bytes_])
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
        "compareRunCharts": _charts(plan, shown, metric, varied, grouped=grouped is not None),
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": grouped,
        "groupsExpanded": {},
        "globalLineChartConfig": {
            "xAxisKey": "step",
            "lineSmoothness": 0,
            "selectedXAxisMetricKey": "",
        },
    }


def _grouped(study: StudyConfig) -> dict[str, Any] | None:
    """Return MLflow's grouping of the runs by row, which shows the mean over seeds; None for one
    row, one seed, or a search, whose configurations must not be averaged."""
    if study.space or min(len(study.rows), len(study.seeds)) < 2:
        return None
    return {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "row"}]}


def varied_keys(plan: Planned) -> list[str]:
    """Return the config keys with more than one value among the trials, keys of the space first.

    Seeds and keys that do not affect results are left out. If the plan has no trials yet, because
    the search learns from results, the keys of its space and of its rows' overrides are returned.
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


def _configs(plan: Planned) -> list[dict[str, Any]]:
    """Return the trials' configs, or the base config if the plan has no trials yet."""
    return [trial["config"] for trial in plan["trials"]] or [plan["study"]["trial"]]


def space_keys(space: Mapping[str, Any]) -> list[str]:
    """Return the dotted config keys of a space; a choice of mappings counts as the mappings'
    keys."""
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


def _sections(plan: Planned, metric: Metric) -> list[dict[str, Any]]:
    """Return the view's sections: ours, MLflow's own for metrics, and closed ones for rows."""
    shown = {SECTION: "Study", "train": "train", "test": "test", "model": "Model metrics"}
    closed = {
        f"row-{place}": sanitise(f"{row['label']}{of_row(metric)}").rpartition("/")[0]
        for place, row in enumerate(plan["study"]["rows"])
    }
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
    plan: Planned, shown: Metric, metric: Metric, varied: list[str], *, grouped: bool
) -> list[dict[str, Any]]:
    """Return the charts, without parallel coordinates for ``grouped`` runs.

    MLflow has none for groups with a param that is text, or that the parent run lacks.
    """
    values = flatten(_configs(plan)[0])
    figure = sanitise(shown.name)
    params = [sanitise(key) for key in varied[:MOST_AXES]] or ["precision.format"]
    parallel = _chart("parallel", "PARALLEL", f"settings and {shown.short}", 100) | {
        "selectedParams": params, "selectedMetrics": [figure], "showAllRuns": False}  # fmt: skip
    charts = [] if grouped else [parallel]
    charts += [_scatter(BITS, "PARAM", figure), _scatter(SECONDS, "METRIC", figure)]
    charts += [
        _scatter(sanitise(key), "PARAM", figure) for key in varied if is_number(values.get(key))
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


def _scatter(x: str, kind: str, y: str) -> dict[str, Any]:
    return _chart(f"error-{x}", "SCATTER", f"{y} over {x}", 100) | {
        "xaxis": {"type": kind, "key": x}, "yaxis": {"type": "METRIC", "key": y}}  # fmt: skip


def _line(name: str) -> dict[str, Any]:
    return _chart(f"line-{name}", "LINE", name, 20) | {
        "metricKey": name, "lineSmoothness": 0, "xAxisScaleType": "linear", "scaleType": "log",
        "range": {}, "xAxisKey": "step", "selectedXAxisMetricKey": "", "yAxisKey": "metric",
        "yAxisExpressions": [], "ignoreOutliers": False,
        "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True}  # fmt: skip
