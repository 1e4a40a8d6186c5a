"""Studies in which each seed is a search: their draws, their best, the figures of a row."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from study.cli import main
from study.config import StudyConfig
from study.evidence.analyses import chosen
from study.evidence.verify import verify
from study.ledger.state import StudyState
from study.ledger.studies import read
from study.plan.plan import make_plan
from study.plan.trials import PlannedTrial
from study.report.tables import headings
from study.results.configurations import best, configurations
from study.results.statistics import seed_means
from study.results.summary import summarise
from tests.study.search.conftest import Make, Pretend, errors_of

SPACE = """
space:
  optimizer.lr: {loguniform: [0.001, 1.0]}
  optimizer.momentum: {uniform: [0.0, 0.9]}
search: {num_samples: 6, per_seed: true, perturbation_interval: 2}
"""
SEARCHES = {
    "random": ["search.algorithm=random"],
    "sobol": ["search.algorithm=sobol"],
    "tpe": ["search.algorithm=tpe"],
    "pbt": ["search.scheduler=pbt"],
    "halving": ["search.scheduler=halving"],
}
FEW = ("rows=[]", "baseline=null", "seeds=[0,5,2]", "trial.epochs=6", "tracking_uri=none")


@pytest.fixture(params=SEARCHES)
def alone(searched: Make, request: pytest.FixtureRequest) -> StudyConfig:
    """The tiny study, one row, of three seeds, each a search of its own."""
    return searched(*FEW, *SEARCHES[request.param], space=SPACE)


def first_draws(trials: list[PlannedTrial]) -> dict[int, list[float]]:
    """The first rates of each seed's search, by seed."""
    found: dict[int, list[float]] = collections.defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.number or 0):
        if trial.asked.get("round", 0) == 0:
            found[trial.seed].append(trial.params["optimizer.lr"])
    return found


def test_every_seed_has_draws_of_its_own_and_numbers_of_its_own(alone: StudyConfig) -> None:
    plan = make_plan(alone)
    pretend = Pretend(plan, errors_of)
    trials = pretend.run()
    assert len(trials) == plan.size
    assert pretend.agenda.exhausted
    assert len({trial.number for trial in trials}) == len(trials)
    draws = first_draws(trials)
    assert [len(draws[seed]) for seed in (0, 5, 2)] == [6, 6, 6]
    assert len({rate for rates in draws.values() for rate in rates}) == 18


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_seed_draws_the_same_whatever_others_there_are(searched: Make, kind: str) -> None:
    histories = []
    for seeds in ("seeds=[0,5,2]", "seeds=[5]", "seeds=[5,0]"):
        study = searched(*FEW, *SEARCHES[kind], seeds, space=SPACE)
        trials = Pretend(make_plan(study), errors_of).run()
        histories.append({trial.id for trial in trials if trial.seed == 5})
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.parametrize("kind", ["tpe", "pbt"])
def test_seeds_in_another_order_train_nothing_again(searched: Make, kind: str) -> None:
    first, second = (
        searched(*FEW, *SEARCHES[kind], seeds, space=SPACE)
        for seeds in ("seeds=[0,5,2]", "seeds=[5,2,0]")
    )
    done = Pretend(make_plan(first), errors_of)
    done.run()
    again = Pretend(make_plan(second), errors_of, done.events)
    assert again.run() == []
    assert_of_every_seed(again.state)


@pytest.mark.parametrize("was", [True, False])
def test_an_adaptive_search_stays_what_it_began_as(searched: Make, was: bool) -> None:
    before, after = (
        searched(*FEW, "search.algorithm=tpe", f"search.per_seed={value}", space=SPACE)
        for value in (was, not was)
    )
    begun = Pretend(make_plan(before), errors_of)
    begun.run(4)
    with pytest.raises(ValueError, match=f"search.per_seed={str(not was).lower()}: the search has"):
        Pretend(make_plan(after), errors_of, begun.events)


def test_a_plan_has_every_seed_early(searched: Make) -> None:
    plan = make_plan(searched(*FEW, space=SPACE))
    assert [trial.seed for trial in plan.trials[:6]] == [0, 5, 2, 0, 5, 2]


