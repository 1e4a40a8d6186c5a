"""One contract, two engines: the same studies give the same trials, figures, weights and ledgers
with this machine's processes and with Ray Tune. Tests with the fixture ``both`` check more of
it."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

import study as public
from study.config import StudyConfig
from study.errors import UserError
from study.ledger.events import Event
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED
from study.lifecycle import Outcome
from tests.study.engines.conftest import Tiny, results, run
from tests.study.sleeping import executor

pytestmark = pytest.mark.slow

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""
LOOP = """
def train(context):
    for epoch in range(1, 4):
        context.report({"validation/error": 1 / epoch, "epoch": epoch})
"""
STUDIES = {
    "rows": [],
    "gang": [
        "rows=[{label: two, overrides: {workers: 2, precision.format: lns12}}]",
        "baseline=null",
    ],
    "pipeline": [
        "rows=[{label: two, overrides: {workers: 2, layout.pp: 2, layout.micro_batches: 2}}]",
        "baseline=null",
    ],
    "search": [
        "rows=[{label: a}]",
        "baseline=null",
        "space={optimizer.lr: {loguniform: [0.001, 1.0]}}",
        "search={num_samples: 5, algorithm: tpe}",
        "max_concurrent=1",
    ],
    "population": [
        "rows=[{label: a}]",
        "baseline=null",
        "space={optimizer.lr: {loguniform: [0.001, 1.0]}}",
        "search={num_samples: 4, scheduler: pbt, perturbation_interval: 1}",
    ],
}


def weights(outcome: Outcome) -> dict[str, str]:
    """SHA-256 of each trial's last weights."""
    found = {}
    for trial in outcome.state.trials:
        if places := trial.checkpoints_left():
            (file,) = Path(places[0]).glob("*.safetensors")
            found[trial.id] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def course(study: StudyConfig) -> dict[str, list[tuple[str, Any]]]:
    """The ledger's content for each trial, in order, without times and places."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for event in read_ledger(study.folder):
        if "trial" in event:
            found.setdefault(event["trial"], []).append((event["event"], event.get("epoch")))
    return found


@pytest.mark.parametrize("name", STUDIES)
def test_both_engines_train_the_same(
    name: str, tiny: Tiny, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Ray Tune a gang is started by Ray Train, then forked."""
    found, gangs, fits = [], name in ("gang", "pipeline"), list[tune.Tuner]()
    fit = tune.Tuner.fit
    monkeypatch.setattr(tune.Tuner, "fit", lambda tuner: fits.append(tuner) or fit(tuner))
    ways = [("local", "auto"), ("ray", "forked"), *([("ray", "train")] if gangs else [])]
    for engine, gang in ways:
        study = tiny(f"{name} {engine} {gang}", f"engine={engine}", f"gang={gang}", *STUDIES[name])
        outcome, _ = run(study)
        assert all(trial.status == FINISHED for trial in outcome.state.trials), outcome.state
        assert weights(outcome)
        actors = [bool(re.fullmatch("[0-9a-f]{32}", t.actor)) for t in outcome.state.trials]
        assert set(actors) == {engine == "ray"}
        by_ray_train = [*study.folder.rglob("checkpoint_manager_snapshot.json")]  # its controller's
        assert len(by_ray_train) == (len(outcome.state.trials) if gang == "train" else 0)
        found.append((results(outcome.state), weights(outcome), course(study)))
    assert all(each == found[0] for each in found)
    assert len(fits) == len(found) - 1


def test_the_users_code_trains_the_same(tiny: Tiny, ray_session: None, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "loop.py").write_text(LOOP)
    net = f"{{model.name: '{tmp_path}/net.py:net', model.hidden: [512]}}"
    rows = (
        f"rows=[{{label: net, overrides: {net}}},"
        f" {{label: loop, overrides: {{trainable.name: '{tmp_path}/loop.py:train'}}}}]"
    )
    found = {}
    for engine in ("local", "ray"):
        outcome, _ = run(tiny(f"own {engine}", f"engine={engine}", rows, "baseline=null"))
        assert all(trial.status == FINISHED for trial in outcome.state.trials), outcome.state
        found[engine] = results(outcome.state)
    assert found["local"] == found["ray"]


SLEEPERS = ["rows=[{label: a}]", "baseline=null", "trial.epochs=1", "trial.optimizer.lr=2.0"]


def test_somebody_elses_task_starts_when_the_next_trial_ends(tiny: Tiny, ray_session: None) -> None:
    """A study that uses all CPUs releases some before its last trial has ended."""

    @ray.remote(num_cpus=1)
    def task() -> float:
        return time.time()

    asked: list[Any] = []

    def ask(event: Event) -> None:
        if event["event"] == "started" and not asked:
            asked.append(task.remote())

    study = tiny("shared", "engine=ray", f"seeds={list(range(12))}", *SLEEPERS)
    with executor():
        outcome, view = run(study, ask)
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    began = ray.get(asked[0], timeout=20)
    ends = [event["time"] for event in view.events if event["event"] == "finished"]
    assert sum(end < began for end in ends) <= 4
    assert len([event for event in view.events if event["event"] == "restarted"]) == 0


def test_a_study_is_a_tuner_for_who_knows_ray_tune(tiny: Tiny, ray_session: None) -> None:
    """They add callbacks, and get a ResultGrid; otherwise the study is unchanged."""
    seen: list[tuple[str, str]] = []

    class Watch(tune.Callback):  # type: ignore[misc]
        def on_trial_complete(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            seen.append((trial.trial_id, str(trial)))

    study = tiny("a tuner", "seeds=[0,1]")
    tuner = public.tuner(study, run_config=tune.RunConfig(callbacks=[Watch()], verbose=0))
    assert isinstance(tuner, tune.Tuner)
    grid = tuner.fit()
    state = public.load(study.folder).state
    assert len(grid) == len(seen) == 4
    assert {name for _, name in seen} == {trial.id for trial in state.trials}
    best = grid.get_best_result("validation/error", "min")
    known = state.known[best.config["trial"]]
    assert best.metrics["validation/error"] == known.metric("validation/error")[3]
    assert best.config["row"] == known.row
    again = public.tuner(study).fit()  # nothing is left to run
    assert again.get_best_result().config == best.config
    frame = again.get_dataframe()
    assert list(frame["config/seed"]) == [trial.seed for trial in state.trials]
    assert again.num_errors == 0
    with pytest.raises(UserError, match=r"run_config.stop=.*: a study decides that itself"):
        public.tuner(study, run_config=tune.RunConfig(stop={"epoch": 1}))
