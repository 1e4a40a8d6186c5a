"""Studies controlled by schedulers, limits and requests, and trials that hang."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.cli import main
from study.engines import silence
from study.engines.control import FILE as CONTROL
from study.engines.control import POLL_SECONDS, Control, Wish, ask
from study.engines.local.pool import Pool
from study.errors import StorageError, UserError
from study.ledger import log
from study.ledger.events import Event
from study.ledger.log import FILE, read_ledger
from study.ledger.state import FINISHED, PLANNED, STOPPED, StudyState, fold
from study.lifecycle import run_study
from study.ops.serve.dashboard import Page
from study.results.summary import summarise
from tests.mounts import mounted, unmount
from tests.study.cli.test_entry import lns_study
from tests.study.conftest import TINY, SilentView, made_up_events
from tests.study.engines.conftest import Tiny, count_reports, results, run
from tests.study.raylets import started
from trainers.workers.messages import HELLO, Message

SEARCH = [
    "rows=[{label: a}, {label: b, overrides: {precision.format: lns12}}]",
    "baseline=null",
    "space={optimizer.lr: {loguniform: [0.001, 1.0]}}",
    "trial.epochs=4",
]


@pytest.mark.slow
def test_a_scheduler_ends_trials_early_and_a_second_run_leaves_them(both: Tiny) -> None:
    study = both("asha", *SEARCH, "search={num_samples: 8, scheduler: asha, reduction_factor: 2}")
    outcome, _ = run(study)
    states = [trial.status for trial in outcome.state.trials]
    assert set(states) == {FINISHED, STOPPED}
    early = [trial for trial in outcome.state.trials if trial.status == STOPPED]
    assert all(
        1 <= trial.epoch < 4 and trial.stopped_by == "asha" and not trial.test for trial in early
    )
    best = {row.label: row.params["optimizer.lr"] for row in summarise(outcome.state).rows}
    lowest = min(
        (t for t in outcome.state.trials if t.status == FINISHED and t.row == "a"),
        key=lambda t: t.metric("validation/error")[4],
    )
    assert best["a"] == lowest.params["optimizer.lr"]
    again, view = run(study)
    assert [event["event"] for event in view.events] == ["ended"]
    assert results(again.state) == results(outcome.state)


@pytest.mark.slow
def test_an_adaptive_search_that_was_broken_off_goes_on(both: Tiny) -> None:
    """Interrupted after a few trials: proposals are kept, and the missing number follows."""
    study = both("tpe", *SEARCH, "search={num_samples: 5, algorithm: tpe}", "trial.epochs=2")
    finished: list[str] = []

    def interrupt(event: Event) -> None:
        if event["event"] == "finished":
            finished.append(event["trial"])
            if len(finished) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(study, interrupt)
    outcome, view = run(study)
    assert [trial.status for trial in outcome.state.trials] == [FINISHED] * 10
    assert not {event["trial"] for event in view.events if event["event"] == "started"} & set(
        finished[:3]
    )
    assert set(count_reports(study).values()) == {1}
    assert {(trial.row, trial.number) for trial in outcome.state.trials} == {
        (row, n) for row in "ab" for n in range(1, 6)
    }


@pytest.mark.slow
def test_a_limit_stops_a_study_and_the_same_command_goes_on(both: Tiny) -> None:
    study = both("limited", *SEARCH, "search.num_samples=3", "limits.trials=2")
    said: list[str] = []
    outcome = run_study(study, SilentView(), said.append)
    assert sum(trial.status == FINISHED for trial in outcome.state.trials) == 2
    assert outcome.state.outcome == "stopped"
    assert any("limits.trials=2 reached" in line for line in said)
    outcome, _ = run(both("limited", *SEARCH, "search.num_samples=3"))
    assert all(trial.status == FINISHED for trial in outcome.state.trials)
    assert outcome.state.outcome == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "ended"), [(Wish.STOP, FINISHED), (Wish.CANCEL, "running")])
def test_stop_lets_trials_end_and_cancel_does_not(both: Tiny, wish: Wish, ended: str) -> None:
    study = both(f"asked to {wish.name}", "trial.epochs=60", "seeds=[0,1,2]", "limits.failures=3")
    asked: list[str] = []

    def ask_once(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not asked:
            asked.append(event["trial"])
            ask(study.folder, wish=wish)
            time.sleep(POLL_SECONDS)

    outcome, _ = run(study, ask_once)
    assert outcome.state.outcome == "stopped"
    assert outcome.state.known[asked[0]].status == ended
    assert any(trial.status == PLANNED for trial in outcome.state.trials)
    if wish == Wish.CANCEL:
        assert outcome.state.known[asked[0]].epoch < 60


@pytest.mark.parametrize(
    "code",
    [errno.EIO, *(pytest.param(c, marks=pytest.mark.slow) for c in (errno.EROFS, errno.ESTALE))],
)
def test_a_ledger_that_takes_no_writes_ends_the_study_in_order(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """With report and remedy, whatever state the storage is in; the same command continues."""
    study, write = tiny(f"refused {code}", "trial.epochs=2"), log._write_all
    written: list[bytes] = []

    def refuse(file: Any, lines: bytes) -> None:
        written.append(lines)
        if len(written) > 4:
            raise OSError(code, os.strerror(code))
        write(file, lines)

    with monkeypatch.context() as patched:
        patched.setattr(log, "_write_all", refuse)
        with pytest.raises(StorageError, match=r"storage: ledger: .*; see that .* can be written"):
            run(study)
    assert (study.folder / "report" / "report.html").exists()
    assert {trial.status for trial in run(study)[0].state.trials} == {FINISHED}


@pytest.mark.parametrize("how", ["moved", "removed", "unmounted", "its folder unmounted"])
def test_a_study_whose_folder_goes_away_ends_and_says_where_its_ledger_is(
    tiny: Tiny, tmp_path: Path, how: str
) -> None:
    """It creates nothing in its place; once the ledger is back, the same command continues."""
    storage, elsewhere = tmp_path / "storage", tmp_path / "elsewhere"
    study = tiny("gone", f"storage={storage}", "trial.epochs=20", "seeds=[0,1]")
    place = study.folder if how.startswith("its") else storage
    place.mkdir(parents=True)
    ends: list[str] = []

    def take_away(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 5 and not ends:
            ends.append(event["trial"])
            if how == "moved":
                study.folder.rename(elsewhere)
            elif how == "removed":
                while study.folder.exists():  # a trial may write there
                    shutil.rmtree(study.folder, ignore_errors=True)
            else:
                unmount(place)

    with mounted(place) if "unmounted" in how else nullcontext():
        with pytest.raises(StorageError, match="was removed, moved, unmounted") as ended:
            run(study, take_away)
        if "unmounted" in how:  # a trial that had just checked may still write a checkpoint
            assert not (study.folder / FILE).exists()
        else:
            assert not study.folder.exists()
        said = str(ended.value).split()[2:]
        copy = next(Path(word.rstrip(",:")) for word in said if FILE in word)
        assert (copy == elsewhere / FILE) == (how == "moved")
        if how == "moved":
            elsewhere.rename(study.folder)
        else:
            study.folder.mkdir(exist_ok=True)
            shutil.copy(copy, study.folder)
    assert {trial.status for trial in run(study)[0].state.trials} == {FINISHED}
    finished = [event["trial"] for event in read_ledger(study.folder) if event["event"] == FINISHED]
    assert sorted(finished) == sorted(set(finished))


def test_a_limit_on_the_size_of_files_ends_a_study_as_a_full_storage_does(
    tiny: Tiny, tmp_path: Path
) -> None:
    """With the exit code of a started study; the same command continues without the limit."""
    study = tiny("limited", f"storage={tmp_path}", "trial.epochs=2", "trial.model.hidden=[16]")
    words = [str(tmp_path / "tiny.yaml"), "name=limited", f"storage={tmp_path}", "--plain"]
    words += ["tracking_uri=none", "trial.epochs=40", "seeds=[0]"]
    code = (
        "import resource, sys; from study.cli import main;"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); sys.exit(main(sys.argv[1:]))"
    )
    limited = subprocess.run(
        [sys.executable, "-c", code, "run", *words], capture_output=True, text=True, timeout=300
    )
    assert limited.returncode == 1, limited.stderr
    assert "ulimit -f" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert read_ledger(study.folder)
    assert main(["run", *words]) == 0


def test_a_ledger_that_takes_no_plan_starts_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with one free byte, which the probe needs."""
    study = tiny("full from the start", "trial.epochs=1")

    def refuse(file: Any, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(log, "_write_all", refuse)
        with pytest.raises(UserError, match=r"storage: ledger: .*; nothing was started"):
            run(study)
    assert {trial.status for trial in run(study)[0].state.trials} == {FINISHED}


@pytest.mark.parametrize("content", ["", "{", '{"wish": "x"}'])
def test_a_wish_that_cannot_be_read_is_looked_at_again(
    tiny: Tiny, content: str, tmp_path: Path
) -> None:
    control = Control(tmp_path, StudyState(), tiny("wishes").limits)
    (tmp_path / CONTROL).mkdir()
    assert control.decide(fresh=True).wish == Wish.RUN
    (tmp_path / CONTROL).rmdir()
    (tmp_path / CONTROL).write_text(content)
    assert control.decide(fresh=True).wish == Wish.RUN
    ask(tmp_path, wish=Wish.STOP)
    assert control.decide(fresh=True).wish == Wish.STOP


@pytest.mark.slow
def test_a_paused_study_begins_nothing_until_it_is_resumed(both: Tiny) -> None:
    study = both("paused", "trial.epochs=2", "seeds=[0,1,2]")
    resumed: list[float] = []
    reported: set[str] = set()

    def pause_once(event: Event) -> None:
        if event["event"] == "report":
            reported.add(event["trial"])
        # both processes run; nothing that was assigned before is still starting
        if len(reported) == 2 and not resumed:
            ask(study.folder, wish=Wish.PAUSE, limits={"trials": 5, "hours": 3.0})
            time.sleep(POLL_SECONDS)
            resumed.append(time.time() + 4)
            threading.Timer(4, ask, [study.folder], {"wish": Wish.RUN}).start()

    outcome, view = run(study, pause_once)
    begun = [event["time"] for event in view.events if event["event"] == "started"]
    assert not [at for at in begun if resumed[0] - 3 < at < resumed[0]]
    assert [at for at in begun if at >= resumed[0]]
    assert sum(trial.status == FINISHED for trial in outcome.state.trials) == 5
    assert outcome.state.limits == {"trials": 5, "hours": 3.0}


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["stop", "stop --now"])
def test_a_wish_from_another_terminal_ends_a_study_with_3(tmp_path: Path, wish: str) -> None:
    """``stop`` lets the running trial end, ``stop --now`` does not."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    one = ("cpus=1", "rows=[{label: a}]", "baseline=null", "seeds=[0,1]", "trial.epochs=60")
    process = started(tmp_path, *one)
    assert process.stdout is not None
    try:
        assert any("epoch 3/" in line for line in process.stdout)
        assert lns_study(*wish.split(), "tiny", cwd=tmp_path).returncode == 0
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 3, said
    first, second = fold(read_ledger(tmp_path / "studies" / "tiny")).trials
    assert (first.status == FINISHED) == (wish == "stop")
    assert second.epoch == 0


@pytest.mark.slow
def test_a_job_begun_again_keeps_wishes_and_edited_limits_of_a_run_that_was_broken_off(
    tmp_path: Path,
) -> None:
    """Preempted while it is stopped, it ends in order at once; the next run continues it."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    study = ("cpus=1", "rows=[{label: a}]", "baseline=null", "seeds=[0,1]", "trial.epochs=60")
    process = started(tmp_path, *study, "--job")
    assert process.stdout is not None
    try:
        assert any("epoch 3/" in line for line in process.stdout)
        for words in (["run", "--extend", "tiny", "limits.gpu_hours=1"], ["stop", "tiny"]):
            assert lns_study(*words, cwd=tmp_path).returncode == 0
        process.terminate()
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, said
    folder = tmp_path / "studies" / "tiny"
    before = len(read_ledger(folder))
    words = ["run", "tiny.yaml", "tracking_uri=none", *study, "--job"]
    again = lns_study(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Ended early: asked to stop" in again.stdout
    state, events = fold(read_ledger(folder)), read_ledger(folder)[before:]
    assert not [event for event in events if event["event"] == "started"]
    assert (state.outcome, (state.limits or {})["gpu_hours"]) == ("stopped", 1.0)
    done = lns_study(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    state = fold(read_ledger(folder))
    assert (state.outcome, state.limits) == ("finished", None)


@pytest.mark.slow
def test_hours_of_the_run_that_a_job_continues_count(tiny: Tiny) -> None:
    def interrupt(event: Event) -> None:
        if event["event"] == "report":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tiny("hours", "trial.epochs=60"), interrupt)
    (first,) = fold(read_ledger(tiny("hours").folder)).runs
    said: list[str] = []
    limited = tiny("hours", "trial.epochs=60", f"limits.hours={(first.end - first.begin) / 3600}")
    outcome = run_study(limited, view := SilentView(), said.append, job=True)
    assert [event["event"] for event in view.events] == ["capacity", "ended"]
    assert outcome.state.outcome == "stopped"
    assert any(line.startswith("Ended early: limits.hours=") for line in said)


EPOCHS = "trial.epochs=12"
"""Long enough to be stopped in time on a busy machine."""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_trial_that_hangs_is_killed_and_started_again(
    both: Tiny, workers: int, rank: int
) -> None:
    """After its second epoch a process is stopped (SIGSTOP) and reports nothing more; the same for
    a gang with this rank. After the heartbeat other processes finish their trial. Steps of gangs
    are slow, so that the gang does not end before."""
    slowly = f"trial.sync.straggler_seconds={0.02 if workers > 1 else 0}"
    one = (
        f"trial.workers={workers}",
        "gang=forked",
        slowly,
        "rows=[{label: float32}]",
        "baseline=null",
        EPOCHS,
    )
    undisturbed, _ = run(both(f"no hang of {workers}", *one))
    stopped: list[int] = []

    def hang_once(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not stopped:
            first = psutil.Process(event["pid"])
            ranks = [first, *(each for each in first.parent().children() if each != first)]
            assert len(ranks) == workers
            stopped.append(ranks[rank].pid)
            ranks[rank].suspend()

    outcome, view = run(both(f"hangs as {rank} of {workers}", *one, "heartbeat=20"), hang_once)
    (again,) = [event for event in view.events if event["event"] == "restarted"]
    assert again["error"] == "no report for 20 s, so its process was killed (heartbeat)"
    assert results(outcome.state) == results(undisturbed.state)
    assert not psutil.pid_exists(stopped[0])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gang_that_hangs_while_it_meets_is_killed_and_started_again(
    tiny: Tiny, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is stopped (SIGSTOP) as soon as it has reported its start, before it trains."""
    one = ("trial.workers=2", "gang=forked", "rows=[{label: float32}]", "baseline=null")
    undisturbed, _ = run(tiny("meets", *one))
    stopped: list[psutil.Process] = []
    react = Pool._react

    def stop_and_react(pool: Pool, group: Any, key: int, message: Message) -> list[Message]:
        if message.kind == HELLO and key == group.keys[rank] and not stopped:
            stopped.append(psutil.Process(message.payload))
            stopped[0].suspend()
        return react(pool, group, key, message)

    monkeypatch.setattr(Pool, "_react", stop_and_react)
    outcome, view = run(tiny(f"meets and hangs as {rank}", *one, "heartbeat=20"))
    (again,) = [event for event in view.events if event["event"] == "restarted"]
    assert again["error"] == "no report for 20 s, so its process was killed (heartbeat)"
    assert results(outcome.state) == results(undisturbed.state)
    assert not stopped[0].is_running()


@pytest.mark.slow
def test_a_frozen_trial_is_named_and_goes_on_with_the_same_bits(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a heartbeat a stopped process (SIGSTOP) is not ended: the command, ``status`` and the
    live page show since when, and the remedy. Once it continues (SIGCONT), so does its trial."""
    one = ("rows=[{label: float32}]", "baseline=null", "trial.epochs=60")
    undisturbed, _ = run(tiny("not frozen", *one))
    monkeypatch.setattr(silence, "LEAST_SECONDS", 5.0)
    monkeypatch.setattr(silence, "EPOCHS", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    study, frozen, said = tiny("frozen", *one), list[int](), list[str]()
    status, page = "", ""

    def freeze_once(event: Event) -> None:
        if event["event"] == "report" and event["epoch"] == 2 and not frozen:
            frozen.append(event["pid"])
            os.kill(event["pid"], signal.SIGSTOP)

    def look_and_thaw(line: str) -> None:
        nonlocal status, page
        said.append(line)
        if "nothing heard" in line:
            assert psutil.Process(frozen[0]).status() == psutil.STATUS_STOPPED
            assert main(["status", str(study.folder)]) == 0
            status, page = capsys.readouterr().out, Page(study.folder, 1.0).text()
            os.kill(frozen[0], signal.SIGCONT)

    outcome = run_study(study, SilentView(freeze_once), look_and_thaw)
    (warning,) = [line for line in said if "nothing heard" in line]
    assert warning.startswith("float32, seed 0: nothing heard for ")
    assert f"if it hangs, kill process {frozen[0]} on " in warning
    assert "run it again with heartbeat=60;" in warning
    assert "float32, seed 0: was heard of again" in said
    assert "running, silent for" in status
    for shown in (" ".join(status.split()), page):
        assert "float32, seed 0: nothing heard for" in shown
        assert "heartbeat=60" in shown
    assert results(outcome.state) == results(undisturbed.state)
    assert outcome.state.trials[0].restarts == 0


@pytest.mark.slow
def test_a_driver_that_was_stopped_does_not_take_its_trials_for_hung(tmp_path: Path) -> None:
    """Ctrl-Z for longer than the heartbeat, then ``fg``: the trials have continued meanwhile."""
    words = ["heartbeat=3", "trial.epochs=300", "rows=[{label: float32}]", "baseline=null"]
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "study", "run", "tiny.yaml", "tracking_uri=none", *words]
    driver = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    for line in driver.stdout:
        if "epoch 2/" in line:
            break
    driver.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    driver.send_signal(signal.SIGCONT)
    driver.communicate()
    assert driver.returncode == 0
    (trial,) = fold(read_ledger(tmp_path / "studies" / "tiny")).trials
    assert (trial.status, trial.epoch, trial.restarts) == (FINISHED, 300, 0)


def test_a_first_epoch_and_a_long_one_are_no_silence(tiny: Tiny) -> None:
    """Kernels compile before a process's first report, and epochs may be long. A trial without a
    process, such as one that waits for a slot after a failure, does not hang either."""
    plan, *_ = made_up_events(tiny("patient", "rows=[{label: float32}]", "baseline=null"))
    trial = plan["trials"][0]["id"]
    events: list[Event] = [plan, {"event": "started", "trial": trial, "time": 1000.0}]

    def silent(later: float, checkpoint_every: int = 1) -> float:
        return silence.silence(fold(events).trials[0], 1000.0 + later, checkpoint_every)

    assert (silent(599.0), silent(601.0)) == (0.0, 601.0)
    report = {"event": "report", "trial": trial, "metrics": {"validation/error": 0.5}}
    events.append({**report, "epoch": 1, "time": 1300.0})
    assert (silent(1799.0), silent(1801.0)) == (0.0, 1501.0)
    events[-1]["time"] = 1001.0
    assert (silent(60.0), silent(62.0)) == (0.0, 61.0)
    events.append({"event": "restarted", "trial": trial, "error": "died", "time": 1002.0})
    assert silent(1e6) == 0.0
    events.append({"event": "started", "trial": trial, "time": 1100.0})
    assert (silent(699.0), silent(701.0)) == (0.0, 601.0)
    events[2]["time"] = 1200.0  # an epoch of 200 s, repeated after the restart
    events[-1]["time"] = 1300.0
    assert (silent(1400.0, 0), silent(1400.0)) == (1100.0, 0.0)
    assert silent(1501.0) == 1201.0
