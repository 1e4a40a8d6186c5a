"""Studies with a user's own training loop: planned, checked, searched with ASHA, killed and
continued, and refused with a reason before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.config.compose import change, load, override_trial
from study.engines.preflight import preflight
from study.ledger.events import Event
from study.ledger.log import FILE, read_ledger
from study.ledger.state import FAILED, FINISHED, STOPPED, fold
from study.lifecycle import run_study
from study.ops.repair.ledger import repair
from study.plan.checkpoints import check_checkpoints
from study.plan.estimate import describe_plan
from study.plan.plan import make_plan
from study.report.tables import facts, render_text
from tests.study.conftest import SilentView
from tests.study.engines.conftest import count_reports, killing_once, results, run
from tests.trainers.user_loops import LOOPS

STUDY = """
name: loops
trainable: loop.py:descend
trial:
  trainable: {args: {factor: 0.5}}
  epochs: 4
baseline: half
rows:
  - {label: half}
  - {label: quarter, overrides: {trainable.args.factor: 0.25}}
cpus: 2
tracking_uri: none
"""

Loops = Callable[..., StudyConfig]


@pytest.fixture
def loops(tmp_path: Path) -> Loops:
    """The study with changes; its loop and its storage are in the test's folder."""
    (tmp_path / "loops.yaml").write_text(STUDY)
    (tmp_path / "loop.py").write_text(LOOPS)
    return lambda *changes: load(str(tmp_path / "loops.yaml"), [f"storage={tmp_path}", *changes])


def named(function: str, tmp_path: Path) -> str:
    return f"trainable={tmp_path / 'loop.py'}:{function}"


def test_the_short_form_is_the_trials_key_and_other_trials_keep_their_ids(
    loops: Loops, tmp_path: Path
) -> None:
    study = loops()
    assert study.trial.trainable.name == f"{tmp_path / 'loop.py'}:descend"
    assert study.trial.trainable.args == {"factor": 0.5}
    assert loops(named("endless", tmp_path)).trial.trainable.name.endswith(":endless")
    plan = make_plan(study)
    assert [trial.config.trainable.args["factor"] for trial in plan.trials] == [0.5, 0.25]
    (line,) = (line for line in describe_plan(plan) if line.startswith("Loop: "))
    assert f"{tmp_path / 'loop.py'}:descend (code {plan.trials[0].config.trainable.code})" in line
    with pytest.raises(ValueError, match="unknown key"):
        override_trial(study.trial.to_dict(), {"trainable.nothing": 1})


def test_a_study_runs_to_its_table_without_anybody_else_s_data(loops: Loops) -> None:
    said: list[str] = []
    study = loops()
    outcome = run_study(study, SilentView(), said.append)
    assert not any(line.startswith("Data") for line in said)
    assert outcome.state.plan["data"] == []
    for trial, factor in zip(outcome.state.trials, (0.5, 0.25), strict=True):
        assert trial.status == FINISHED
        assert trial.metric("validation/error") == {n: factor**n for n in (1, 2, 3, 4)}
        assert trial.metric("plain") == dict.fromkeys((1, 2, 3, 4), 1.0)
        assert trial.test == {"test/error": factor**4, "accuracy": 0.25}
    assert "6.25" in render_text(outcome.state)
    assert facts(outcome.state)["Data"] == "what the study's own code takes"
    assert all(whole for _, whole in check_checkpoints(study.folder))
    kept = Path(outcome.state.trials[0].checkpoints_left()[0])
    (kept / "dict.pt").write_bytes(b"")
    broken = [place for place, whole in check_checkpoints(study.folder) if not whole]
    assert broken == [str(kept)]


def test_a_plan_says_which_searched_arguments_are_new(loops: Loops) -> None:
    space = "{trainable.args.facter: {uniform: [0, 1]}, trainable.args.factor: {uniform: [0, 1]}}"
    study = loops(f"space={space}", "search={num_samples: 1}", "rows=[]", "baseline=null")
    said = [line for line in describe_plan(make_plan(study)) if "is searched" in line]
    assert said == [
        "  trainable.args.facter is searched, and trial.trainable.args has no facter, but factor:"
        " is it what the loop reads?"
    ]


