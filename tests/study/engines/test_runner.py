"""Whole studies with real Ray: run to the end, resumed, with a killed process, data-parallel."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from study._compat import RAY_JOB
from study.config import StudyConfig
from study.config.compose import change
from study.engines.control import GRACE_VARIABLE, grace_seconds
from study.engines.runner import DOUBLED_SECONDS
from study.errors import UserError
from study.ledger.events import Event
from study.ledger.log import read_ledger
from study.ledger.state import FAILED, FINISHED, STOPPED, TrialState, fold
from study.lifecycle import Outcome, report_study, run_study
from study.report.tables import protocol
from study.tracking.payload import data_of
from study.tracking.writer import connect, sync
from study.tracking.writer_supervisor import Tracker
from tests.study.conftest import SilentView
from tests.study.engines.conftest import Tiny, count_reports, killing_once, results, run, run_tiny
from tests.study.servers import Server
from trainers.checkpoint.manifest import STATE
from trainers.config import TrialConfig
from trainers.training.trainer import Training
from trainers.workers.worker_process import checkpoints_in


def weights(trial: TrialState) -> dict[str, torch.Tensor]:
    """The tensors of a trial's last checkpoint."""
    path = trial.checkpoints_left()[0]
    (file,) = Path(path).glob("*.safetensors")
    return load_file(file)


def workers() -> list[psutil.Process]:
    """Return the worker processes of studies that this process runs, also on its Ray."""

    def is_server(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # a process that has just ended has no command line
            return "fork_server" in " ".join(process.cmdline())
        return False

    return [
        process
        for guard in psutil.Process().children(recursive=True)
        if is_server(guard) and not is_server(guard.parent())
        for server in guard.children()
        for process in server.children()
    ]


LONG = "trial.epochs=40"
"""Enough epochs that a trial does not end before its process is killed."""


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, storage: Path
) -> tuple[StudyConfig, Outcome]:
    return run_tiny(tmp_path_factory.mktemp("a"), "name=undisturbed", f"storage={storage}")


@pytest.fixture(scope="module")
def long_undisturbed(
    tmp_path_factory: pytest.TempPathFactory, storage: Path
) -> tuple[StudyConfig, Outcome]:
    return run_tiny(tmp_path_factory.mktemp("a"), "name=long", f"storage={storage}", LONG)


def test_rows_of_different_sizes_of_data_are_continued_and_extended(tiny: Tiny) -> None:
    rows = (
        "rows=[{label: few, overrides: {data.train_size: 64}}, {label: more, overrides:"
        " {data.train_size: 96}}, {label: all}]"
    )
    study = tiny("sizes of data", rows, "baseline=null", "trial.epochs=1")
    first, _ = run(study)
    again, _ = run(study)
    assert results(again.state) == results(first.state)
    longer, _ = run(change(study, ["trial.epochs=2", "trial.data.validation_size=200"]))
    assert [trial.status for trial in longer.state.trials] == [FINISHED] * 3
    assert {
        trial.row: data_of(longer.state.plan, trial)["train"] for trial in longer.state.trials
    } == {"few": 64, "more": 96, "all": 1300}


def test_data_sets_of_one_name_are_continued_and_logged_each_as_itself(tiny: Tiny) -> None:
    row = "{{label: noise {0}, overrides: {{data.args: {{noise: {0}, examples: 200, test: 40}}}}}}"
    one, other, added = (row.format(noise) for noise in (0.5, 0.1, 0.3))
    size = "trial.data.validation_size=40"
    rows = f"rows=[{one}, {other}]"
    study = tiny("one name", "trial.data.name=mnist1d", rows, size, "baseline=null")
    first, _ = run(study)
    longer, _ = run(change(study, ["trial.epochs=4"]))
    more, _ = run(change(study, [f"rows=[{added}, {other}]"]))
    for outcome in first, longer, more:
        assert [trial.status for trial in outcome.state.trials] == [FINISHED] * 2
        plan = outcome.state.plan
        assert len({entry["files"] for entry in plan["data"]}) == 2
        for trial in outcome.state.trials:
            entry = data_of(plan, trial)
            assert entry is not None
            assert f"'noise': {trial.row.split()[1]}" in entry["source"]
            assert f"mnist1d {entry['args']}: 160 train" in protocol(outcome.state)


def test_a_study_runs_to_its_report(undisturbed: tuple[StudyConfig, Outcome]) -> None:
    study, outcome = undisturbed
    assert all(trial.status == FINISHED and trial.epoch == 3 for trial in outcome.state.trials)
    assert outcome.tracking_error == ""
    assert (outcome.report / "report.html").exists()
    assert set(count_reports(study).values()) == {1}
    assert outcome.state.outcome == "finished"


