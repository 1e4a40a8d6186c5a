"""Races between the best configurations: made-up results, no Ray."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from study.ledger.state import fold
from study.plan.estimate import describe_plan
from study.plan.plan import make_plan
from study.results.configurations import best, configurations
from study.search.agenda import adopt
from study.search.racing import ALPHA, contenders, level_of_test
from tests.study.search.conftest import Curve, Make, Pretend


def test_more_seeds_of_what_is_no_longer_planned_are_no_configuration(searched: Make) -> None:
    """Only the seeds that confirmed it would be left, and most seeds win."""
    rows = ("rows=[]", "baseline=null")
    begun = Pretend(make_plan(searched(*rows, space=RACE)), noisy(lucky), slots=2)
    begun.run()
    narrow = RACE.replace("0.03, 0.04, ", "")
    plan = adopt(make_plan(searched(*rows, space=narrow)), fold(begun.events))
    assert {(trial.params["optimizer.lr"], trial.number) for trial in plan.trials} == {
        (0.01, 1),
        (0.02, 2),
        (0.05, 3),
    }
    assert {trial.seed for trial in plan.trials if trial.params["optimizer.lr"] == 0.02} > {0, 10}


def noisy(error: Callable[[dict[str, Any], int], float]) -> Curve:
    """The same error in every epoch, a function of the sampled values and the seed."""
    return lambda trial: [error(trial.params, trial.seed)] * trial.config.epochs


RATES = {0.01: 0.30, 0.02: 0.18, 0.03: 0.10, 0.04: 0.101, 0.05: 0.40}


RACE = (
    "\nspace: {optimizer.lr: {grid: [0.01, 0.02, 0.03, 0.04, 0.05]}}\n"
    + f"search: {{algorithm: grid, confirm: 3, confirm_seeds: {list(range(10, 20))}}}\n"
)


def lucky(params: dict[str, Any], seed: int) -> float:
    """With seed 0 the configuration that is truly third is the best by far."""
    rate = params["optimizer.lr"]
    luck = -0.1 if (rate, seed) == (0.02, 0) else 0.002 * math.sin(seed + 100 * rate)
    return RATES[rate] + luck


def test_the_promising_get_more_seeds_until_the_evidence_is_clear(searched: Make) -> None:
    pretend = Pretend(
        make_plan(searched("rows=[]", "baseline=null", space=RACE)), noisy(lucky), slots=2
    )
    done = pretend.run()
    assert pretend.agenda.exhausted
    seeds = {
        rate: [trial.seed for trial in done if trial.params["optimizer.lr"] == rate]
        for rate in RATES
    }
    assert seeds[0.01] == seeds[0.05] == [0]
    assert seeds[0.03] == seeds[0.04] == [0, *range(10, 20)]
    assert seeds[0.02][:3] == [0, 10, 11]  # no test has power with two pairs
    assert len(seeds[0.02]) < 11
    found = configurations(pretend.state.trials, ["validation/error"])
    winner = best(found, {"validation/error": "min"})
    assert winner is not None
    assert winner.params["optimizer.lr"] in (0.03, 0.04)


def test_a_row_with_one_configuration_is_confirmed(searched: Make) -> None:
    """It has no competitor, but its figure needs the seeds all the same."""
    alone = RACE.replace("0.01, 0.02, 0.03, 0.04, 0.05", "0.03")
    study = searched("rows=[]", "baseline=null", space=alone)
    done = Pretend(make_plan(study), noisy(lucky), slots=2).run()
    assert [trial.seed for trial in done] == [0, *range(10, 20)]


@pytest.mark.parametrize(
    ("confirm", "at_once"), [(1, [0, *range(10, 20)]), (5, [0, *[10] * 5, *[11] * 5])]
)
def test_seeds_between_which_nothing_is_decided_run_at_once(
    searched: Make, confirm: int, at_once: list[int]
) -> None:
    """All seeds of a single candidate, and those before the first test of several."""
    alone = RACE.replace("0.01, 0.02, 0.03, 0.04, 0.05", "0.03") if confirm == 1 else RACE
    study = searched("rows=[]", "baseline=null", f"search.confirm={confirm}", space=alone)
    pretend = Pretend(make_plan(study), noisy(lucky), slots=100)
    search = len(pretend.plan.trials)
    pretend.run(at_most=search)
    assert pretend.agenda.next() is not None
    waiting = pretend.agenda.trials
    assert [0, *(trial.seed for trial in pretend.state.trials[search:])] == at_once
    assert len(waiting) == len(at_once) - 2


SPACE = "\nspace: {optimizer.lr: {uniform: [0.01, 1.0]}}\nsearch: {num_samples: 4}\n"
HALVING = ("search.scheduler=halving", "search.num_samples=9", "search.reduction_factor=3")
PBT = ("search.scheduler=pbt", "search.perturbation_interval=2", "trial.epochs=4")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        (
            (),
            "14 trials = 2 rows (float32, lns matmul) x 4 configurations (random) x 1 seed, and 6",
        ),
        (("rows=[]", "search.algorithm=tpe"), "7 trials = 1 row (tiny) x 4"),
        (("rows=[]", *HALVING), "16 trials = 1 row (tiny) x 13 "),
        (("rows=[]", *PBT), "11 trials = 1 row (tiny) x 8 "),
    ],
)
def test_a_plan_counts_the_runs_that_confirm(
    searched: Make, changes: tuple[str, ...], size: str
) -> None:
    """As many as will exist: nothing drops out of a race of one."""
    confirm = ("baseline=null", "search.confirm=1", "search.confirm_seeds=[7,8,9]")
    plan = make_plan(searched(*confirm, *changes, space=SPACE))
    assert next(describe_plan(plan)).startswith(f"tiny: {size}")
    done = Pretend(plan, noisy(lambda params, seed: params["optimizer.lr"])).run()
    assert len(done) == int(size.split()[0])


def test_a_plan_of_a_race_says_that_it_may_take_fewer(searched: Make) -> None:
    plan = make_plan(searched("rows=[]", "baseline=null", space=RACE))
    assert next(describe_plan(plan)) == (
        "tiny: up to 35 trials = 1 row (tiny) x 5 configurations (grid) x 1 seed, and up to 30 that"
        " confirm the best"
    )
    assert 5 < len(Pretend(plan, noisy(lucky)).run()) < 35
    alone = RACE.replace("0.01, 0.02, 0.03, 0.04, 0.05", "0.03")
    study = searched("rows=[]", "baseline=null", space=alone)
    assert next(describe_plan(make_plan(study))).endswith("and up to 10 that confirm the best")


@pytest.mark.parametrize(
    "broken_off", [3, 9, *(pytest.param(trials, marks=pytest.mark.slow) for trials in (5, 6, 14))]
)
def test_a_race_broken_off_goes_on_as_it_would_have(searched: Make, broken_off: int) -> None:
    study = searched("rows=[]", "baseline=null", space=RACE)
    whole = {trial.id for trial in Pretend(make_plan(study), noisy(lucky), slots=2).run()}
    begun = Pretend(make_plan(study), noisy(lucky), slots=2)
    first = {trial.id for trial in begun.run(at_most=broken_off)}
    again = Pretend(make_plan(study), noisy(lucky), begun.events, slots=2)
    rest = [trial.id for trial in again.run()]
    assert first | set(rest) == whole
    assert len(first) + len(rest) == len(whole)


@pytest.mark.parametrize("broken_off", [4, 7, 9, 20])
def test_a_race_is_between_configurations_of_the_space_as_it_is_now(
    searched: Make, broken_off: int
) -> None:
    """Configurations outside are not repeated, and do not keep the race from ending."""
    confirmed = (
        "search: {algorithm: tpe, num_samples: 6, confirm: 3, confirm_seeds: [10, 11, 12]}\n"
    )
    wide, narrow = (
        f"\nspace: {{optimizer.lr: {{uniform: [{low}, 1.0]}}}}\n{confirmed}"
        for low in (0.0001, 0.5)
    )

    def rising(params: dict[str, Any], seed: int) -> float:
        return float(params["optimizer.lr"]) + 1e-6 * math.sin(seed)  # the best lie outside

    rows = ("rows=[]", "baseline=null")
    begun = Pretend(make_plan(searched(*rows, space=wide)), noisy(rising), slots=2)
    begun.run(at_most=broken_off)
    study = searched(*rows, space=narrow)
    again = Pretend(make_plan(study), noisy(rising), begun.events, slots=2)
    rest = again.run()
    assert again.agenda.exhausted
    assert all(trial.params["optimizer.lr"] >= 0.5 for trial in rest)
    rates = {trial.params["optimizer.lr"] for trial in again.state.trials}
    best_inside = min(rate for rate in rates if rate >= 0.5)
    seeds = {
        trial.seed for trial in again.state.trials if trial.params["optimizer.lr"] == best_inside
    }
    assert seeds >= {0, 10, 11}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "search.confirm_seeds=[]",
            "search.confirm=3 with search.confirm_seeds=\\[\\].* belong together",
        ),
        ("seeds=[0,12]", "search.confirm_seeds: 12 is among the study's seeds"),
        ("search.confirm_seeds=[10,10]", "10 appears more than once"),
        ("search.confirm=-1", "search.confirm=-1"),
    ],
)
def test_races_that_cannot_be_are_refused(searched: Make, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searched("rows=[]", "baseline=null", override, space=RACE)


RACES, CANDIDATES, MORE = 150, 3, 10


def share_of_races_that_eliminate(level: float, seeds: int) -> float:
    """Races of equal candidates with normal errors and an effect of the seed."""
    random = np.random.default_rng(7)
    lost = 0
    for _ in range(RACES):
        effects = random.normal(0, 3, seeds + MORE)
        errors = random.normal(0, 1, (CANDIDATES, seeds + MORE)) + effects
        racing = list(range(CANDIDATES))
        for round_ in range(1, MORE):
            left = contenders([list(errors[place, : seeds + round_]) for place in racing], level)
            racing = [racing[place] for place in left]
        lost += len(racing) < CANDIDATES
    return lost / RACES


@pytest.mark.parametrize("seeds", [1, 3])
def test_equal_candidates_are_eliminated_no_oftener_than_the_level_says(seeds: int) -> None:
    """Over all rounds and pairs together; the same level for each test would not be enough."""
    assert share_of_races_that_eliminate(level_of_test(CANDIDATES, seeds, MORE), seeds) <= ALPHA
    assert share_of_races_that_eliminate(ALPHA, seeds) > 4 * ALPHA


def test_the_level_of_a_test_counts_the_looks_that_can_save_seeds() -> None:
    assert level_of_test(2, 3, 2) == ALPHA / (1 * 2)
    assert level_of_test(3, 1, 6) == ALPHA / (4 * 6)  # with 3, 4, 5 and 6 seeds
    assert level_of_test(3, 1, 2) == level_of_test(1, 5, 5) == ALPHA  # nothing is tested


def test_equal_differences_are_tested_by_their_signs() -> None:
    """Errors of few examples often differ by the same count at a few seeds, by chance."""
    lower, level = [0.05, 0.04, 0.06], level_of_test(3, 1, 4)
    higher = [error + 1 / 300 for error in lower]
    assert contenders([lower, higher], level) == [0, 1]
    assert contenders([lower * 5, higher * 5], level) == [0]
    assert contenders([lower * 5, lower * 5], level) == [0, 1]