def test_ranks_take_the_best_of_every_seed(searched: Make) -> None:
    study = searched(*FEW, "search.algorithm=random", space=SPACE)
    pretend = Pretend(make_plan(study), errors_of)
    pretend.run()
    ((found,),) = (cell.values() for cell in chosen(pretend.state, "row", ["batch_size"]).values())
    (row,) = summarise(pretend.state).rows
    assert [trial.id for trial in found] == [trial.id for trial in row.trials]


def test_gaps_of_seeds_with_configurations_of_their_own_are_averaged_by_seed() -> None:
    assert seed_means([{3: 1.0}, {3: 2.0}, {1: 5.0}]) == [5.0, 1.5]
    assert seed_means([{3: 1.0, 1: 2.0}, {3: 2.0}]) == []


def test_a_row_has_the_best_of_every_seed(alone: StudyConfig) -> None:
    pretend = Pretend(make_plan(alone), errors_of)
    pretend.run()
    assert_of_every_seed(pretend.state)


def assert_of_every_seed(state: StudyState) -> None:
    (row,) = summarise(state).rows
    objectives = {"validation/error": "min"}
    found = configurations(state.trials, objectives)
    for seed in state.config.seeds:
        winner = best([entry for entry in found if entry.trials[0].seed == seed], objectives)
        assert winner is not None
        assert [trial.id for trial in row.trials if trial.seed == seed] == [winner.trials[0].id]
    assert row.seeds == row.finished == len(state.config.seeds)
    assert row.params == {}


def test_a_row_has_no_figure_while_a_seed_has_none(alone: StudyConfig) -> None:
    pretend = Pretend(make_plan(alone), errors_of, fails=lambda trial: trial.seed == 2)
    pretend.run()
    (row,) = summarise(pretend.state).rows
    assert (row.trials, row.mean) == ((), None)


@pytest.mark.parametrize("broken_off", [3, 10, 20])
def test_a_search_broken_off_goes_on_as_it_would_have(alone: StudyConfig, broken_off: int) -> None:
    whole = [trial.id for trial in Pretend(make_plan(alone), errors_of).run()]
    first = Pretend(make_plan(alone), errors_of)
    begun = [trial.id for trial in first.run(broken_off)]
    second = Pretend(make_plan(alone), errors_of, first.events)
    assert sorted(begun + [trial.id for trial in second.run()]) == sorted(whole)
    assert second.agenda.exhausted


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (["search.scheduler=asha"], "search.per_seed=true with search.scheduler=asha"),
        (
            ["search.confirm=2", "search.confirm_seeds=[9]"],
            "search.per_seed=true with search.confirm=2",
        ),
        (
            ["space={optimizer.lr: {grid: [0.1, 0.2]}}", "search.algorithm=grid"],
            "search.per_seed=true with search.algorithm=grid",
        ),
    ],
)
def test_what_is_one_search_for_all_seeds_is_refused(
    searched: Make, override: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        searched(*FEW, *override, space=SPACE)


def test_a_space_of_grids_alone_is_refused(searched: Make) -> None:
    space = "space: {optimizer.lr: {grid: [0.1, 0.2]}}\nsearch: {per_seed: true}\n"
    with pytest.raises(ValueError, match=r"search\.per_seed=true: the space has grids only"):
        searched(*FEW, space=space)


@pytest.mark.slow
def test_the_report_has_the_figures_of_every_seed_and_is_verified(tmp_path: Path) -> None:
    small = ["seeds=[3,4]", "trial.epochs=2", "search.num_samples=3", "cpus=2"]
    assert main(["run", "evolution", f"storage={tmp_path}", "tracking_uri=none", *small]) == 0
    folder = tmp_path / "evolution"
    state = read(folder)
    summary = summarise(state)
    assert headings(state, summary)[-1] == "best of 6 that 2 searches tried, by validation/error"
    for row in summary.rows:
        assert [trial.seed for trial in row.trials] == [3, 4]
        assert row.sd is not None
    assert list(verify(folder, "none")) == []
