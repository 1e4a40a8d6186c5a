"""Whole studies with real Ray: to the end, resumed, with a killed process, data-parallel."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from study.config import StudyConfig
from study.engine import Outcome, report_study, run_study
from study.ledger import Event, read_ledger
from study.state import FAILED, FINISHED, TrialState, fold
from tests.study.conftest import SilentView

Tiny = Callable[..., StudyConfig]
TIMED = {"samples_per_second"}


def run(study: StudyConfig, react: Callable[[Event], None] = lambda event: None) -> tuple[Outcome, SilentView]:
    view = SilentView(react)
    outcome = run_study(study, view, lambda line: None)
    return outcome, view


def results(state: Any) -> dict[str, Any]:
    """Everything a trial computed, by trial id: metrics of every epoch and the test, timings left out."""
    return {
        trial.id: [
            {name: value for name, value in event["metrics"].items() if name not in TIMED}
            for _, event in sorted(trial.reports.items())
        ]
        + [trial.test]
        for trial in state.trials
    }


def weights(trial: TrialState) -> dict[str, torch.Tensor]:
    """The tensors of a trial's last checkpoint."""
    path = trial.checkpoints_left()[0]
    (file,) = Path(path).glob("*.safetensors")
    return load_file(file)


def count_reports(study: StudyConfig) -> dict[tuple[str, int], int]:
    """Report lines in the ledger's file itself, by trial and epoch."""
    counts: dict[tuple[str, int], int] = {}
    import json

    for line in (study.folder / "ledger.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "report":
            key = (event["trial"], event["epoch"])
            counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.fixture(scope="module")
def undisturbed(ray_session: None, tmp_path_factory: pytest.TempPathFactory, storage: Path) -> tuple[StudyConfig, Outcome]:
    """The tiny study, run once without trouble."""
    from study.compose import load
    from tests.study.conftest import TINY

    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    study = load(str(path), ["name=undisturbed", f"storage={storage}"])
    outcome, view = run(study)
    assert [event["event"] for event in view.events if event["event"] == "finished"] == ["finished"] * 2
    return study, outcome


def test_a_study_runs_to_its_report(undisturbed: tuple[StudyConfig, Outcome]) -> None:
    study, outcome = undisturbed
    assert all(trial.status == FINISHED and trial.epoch == 3 for trial in outcome.state.trials)
    assert outcome.tracking_error == ""
    assert (outcome.report / "report.html").exists()
    assert set(count_reports(study).values()) == {1}
    assert outcome.state.outcome == "finished"


def test_a_second_run_trains_nothing_again(undisturbed: tuple[StudyConfig, Outcome]) -> None:
    study, first = undisturbed
    said: list[str] = []
    view = SilentView()
    again = run_study(study, view, said.append)
    assert [event["event"] for event in view.events] == ["ended"]
    assert results(again.state) == results(first.state)
    assert said[0].startswith("Data: scikit-learn's handwritten digits")
    assert "2 of 2 trials are finished" in said[1]


def test_mlflow_is_closed_where_the_report_cannot_be_written(
    undisturbed: tuple[StudyConfig, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("study.engine.write_report", fail)
    monkeypatch.setattr("study.engine.Tracker.close", lambda self, report: closed.append(report) or "")
    with pytest.raises(OSError, match="disk full"):
        run(undisturbed[0])
    assert closed == [None]


def test_report_makes_the_report_again(undisturbed: tuple[StudyConfig, Outcome]) -> None:
    study, _ = undisturbed
    page = study.folder / "report" / "report.html"
    page.unlink()
    outcome = report_study(study.folder, lambda line: None)
    assert page.exists()
    assert outcome.tracking_error == ""


def test_a_killed_process_loses_no_epoch_and_ends_bit_equal(undisturbed: tuple[StudyConfig, Outcome], tiny: Tiny) -> None:
    study, killed = tiny("killed"), []

    def kill_once(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not killed:
            killed.append(event["trial"])
            os.kill(event["pid"], signal.SIGKILL)

    outcome, view = run(study, kill_once)
    assert [event["trial"] for event in view.events if event["event"] == "restarted"] == killed
    assert set(count_reports(study).values()) == {1}
    assert results(outcome.state) == results(undisturbed[1].state)
    for ours, theirs in zip(outcome.state.trials, undisturbed[1].state.trials, strict=True):
        one, other = weights(ours), weights(theirs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_interrupted_study_continues_from_its_checkpoints(undisturbed: tuple[StudyConfig, Outcome], tiny: Tiny) -> None:
    study = tiny("interrupted")

    def interrupt(event: Event) -> None:
        if event["event"] == "checkpoint" and event["epoch"] == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt)
    before = fold(read_ledger(study.folder))
    assert before.outcome == "interrupted"
    outcome, view = run(study)
    repeated = [event["epoch"] for event in view.events if event["event"] == "report" and event["trial"] in before.known]
    assert results(outcome.state) == results(undisturbed[1].state)
    assert len(repeated) < 6
    assert set(count_reports(study).values()) == {1}


def interrupt_at(epoch: int) -> Callable[[Event], None]:
    """Ctrl-C once a trial's checkpoint of ``epoch`` is on disk."""

    def react(event: Event) -> None:
        if event["event"] == "checkpoint" and event["epoch"] == epoch:
            signal.raise_signal(signal.SIGINT)

    return react


@pytest.mark.parametrize("damaged", [1, 99], ids=["newest", "every"])
def test_a_damaged_checkpoint_is_passed_over(undisturbed: tuple[StudyConfig, Outcome], tiny: Tiny, damaged: int) -> None:
    study = tiny(f"damaged {damaged}")
    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt_at(2))
    # Both trials may have come so far before the interrupt took hold; one of them is damaged.
    trial, *_ = [trial for trial in fold(read_ledger(study.folder)).trials if trial.epoch >= 2 and trial.status != FINISHED]
    for path in trial.checkpoints_left()[:damaged]:
        (file,) = Path(path).glob("*.safetensors")
        file.write_bytes(file.read_bytes() + b"x")
    outcome, view = run(study)
    assert results(outcome.state) == results(undisturbed[1].state)
    (said,) = [event for event in view.events if event["event"] == "damaged"]
    assert said["trial"] == trial.id
    assert "digest" in said["error"]
    assert not [event for event in view.events if event["event"] == "restarted"]


def test_what_cannot_work_fails_at_once_with_its_message(ray_session: None, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("study.engine.preflight", lambda plan: [])
    rows = "[{label: bad, overrides: {data.train_size: 99999}}, {label: good}]"
    outcome, view = run(tiny("refused", f"rows={rows}", "baseline=null"))
    bad, good = outcome.state.trials
    assert (bad.status, good.status) == (FAILED, FINISHED)
    assert bad.error.startswith("data.train_size=99999: ")
    assert not [event for event in view.events if event["event"] == "restarted"]
    assert not bad.checkpoints


def test_a_trial_that_cannot_finish_is_reported_not_hidden(ray_session: None, tiny: Tiny) -> None:
    study = tiny("hopeless", "max_failures=1", "trial.epochs=60")
    victim: list[str] = []

    def kill_always(event: Event) -> None:
        if event["event"] == "report":
            victim[:] = victim or [event["trial"]]
            if event["trial"] == victim[0]:
                os.kill(event["pid"], signal.SIGKILL)

    outcome, _ = run(study, kill_always)
    dead, alive = sorted(outcome.state.trials, key=lambda trial: trial.id != victim[0])
    assert alive.status == FINISHED
    assert dead.status == FAILED
    assert outcome.failed == 1
    assert "FAILED" in (outcome.report / "report.md").read_text()


@pytest.mark.slow
def test_two_workers_train_the_same_trial(ray_session: None, tiny: Tiny) -> None:
    study = tiny("gang", "trial.workers=2", "rows=[{label: float32}]", "trial.precision.format=float32")
    outcome, _ = run(study)
    single, _ = run(tiny("single", "rows=[{label: float32}]", "trial.precision.format=float32"))
    (gang_trial,), (trial,) = outcome.state.trials, single.state.trials
    assert (gang_trial.status, gang_trial.epoch) == (FINISHED, 3)
    assert gang_trial.test["test/error"] == pytest.approx(trial.test["test/error"], abs=0.02)
    assert set(count_reports(study).values()) == {1}
