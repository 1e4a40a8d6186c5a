"""A diverged trial is never chosen, whatever figures it has besides its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from study.api import Study, run
from study.config import SearchConfig, StudyConfig
from study.config.compose import load
from study.engines.early_stopping import Scheduler, make_scheduler
from study.ledger.events import Event
from study.ledger.state import StudyState, fold
from study.plan.plan import make_plan
from study.plan.trials import Base
from study.report.compare import compare
from study.report.tables import cells, remarks, render_csv, render_text
from study.results.answer import answer
from study.results.configurations import best, condition, configurations, pareto_front
from study.results.statistics import entries
from study.results.summary import summarise
from study.search.optuna_proposer import Proposer
from study.search.racing import Confirmation
from study.views.progress import summary as progress
from tests.study.conftest import TINY, made_up_events, write_ledger
from tests.study.search.conftest import Pretend, steady

Tiny = Callable[..., StudyConfig]
ONE_ROW = ("rows=[]", "baseline=null")
RATES = "space={optimizer.lr: {loguniform: [0.001, 1.0]}}"
GRID = "space={optimizer.lr: {grid: [0.1, 0.2, 1.0]}}"
LOW = {"validation/error": 0.001, "validation/loss": math.nan}
"""Reports of a diverged network if nearly all examples are of the first class."""


def diverging(study: StudyConfig, which: Callable[[dict[str, Any]], bool]) -> list[Event]:
    """A made-up ledger in which some trials have diverged by their last epoch."""
    events = made_up_events(study)
    lost = {trial["id"] for trial in events[0]["trials"] if which(trial)}
    for event in events:
        if event.get("trial") in lost and event["event"] == "report" and event["epoch"] > 1:
            event["metrics"] |= LOW
        if event.get("trial") in lost and event["event"] == "finished":
            event["metrics"] = {"test/error": 0.0012, "test/loss": math.nan}
    return events


def searched_state(tiny: Tiny, *overrides: str) -> StudyState:
    study = tiny("lost", GRID, "search={algorithm: grid}", "seeds=[0,1]", *ONE_ROW, *overrides)
    return fold(diverging(study, lambda trial: trial["params"]["optimizer.lr"] == 1.0))


def test_a_diverged_configuration_is_never_the_best(tiny: Tiny) -> None:
    state = searched_state(tiny)
    objectives = state.config.search.objectives
    found = configurations(state.trials, objectives)
    chosen = best(found, objectives)
    assert chosen is not None
    assert chosen.params["optimizer.lr"] != 1.0
    assert [entry.params["optimizer.lr"] for entry in pareto_front(found, objectives)] == [0.1, 0.2]
    assert [condition(entry) for entry in found] == [
        "finished", "finished", "finished; 2 of 2 diverged",
    ]  # fmt: skip
    assert render_csv(state).splitlines()[-1].endswith("finished; 2 of 2 diverged")
    (row,) = summarise(state).rows
    assert row.params == chosen.params
    assert "AT AN END" not in "".join(
        line for line in remarks(state, summarise(state)) if "is 1," in line
    )
    assert {entry.params["optimizer.lr"] for entry in entries(state)} == {0.1, 0.2}
    assert "2 diverged; best validation/error 6.67 %" in progress(state, running=False)


def test_a_diverged_trial_never_beats_a_pruned_one(tiny: Tiny) -> None:
    """Also where it alone has trained to the end."""
    study = tiny("pruned", GRID, "search={algorithm: grid, scheduler: asha}", *ONE_ROW)
    events = diverging(study, lambda trial: trial["params"]["optimizer.lr"] == 1.0)
    lost = {each["id"] for each in events[0]["trials"] if each["params"]["optimizer.lr"] == 1.0}
    state = fold(
        {"event": "stopped", "trial": event["trial"], "by": "asha", "time": event["time"]}
        if event["event"] == "finished" and event["trial"] not in lost
        else event
        for event in events
    )
    found = configurations(state.trials, state.config.search.objectives)
    assert [condition(entry) for entry in found][-1] == "finished; 1 of 1 diverged"
    assert best(found, state.config.search.objectives) is None
    assert answer(state, summarise(state)) == "No answer: 1 of 3 trials diverged."
    assert "best validation/error 6.67 % (pruned #1, seed 0)" in progress(state, running=False)


def test_the_handle_has_no_diverged_best(tiny: Tiny) -> None:
    study = tiny("lost handle", GRID, "search={algorithm: grid}", *ONE_ROW)
    write_ledger(study, diverging(study, lambda trial: trial["params"]["optimizer.lr"] != 0.2))
    chosen = Study(study.folder).best
    assert chosen is not None
    assert chosen.params["optimizer.lr"] == 0.2


def test_a_diverged_configuration_is_never_feasible(tiny: Tiny) -> None:
    state = searched_state(tiny, "search.constraints={validation/error: '<= 0.01'}")
    search = state.config.search
    found = configurations(state.trials, ["bits"], search.constraints)
    assert best(found, {"bits": "min"}) is None
    assert "all 2 finished configurations violate" in answer(state, summarise(state))


def test_a_search_of_which_all_diverged_says_so(tiny: Tiny) -> None:
    study = tiny("all lost", GRID, "search={algorithm: grid}", *ONE_ROW)
    state = fold(diverging(study, lambda trial: True))
    assert answer(state, summarise(state)) == "No answer: 3 of 3 trials diverged."
    assert "NO FIGURE: all lost" in render_text(state)


def test_a_row_with_a_diverged_seed_says_how_many_and_passes_nothing(tiny: Tiny) -> None:
    study = tiny("lost row", "seeds=[0,1,2]")
    events = diverging(study, lambda trial: trial["row"] == "lns matmul" and trial["seed"] == 1)
    state = fold(events)
    table = summarise(state)
    base, row = table.rows
    assert (base.diverged, row.diverged) == (0, 1)
    assert row.verdict == "fail"
    assert cells(row, table)[2] == "3, 1 diverged"
    (said,) = [line for line in remarks(state, table) if line.startswith("DIVERGED")]
    assert "1 of 6 trials" in said
    assert "(lns matmul: 1 of 3)" in said
    assert answer(state, table) == (
        "Test error of float32: 2.01 ± 0.01 %, 3 seeds."
        " Not compared, because trials diverged: lns matmul (1 of 3)."
    )
    whole = fold(made_up_events(study))
    assert compare(whole, state).diverged == ["lns matmul"]


def test_a_large_finite_metric_has_not_diverged(tiny: Tiny) -> None:
    study = tiny("large", "metric=validation/loss")
    events = made_up_events(study)
    for event in events:
        if event["event"] == "report":
            event["metrics"]["validation/loss"] = 1.2e308
    assert "DIVERGED" not in render_text(fold(events))


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median"])
def test_a_scheduler_ends_no_sound_trial_for_a_diverged_one(scheduler: str) -> None:
    search = SearchConfig(scheduler=scheduler, objectives={"validation/error": "min"})
    alone, beside = Scheduler(search, 9), Scheduler(search, 9)
    for number in range(8):
        assert beside.ends(f"lost {number}", 1, LOW)
        beside.note_end(f"lost {number}", 1, LOW)
    sound = {"validation/error": 0.12, "validation/loss": 0.4}
    for number in range(4):
        for epoch in range(1, 9):
            found = [each.ends(f"{number}", epoch, sound) for each in (alone, beside)]
            assert found == [False, False], (number, epoch)


def test_a_continued_scheduler_ranks_diverged_trials_last(tiny: Tiny) -> None:
    study = tiny(
        "told again", GRID, "search={algorithm: grid, scheduler: asha, reduction_factor: 2}",
        *ONE_ROW,
    )  # fmt: skip
    events = diverging(study, lambda trial: trial["params"]["optimizer.lr"] != 0.2)
    (sound,) = [each for each in events[0]["trials"] if each["params"]["optimizer.lr"] == 0.2]
    state = fold(event for event in events if event.get("trial") != sound["id"])
    scheduler = make_scheduler(study.search, state)
    assert scheduler is not None
    assert not scheduler.ends(sound["id"], 2, {"validation/error": 0.09, "validation/loss": 0.4})


def test_a_sampler_is_told_that_a_diverged_trial_failed(tiny: Tiny) -> None:
    study = tiny("told", RATES, "search={algorithm: tpe, num_samples: 6}", *ONE_ROW)
    lossy = Lossy(make_plan(study), steady(lambda params: 0.5))
    lossy.run()
    (proposer,) = lossy.agenda._proposers
    assert isinstance(proposer, Proposer)
    proposer.learn(lossy.state)
    told = [trial.state.name for trial in proposer._study.trials]
    assert "FAIL" in told
    lost = [trial for trial in proposer._study.trials if trial.value == LOW["validation/error"]]
    assert not lost


class Lossy(Pretend):
    """The second trial of all diverges."""

    def _append(self, event: dict[str, Any]) -> None:
        ended = sum(past["event"] == "finished" for past in self.events)
        if event["event"] == "report" and ended == 1:
            event = event | {"metrics": LOW}
        super()._append(event)


@pytest.mark.parametrize("scheduler", ["halving", "pbt"])
def test_a_diverged_member_is_not_promoted(tiny: Tiny, scheduler: str) -> None:
    search = f"search={{num_samples: 6, scheduler: {scheduler}, perturbation_interval: 1}}"
    study = tiny("members", RATES, search, *ONE_ROW)
    lossy = Lossy(make_plan(study), steady(lambda params: 0.5))
    done = lossy.run()
    rate = done[1].params["optimizer.lr"]
    assert len(done) > 6
    assert rate not in [trial.params["optimizer.lr"] for trial in done[6:]]


def test_a_diverged_configuration_is_in_no_race(tiny: Tiny) -> None:
    search = "search={num_samples: 3, confirm: 2, confirm_seeds: [101, 102]}"
    study = tiny("race", RATES, search, "seeds=[0,1]", *ONE_ROW)
    plan = make_plan(study)
    numbers = sorted({trial.number for trial in plan.trials if trial.number is not None})
    state = fold(diverging(study, lambda trial: trial["number"] == numbers[1]))
    race = Confirmation(Base(study, plan.rows[0]), plan.rows[0].label)
    assert numbers[1] not in {trial.number for trial in race.next(state)}


UNBALANCED = """
import torch


