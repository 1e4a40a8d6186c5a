"""Importance of choices of many values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from study.config import StudyConfig
from study.ledger.state import fold
from study.results.importance import importance
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]


def test_importance_of_a_key_with_many_values_takes_no_walk_for_each_of_their_combinations(
    tiny: Tiny,
) -> None:
    """2^24 walks of every tree would not end; the shares are those of the grid's variance."""
    widths, rates = [[each] for each in range(1, 25)], [0.001, 0.01, 0.1]
    space = {"model.hidden": {"grid": widths}, "optimizer.lr": {"grid": rates}}
    study = tiny(
        "many",
        "rows=[{label: a}]",
        "baseline=null",
        "seeds=[0]",
        f"space={json.dumps(space)}",
        "search={algorithm: grid}",
    )
    events = made_up_events(study)
    config = {trial["id"]: trial["config"] for trial in events[0]["trials"]}

    def error(width: int, rate: float) -> float:
        return (7 * width % 24) / 100 + 0.03 * math.log10(rate)

    for event in events:
        if event["event"] == "report":
            trial = config[event["trial"]]
            event["metrics"]["validation/error"] = error(
                trial["model"]["hidden"][0], trial["optimizer"]["lr"]
            )
    of_widths = np.var([error(width, 0.1) for (width,) in widths])
    of_rates = np.var([error(1, rate) for rate in rates], ddof=0)
    found = importance(fold(events))
    assert found is not None
    assert found.single["model.hidden"] == pytest.approx(
        of_widths / (of_widths + of_rates), abs=0.1
    )
    assert len(found.curves["model.hidden"][0]) == 24


def test_a_choice_whose_values_were_tried_too_seldom_has_no_importance(tiny: Tiny) -> None:
    """In the order of their one metric each they would explain all of it."""
    widths = [[each] for each in range(1, 15)]
    space = {"model.hidden": {"grid": widths}, "optimizer.lr": {"grid": [0.01, 0.1]}}
    study = tiny(
        "seldom", "rows=[{label: a}]", "baseline=null", "seeds=[0]",
        f"space={json.dumps(space)}", "search={algorithm: grid}",
    )  # fmt: skip
    events = made_up_events(study)
    config = {trial["id"]: trial["config"] for trial in events[0]["trials"]}
    for event in events:
        if event["event"] == "report":
            rate = config[event["trial"]]["optimizer"]["lr"]
            event["metrics"]["validation/error"] = rate + 1e-4 * len(event["trial"])
    found = importance(fold(events))
    assert found is not None
    assert found.single.keys() == {"optimizer.lr"}
    assert not found.pairs
