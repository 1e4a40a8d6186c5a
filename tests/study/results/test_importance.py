"""Importance over the space as it is searched, and of choices with many values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from study.config import StudyConfig
from study.config.distribution import quiet_optuna
from study.config.space import Domain
from study.evidence.analyses import judge_importance
from study.evidence.verdict import HOLDS, UNDECIDED
from study.ledger.state import StudyState, fold
from study.results.importance import fanova, importance
from study.results.statistics import DEPTH, TREES
from tests.study.conftest import made_up_events

Tiny = Callable[..., StudyConfig]


def test_importance_of_a_key_with_many_values_takes_no_walk_for_each_of_their_combinations(
    tiny: Tiny,
) -> None:
    """2^24 walks of every tree would not end; the shares are fractions of the grid's variance."""
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
    """Ordered by the only metric that each has, they would explain all of the variance."""
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


RATE = Domain(key="rate", kind="loguniform", values=(1e-4, 1.0))
MOMENTUM = Domain(key="momentum", kind="uniform", values=(0.0, 1.0))
KIND = Domain(key="kind", kind="choice", values=tuple("abcdefghi"))


def drawn(count: int) -> list[dict[str, Any]]:
    """Points in a space of a rate, a momentum and one of nine kinds."""
    domains, random = (RATE, MOMENTUM, KIND), np.random.default_rng(0)
    return [{each.key: each.at(float(random.random())) for each in domains} for _ in range(count)]


def test_a_share_is_over_the_logarithm_of_a_rate() -> None:
    """Half of the rates are below 0.01, which is a hundredth of their axis."""
    points = drawn(400)
    figures = [(each["rate"] < 0.01) + 1.0 * (each["momentum"] < 0.5) for each in points]
    shares = fanova(points, figures, [RATE, MOMENTUM])
    assert shares is not None
    assert shares == pytest.approx({"rate": 0.5, "momentum": 0.5}, abs=0.02)


def test_each_value_of_a_choice_counts_alike() -> None:
    """One of nine kinds is 3 above the others, so the variance is 9 x 8 / 81."""
    points = drawn(900)
    figures = [3.0 * (each["kind"] == "e") + 2.0 * (each["momentum"] < 0.5) for each in points]
    shares = fanova(points, figures, [MOMENTUM, KIND])
    of_kind = 9 * (1 / 9) * (8 / 9)
    assert shares is not None
    assert shares["kind"] == pytest.approx(of_kind / (of_kind + 4 / 4), abs=0.03)


def test_shares_of_uniform_ranges_are_those_of_optunas_evaluator() -> None:
    points = drawn(200)
    names = ["momentum", "second"]
    for point, other in zip(points, drawn(400)[200:], strict=True):
        point["second"] = other["momentum"]
    figures = [each["momentum"] ** 2 + 0.5 * each["second"] for each in points]
    optuna = quiet_optuna()
    ends = {name: [end(each[name] for each in points) for end in (min, max)] for name in names}
    distributions = {name: optuna.distributions.FloatDistribution(*ends[name]) for name in names}
    theirs = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for each, value in zip(points, figures, strict=True):
        theirs.add_trial(
            optuna.trial.create_trial(
                params={name: each[name] for name in names},
                distributions=distributions,
                value=value,
            )
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, max_depth=DEPTH, seed=3)
    second = replace(MOMENTUM, key="second")
    assert fanova(points, figures, [MOMENTUM, second], seed=3) == evaluator.evaluate(theirs)


def test_whole_numbers_weigh_as_they_are_drawn() -> None:
    """One of eight values has an eighth of a ``randint``; the value 1 has log 2 / log 9 of a
    ``lograndint``."""
    for kind, at, weight in (("randint", 8, 1 / 8), ("lograndint", 1, math.log(2, 9))):
        domain = Domain(key="count", kind=kind, values=(1, 9))
        random = np.random.default_rng(0)
        points = [{"count": domain.at(float(u)), "momentum": v} for u, v in random.random((600, 2))]
        figures = [(each["count"] == at) + 1.0 * (each["momentum"] < 0.5) for each in points]
        shares = fanova(points, figures, [domain, MOMENTUM])
        variance = weight * (1 - weight)
        assert shares is not None
        assert shares["count"] == pytest.approx(variance / (variance + 0.25), abs=0.03)


def test_survivors_of_early_stopping_have_no_importance(tiny: Tiny) -> None:
    """Trials that ended early are missing, and the others are not a random sample of the space."""
    words = ("space={optimizer.lr: {loguniform: [0.001, 1.0]}}", "search.num_samples=20")
    claim = "claims=[{name: rate, claim: The rate matters., source: here,"
    claim += " importance: {key: optimizer.lr, at_least: 0.5}}]"

    def run(name: str, *more: str) -> StudyState:
        events = made_up_events(tiny(name, *words, claim, *more))
        config = {trial["id"]: trial["config"] for trial in events[0]["trials"]}
        for event in events:
            if event["event"] == "report":
                rate = config[event["trial"]]["optimizer"]["lr"]
                event["metrics"]["validation/error"] = rate
        return fold(events)

    whole, ended = run("whole"), run("ended", "search.scheduler=asha")
    assert importance(whole) is not None
    assert importance(ended) is None
    sure = judge_importance(whole.config.claims[0], whole)
    assert sure.outcome == HOLDS
    assert sure.low < sure.figure < sure.high
    assert "bootstrap" in sure.note
    verdict = judge_importance(ended.config.claims[0], ended)
    assert verdict.outcome == UNDECIDED
    assert "asha ended early" in verdict.note


def test_noise_tells_nothing_of_the_best(tiny: Tiny) -> None:
    """In the best tenth of 40, some key differs from the others by chance."""
    events = made_up_events(
        tiny(
            "noise",
            "space={optimizer.lr: {loguniform: [0.001, 1.0]}, batch_size: {choice: [16, 32]}}",
            "search.num_samples=20",
        )
    )
    random = np.random.default_rng(3)
    for event in events:
        if event["event"] == "report":
            event["metrics"]["validation/error"] = float(random.random())
    found = importance(fold(events))
    assert found is not None
    assert found.best == {}
