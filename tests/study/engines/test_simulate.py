"""The simulator compared with arithmetic, with the scheduler's promises, and with a ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from study.cli import main
from study.config import SearchConfig, StudyConfig
from study.config.compose import load
from study.engines.early_stopping import Scheduler
from study.engines.simulate import recorded_errors, recorded_seconds, simulate, synthetic
from study.ledger.state import fold
from study.plan.plan import make_plan
from tests.study.conftest import TINY, made_up_events, write_ledger

Make = Callable[..., StudyConfig]


@pytest.fixture
def searched(tmp_path: Path) -> Make:
    """A study of 40 sampled trials of 9 epochs."""
    path = tmp_path / "searched.yaml"
    path.write_text(TINY + "\nspace: {optimizer.lr: {loguniform: [0.001, 1.0]}}\n")
    common = [
        f"storage={tmp_path}",
        "rows=[]",
        "baseline=null",
        "search.num_samples=40",
        "trial.epochs=9",
    ]
    return lambda *overrides: load(str(path), [*common, *overrides])


@pytest.mark.parametrize(("slots", "rounds"), [(1, 40), (7, 6), (40, 1), (1000, 1)])
def test_without_a_scheduler_it_is_arithmetic(searched: Make, slots: int, rounds: int) -> None:
    plan = make_plan(searched())
    found = simulate(plan, slots, lambda trial: 2.0, lambda trial, epoch: 0.5, start_seconds=1.0)
    assert found.makespan == pytest.approx(rounds * (9 * 2.0 + 1.0))
    assert (found.epochs, found.saved, found.early) == (360, 0, 0)
    assert found.idle == pytest.approx(1 - 360 * 2.0 / (slots * found.makespan))
    assert found.requests == pytest.approx(200 / found.makespan)


def test_max_concurrent_bounds_the_trials_at_a_time(searched: Make) -> None:
    plan = make_plan(searched("max_concurrent=4"))
    found = simulate(plan, 8, lambda trial: 2.0, lambda trial, epoch: 0.5, start_seconds=0.0)
    assert found.makespan == pytest.approx(10 * 9 * 2.0)
    assert found.idle == pytest.approx(0.5)


def test_asha_saves_epochs_and_keeps_the_best(searched: Make) -> None:
    """Curves that never cross: the best is never behind, so it must not be ended early."""
    plan = make_plan(searched("search.scheduler=asha"))
    place = {trial.id: number for number, trial in enumerate(plan.trials)}
    last: dict[str, int] = {}

    def error(trial: object, epoch: int) -> float:
        key = trial.id  # type: ignore[attr-defined]
        last[key] = epoch
        return (1 + place[key]) / (100 * epoch)

    found = simulate(plan, 4, lambda trial: 1.0, error)
    assert found.early > 20
    assert found.saved + found.epochs == 360
    assert last[plan.trials[0].id] == 9


def test_more_slots_are_never_slower(searched: Make) -> None:
    plan = make_plan(searched("search.scheduler=asha"))
    times = [
        simulate(
            plan, slots, lambda trial: 1.0, lambda trial, epoch: synthetic(trial.id, epoch)
        ).makespan
        for slots in (1, 4, 16, 64)
    ]
    assert times == sorted(times, reverse=True)


def test_recorded_times_and_curves_are_used(searched: Make) -> None:
    study = searched("search.num_samples=3")
    plan = make_plan(study)
    events = made_up_events(study)
    state = fold(events)
    seconds, error = (
        recorded_seconds(plan, [state], 77.0),
        recorded_errors([state], "validation/error"),
    )
    assert seconds(plan.trials[0]) == pytest.approx(1.0)  # made-up epochs are a second apart
    assert [error(plan.trials[0], epoch) for epoch in (1, 2)] == [0.2, 0.1]
    other = make_plan(searched("search.num_samples=3", "trial.model.hidden=[8]"))
    assert recorded_seconds(other, [state], 77.0)(other.trials[0]) == 77.0
    assert error(other.trials[0], 1) == synthetic(other.trials[0].id, 1)


def test_the_simulation_of_a_real_run(searched: Make) -> None:
    """Three trials, one after the other, as in the made-up ledger: 3 x 9 epochs of a second."""
    study = searched("search.num_samples=3")
    state = fold(made_up_events(study))
    plan = make_plan(study)
    found = simulate(
        plan,
        1,
        recorded_seconds(plan, [state], 1.0),
        recorded_errors([state], "validation/error"),
        start_seconds=0.0,
    )
    assert found.makespan == pytest.approx(sum(trial.seconds for trial in state.trials))


def test_a_study_that_there_is_is_simulated_by_its_name_and_storage(
    searched: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = searched("name=there")
    write_ledger(study, made_up_events(study))
    for where in (["there", "--storage", str(tmp_path)], [str(study.folder)]):
        assert main(["plan", *where, "--slots", "30"]) == 0
        assert capsys.readouterr().out.startswith("there: 40 trials\n")
    there = ["--slots", "--storage", str(tmp_path)]
    assert main(["plan", "there", "search.num_samples=20", *there]) == 0
    assert capsys.readouterr().out.startswith("there: 20 trials\n")
    assert main(["plan", "table", "trial.data.name=digits", *there]) == 0
    assert capsys.readouterr().out.startswith("table: 12 trials\n")
    assert main(["plan", "nowhere", *there]) == 2


def test_the_command_tells_the_utilisation(
    searched: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 trials of 9 epochs of 10 s, without gaps, on 30 slots: two rounds, the second with ten."""
    assert (
        main(
            [
                "plan",
                str(tmp_path / "searched.yaml"),
                "search.num_samples=40",
                "rows=[]",
                "baseline=null",
                "trial.epochs=9",
                f"storage={tmp_path}",
                "--slots",
                "30",
            ]
        )
        == 0
    )
    heading, told = capsys.readouterr().out.splitlines()[1:]
    assert heading.split()[:3] == ["slots", "makespan", "utilisation"]
    assert told.split()[:5] == ["30", "3", "min", "67", "%"]


