"""Optuna's samplers behind a search: restarts, pending trials, constraints, importance."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from study.api import Study
from study.config.search import FEW, choose_sampler
from study.ledger.state import fold
from study.plan.estimate import describe_plan
from study.plan.plan import make_plan
from study.results.answer import answer
from study.results.configurations import best, condition, configurations, pareto_front
from study.results.importance import importance
from study.results.summary import summarise
from study.views.progress import render
from tests.study.conftest import write_ledger
from tests.study.search.conftest import Make, Pretend, bowl, steady

ONE_ROW = ("rows=[]", "baseline=null")
RANGES = """
space: {optimizer.lr: {loguniform: [0.001, 1.0]}, optimizer.momentum: {uniform: [0.0, 0.9]}}
search: {num_samples: 14}
"""
CHOICES = """
space: {batch_size: {choice: [16, 32, 64]}, optimizer.name: {choice: [sgd, adam]}}
search: {num_samples: 16}
"""


def distance(params: dict[str, Any]) -> float:
    return float(abs(params["optimizer.lr"] - 0.1) + params["optimizer.momentum"])


@pytest.mark.parametrize("algorithm", ["gp", "auto"])
@pytest.mark.parametrize(
    "objectives", ["validation/error: min", "validation/error: min, bits: min"]
)
def test_a_gaussian_process_goes_on_as_it_would_have(
    searched: Make, algorithm: str, objectives: str
) -> None:
    study = searched(
        f"search.algorithm={algorithm}",
        f"search.objectives={{{objectives}}}",
        *ONE_ROW,
        space=RANGES,
    )
    whole = [trial.params for trial in Pretend(make_plan(study), steady(distance)).run()]
    begun = Pretend(make_plan(study), steady(distance))
    first = begun.run(at_most=12)
    rest = Pretend(make_plan(study), steady(distance), begun.events).run()
    assert [trial.params for trial in [*first, *rest]] == whole
    assert len(whole) == 14


@pytest.mark.parametrize(
    ("change", "space", "chosen"),
    [
        ([], RANGES, "gp"),
        ([], CHOICES, "tpe"),
        ([f"search.num_samples={FEW + 1}"], RANGES, "cmaes"),
        ([f"search.num_samples={FEW + 1}", "search.constraints={bits: '<= 9'}"], RANGES, "tpe"),
        (
            [
                f"search.num_samples={FEW + 1}",
                "search.objectives={validation/error: min, bits: min}",
            ],
            RANGES,
            "nsga2",
        ),
    ],
)
def test_auto_says_what_it_takes_and_why(
    searched: Make, change: list[str], space: str, chosen: str
) -> None:
    study = searched("search.algorithm=auto", *ONE_ROW, *change, space=space)
    name, why = choose_sampler(study.search, study.parsed_space)
    assert name == chosen
    assert any(f"{chosen} (auto: {why})" in line for line in describe_plan(make_plan(study)))


def test_pending_proposals_differ(searched: Make) -> None:
    """After enough results for a model, without results of the running trials."""
    study = searched("search.algorithm=tpe", "search.num_samples=30", *ONE_ROW, space=RANGES)
    pretend = Pretend(make_plan(study), steady(distance))
    pretend.run(at_most=15)
    waiting = [pretend.agenda.next() for _ in range(6)]
    rates = {trial.params["optimizer.lr"] for trial in waiting if trial is not None}
    assert len(rates) == 6


@pytest.mark.parametrize("algorithm", ["tpe", "gp", "nsga2", "auto"])
@pytest.mark.parametrize("broken_off", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_a_finite_space_is_proposed_whole_and_once(
    searched: Make, algorithm: str, broken_off: int
) -> None:
    study = searched(f"search.algorithm={algorithm}", *ONE_ROW, space=CHOICES)
    begun = Pretend(make_plan(study), steady(lambda params: params["batch_size"] / 64))
    first = begun.run(at_most=broken_off) if broken_off else []
    again = Pretend(
        make_plan(study), steady(lambda params: params["batch_size"] / 64), begun.events
    )
    done = [*first, *again.run()]
    assert again.agenda.exhausted
    assert len(done) == 6
    assert {(trial.params["batch_size"], trial.params["optimizer.name"]) for trial in done} == {
        (size, name) for size in (16, 32, 64) for name in ("sgd", "adam")
    }


@pytest.mark.parametrize("algorithm", ["random", "sobol", "tpe", "gp", "nsga2"])
def test_the_best_keeps_the_constraints(searched: Make, algorithm: str) -> None:
    study = searched(
        f"search.algorithm={algorithm}",
        "search.num_samples=12",
        "search.objectives={validation/error: min}",
        'search.constraints={bits: "<= 20", validation/error: ">= 0.2"}',
    )
    pretend = Pretend(make_plan(study), steady(bowl))
    pretend.run()
    found = configurations(pretend.state.trials, study.search.objectives, study.search.constraints)
    winner = best(found, study.search.objectives)
    assert winner is not None
    errors = {
        bowl(entry.params)
        for entry in found
        if entry.row == "lns matmul" and bowl(entry.params) >= 0.2
    }
    assert winner.objectives["validation/error"] == pytest.approx(min(errors))
    of_float = [entry for entry in found if entry.row == "float32"]
    assert all("infeasible: bits 32 <= 20" in condition(entry) for entry in of_float)
    front = pareto_front(found, study.search.objectives)
    assert all(entry.row == "lns matmul" for entry in front)
    write_ledger(study, pretend.events)
    read = Study(study.folder).best
    assert read is not None
    assert read.trials[0].id == winner.trials[0].id
    console = Console(file=io.StringIO(), width=200)
    console.print(render(pretend.state))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    marked = [line for line in lines if "finished, infeasible" in line]
    assert any(line.startswith("float32") for line in marked)
    assert not any(winner.trials[0].id in line for line in marked)


def test_where_nothing_keeps_a_constraint_the_answer_says_so(searched: Make) -> None:
    bound = "search.constraints={bits: '<= 1'}"
    pretend = Pretend(make_plan(searched("search.num_samples=2", bound)), steady(bowl))
    pretend.run()
    said = answer(pretend.state, summarise(pretend.state))
    assert said == "No answer: all 4 finished configurations violate bits <= 1."


def test_tpe_learns_the_constraints(searched: Make) -> None:
    """Most of its later proposals keep a bound that half of the space breaks."""
    study = searched(
        "search.algorithm=tpe",
        "search.num_samples=40",
        "search.constraints={validation/loss: '<= 0'}",
        *ONE_ROW,
        space=RANGES,
    )
    pretend = Pretend(make_plan(study), steady(distance))
    add = pretend._append

    def with_loss(event: dict[str, Any]) -> None:
        if event["event"] == "report":
            params = pretend.state.known[event["trial"]].params
            over = math.log10(params["optimizer.lr"]) + 1.5
            event["metrics"]["validation/loss"] = over
        add(event)

    pretend._append = with_loss  # type: ignore[method-assign]
    later = pretend.run()[20:]
    kept = [trial for trial in later if trial.params["optimizer.lr"] <= 10**-1.5]
    assert len(kept) > 0.6 * len(later)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["search.constraints={bits: 12}"], "bits='12': must be <= or >= and a finite number"),
        (["search.constraints={bits: '< 12'}"], "bits='< 12': must be <= or >="),
        (["search.constraints={bits: '<= nan'}"], "must be <= or >= and a finite number"),
        (["search.constraints={test/error: '<= 1'}"], "nothing may be chosen by the test set"),
        (
            ["search.constraints={bits: '<= 9'}", "search.scheduler=halving"],
            "rounds promote by the objective alone",
        ),
        (
            ["search.constraints={bits: '<= 9'}", "search.algorithm=cmaes"],
            "learns from the objective alone",
        ),
    ],
)
def test_bad_constraints_are_refused(searched: Make, change: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        searched(*change)


def test_importance_counts_keys_with_a_when(searched: Make) -> None:
    study = searched("search.num_samples=40", *ONE_ROW)
    pretend = Pretend(make_plan(study), steady(bowl))
    pretend.run()
    found = importance(fold(pretend.events))
    assert found is not None
    assert "optimizer.momentum" not in found.single
    assert found.best.keys() == {"optimizer.lr", "optimizer.name", "optimizer.momentum"}
    assert sum(found.best.values()) == pytest.approx(1.0)
    assert found.best["optimizer.momentum"] < found.best["optimizer.lr"]
