"""Points of a space that a rule refuses: left out, drawn again, named; made-up results, no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from study.engines.preflight import preflight
from study.errors import UserError
from study.ledger.state import fold
from study.plan.estimate import describe_plan
from study.plan.plan import make_plan
from study.search.agenda import Agenda
from tests.study.search.conftest import Make, Pretend, steady

WIRES = """
space:
  wire.name: {choice: [native, int8, lns16]}
  optimizer.lr: {loguniform: [0.001, 1.0]}
search: {num_samples: 6}
"""
"""With one worker every wire format except native is refused."""
WARM = """
space:
  lr_schedule.warmup_epochs: {uniform: [0.0, 9.0]}
  optimizer.lr: {loguniform: [0.001, 1.0]}
search: {num_samples: 6}
"""
"""A third of the points have a warm-up shorter than the trial's three epochs."""
GRIDS = """
space:
  wire.name: {grid: [native, int8]}
  optimizer.lr: {loguniform: [0.001, 1.0]}
search: {num_samples: 3}
"""
SCARCE = """
space:
  lr_schedule.warmup_epochs: {uniform: [0.0, 90.0]}
search: {num_samples: 6}
"""
"""One point of thirty has a warm-up shorter than the trial's three epochs."""
RULE = "no gradient travels where there is one replica"
TOO_LONG = "the rate would never reach its full value"


@steady
def rate(params: dict[str, Any]) -> float:
    return float(params.get("optimizer.lr", 0.5))


@pytest.mark.parametrize("algorithm", ["random", "sobol"])
def test_sampled_points_are_drawn_again(searched: Make, algorithm: str) -> None:
    plan = make_plan(searched(f"search.algorithm={algorithm}", space=WIRES))
    assert len(plan.trials) == 2 * 6
    assert {trial.params["wire.name"] for trial in plan.trials} == {"native"}
    assert plan.excluded
    assert all(RULE in entry.reason for entry in plan.excluded)


def test_points_of_a_grid_are_left_out_and_named_with_the_rule_once(searched: Make) -> None:
    plan = make_plan(
        searched(
            space="\nspace: {wire.name: {grid: [native, int8, lns16]}}\nsearch: {algorithm: grid}\n"
        )
    )
    assert [trial.params["wire.name"] for trial in plan.trials] == ["native", "native"]
    said = list(describe_plan(plan))
    assert "Left out, 4 configurations that make no valid trial:" in said
    assert sum(RULE in line for line in said) == 1
    (start,) = [number for number, line in enumerate(said) if RULE in line]
    assert said[start].startswith("  4: wire.name=int8 with workers=1")
    assert said[start + 1 : start + 5] == [
        f"    {row}: name={name}" for row in ("float32", "lns matmul") for name in ("int8", "lns16")
    ]


@pytest.mark.parametrize(
    ("algorithm", "space"), [("tpe", WIRES), ("nsga2", WIRES), ("tpe", WARM), ("cmaes", WARM)]
)
def test_proposers_are_asked_again(searched: Make, algorithm: str, space: str) -> None:
    plan = make_plan(searched(f"search.algorithm={algorithm}", space=space))
    pretend = Pretend(plan, rate)
    trials = pretend.run()
    assert len(trials) == plan.size == 2 * 6
    assert {trial.config.wire.name for trial in trials} == {"native"}
    assert pretend.agenda.exhausted
    assert [trial.id for trial in Pretend(plan, rate).run()] == [trial.id for trial in trials]


@pytest.mark.parametrize("algorithm", ["random", "grid"])
def test_a_row_whose_points_the_data_all_forbid_is_refused(searched: Make, algorithm: str) -> None:
    rows = "rows=[{label: float32}, {label: few, overrides: {data.train_size: 40}}]"
    space = f"""
space:
  batch_size: {{choice: [64, 128]}}
search: {{num_samples: 2, algorithm: {algorithm}}}
"""
    with pytest.raises(ValueError, match=r"row 'few': no point of the space .* batch_size="):
        preflight(make_plan(searched(rows, "tracking_uri=none", space=space)))


