"""Searches, planned and adaptive; made-up results, no Ray."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from study.config.compose import load
from study.engines.control import Decision
from study.engines.preflight import preflight
from study.ledger.state import TrialState, fold
from study.lifecycle import _describe_end
from study.plan.candidates import bind_space
from study.plan.plan import make_plan
from study.report.write import write_report
from study.results.configurations import best, configurations, pareto_front
from study.results.importance import importance
from study.results.objectives import bits_of, weight_bits_of
from study.results.statistics import entries
from study.search.agenda import Agenda, adopt
from tests.study.conftest import TINY
from tests.study.search.conftest import Make, Pretend, bowl, steady
from trainers.config import OptimizerConfig, PrecisionConfig, TrialConfig


def test_every_row_gets_the_same_configurations_and_seeds(searched: Make) -> None:
    plan = make_plan(searched("seeds=[0,1]"))
    assert len(plan.trials) == plan.size == 2 * 6 * 2
    assert [trial.seed for trial in plan.trials] == [0] * 12 + [1] * 12
    by_row = {
        row: [t.params for t in plan.trials if t.row == row and t.seed == 0]
        for row in ("float32", "lns matmul")
    }
    assert by_row["float32"] == by_row["lns matmul"]
    assert all(
        t.config.optimizer.lr == t.params["optimizer.lr"]
        and t.config.optimizer.name == t.params["optimizer.name"]
        for t in plan.trials
    )
    assert len({trial.id for trial in plan.trials}) == 24


def test_trials_behind_one_that_waits_are_proposed_as_they_are_wanted(searched: Make) -> None:
    one_row = ["rows=[{label: a}]", "baseline=null"]
    study = searched("search.algorithm=tpe", "search.num_samples=9", *one_row)
    agenda = Pretend(make_plan(study), steady).agenda
    head = agenda.peek()
    assert head is not None
    assert list(agenda.behind(head, 3, propose=False)) == []
    behind = list(agenda.behind(head, 3, propose=True))
    assert len({head.id, *(trial.id for trial in behind)}) == 4
    assert list(agenda.behind(head, 3, propose=True)) == behind  # none has started
    assert agenda.trials == [head, *behind]
    for trial in agenda.behind(head, 9, propose=True):
        agenda.take(trial)
    assert (agenda.trials, agenda.peek()) == ([head], head)
    agenda.take(head)
    assert agenda.exhausted


def test_more_samples_keep_the_trials_there_are(searched: Make) -> None:
    few, many = make_plan(searched()), make_plan(searched("search.num_samples=20"))
    assert {trial.id for trial in few.trials} < {trial.id for trial in many.trials}


def test_what_makes_no_valid_trial_is_left_out_with_the_rule(searched: Make) -> None:
    space = (
        "\nspace:\n  optimizer.name: {choice: [sgd, adam]}\n  optimizer.momentum: {choice: [0.0,"
        " 0.9]}\nsearch: {algorithm: grid}\n"
    )
    plan = make_plan(searched(space=space))
    assert len(plan.trials) == 2 * 3
    assert {(entry.row, entry.params["optimizer.name"]) for entry in plan.excluded} == {
        ("float32", "adam"),
        ("lns matmul", "adam"),
    }
    assert "optimizer.name=adam" in plan.excluded[0].reason
    assert [trial.number for trial in plan.trials] == [1, 1, 2, 2, 3, 3]


def test_choices_take_the_type_of_their_key(searched: Make) -> None:
    """lr: 1 and lr: 1.0 are one trial, whichever way a config writes it."""
    one = make_plan(
        searched(space="\nspace: {optimizer.lr: {choice: [1, 2]}}\nsearch: {algorithm: grid}\n")
    )
    two = make_plan(
        searched(space="\nspace: {optimizer.lr: {choice: [1.0, 2.0]}}\nsearch: {algorithm: grid}\n")
    )
    assert [trial.id for trial in one.trials] == [trial.id for trial in two.trials]


@pytest.mark.parametrize("algorithm", ["tpe", "nsga2"])
def test_an_adaptive_search_proposes_as_many_for_every_row(searched: Make, algorithm: str) -> None:
    pretend = Pretend(
        make_plan(searched(f"search.algorithm={algorithm}", "seeds=[0,1]")), steady(bowl)
    )
    done = pretend.run()
    assert pretend.agenda.exhausted
    assert len(done) == pretend.plan.size == 24
    assert {(trial.row, trial.number, trial.seed) for trial in done} == {
        (row, number, seed)
        for row in ("float32", "lns matmul")
        for number in range(1, 7)
        for seed in (0, 1)
    }
    assert len({trial.id for trial in done}) == 24


def test_the_data_of_a_search_are_known_before_it_has_trials(searched: Make) -> None:
    plan = make_plan(searched("search.algorithm=tpe"))
    assert plan.trials == ()
    assert [info["name"] for info in preflight(plan)[1]] == ["digits"]


def test_tpe_learns(searched: Make) -> None:
    """The last half of the proposals is nearer to the optimum than the first ten, which are random
    (it still explores, so medians are compared)."""
    done = Pretend(
        make_plan(
            searched("search.algorithm=tpe", "search.num_samples=40", "rows=[]", "baseline=null")
        ),
        steady(bowl),
    ).run()
    errors = [bowl(trial.params) for trial in done]
    assert statistics.median(errors[20:]) < 0.5 * statistics.median(errors[:10])


@pytest.mark.parametrize("algorithm", ["tpe", "cmaes", "nsga2"])
@pytest.mark.parametrize("broken_off", [1, 7, 15])
def test_a_search_broken_off_proposes_what_it_would_have(
    searched: Make, algorithm: str, broken_off: int
) -> None:
    """From the ledger alone: the same configurations follow (for nsga2 as many, of the same
    generations), and each is proposed once."""
    space = (
        "\nspace: {optimizer.lr: {loguniform: [0.001, 1.0]}, optimizer.momentum: {uniform: [0.0,"
        " 0.9]}}\nsearch: {num_samples: 16}\n"
    )
    study = searched(f"search.algorithm={algorithm}", "rows=[]", "baseline=null", space=space)

    def error(params: dict[str, Any]) -> float:
        return float(abs(params["optimizer.lr"] - 0.1) + params["optimizer.momentum"])

    whole = [trial.params for trial in Pretend(make_plan(study), steady(error)).run()]
    begun = Pretend(make_plan(study), steady(error))
    first = begun.run(at_most=broken_off)
    again = Pretend(make_plan(study), steady(error), begun.events)
    rest = again.run()
    params = [trial.params for trial in [*first, *rest]]
    assert len(params) == len(whole) == len({tuple(entry.values()) for entry in params})
    if algorithm == "nsga2":
        generations = [trial.asked["NSGAIISampler:generation"] for trial in [*first, *rest]]
        assert generations == sorted(generations)
        assert generations[-1] == 3
    else:
        assert params == whole


@pytest.mark.parametrize("broken_off", [7, 8, 15])
@pytest.mark.parametrize("rows", [2, 3])
def test_a_search_of_rows_broken_off_goes_on_with_the_row_whose_turn_it_was(
    searched: Make, rows: int, broken_off: int
) -> None:
    labels = ", ".join(
        f"{{label: r{row}, overrides: {{batch_size: {16 + row}}}}}" for row in range(rows)
    )
    study = searched("search.algorithm=tpe", f"rows=[{labels}]", "baseline=null")
    whole = [trial.id for trial in Pretend(make_plan(study), steady(bowl)).run()]
    begun = Pretend(make_plan(study), steady(bowl))
    first = begun.run(at_most=broken_off)
    rest = Pretend(make_plan(study), steady(bowl), begun.events).run()
    assert [trial.id for trial in [*first, *rest]] == whole


WIDE = {
    "batch_size": "{choice: [16, 32, 64]}",
    "optimizer.lr": "{loguniform: [0.001, 1.0]}",
    "optimizer.momentum": "{quniform: [0.0, 0.8, 0.1]}",
    "epochs": "{randint: [3, 9]}",
}
NARROW = [
    {"batch_size": "{choice: [32, 16]}"},
    {"optimizer.lr": "{loguniform: [0.01, 0.1]}"},
    {"optimizer.momentum": "{quniform: [0.0, 0.8, 0.2]}"},
    {"epochs": "{randint: [4, 6]}"},
    {"batch_size": None},
    {"optimizer.nesterov": "{choice: [true, false]}"},
    {"batch_size": "{grid: [32, 64]}"},
]


def space_of(domains: dict[str, str | None], samples: int = 8) -> str:
    """The part of a config that searches these keys."""
    inner = ", ".join(f"{key}: {domain}" for key, domain in domains.items() if domain is not None)
    return f"\nspace: {{{inner}}}\nsearch: {{algorithm: tpe, num_samples: {samples}}}\n"


def uneven(params: dict[str, Any]) -> float:
    """An error that differs everywhere."""
    return float(
        math.sin(sum((7 + place) * float(value) for place, value in enumerate(params.values())))
        ** 2
    )


@pytest.mark.parametrize(
    ("broken_off", "change"),
    [
        *((5, change) for change in NARROW[:2]),
        (16, NARROW[0]),
        *(pytest.param(5, change, marks=pytest.mark.slow) for change in NARROW[2:]),
        *(pytest.param(16, change, marks=pytest.mark.slow) for change in NARROW[1:]),
    ],
)
def test_what_lies_outside_a_changed_space_is_history(
    searched: Make, tmp_path: Path, change: dict[str, str | None], broken_off: int
) -> None:
    """It stays in the figures. The sampler does not learn from it, and proposes the requested
    number inside."""
    rows = ("rows=[]", "baseline=null", "seeds=[0,1]")
    begun = Pretend(make_plan(searched(*rows, space=space_of(WIDE))), steady(uneven))
    first = begun.run(broken_off)
    assert fold(begun.events).trials  # and, broken off in the middle of one, a trial that never ran
    study = searched(*rows, space=space_of(WIDE | change))
    space = bind_space(study)
    again = Pretend(make_plan(study), steady(uneven), begun.events)
    history = [trial.id for trial in first if not space.holds(trial.params)]
    waiting = [
        trial for trial in again.plan.trials if trial.id not in {trial.id for trial in first}
    ]
    assert all(space.holds(trial.params) for trial in waiting)
    rest = again.run()
    assert again.agenda.exhausted
    assert all(space.holds(trial.params) for trial in rest)
    points = space.grid_points()
    assert len([trial for trial in again.state.trials if space.holds(trial.params)]) == 2 * 8 * len(
        points
    )
    assert set(history) <= {trial.id for trial in again.state.trials}
    assert len(again.state.trials) == again.plan.size
    numbers = {trial.number: trial.params for trial in again.state.trials}
    assert all(numbers[trial.number] == trial.params for trial in again.state.trials)
    assert {trial.id for entry in entries(again.state) for trial in entry.trials} == {
        trial.id for trial in again.state.trials if trial.status == "finished"
    }
    if broken_off == 16 and "batch_size" in change:
        again.state.plan |= {"provenance": {"versions": {}, "platform": "", "python": ""}}
        assert importance(again.state) is not None
        write_report(again.state, tmp_path / "report")
    assert Agenda(
        adopt(make_plan(study), fold(again.events)), fold(again.events), lambda trial: None
    ).exhausted


def test_grids_are_searched_point_by_point(searched: Make) -> None:
    space = (
        "\nspace: {batch_size: {grid: [32, 64]}, optimizer.lr: {loguniform: [0.001, 1.0]}}\nsearch:"
        " {num_samples: 3, algorithm: tpe}\n"
    )
    done = Pretend(
        make_plan(searched("rows=[]", "baseline=null", space=space)),
        steady(lambda params: params["optimizer.lr"]),
    ).run()
    assert [trial.params["batch_size"] for trial in done].count(32) == 3
    assert sorted(trial.number or 0 for trial in done) == [1, 2, 3, 4, 5, 6]


def test_the_best_and_the_unbeaten(searched: Make) -> None:
    study = searched(
        "search.objectives={validation/error: min, bits: min}", "search.algorithm=nsga2"
    )
    pretend = Pretend(make_plan(study), steady(bowl))
    pretend.run()
    objectives = study.search.objectives
    found = configurations(pretend.state.trials, objectives)
    assert len(found) == 12
    winner = best(found, objectives)
    assert winner is not None
    assert winner.objectives["validation/error"] == min(
        entry.objectives["validation/error"] for entry in found
    )
    front = pareto_front(found, objectives)
    points = [tuple(entry.objectives.values()) for entry in front]
    assert points == sorted(points)
    for entry in found:
        point = tuple(entry.objectives.values())
        beaten = any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True))
            for other in points
        )
        assert beaten != (point in points)


def test_bits_of_a_format(searched: Make) -> None:
    plan = make_plan(searched())
    assert {trial.row: bits_of(trial.config.to_dict()) for trial in plan.trials} == {
        "float32": 32,
        "lns matmul": 12,
    }


@pytest.mark.parametrize(
    ("precision", "optimizer", "bits"),
    [
        ({"format": "lns8/block"}, "sgd", 8.25),
        ({"format": "lns8/block", "kahan_sum": True}, "sgd", 16.5),
        ({"format": "lns8/block", "master_format": "lns16"}, "sgd", 24.25),
        ({"format": "lns8/block", "master_format": "lns16", "kahan_sum": True}, "sgd", 40.25),
        ({"format": "lns12", "scope": "everywhere", "kahan_sum": True}, "adam", 24),
        ({"format": "lns12", "scope": "everywhere", "kahan_sum": True}, "madam", 28),
        ({"format": "lns12/channel", "kahan_sum": True}, "madam", 24),
        ({"format": "lns8/channel", "master_format": "lns12", "kahan_sum": True}, "madam", 32),
        ({"format": "lns12", "scope": "matmul", "kahan_sum": True}, "sgd", 64),
        ({"format": "float32"}, "sgd", 32),
    ],
)
def test_a_copy_and_a_compensation_take_bits_of_a_weight(
    precision: dict[str, Any], optimizer: str, bits: float
) -> None:
    config = TrialConfig(
        precision=PrecisionConfig(**precision), optimizer=OptimizerConfig(name=optimizer)
    )
    assert weight_bits_of(config.to_dict()) == bits


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["search.algorithm=bayes"], "search.algorithm='bayes': must be one of random"),
        (["search.objectives={test/error: min}"], "nothing may be chosen by the test set"),
        (["search.objectives={validation/error: least}"], "must be one of min, max"),
        (["search.algorithm=cmaes"], "is a choice, which has no distances"),
        (["search.algorithm=grid"], "loguniform has no end of values"),
        (["space={optimizer.speed: {choice: [1]}}"], "speed: unknown key"),
        (["space={optimizer.lr: {choice: [fast]}}"], "'fast' is not possible"),
        (["space={seed: {choice: [1, 2]}}"], "the study's seeds"),
        (
            ["space={optimizer.momentum: {choice: [1.5, 2]}}"],
            "no point of the space makes a valid trial",
        ),
        (["limits.hours=-1"], "limits.hours=-1"),
    ],
)
def test_bad_searches_are_refused(searched: Make, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_plan(searched(*overrides))


def test_a_search_without_a_space_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    with pytest.raises(ValueError, match="the study has no space to search"):
        load(str(path), ["search.num_samples=3"])


def test_the_last_trials_run_longest_first(searched: Make) -> None:
    """Once three per slot are left; until then in the plan's order. Trials without a similar one
    count as the longest."""
    pretend = Pretend(make_plan(searched("seeds=[0,1]", space="")), steady(lambda params: 0.5))
    assert [trial.row for trial in pretend.agenda.trials] == ["float32", "lns matmul"] * 2
    pretend.agenda.tail = 3
    for trial, seconds in zip(pretend.plan.trials[:2], (5.0, 1.0), strict=True):
        like = TrialState(
            id=trial.row,
            row=trial.row,
            seed=9,
            config=trial.config.to_dict(),
            took={1: seconds, 2: seconds, 3: seconds},
        )
        like.reports = {epoch: {"time": epoch * seconds, "metrics": {}} for epoch in (1, 2, 3)}
        pretend.state.known[trial.row] = like
    assert [trial.row for trial in iter(pretend.agenda.next, None)] == [
        "float32",
        "float32",
        "lns matmul",
        "lns matmul",
    ]
    again = Pretend(pretend.plan, steady(lambda params: 0.5))
    again.agenda.tail = 4
    again.state.known["lns matmul"] = pretend.state.known["lns matmul"]
    assert [trial.row for trial in iter(again.agenda.next, None)] == [
        "float32",
        "float32",
        "lns matmul",
        "lns matmul",
    ]


@pytest.mark.parametrize(
    ("options", "done", "ends"),
    [
        (["search.algorithm=tpe"], 5, "stopped"),
        (["search.algorithm=tpe"], 12, "finished"),
        (["search.algorithm=random"], 12, "finished"),
        (["search.confirm=1", "search.confirm_seeds=[7]"], 12, "stopped"),
    ],
)
def test_a_retry_of_failed_trials_does_not_end_a_search_that_was_broken_off(
    searched: Make, options: list[str], done: int, ends: str
) -> None:
    plan = make_plan(searched(*options))
    begun = Pretend(plan, steady(bowl))
    begun.run(at_most=done)
    again = adopt(plan, begun.state)
    assert _describe_end(again, begun.state, Decision(), broken_off=True) == ends
    assert _describe_end(again, begun.state, Decision(), broken_off=False) == "finished"