def test_a_killed_loop_continues_and_no_epoch_is_counted_twice(loops: Loops) -> None:
    study, killed = loops("trainable.args.seconds=0.1"), list[str]()

    outcome, view = run(study, killing_once(killed))
    assert [event["trial"] for event in view.events if event["event"] == "restarted"] == killed
    assert set(count_reports(study).values()) == {1}
    for trial, factor in zip(outcome.state.trials, (0.5, 0.25), strict=True):
        assert trial.metric("validation/error") == {n: factor**n for n in (1, 2, 3, 4)}


@pytest.mark.slow
def test_an_interrupted_study_goes_on_where_its_loops_were(loops: Loops) -> None:
    study = loops("max_concurrent=1")

    def interrupt(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt)
    begun = [trial for trial in fold(read_ledger(study.folder)).trials if trial.epoch]
    assert begun
    outcome, view = run(study)
    for trial in begun:
        reports = [event for event in view.events if event["event"] == "report"]
        assert {event["epoch"] for event in reports if event["trial"] == trial.id} <= {3, 4}
    assert set(count_reports(study).values()) == {1}
    assert [trial.epoch for trial in outcome.state.trials] == [4, 4]


def test_asha_ends_loops_that_fall_behind(loops: Loops) -> None:
    study = loops(
        "rows=[]",
        "baseline=null",
        "epochs=9",
        "trainable.args.epochs=9",
        "space={trainable.args.factor: {choice: [0.1, 0.9, 0.8, 0.7]}}",
        "search={algorithm: grid, scheduler: asha}",
        "max_concurrent=1",
    )
    outcome, _ = run(study)
    best, *others = outcome.state.trials
    assert (best.status, best.epoch) == (FINISHED, 9)
    assert {trial.status for trial in others} == {STOPPED}
    assert {trial.stopped_by for trial in others} == {"asha"}
    assert {trial.epoch for trial in others} == {1}
    assert outcome.state.outcome == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["report", "finished"])
def test_a_loop_that_returns_early_has_finished_also_in_a_repaired_ledger(
    loops: Loops, lost: str
) -> None:
    study = loops("epochs=50")
    outcome, _ = run(study)
    assert [(trial.status, trial.epoch) for trial in outcome.state.trials] == [(FINISHED, 4)] * 2
    ledger = study.folder / FILE
    lines = ledger.read_bytes().splitlines(keepends=True)
    (place, *_) = (at for at, line in enumerate(lines) if b'"event": "%b"' % lost.encode() in line)
    lines[place] = lines[place].replace(b"validation", b"veneration").replace(b"accu", b"acco")
    ledger.write_bytes(b"".join(lines))
    repair(study.folder, None)
    repaired = fold(read_ledger(study.folder))
    assert repaired.damage == ""
    assert results(repaired) == results(outcome.state)
    _, view = run(study)
    assert [event["event"] for event in view.events] == ["ended"]


@pytest.mark.slow
def test_more_epochs_are_trained_anew(loops: Loops) -> None:
    study = loops("rows=[]", "baseline=null", "epochs=2")
    run(study)
    _, view = run(change(study, ["epochs=3"]))
    assert [event["epoch"] for event in view.events if event["event"] == "report"] == [1, 2, 3]


@pytest.mark.slow
def test_a_changed_loop_is_another_trial_and_is_said_aloud(loops: Loops, tmp_path: Path) -> None:
    said: list[str] = []
    run(loops())
    (tmp_path / "loop.py").write_text(LOOPS.replace('"accuracy": 0.25', '"accuracy": 0.5'))
    outcome = run_study(loops(), SilentView(), said.append)
    assert any("loop.py:descend has changed since the last run" in line for line in said)
    assert len(outcome.state.known) == 4
    assert outcome.state.trials[0].test["accuracy"] == 0.5