@pytest.mark.parametrize(
    "how", ["search.algorithm=tpe", "search.scheduler=halving", "search.scheduler=pbt"]
)
def test_an_adaptive_search_leaves_out_points_of_the_grids(searched: Make, how: str) -> None:
    plan = make_plan(searched(how, "trial.epochs=10", space=GRIDS))
    assert [(entry.row, entry.params) for entry in plan.excluded] == [
        ("float32", {"wire.name": "int8"}),
        ("lns matmul", {"wire.name": "int8"}),
    ]
    assert RULE in plan.excluded[0].reason
    trials = Pretend(plan, rate).run()
    assert {trial.params["wire.name"] for trial in trials} == {"native"}
    if "tpe" in how:
        assert len(trials) == plan.size == 2 * 3


def test_halving_takes_as_many_valid_configurations_as_it_is_told(searched: Make) -> None:
    plan = make_plan(searched("search.scheduler=halving", "rows=[]", "baseline=null", space=WIRES))
    trials = Pretend(plan, rate).run()
    assert [trial.number for trial in trials][:6] == [1, 2, 3, 4, 5, 6]
    assert {trial.params["wire.name"] for trial in trials} == {"native"}


def test_a_population_has_no_warm_up_longer_than_its_first_generation(searched: Make) -> None:
    """A generation is a trial with fewer epochs, so a warm-up may be too long for it."""
    space = """
space:
  lr_schedule.warmup_epochs: {grid: [0.0, 3.0]}
  optimizer.lr: {loguniform: [0.001, 1.0]}
search: {scheduler: pbt, num_samples: 3, perturbation_interval: 2}
"""
    plan = make_plan(searched("trial.epochs=6", space=space))
    with pytest.raises(UserError, match=f"lr_schedule.warmup_epochs=3 with epochs=2: {TOO_LONG}"):
        Agenda(plan, fold([]), lambda trial: None)


@pytest.mark.parametrize("algorithm", ["random", "sobol"])
def test_a_space_that_is_hardly_valid_is_refused_with_the_rule(
    searched: Make, algorithm: str
) -> None:
    with pytest.raises(ValueError, match=rf"num_samples=6, but 48 points .*{TOO_LONG}.*; narrow"):
        make_plan(searched(f"search.algorithm={algorithm}", space=SCARCE))


def test_a_proposer_that_finds_hardly_anything_valid_says_so(searched: Make) -> None:
    space = SCARCE.replace("90.0", "900.0").replace("0.0,", "2.5,")
    with pytest.raises((ValueError, UserError), match=TOO_LONG):
        Pretend(make_plan(searched("search.algorithm=tpe", space=space)), rate).run()


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_a_search_of_few_points_ends_with_those_that_are_valid(
    searched: Make, algorithm: str
) -> None:
    space = """
space:
  wire.name: {choice: [native, int8]}
  optimizer.lr: {choice: [0.01, 0.1]}
search: {num_samples: 6}
"""
    plan = make_plan(searched(f"search.algorithm={algorithm}", space=space))
    trials = Pretend(plan, rate).run()
    assert sorted(trial.params["optimizer.lr"] for trial in trials) == [0.01, 0.01, 0.1, 0.1]


RATES = """
space: {optimizer.lr: {loguniform: [0.001, 1.0]}}
search: {num_samples: 6}
"""
"""Seven of ten rates are not numbers of lns8 once they are divided by the batch."""


@pytest.mark.parametrize(
    "way", ["algorithm=random", "algorithm=tpe", "algorithm=gp", "scheduler=pbt"]
)
def test_rates_that_underflow_are_drawn_again(searched: Make, way: str) -> None:
    precision = "{precision.format: lns8, precision.scope: everywhere}"
    eight = f"rows=[{{label: eight, overrides: {precision}}}]"
    plan = make_plan(searched(f"search.{way}", eight, "baseline=null", space=RATES))
    run = Pretend(plan, rate)
    trials = run.run()
    assert len(trials) >= 6
    assert all(trial.config.optimizer.lr / 32 > 2.0**-8 for trial in trials)
    assert all("underflows to zero in lns8" in entry.reason for entry in run.plan.excluded)
