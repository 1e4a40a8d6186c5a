"""Searches in rounds, populations and halving: made-up results for the next trials, real studies
for the training."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.config import StudyConfig
from study.config.compose import load
from study.config.space import Domain
from study.errors import UserError
from study.evidence.rerun import rerun
from study.lifecycle import run_study
from study.plan.plan import make_plan
from study.plan.trials import PlannedTrial
from study.results.configurations import best, configurations
from study.search.pb2 import explored
from tests.study.conftest import TINY, SilentView
from tests.study.search.conftest import Make, Pretend, errors_of, rates

SPACE = """
space:
  optimizer.lr: {loguniform: [0.001, 1.0]}
  optimizer.momentum: {uniform: [0.0, 0.9]}
search: {scheduler: pbt, num_samples: 6, perturbation_interval: 2, seed: 3}
"""
QUICK = ("search.perturbation_interval=1", "search.quantile_fraction=0.5")


@pytest.fixture
def bred(tmp_path: Path) -> Make:
    """The tiny study as a population of six over six epochs, one row."""

    def make(*overrides: str, space: str = SPACE) -> StudyConfig:
        path = tmp_path / "bred.yaml"
        path.write_text(TINY + space)
        return load(
            str(path),
            [
                f"storage={tmp_path}",
                "tracking_uri=none",
                "trial.epochs=6",
                "rows=[]",
                "baseline=null",
                *overrides,
            ],
        )

    return make


def final_error(trials: list[PlannedTrial]) -> float:
    return min(errors_of(trial)[-1] for trial in trials if trial.config.epochs == 6)


@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
def test_the_worst_go_on_from_the_best_with_other_values(bred: Make, scheduler: str) -> None:
    plan = make_plan(bred(f"search.scheduler={scheduler}"))
    assert plan.size == 18
    trials = Pretend(plan, errors_of).run()
    generations = [trials[i : i + 6] for i in (0, 6, 12)]
    assert [{trial.config.epochs for trial in generation} for generation in generations] == [
        {2},
        {4},
        {6},
    ]
    assert [trial.number for trial in trials] == list(range(1, 19))
    for before, after in itertools.pairwise(generations):
        end = before[0].config.epochs
        order = sorted(range(6), key=lambda i: errors_of(before[i])[-1])
        for place, member in enumerate(order):
            line = after[member].config.changes
            if place < 4:
                assert line == before[member].config.changes
                assert after[member].params["optimizer.lr"] == before[member].params["optimizer.lr"]
            else:
                parents = [before[parent] for parent in order[:2]]
                assert line[-1]["epoch"] == end
                assert (line[:-1], rates(after[member])[:end]) in [
                    (parent.config.changes, rates(parent)) for parent in parents
                ]
                assert (
                    rates(after[member])[end] != rates(after[member])[end - 1]
                    or "optimizer.momentum" in line[-1]
                )


@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
@pytest.mark.parametrize("broken_off", [3, pytest.param(6, marks=pytest.mark.slow), 10])
def test_a_population_broken_off_breeds_what_it_would_have(
    bred: Make, scheduler: str, broken_off: int
) -> None:
    study = bred(f"search.scheduler={scheduler}", "seeds=[0,1]")
    whole = [trial.id for trial in Pretend(make_plan(study), errors_of).run()]
    assert len(set(whole)) == 36
    first = Pretend(make_plan(study), errors_of)
    begun = [trial.id for trial in first.run(broken_off)]
    second = Pretend(make_plan(study), errors_of, first.events)
    assert begun + [trial.id for trial in second.run()] == whole
    assert second.agenda.exhausted


def test_only_members_that_trained_to_the_end_are_chosen(bred: Make) -> None:
    study = bred()
    pretend = Pretend(make_plan(study), errors_of)
    trials = pretend.run()
    found = configurations(pretend.state.trials, ["validation/error"])
    assert [entry.whole for entry in found] == [False] * 12 + [True] * 6
    winner = best(found, {"validation/error": "max"})
    assert winner is not None
    assert winner.trials[0].epochs == 6
    assert winner.objectives["validation/error"] < max(errors_of(trial)[-1] for trial in trials)


def test_the_best_of_the_last_round_get_more_seeds(bred: Make) -> None:
    study = bred("search.confirm=1", "search.confirm_seeds=[7,8]")
    pretend = Pretend(make_plan(study), errors_of)
    trials = pretend.run()
    assert [trial.seed for trial in trials] == [0] * 18 + [7, 8]
    winner = min(trials[12:18], key=lambda trial: errors_of(trial)[-1])
    assert all(trial.params == winner.params for trial in trials[18:])
    assert pretend.agenda.exhausted


def test_members_that_fail_are_replaced_and_a_dead_population_ends(bred: Make) -> None:
    plan = make_plan(bred())
    lost = {trial.id for trial in Pretend(plan, errors_of).run()[:4]}
    survivors = Pretend(plan, errors_of, fails=lambda trial: trial.id in lost).run()
    assert len(survivors) == 18
    assert all(
        trial.config.changes and trial.config.changes[0]["epoch"] == 2 for trial in survivors[6:10]
    )
    dead = Pretend(plan, errors_of, fails=lambda trial: True)
    assert len(dead.run()) == 6
    assert dead.agenda.exhausted


@pytest.mark.slow
def test_populations_find_better_than_their_first_members_would_have(bred: Make) -> None:
    """Over eight searches; PB2 learns where the error falls fastest, PBT changes values randomly by
    a fifth."""
    found: dict[str, list[float]] = {"pbt": [], "pb2": [], "first": []}
    for seed in range(8):
        for scheduler in ("pbt", "pb2"):
            study = bred(
                f"search.scheduler={scheduler}",
                f"search.seed={seed}",
                "search.perturbation_interval=1",
                "search.quantile_fraction=0.5",
            )
            trials = Pretend(make_plan(study), errors_of).run()
            found[scheduler].append(final_error(trials))
        steady = [
            1 / (1 + math.log10(trial.params["optimizer.lr"] / 0.03) ** 2) for trial in trials[:6]
        ]
        found["first"].append(math.exp(-0.3 * 6 * max(steady)))
    means = {name: statistics.fmean(values) for name, values in found.items()}
    assert means["pbt"] <= means["first"]
    assert means["pb2"] < means["first"]


def test_a_grid_makes_a_population_of_each_point(bred: Make) -> None:
    space = SPACE.replace("search:", "  model.hidden: {grid: [[8], [16]]}\nsearch:")
    plan = make_plan(bred(space=space))
    trials = Pretend(plan, errors_of).run()
    assert plan.size == len(trials) == len({trial.id for trial in trials}) == 36
    assert sorted(trial.number or 0 for trial in trials) == list(range(1, 37))
    for hidden in ([8], [16]):
        assert (
            sum(
                trial.config.model.hidden == hidden and trial.config.epochs == 6 for trial in trials
            )
            == 6
        )


DOMAINS = [
    Domain(key="a", kind="uniform", values=(-1.0, 3.0), real=True),
    Domain(key="b", kind="loguniform", values=(1e-4, 10.0), real=True),
    Domain(key="c", kind="quniform", values=(0.0, 1.0, 0.1), real=True),
    Domain(key="d", kind="randint", values=(2, 9)),
    Domain(key="e", kind="lograndint", values=(1, 1000)),
    Domain(key="f", kind="choice", values=("x", "y", "z")),
]


def test_halving_shows_all_a_part_of_the_data_and_the_best_all_of_it(bred: Make) -> None:
    """Nine configurations, then three, then one; with 133, 400 and 1,200 of 1,200 images."""
    study = bred(
        "search.scheduler=halving",
        "search.num_samples=9",
        "seeds=[0,1]",
        "search.perturbation_interval=4",
    )
    plan = make_plan(study)
    assert plan.size == 26
    pretend = Pretend(plan, errors_of)
    trials = pretend.run()
    sizes = [trial.config.data.train_size for trial in trials]
    assert sizes == [133] * 18 + [400] * 6 + [None] * 2
    by_error = sorted(trials[:18:2], key=lambda trial: errors_of(trial)[-1])
    assert {trial.params["optimizer.lr"] for trial in trials[18:24]} == {
        trial.params["optimizer.lr"] for trial in by_error[:3]
    }
    assert {trial.params["optimizer.lr"] for trial in trials[24:]} == {
        by_error[0].params["optimizer.lr"]
    }
    found = configurations(pretend.state.trials, ["validation/error"])
    assert [entry.whole for entry in found] == [False] * 12 + [True]
    broken = Pretend(make_plan(study), errors_of)
    begun = [trial.id for trial in broken.run(19)]
    rest = Pretend(make_plan(study), errors_of, broken.events).run()
    assert [*begun, *(trial.id for trial in rest)] == [trial.id for trial in trials]


@pytest.mark.parametrize(
    ("scheduler", "key", "apart", "shared"),
    [("pbt", "epochs", (1, 6), (2, 6)), ("halving", "data.train_size", (400, 150), (400, 200))],
)
def test_rows_whose_rounds_are_the_same_trials_are_refused(
    bred: Make, scheduler: str, key: str, apart: tuple[int, int], shared: tuple[int, int]
) -> None:
    """Otherwise the search would find in the middle that a trial belongs to two rows."""

    def begun(sizes: tuple[int, int]) -> Pretend:
        rows = ", ".join(f"{{label: of {size}, overrides: {{{key}: {size}}}}}" for size in sizes)
        choice = f"search.scheduler={scheduler}", "search.reduction_factor=2"
        return Pretend(make_plan(bred(f"rows=[{rows}]", *choice)), errors_of)

    begun(apart).run()
    refused = rf"rows 'of {shared[0]}' and .*{scheduler}: they only differ"
    with pytest.raises(UserError, match=refused):
        begun(shared).run()


@given(
    st.sampled_from(DOMAINS),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1.0]),
)
def test_values_and_units_are_inverse_and_moves_stay_inside(
    domain: Domain, unit: float, seed: int, resample: float
) -> None:
    value = domain.at(unit)
    if domain.kind in ("uniform", "loguniform"):
        assert domain.at(domain.unit(value)) == pytest.approx(value, rel=1e-9, abs=1e-12)
    else:
        assert domain.at(domain.unit(value)) == value
    moved = explored(domain, value, resample, np.random.default_rng(seed))
    assert type(moved) is type(value)
    if domain.categorical:
        assert moved in domain.values
    else:
        assert domain.values[0] <= moved <= domain.values[1]
        assert domain.nearest(moved) == moved


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["search.algorithm=tpe"], "search.scheduler=pbt with search.algorithm=tpe"),
        (["search.num_samples=1"], "there must be at least two"),
        (["search.quantile_fraction=0.7"], "search.quantile_fraction=0.7: must be in 0 .. 0.5"),
        (["search.perturbation_interval=0"], "search.perturbation_interval=0"),
        (
            ["space={batch_size: {choice: [64, 128]}}"],
            "space.batch_size with search.scheduler=pbt: cannot change in the middle",
        ),
        (["trial.lr_schedule.decay=cosine"], "a generation would decay to its own end"),
        (
            ["search.scheduler=halving", "search.algorithm=tpe"],
            "search.scheduler=halving with search.algorithm=tpe",
        ),
        (["trial.optimizer.name=rprop"], "optimizer.name=rprop with search.scheduler=pbt"),
    ],
)
def test_populations_that_cannot_be_are_refused(
    bred: Make, overrides: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        make_plan(bred(*overrides))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "epochs"), [([], 3), (["gang=train", "trial.workers=2"], 2)])
def test_a_real_population_computes_every_epoch_once(
    bred: Make, ray_session: None, kind: list[str], epochs: int
) -> None:
    size = ["search.num_samples=2", f"trial.epochs={epochs}"]
    study = bred(f"name=population-{len(kind)}", *kind, *size, *QUICK)
    view = SilentView()
    outcome = run_study(study, view, lambda line: None)
    trials = outcome.state.trials
    assert [trial.status for trial in trials] == ["finished"] * 2 * epochs
    reports = [event for event in view.events if event["event"] == "report"]
    computed = [event for event in reports if "source" not in event]
    assert len(computed) == 2 * epochs
    assert len(reports) == 2 * sum(range(1, epochs + 1))
    child = next(trial for trial in trials if trial.config["changes"])
    again = rerun(
        outcome.state, child, lambda alone: run_study(alone, SilentView(), lambda line: None).state
    )
    assert again.again.reports.keys() == set(range(1, child.epochs + 1))
    assert again.differences == []
