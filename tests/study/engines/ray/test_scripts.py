"""Tune scripts of the user's own: a study's trials as a trainable, its search as a searcher, and
trials of a script in a ledger."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ray import tune

import study as public
from study.config import StudyConfig
from study.engines.ray.scripts import metrics_of, planned_trial
from study.errors import UserError
from study.ledger.state import FINISHED, STOPPED
from study.plan.plan import make_plan
from tests.study.engines.conftest import Tiny, results, run

ROWS = "rows=[{label: a}, {label: b, overrides: {precision.format: lns12}}]"
ONE = ["rows=[{label: a}]", "baseline=null"]


def test_a_tune_config_is_a_trial_of_the_study(tiny: Tiny) -> None:
    study = tiny("configs", ROWS, "baseline=null", "seeds=[3,4]")
    (first, *_) = make_plan(study).trials
    assert planned_trial(study, {}).id == first.id
    trial = planned_trial(
        study, {"row": "b", "seed": 4, "optimizer": {"lr": 0.25}, "epochs": 1, "trial": "x"}, 7
    )
    assert (trial.row, trial.seed, trial.number) == ("b", 4, 7)
    assert trial.params == {"optimizer.lr": 0.25, "epochs": 1}
    assert trial.config.optimizer.lr == 0.25
    assert trial.config.precision.format == "lns12"
    with pytest.raises(ValueError, match="row='c': no such row; use one of a, b"):
        planned_trial(study, {"row": "c"})
    with pytest.raises(ValueError, match=r"learning_rate"):
        planned_trial(study, {"learning_rate": 0.1})


def test_tunes_own_numbers_are_no_metrics() -> None:
    result = {"epoch": 2, "done": True, "pid": 3, "training_iteration": 2, "error": 0.5, "s": "x"}
    assert metrics_of(result) == {"error": 0.5}


def tuner(
    trainable: Any, space: dict[str, Any], *callbacks: tune.Callback, **config: Any
) -> tune.ResultGrid:
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(**config),
        run_config=tune.RunConfig(callbacks=list(callbacks), verbose=0),
    ).fit()


@pytest.mark.slow
def test_a_script_trains_a_studys_trials_and_its_ledger_has_them(
    tiny: Tiny, ray_session: None
) -> None:
    """Tune's own grid over layouts; the study's trials with the same settings have the same
    figures."""
    mine = public.create(tiny("script", *ONE))
    space = {"precision.format": "lns12", "workers": tune.grid_search([1, 2])}
    grid = tuner(public.tune_trainable(mine.config), space, public.LedgerCallback(mine))
    assert grid.num_errors == 0
    trials = public.load(mine.folder).state.trials
    assert [trial.status for trial in trials] == [FINISHED] * 2
    assert [sorted(trial.reports) for trial in trials] == [[1, 2, 3]] * 2
    assert {trial.params["workers"] for trial in trials} == {1, 2}
    best = grid.get_best_result("validation/error", "min")
    assert best.metrics["validation/error"] == min(t.metric("validation/error")[3] for t in trials)
    of_two = "{precision.format: lns12, workers: 2}"
    rows = (
        "rows=[{label: a, overrides: {precision.format: lns12}},"
        f" {{label: b, overrides: {of_two}}}]"
    )
    outcome, _ = run(tiny("the same", rows, "baseline=null"))
    assert results(public.load(mine.folder).state) == results(outcome.state)
    assert mine.report().is_file()
    again = tuner(  # events that the ledger has are not added again
        public.tune_trainable(mine.config), space | {"workers": 1}, public.LedgerCallback(mine)
    )
    assert again.num_errors == 0
    assert len(public.load(mine.folder).state.trials) == 2


@pytest.mark.slow
def test_a_trial_that_tunes_scheduler_ends_is_stopped_in_the_ledger(
    tiny: Tiny, ray_session: None
) -> None:
    mine = public.create(tiny("ended early", *ONE, "trial.epochs=4"))
    scheduler = tune.schedulers.ASHAScheduler(
        metric="validation/error", mode="min", grace_period=1, reduction_factor=2, max_t=4
    )
    tuner(
        public.tune_trainable(mine.config),
        {"optimizer.lr": tune.grid_search([0.2, 0.000001])},
        public.LedgerCallback(mine),
        scheduler=scheduler,
        max_concurrent_trials=1,
    )
    good, bad = public.load(mine.folder).state.trials
    assert (good.status, good.epoch) == (FINISHED, 4)
    assert (bad.status, bad.epoch) == (STOPPED, 1)


def distance(config: dict[str, Any]) -> dict[str, float]:
    if config["optimizer.lr"] > 0.5:
        raise RuntimeError("too far")
    return {"distance": math.log10(config["optimizer.lr"] / 0.1) ** 2}


@pytest.mark.slow
def test_a_studys_search_feeds_a_trainable_of_the_users(tiny: Tiny, ray_session: None) -> None:
    space = "space={optimizer.lr: {loguniform: [0.001, 1.0]}}"
    search = "search={algorithm: tpe, num_samples: 6}"
    config: StudyConfig = tiny("searched", *ONE, space, search, "metric=distance")
    mine = public.create(config)
    grid = tuner(distance, {}, search_alg=public.StudySearcher(mine), num_samples=-1)
    state = public.load(mine.folder).state
    assert len(grid) == len(state.trials) == 6
    assert state.outcome in ("finished", "failed")
    for trial in state.trials:
        lr = trial.params["optimizer.lr"]
        assert trial.status == ("failed" if lr > 0.5 else FINISHED)
        if trial.status == FINISHED:
            assert trial.metric("distance") == {3: math.log10(lr / 0.1) ** 2}


def test_one_script_at_a_time_records_a_study(tiny: Tiny) -> None:
    mine = public.create(tiny("taken", *ONE))
    first, second = public.LedgerCallback(mine), public.LedgerCallback(mine)
    first.setup()
    with pytest.raises(UserError, match=r"taken"):
        second.setup()
    first.on_experiment_end([])
    second.setup()
    second.on_experiment_end([])
    assert public.load(mine.folder).state.outcome == "finished"  # there were no trials