def rare(train):
    x = torch.linspace(-1, 1, 300 if train else 100)[:, None].repeat(1, 3)
    return x, (torch.arange(len(x)) % 8 == 0).long()
"""


@pytest.mark.parametrize(
    "search", ["{algorithm: grid}", "{algorithm: tpe, num_samples: 3, scheduler: asha}"]
)
def test_a_rate_at_which_all_diverges_is_not_found(tmp_path: Path, search: str) -> None:
    """With NaN outputs the first class is predicted, which is right for seven of eight examples."""
    (tmp_path / "rare.py").write_text(UNBALANCED)
    (tmp_path / "rare.yaml").write_text(TINY)
    study = load(
        str(tmp_path / "rare.yaml"),
        [
            "name=rare", f"storage={tmp_path}/store", "tracking_uri=none",
            f"trial.data={{name: '{tmp_path}/rare.py:rare', validation_size: 100}}",
            "space={optimizer.lr: {choice: [0.00001, 1.0e+30, 1.0e+38]}}", f"search={search}",
            *ONE_ROW,
        ],
    )  # fmt: skip
    found = run(study)
    assert found.best is not None
    assert found.best.params["optimizer.lr"] == 0.00001
    assert "DIVERGED: 2 of 3 trials" in render_text(found.state)