@pytest.mark.slow
def test_what_a_loop_does_wrong_is_in_the_ledger(loops: Loops, tmp_path: Path) -> None:
    outcome, _ = run(loops(named("raises", tmp_path)))
    for trial in outcome.state.trials:
        assert (trial.status, trial.restarts) == (FAILED, 0)
        assert "RuntimeError in" in trial.error
        assert "loop.py, line" in trial.error
    outcome, _ = run(
        loops("name=lacks", named("gives", tmp_path), "trainable.args={metrics: '{\"loss\": 1}'}")
    )
    assert "lacks validation/error, by which the study" in outcome.state.trials[0].error


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["{two}"], r"missing a required argument: 'other'"),
        (["{absent}"], r"has no function or class absent"),
        (["trainable=nowhere.py:train"], r"there is no file .*nowhere\.py"),
        (["gang=train"], r"gang=train with trainable\.name=.*use gang=auto"),
        (
            ["{two}", "space={trainable.args.x: {uniform: [0, 1]}}", "search={algorithm: tpe}"],
            r"row 'half': .*missing a required argument",
        ),
        (
            [
                "rows=[]",
                "baseline=null",
                "space={trainable.args.x: {uniform: [0, 1]}}",
                "search={scheduler: halving, num_samples: 4}",
            ],
            r"scheduler=halving with trainable\.name=.*use search\.scheduler=asha",
        ),
    ],
)
def test_a_study_that_cannot_work_is_refused_before_anything_starts(
    loops: Loops, tmp_path: Path, changes: list[str], told: str
) -> None:
    filled = [
        named(text.strip("{}"), tmp_path) if text.startswith("{") else text for text in changes
    ]
    with pytest.raises(ValueError, match=told):
        preflight(make_plan(loops(*filled)))
    assert not (tmp_path / "loops").exists() or not list((tmp_path / "loops").iterdir())


RAYS = """
import os
import tempfile

import torch
from ray.tune import Checkpoint
from trainers import get_checkpoint, report  # of ray.tune before


def objective(config):
    model, start = torch.nn.Linear(1, 1), 0
    with torch.no_grad():
        model.weight.fill_(1.0)
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            saved = torch.load(os.path.join(checkpoint_dir, "checkpoint.pt"))
            model.load_state_dict(saved["model"])
            start = saved["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        with torch.no_grad():
            model.weight.mul_(config["factor"])
        metrics = {"mean_loss": model.weight.item()}
        with tempfile.TemporaryDirectory() as tempdir:
            saved = {"epoch": epoch, "model": model.state_dict()}
            torch.save(saved, os.path.join(tempdir, "checkpoint.pt"))
            report(metrics, checkpoint=Checkpoint.from_directory(tempdir))
"""


@pytest.mark.slow
def test_a_function_of_ray_tunes_runs_but_for_its_import(loops: Loops, tmp_path: Path) -> None:
    """Written like Ray's examples: a searched config, a checkpoint in a temporary folder, ASHA.
    After a kill it continues from its checkpoint."""
    (tmp_path / "rays.py").write_text(RAYS)
    study, killed = (
        loops(
            f"trainable={tmp_path / 'rays.py'}:objective",
            "trial={trainable: {args: {factor: 0.5, epochs: 4}}, epochs: 4}",
            "metric=mean_loss",
            "space={trainable.args.factor: {choice: [0.5, 0.9, 0.7]}}",
            "search={algorithm: grid, scheduler: asha, grace_period: 2}",
            "rows=[]",
            "baseline=null",
            "max_concurrent=1",
        ),
        list[str](),
    )

    outcome, _ = run(study, killing_once(killed))
    assert killed
    assert set(count_reports(study).values()) == {1}
    first, *others = outcome.state.trials
    assert first.metric("mean_loss") == {n: 0.5**n for n in (1, 2, 3, 4)}
    assert {(trial.status, trial.epoch) for trial in others} == {(STOPPED, 2)}