@pytest.mark.parametrize("name", ["asha", "median"])
def test_trials_of_other_data_are_not_ranked_with_each_other(name: str) -> None:
    """Figures on the harder set are all worse, which says nothing about its trials."""
    search = SearchConfig(scheduler=name, objectives={"figure": "min"}, reduction_factor=2)

    def ended(figures: dict[str, float]) -> set[str]:
        scheduler = Scheduler(search, 8, lambda trial: trial[0])
        found: set[str] = set()
        for epoch in range(1, 8):
            for trial in sorted(figures.keys() - found):
                if scheduler.ends(trial, epoch, {"figure": figures[trial]}):
                    found.add(trial)
        return found

    easy, hard = (
        {f"{data}{n}": base + n / 10 for n in range(6)} for data, base in (("e", 0.0), ("h", 2.0))
    )
    assert ended(easy | hard) == ended(easy) | ended(hard)
    assert ended(hard)


def test_a_trial_has_the_same_bracket_in_each_run() -> None:
    """HyperBand draws it; a continued study must not draw another."""
    search = SearchConfig(scheduler="hyperband", objectives={"figure": "min"}, reduction_factor=2)

    def ends() -> list[int]:
        scheduler = Scheduler(search, 16)
        return [
            next(
                (epoch for epoch in range(1, 16) if scheduler.ends(trial, epoch, {"figure": n})), 16
            )
            for n, trial in enumerate(f"trial {n}" for n in range(40))
        ]

    first = ends()
    np.random.random()
    assert ends() == first
    assert len(set(first)) > 2
    np.random.seed(5)
    one = np.random.random()
    np.random.seed(5)
    ends()
    assert np.random.random() == one


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("name", ["asha", "median"])
def test_trials_that_diverged_neither_warn_nor_save_a_bad_one(name: str, mode: str) -> None:
    sign = 1.0 if mode == "min" else -1.0
    scheduler = Scheduler(SearchConfig(scheduler=name, objectives={"figure": mode}), 9)
    values = {"a": math.nan, "b": math.inf, "c": math.inf, "d": 0.1, "e": 0.2, "f": 0.15, "g": 5.0}
    ends: dict[str, int] = {}
    for trial, value in values.items():
        for epoch in range(1, 10):
            if scheduler.ends(trial, epoch, {"figure": sign * value}):
                break
        ends[trial] = epoch
        scheduler.note_end(trial, epoch, {"figure": sign * value})
    assert {trial for trial, epoch in ends.items() if epoch == 1} == {"a", "b", "c", "g"}
    assert ends["d"] == 9
