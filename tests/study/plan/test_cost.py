"""The estimated cost of a study, for searches whose trials are not known before."""

from __future__ import annotations

import re

from study.config import StudyConfig
from study.plan.estimate import describe_cost, describe_plan
from study.plan.plan import make_plan
from tests.study.conftest import Tiny, made_up_events, write_ledger

RATE = "optimizer.lr: {loguniform: [0.01, 1.0]}"


def searched(
    local: Tiny, name: str, *words: str, space: str = f"{RATE}, epochs: {{choice: [2, 4]}}"
) -> StudyConfig:
    """A study of one row that searches."""
    row = ("rows=[]", "baseline=null", f"space={{{space}}}", "search.num_samples=8")
    return local(name, *row, *words)


def test_a_search_is_estimated_as_random_configurations_are(local: Tiny) -> None:
    known = searched(local, "known")
    write_ledger(known, made_up_events(known))

    def told(name: str, *words: str) -> tuple[str, str]:
        plan = make_plan(searched(local, name, *words))
        return describe_cost(plan), list(describe_plan(plan))[-1]

    cost, time = told("other")
    assert re.fullmatch(r"Cost: about 0 GPU hours and 0\.00\d+ CPU hours", cost)
    assert time.startswith("Expected time: ")
    assert "unknown" not in time
    for algorithm in ("tpe", "gp", "nsga2"):
        assert told("other", f"search.algorithm={algorithm}") == (cost, time)
    cut = ", less with what the scheduler ends early"
    for algorithm in ("random", "tpe"):
        words = (f"search.algorithm={algorithm}", "search.scheduler=asha")
        assert told("other", *words) == (cost + cut, time + cut)


def test_a_population_costs_what_its_members_train(local: Tiny) -> None:
    known = searched(local, "known", space=RATE)
    write_ledger(known, made_up_events(known))
    population = ("search.scheduler=pbt", "search.perturbation_interval=2")
    words = ("trial.epochs=8",)
    plan = make_plan(searched(local, "other", *words, *population, space=RATE))
    assert plan.size == 4 * 8  # four generations
    alone = make_plan(searched(local, "other", *words, space=RATE))
    assert describe_cost(plan) == describe_cost(alone)


def test_rounds_on_part_of_the_data_are_estimated_from_above(local: Tiny) -> None:
    known = searched(local, "known", space=RATE)
    write_ledger(known, made_up_events(known))
    plan = make_plan(searched(local, "other", "search.scheduler=halving", space=RATE))
    assert describe_cost(plan).endswith(", less with rounds on part of the data")


def test_a_search_without_earlier_trials_says_what_a_trial_takes(local: Tiny) -> None:
    words = ("search.algorithm=tpe", "trial.device=cuda", "trial.gpus=0.25")
    cost = describe_cost(make_plan(searched(local, "new", *words)))
    assert cost.endswith("a trial takes 0.25 GPU and 1 CPU")