def test_a_rows_model_comes_back_from_a_real_server(
    undisturbed: tuple[StudyConfig, Outcome],
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every row's model can be downloaded as safetensors and JSON, and its test gives the ledger's
    figures."""
    from mlflow.artifacts import download_artifacts

    study, outcome = undisturbed
    assert sync(study.folder, server.uri, tmp_path, None, lambda message: None) == ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    client = connect(server.uri)
    models = client.search_logged_models([client.get_experiment_by_name(study.name).experiment_id])
    trials = {trial.id: trial for trial in outcome.state.trials}
    assert {model.tags["row"] for model in models} == {trial.row for trial in trials.values()}
    for model in models:
        target = tmp_path / model.model_id
        target.mkdir()
        folder = Path(download_artifacts(f"models:/{model.model_id}", dst_path=str(target)))
        assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}
        trial = trials[model.tags["trial"]]
        training = Training(TrialConfig.from_dict(trial.config))
        training.restore(folder)
        assert training.test() == trial.test
        assert client.get_run(model.source_run_id).data.tags["trial"] == trial.id


def test_a_second_run_trains_nothing_again(undisturbed: tuple[StudyConfig, Outcome]) -> None:
    study, first = undisturbed
    said: list[str] = []
    view = SilentView()
    again = run_study(study, view, said.append)
    assert [event["event"] for event in view.events] == ["ended"]
    assert results(again.state) == results(first.state)
    said = [line for line in said if not line.startswith("Checking")]  # on a busy machine
    assert said[0].startswith("Data: scikit-learn's handwritten digits")
    assert "2 of 2 trials are finished" in said[1]


@pytest.mark.slow
def test_mlflow_is_closed_where_the_report_cannot_be_written(
    undisturbed: tuple[StudyConfig, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    def fail(*_: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("study.lifecycle.write_report", fail)
    close = Tracker.close
    monkeypatch.setattr(
        "study.lifecycle.Tracker.close",
        lambda self, report: closed.append(report) or close(self, report),
    )
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


def test_a_killed_process_loses_no_epoch_and_ends_bit_equal(
    long_undisturbed: tuple[StudyConfig, Outcome], both: Tiny
) -> None:
    study, killed = both("killed", LONG), []

    outcome, view = run(study, killing_once(killed))
    assert [event["trial"] for event in view.events if event["event"] == "restarted"] == killed
    assert set(count_reports(study).values()) == {1}
    assert results(outcome.state) == results(long_undisturbed[1].state)
    for ours, theirs in zip(outcome.state.trials, long_undisturbed[1].state.trials, strict=True):
        one, other = weights(ours), weights(theirs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_packed_trials_share_a_process_whose_death_loses_no_epoch(
    long_undisturbed: tuple[StudyConfig, Outcome], both: Tiny
) -> None:
    study, killed = both("packed", LONG, "executor=packed"), list[str]()
    outcome, view = run(study, killing_once(killed))  # this process hosts all
    assert killed
    assert [event for event in view.events if event["event"] == "restarted"]
    assert set(count_reports(study).values()) == {1}
    assert results(outcome.state) == results(long_undisturbed[1].state)
    assert not workers()


def test_an_interrupted_study_continues_from_its_checkpoints(
    undisturbed: tuple[StudyConfig, Outcome], both: Tiny
) -> None:
    study = both("interrupted")

    def interrupt(event: Event) -> None:
        if event["event"] == "checkpoint" and event["epoch"] == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt)
    before = fold(read_ledger(study.folder))
    assert before.outcome == "interrupted"
    outcome, view = run(study)
    repeated = [
        event["epoch"]
        for event in view.events
        if event["event"] == "report" and event["trial"] in before.known
    ]
    assert results(outcome.state) == results(undisturbed[1].state)
    assert len(repeated) < 6
    assert set(count_reports(study).values()) == {1}


LEFT = ("trial.epochs=14", "checkpoint_every=14")
ALONE, GANG, PACKED, WAITING = (
    ("executor=auto",),
    ("trial.workers=2",),
    ("executor=packed",),
    (
        "search={scheduler: asha, grace_period: 14}",
        "baseline=null",
        "space={optimizer.lr: {grid: [0.1]}}",
    ),
)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(GANG, id="gang", marks=pytest.mark.slow),
        pytest.param(PACKED, id="packed", marks=pytest.mark.slow),
        pytest.param(WAITING, id="asha", marks=pytest.mark.slow),
    ],
)
def test_trials_of_a_study_that_ends_leave_with_a_checkpoint(
    both: Tiny, form: tuple[str, ...]
) -> None:
    """Long before a checkpoint is due, after an epoch on which the ranks of a gang agree, and
    without losing a message: the same command repeats no epoch."""
    study = both(f"left {len(str(form))}", *LEFT, *form)

    def interrupt(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt)
    left = [trial for trial in fold(read_ledger(study.folder)).trials if trial.epoch]
    assert any(4 <= trial.epoch < 14 for trial in left)
    for trial in left:
        (newest, *_) = trial.checkpoints_left()
        assert int(Path(newest).name) == trial.epoch
        assert (Path(newest) / STATE).is_file()
    outcome, _ = run(study)
    straight, _ = run(both(f"straight {len(str(form))}", *LEFT, *form))
    assert results(outcome.state) == results(straight.state)
    assert set(count_reports(study).values()) == {1}
    assert not any("repeated" in event for event in read_ledger(study.folder))


@pytest.mark.parametrize("said", ["0", "again"])
def test_a_study_ends_at_once_if_told_so(
    both: Tiny, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """With a second Ctrl-C, or without grace time."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("Ending: "):
            signal.raise_signal(signal.SIGINT)  # the same notice, sent to the group as well
            time.sleep(DOUBLED_SECONDS)
            signal.raise_signal(signal.SIGINT)

    interrupted = False

    def interrupt(event: Event) -> None:
        nonlocal interrupted
        if event["event"] == "report" and event["epoch"] == 2 and not interrupted:
            interrupted = True
            signal.raise_signal(signal.SIGINT)

    if said == "0":
        monkeypatch.setenv(GRACE_VARIABLE, said)
    study = both(f"at once {said}", "trial.epochs=500", "checkpoint_every=500")  # none may finish
    with pytest.raises(KeyboardInterrupt):
        run_study(study, SilentView(interrupt), say)
    assert any(line.startswith("Ending: ") for line in lines) == (said == "again")
    trials = fold(read_ledger(study.folder)).trials
    assert any(trial.epoch >= 2 for trial in trials)
    assert not workers()
    if said == "0":
        assert not any(trial.checkpoints_left() for trial in trials)


def test_a_grace_that_is_no_number_is_refused_before_work_starts(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grace_seconds() == 20
    monkeypatch.setenv(RAY_JOB, "{}")
    assert grace_seconds() == 1
    monkeypatch.setenv(GRACE_VARIABLE, "soon")
    study = tiny("no number", *LEFT)
    with pytest.raises(UserError, match=f"{GRACE_VARIABLE}=soon: must be a number of seconds"):
        run(study)
    assert not study.folder.exists()


def interrupt_at(epoch: int) -> Callable[[Event], None]:
    """Send Ctrl-C once a trial's checkpoint of ``epoch`` is on disk."""

    def react(event: Event) -> None:
        if event["event"] == "checkpoint" and event["epoch"] == epoch:
            signal.raise_signal(signal.SIGINT)

    return react


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [pytest.param(1, id="newest"), pytest.param(99, id="every")])
def test_a_damaged_checkpoint_is_passed_over(
    undisturbed: tuple[StudyConfig, Outcome],
    tiny: Tiny,
    damaged: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GRACE_VARIABLE, "0")  # otherwise they would finish
    study = tiny(f"damaged {damaged}")
    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt_at(2))
    # Both trials may have reached it before the interrupt; one of them is damaged.
    trial, *_ = [
        trial
        for trial in fold(read_ledger(study.folder)).trials
        if trial.epoch >= 2 and trial.status != FINISHED
    ]
    # The disk may have one more than the ledger names, and one that the interrupted process had
    # only started.
    whole = [
        path
        for path in checkpoints_in(study.folder / "checkpoints" / trial.id)
        if (path / STATE).exists()
    ]
    for path in whole[:damaged]:
        (file,) = path.glob("*.safetensors")
        file.write_bytes(file.read_bytes() + b"x")
    outcome, view = run(study)
    assert results(outcome.state) == results(undisturbed[1].state)
    # The other trial may have been killed while it wrote a checkpoint.
    told = [event for event in view.events if event["event"] == "damaged"]
    assert ["digest" in event["error"] for event in told if event["trial"] == trial.id] == [True]
    assert not [event for event in view.events if event["event"] == "restarted"]


