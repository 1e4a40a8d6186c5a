"""Names in MLflow, and the view that shows them."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.config import RowConfig
from study.plan.plan import make_plan
from study.text import layout_of
from study.tracking.address import page
from study.tracking.names import NAME_LENGTH, check_loggable, restore, sanitise
from study.tracking.view import TAG, varied_keys, view_key, view_state
from study.tracking.writer import connect
from tests.study.conftest import made_up_events
from tests.study.tracking.conftest import Tiny, send


@given(st.text(max_size=40))
def test_names_are_legal_and_come_back(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(sanitise(name))
    assert restore(sanitise(name)) == name


@given(st.text(alphabet="a:3d./=", max_size=8), st.text(alphabet="a:3d./=", max_size=8))
def test_no_two_names_meet(first: str, second: str) -> None:
    assert (sanitise(first) == sanitise(second)) == (first == second)


def test_names_that_are_too_long_are_cut_and_differ() -> None:
    from mlflow.utils.validation import _validate_metric_name

    long = ["x" * 300 + end for end in "ab"]
    for name in (*long, "\N{BLACK STAR}" * 100, "/" * 249 + "a"):
        _validate_metric_name(sanitise(name))
        assert len(sanitise(name)) <= NAME_LENGTH
    assert len({*map(sanitise, long)}) == 2


def test_plain_names_stay_and_others_are_readable() -> None:
    assert [sanitise(name) for name in ("validation/error", "a b-c.d_e", "dp=2")] == [
        "validation/error",
        "a b-c.d_e",
        "dp:3d:2",
    ]


def test_what_mlflow_would_cut_off_is_refused(tracked: Tiny) -> None:
    """A config's names are shorter; an older study's may be longer."""
    study = tracked("long", "baseline=null")
    label, name = "=" * NAME_LENGTH, "n" * 501
    for changed, said in (
        (
            replace(study, rows=[RowConfig(label=label)]),
            r"label: has .* characters as MLflow stores it, which takes 250",
        ),
        (replace(study, name=name), r"name: has 501 characters"),
    ):
        with pytest.raises(ValueError, match=said):
            check_loggable(make_plan(changed))


def test_the_view_has_the_columns_the_sort_and_the_charts(tracked: Tiny) -> None:
    study = tracked("tracked view")
    _, (opened,) = send(study, made_up_events(study))
    client = connect(study.tracking)
    tags = client.get_experiment(opened["experiment"]).tags
    packed = json.loads(tags[TAG + opened["view"]])["state"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert opened["view"] == view_key({"ledger": "abc123"})
    assert state["orderByKey"] == "metrics.`validation/error`"
    assert {"tags.`row`", "params.`precision.format`", "metrics.`test/error`"} <= set(
        state["selectedColumns"]
    )
    assert "params.`bits`" in state["selectedColumns"]
    assert {chart["type"] for chart in state["compareRunCharts"]} == {"PARALLEL", "SCATTER", "LINE"}
    assert (
        page("7", "k") == "#/experiments/7/runs?viewStateShareKey=k&workflowType=machine_learning"
    )


def test_the_view_of_a_search_shows_what_it_varies_before_it_has_trials(tiny: Tiny) -> None:
    space = (
        "space={optimizer.lr: {loguniform: [0.01, 1]}, model: {choice: [{hidden: [8]}, {hidden:"
        " [16]}]}}"
    )
    plan = make_plan(tiny("a search's view", space, "search={algorithm: tpe, num_samples: 2}"))
    event = plan.to_event()
    assert event["trials"] == []
    assert varied_keys(event) == [
        "optimizer.lr",
        "model.hidden",
        "precision.format",
        "precision.scope",
    ]
    state = view_state(event)
    assert {"params.`optimizer.lr`", "params.`model.hidden`"} <= set(state["selectedColumns"])
    charts = {chart["uuid"]: chart for chart in state["compareRunCharts"]}
    assert charts["parallel"]["selectedParams"][:2] == ["optimizer.lr", "model.hidden"]
    assert charts["error-optimizer.lr"]["xaxis"] == {"type": "PARAM", "key": "optimizer.lr"}
    assert "error-precision.format" not in charts


SEARCH = ("space={optimizer.lr: {loguniform: [0.01, 1]}}", "search={num_samples: 2}")


@pytest.mark.parametrize(
    ("overrides", "by_row"),
    [
        (["seeds=[0,1]"], True),
        (["seeds=[0]"], False),
        (["seeds=[0,1]", "rows=[{label: float32}]", "baseline=null"], False),
        (["seeds=[0,1]", *SEARCH], False),
    ],
    ids=["rows and seeds", "one seed", "one row", "search"],
)
def test_the_view_averages_seeds_by_row_but_not_configurations(
    tiny: Tiny, overrides: list[str], by_row: bool
) -> None:
    state = view_state(make_plan(tiny("a view", *overrides)).to_event())
    grouped = {
        "aggregateFunction": "average",
        "groupByKeys": [{"mode": "tag", "groupByData": "row"}],
    }
    assert state["groupBy"] == (grouped if by_row else None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"workers": 1, "layout": {}}, "1 worker"),
        ({"workers": 4}, "dp 4"),
        ({"workers": 2, "layout": {"pp": 2}}, "pp 2"),
        ({"workers": 4, "layout": {"tp": 2}}, "dp 2 x tp 2"),
        ({"workers": 2, "layout": {"fsdp": True}}, "dp 2 sharded"),
    ],
)
def test_a_layout_has_a_name(config: dict[str, Any], said: str) -> None:
    assert layout_of(config) == said