def test_what_cannot_work_fails_at_once_with_its_message(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, nodes that lack the data get no trial (``tests/study/engines/ray``)."""
    monkeypatch.setattr("study.lifecycle.preflight", lambda plan, *_: (plan, []))
    rows = "[{label: bad, overrides: {data.train_size: 99999}}, {label: good}]"
    outcome, view = run(tiny("refused", f"rows={rows}", "baseline=null"))
    bad, good = outcome.state.trials
    assert (bad.status, good.status) == (FAILED, FINISHED)
    assert bad.error.startswith("data.train_size=99999: ")
    assert not [event for event in view.events if event["event"] == "restarted"]
    assert not bad.checkpoints


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_missing_is_refused_before_the_study_begins(tiny: Tiny) -> None:
    study = tiny("no-device", "trial.device=cuda")
    with pytest.raises(UserError, match=r"^device=cuda: .*; use device=cpu"):
        run_study(study, SilentView(), print)
    assert not read_ledger(study.folder)


@pytest.mark.slow
def test_a_trial_that_cannot_finish_is_reported_not_hidden(both: Tiny) -> None:
    study = both("hopeless", "max_failures=0", "trial.epochs=60")
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


GANG = [
    "gang=forked",
    "trial.workers=2",
    "rows=[{label: float32}]",
    "baseline=null",
    "trial.precision.format=float32",
]


@pytest.mark.slow
def test_gangs_train_what_one_process_does_and_keep_their_processes(both: Tiny) -> None:
    study = both("gang", *GANG, "seeds=[0,1]")
    held: list[set[int]] = []
    outcome, _ = run(
        study,
        lambda event: (
            held.append({one.pid for one in workers()}) if event["event"] == "report" else None
        ),
    )
    single, _ = run(both("single", *GANG, "trial.workers=1"))
    gangs, (trial,) = outcome.state.trials, single.state.trials
    assert [(gang.status, gang.epoch) for gang in gangs] == [(FINISHED, 3)] * 2
    assert gangs[0].test["test/error"] == pytest.approx(trial.test["test/error"], abs=0.02)
    assert set(count_reports(study).values()) == {1}
    assert len(held[0]) == 2
    if study.engine == "local":
        assert held[0] == held[-1]
        assert {event["pid"] for event in gangs[0].reports.values()} == {
            event["pid"] for event in gangs[1].reports.values()
        }


@pytest.mark.slow
def test_a_gang_with_a_killed_rank_loses_no_epoch_and_ends_bit_equal(both: Tiny) -> None:
    undisturbed, _ = run(both("gang whole", *GANG, "trial.epochs=5"))
    killed: list[int] = []

    def kill_a_rank(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not killed:
            (other,) = [process for process in workers() if process.pid != event["pid"]]
            killed.append(other.pid)
            other.kill()

    study = both("gang killed", *GANG, "trial.epochs=5")
    outcome, _ = run(study, kill_a_rank)
    assert killed
    assert outcome.state.trials[0].restarts == 1
    assert results(outcome.state) == results(undisturbed.state)
    assert set(count_reports(study).values()) == {1}


@pytest.mark.slow
def test_ray_train_trains_the_same_trial(ray_session: None, tiny: Tiny) -> None:
    outcome, _ = run(tiny("train", *GANG, "gang=train"))
    single, _ = run(tiny("train single", *GANG, "trial.workers=1"))
    (gang_trial,), (trial,) = outcome.state.trials, single.state.trials
    assert (gang_trial.status, gang_trial.epoch) == (FINISHED, 3)
    assert gang_trial.test["test/error"] == pytest.approx(trial.test["test/error"], abs=0.02)


@pytest.mark.slow
def test_a_scheduler_ends_a_trial_of_ray_train_early(ray_session: None, tiny: Tiny) -> None:
    """The second of three is the worst after an epoch; its processes end, and the third gets their
    CPUs."""
    search = "search={algorithm: grid, scheduler: asha, reduction_factor: 2}"
    rates = "space={optimizer.lr: {choice: [0.2, 0.000001, 0.3]}}"
    one = ["rows=[{label: a}]", "baseline=null", "seeds=[0]", "trial.epochs=4", "max_concurrent=1"]
    outcome, _ = run(tiny("train asha", *GANG, "gang=train", rates, search, *one))
    assert [trial.status for trial in outcome.state.trials] == [FINISHED, STOPPED, FINISHED]
    assert [trial.epoch for trial in outcome.state.trials] == [4, 1, 4]
