"""Studies from Python: configs in files, runs, results as frames and figures, ask and tell."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure

import study
from study.cli import main
from study.config import StudyConfig
from study.config.compose import load
from study.errors import UserError
from study.ledger.log import FILE, Ledger, read_ledger
from study.ledger.state import FINISHED, fold
from study.ops.repair.ledger import repair

Tiny = Callable[..., StudyConfig]
SEARCH = ("space={optimizer.lr: {loguniform: [0.01, 1.0]}}", "rows=[]", "baseline=null")
SCRIPT = """
import study
from study import DataConfig, ModelConfig, StudyConfig, TrialConfig

small = StudyConfig(
    name="small",
    trial=TrialConfig(
        epochs=2,
        data=DataConfig(name="digits", validation_size=300),
        model=ModelConfig(name="net.py:make_net"),
    ),
    cpus=2,
    tracking_uri="none",
)
"""
NET = """
from torch import nn

def make_net(inputs, classes):
    return nn.Linear(inputs, classes)
"""
WAIT = 300.0
"""Seconds after which a process counts as hung."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A Python file that defines a study, with a network beside it."""
    (tmp_path / "net.py").write_text(NET)
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def python(code: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start Python on ``code`` in ``folder``."""
    file = folder / f"main_{len(list(folder.iterdir()))}.py"
    file.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(file)],
        cwd=folder,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(study.__file__).parents[1])},
        stdout=subprocess.PIPE,
        **options,
    )


def test_import_study_is_cheap() -> None:
    code = "import sys, study; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "ray", "mlflow", "pandas", "omegaconf", "matplotlib"}
    assert {"run", "load", "Study", "StudyConfig"} <= set(dir(study))
    assert all(getattr(study, name) is not None for name in study.__all__)
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = study.rum


# --------------------------------------------------------------------------------------------------


def test_a_python_file_defines_a_study(script: Path) -> None:
    found = load(str(script), ["trial.epochs=5", "seeds=[0,1]"])
    assert (found.name, found.trial.epochs, found.seeds) == ("small", 5, [0, 1])
    assert found.trial.model.name == f"{script.parent}/net.py:make_net"
    assert str(script.parent) not in sys.path[: len(sys.path) // 2]


def test_the_command_line_runs_a_python_file(
    script: Path, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["name=by-file", f"storage={storage}"]
    assert main(["plan", str(script), *options]) == 0
    assert "Not checked: your own code, which a plan does not run." in capsys.readouterr().out
    assert main(["run", str(script), "--dry-run", *options]) == 0
    assert main(["plan", str(script), *options, "--slots", "2"]) == 0
    assert not (storage / "by-file").exists()
    assert main(["run", str(script), "--plain", *options]) == 0
    assert "by-file: 1 trial, 2 epochs in all" in capsys.readouterr().out
    (trial,) = study.load("by-file", str(storage)).state.trials
    assert trial.status == FINISHED
    assert trial.config["model"]["name"] == f"{script.parent}/net.py:make_net"


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "", "defines no study"),
        ("\n\n1 / 0\n", "", "ZeroDivisionError in .*mine.py, line 3"),
        ("a = (\n", "", "SyntaxError in .*mine.py, line 1"),
        ("from study import StudyConfig\na = StudyConfig(seeds=[0, 0])", "", "mine.py, line 2"),
        ("from study import *\na = StudyConfig()\nb = StudyConfig()", "", "mine.py:a, .*mine.py:b"),
        ("from study import *\na = StudyConfig()", ":b", "none of them b; choose one: .*mine.py:a"),
    ],
)
def test_a_file_without_one_study_is_refused(
    text: str, name: str, message: str, script: Path
) -> None:
    script.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(f"{script}{name}")


def test_files_of_our_names_beside_a_study_change_nothing(script: Path) -> None:
    script.write_text(SCRIPT.replace("import study\nfrom study", "from lns_study"))
    for name in ("study", "trainers", "lns_ops"):
        (script.parent / f"{name}.py").write_text("raise RuntimeError('imported')")
    words = [sys.executable, "-P", "-m", "study", "run", script.name, "--dry-run"]  # as lns-study
    env = {**os.environ, "PYTHONPATH": str(Path(study.__file__).parents[1])}
    done = subprocess.run(words, cwd=script.parent, env=env, capture_output=True, text=True)
    assert "# 1 trial:" in done.stdout, done.stderr


def test_one_of_several_studies_is_chosen(script: Path) -> None:
    script.write_text("from study import *\na = StudyConfig(name='a')\nb = StudyConfig(name='b')")
    assert load(f"{script}:b", ["data=digits"]).name == "b"
    with pytest.raises(ValueError, match="there is no file"):
        load("nowhere.py")


# --------------------------------------------------------------------------------------------------


def test_a_study_runs_and_is_read(
    tiny: Tiny, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = study.run(tiny("by-python"), {"trial.epochs": 2}, seeds=[0, 1])
    assert "4 trials, 8 epochs in all" in capsys.readouterr().out
    assert (found.config.trial.epochs, found.config.seeds) == (2, [0, 1])
    trials, epochs = found.trials, found.epochs
    assert list(trials["status"]) == [FINISHED] * 4
    assert len(epochs) == 8
    last = epochs[epochs["epoch"] == 2].set_index("id")["validation/error"]
    assert dict(last) == dict(trials.set_index("id")["validation/error"])
    assert found.best is not None
    by_row = trials.groupby("row")["validation/error"].mean()
    assert found.best.objectives["validation/error"] == pytest.approx(by_row.min())
    for rows, frame in (("trials", trials), ("epochs", epochs)):
        table = found.polars(rows)
        assert table.columns == list(frame.columns)
        assert table["id"].to_list() == list(frame["id"])
        assert table["validation/error"].to_list() == list(frame["validation/error"])
        assert table["number"].null_count() == len(frame)
    with pytest.raises(UserError, match="unknown rows; use 'trials' or 'epochs'"):
        found.polars("trial")
    assert list(found.summary().index) == ["float32", "lns matmul"]
    assert found.answer in found._repr_html_()
    figure = found.figure("error_per_epoch")
    assert isinstance(figure, Figure)
    assert [len(line.get_xdata()) for line in figure.axes[0].get_lines()][:2] == [2, 2]
    with pytest.raises(UserError, match="has no data for it; use one of differences"):
        found.figure("importance")
    with pytest.raises(UserError, match=r"no such picture; use one of .*test_error"):
        found.figure("error")
    dots = found.plot().data
    assert [dot.name for dot in dots] == ["float32", "lns matmul"]
    shown = sorted(value / 100 for dot in dots for value in dot.y)
    assert shown == pytest.approx(sorted(trials["validation/error"]))
    with pytest.raises(UserError, match="must be one of validation error"):
        found.plot("error")
    assert found.report().is_file()

    again = study.load("by-python", str(storage))
    before = len(read_ledger(again.folder))
    # again in the same process, in a thread of an event loop's
    grown = asyncio.run(asyncio.to_thread(again.run, trial={"epochs": 3}))
    assert list(grown.trials["epoch"]) == [3] * 4
    assert len(again.epochs) == 12
    assert len(read_ledger(again.folder)) > before
    with pytest.raises(UserError, match="that would be another study"):
        again.run(name="other")


def test_polars_is_asked_for_where_it_is_missing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = study.create(tiny("no-polars"))
    assert found.polars("epochs").shape == (0, 0)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UserError, match=r"pip install 'lns-study\[polars\]'`, or .epochs"):
        found.polars("epochs")
    assert len(found.trials) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trial.epochs": "many"}, "trial.epochs"),
        ({"trial.epoch": 3}, "epoch"),
        ({"trial": {"epochs": -1}}, "epochs"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"model": "mlp_0"}, "model=mlp_0: no such config"),
        ({"question": object()}, "a config holds numbers, texts"),
    ],
)
def test_overrides_are_checked_as_on_the_command_line(
    overrides: dict[str, Any], message: str, tiny: Tiny
) -> None:
    config = tiny("refused")
    with pytest.raises(UserError, match=message):
        study.run(config, overrides)
    assert not config.folder.exists()


def test_overrides_are_values_and_groups(tiny: Tiny) -> None:
    changes: dict[str, Any] = {
        "trial.optimizer.lr": np.float64(1e-05),
        "name": "null",
        "question": "a: b = \"c\" 'd' é",
        "precision": "lns16",
        "trial.precision": {"kahan_sum": True},
        "cpus": None,
        "storage": Path("there"),
        "seeds": (3, 4),
    }
    from study.config.compose import as_overrides

    found = load(tiny("values"), as_overrides(changes))
    assert found.trial.optimizer.lr == 1e-05
    assert (found.name, found.cpus, found.storage) == ("null", None, "there")
    assert found.question == "a: b = \"c\" 'd' é"
    assert found.seeds == [3, 4]
    assert (found.trial.precision.format, found.trial.precision.kahan_sum) == ("lns16", True)


INTERRUPTED = """
import study

try:
    study.run({config!r}, storage={storage!r}, tracking_uri="none", **{{"trial.epochs": 40}})
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
found = study.run({config!r}, storage={storage!r}, tracking_uri="none", **{{"trial.epochs": 40}})
print(repr(found))
"""


@pytest.mark.slow
def test_an_interrupt_ends_in_order_and_the_same_call_goes_on(tmp_path: Path, tiny: Tiny) -> None:
    tiny("interrupted")  # writes the file
    code = INTERRUPTED.format(config=str(tmp_path / "tiny.yaml"), storage=str(tmp_path / "s"))
    process = python(code, tmp_path)
    folder, until = tmp_path / "s" / "tiny", time.monotonic() + WAIT
    while not any(event["event"] == "report" for event in read_ledger(folder)):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT)
    assert "\ninterrupted\n" in output
    assert "<Study 'tiny': finished; 2 finished>" in output
    events = read_ledger(folder)
    ends = [event["outcome"] for event in events if event["event"] == "ended"]
    assert ends == ["interrupted", "finished"]
    reports = [(e["trial"], e["epoch"]) for e in events if e["event"] == "report"]
    assert len(reports) == len(set(reports)) == 80


# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_ask_and_tell(algorithm: str, tiny: Tiny) -> None:
    search = {"algorithm": algorithm, "num_samples": 4}
    found = study.create(tiny(f"told-{algorithm}", *SEARCH), search=search)
    assert "stopped" in repr(found)
    told = {}
    while (suggestion := found.ask()) is not None:
        assert [each.trial for each in found.asked] == [suggestion.trial]
        assert suggestion.config.optimizer.lr == suggestion.params["optimizer.lr"]
        assert suggestion.number is not None
        told[suggestion.number] = abs(suggestion.params["optimizer.lr"] - 0.1)
        if suggestion.number == 3:
            found.tell(suggestion, error="no luck")
            del told[3]
        else:
            found.tell(suggestion, {"validation/error": told[suggestion.number], "test/error": 0.5})
    assert sorted(told) == [1, 2, 4]
    assert found.asked == []
    assert "failed; 3 finished, 1 failed" in repr(found)
    assert found.best is not None
    assert found.best.number == min(told, key=lambda number: told[number])
    values = found.trials.set_index("number")["validation/error"].dropna()
    assert dict(values) == told
    assert list(found.trials["error"]).count("no luck") == 1
    before = len(read_ledger(found.folder))
    study.create(found.config)
    assert len(read_ledger(found.folder)) == before  # nothing new is planned


def test_a_ledger_that_was_replaced_by_one_as_long_is_read_again(tiny: Tiny) -> None:
    found = study.create(tiny("replaced"))
    assert not found.state.damage
    path = found.folder / FILE
    path.write_bytes(path.read_bytes().replace(b"replaced", b"replacer"))
    with pytest.raises(UserError, match="the ledger is damaged"):
        print(found.state)


@pytest.mark.slow
def test_what_an_own_loop_told_a_search_learns_in_a_run(tiny: Tiny) -> None:
    search = {"algorithm": "tpe", "num_samples": 3}
    found = study.create(tiny("told-then-run", *SEARCH), search=search)
    first = found.ask()
    assert first is not None
    found.tell(first, 0.001)
    state = found.run().state
    assert state.counts() == {FINISHED: 3}
    assert found.best is not None
    assert found.best.trials[0].id == first.trial
    assert [trial.epoch for trial in state.trials] == [3, 3, 3]
    assert found.resume().state.counts() == {FINISHED: 3}


CRASH = """
import os, study
suggestion = study.load({folder!r}).ask()
print(suggestion.trial, flush=True)
os._exit(1)
"""


@pytest.mark.slow
def test_a_trial_that_a_dead_process_asked_for_is_asked_again(tiny: Tiny, tmp_path: Path) -> None:
    search = {"algorithm": "tpe", "num_samples": 2}
    found = study.create(tiny("crashed", *SEARCH), search=search)
    output, _ = python(CRASH.format(folder=str(found.folder)), tmp_path).communicate(timeout=WAIT)
    lost = output.split()[-1]
    assert [each.trial for each in found.asked] == [lost]
    again = found.ask()
    assert again is not None
    assert again.trial == lost
    other = found.ask()  # this process still has the first, so it gets another
    assert other is not None
    assert other.trial != lost
    assert {each.trial for each in found.asked} == {lost, other.trial}
    assert found.ask() is None
    assert "stopped" in repr(found)
    for suggestion in found.asked:
        found.tell(suggestion, 0.5)
    assert found.ask() is None
    assert "finished; 2 finished" in repr(found)


@pytest.mark.parametrize("born", ["later", "dead"])
def test_a_process_with_the_id_of_a_dead_one_holds_no_trial(tiny: Tiny, born: str) -> None:
    """Process ids are reused, and a process keeps its own until somebody waits for it."""
    found = study.create(tiny(f"reused-{born}", *SEARCH), search={"num_samples": 1})
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = {"pid": process.pid, "host": socket.gethostname()}
    begun = psutil.Process(process.pid).create_time()
    with Ledger(found.folder) as ledger:
        (planned,) = [event for event in ledger.history if event["event"] == "planned"]
        (trial,) = planned["trials"]
        ledger.append({"event": "started", "trial": trial["id"], "time": begun + 60, **here})
        assert planned["time"] < begun + 60
    assert found.ask() is None
    if born == "later":
        with Ledger(found.folder) as ledger:
            ledger.append({"event": "started", "trial": trial["id"], "time": begun - 60, **here})
    process.kill()
    if born == "dead":
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    suggestion = found.ask()
    process.communicate()
    assert suggestion is not None
    assert suggestion.trial == trial["id"]


LOOP = """
import pathlib, time, study
found = study.load({folder!r})
pathlib.Path("ready-{name}").touch()
while len(list(pathlib.Path().glob("ready-*"))) < 2:
    time.sleep(0.01)
while (suggestion := found.ask()) is not None:
    print(suggestion.trial, flush=True)
    found.tell(suggestion, suggestion.params["optimizer.lr"])
"""


@pytest.mark.slow
def test_processes_that_ask_at_once_take_turns(tiny: Tiny, tmp_path: Path) -> None:
    found = study.create(tiny("at-once", *SEARCH), search={"num_samples": 12})
    loops = [python(LOOP.format(folder=str(found.folder), name=name), tmp_path) for name in "ab"]
    outputs = [process.communicate(timeout=WAIT)[0].split() for process in loops]
    assert sorted([*outputs[0], *outputs[1]]) == sorted(trial.id for trial in found.state.trials)
    assert found.state.counts() == {FINISHED: 12}
    ends = [event for event in read_ledger(found.folder) if event["event"] == FINISHED]
    assert len(ends) == 12


def test_what_cannot_be_told_is_refused(tiny: Tiny) -> None:
    found = study.create(tiny("refused-tell", *SEARCH), search={"num_samples": 2})
    suggestion = found.ask()
    assert suggestion is not None
    for values, message in [
        (None, "one of them must be given"),
        ("low", "must be numbers"),
        ({"train/error": 0.1}, "validation/error is missing"),
        (10**400, "must be numbers"),
        ({"validation/error": 0.1, "epoch": 3}, "the name 'epoch' is taken"),
    ]:
        with pytest.raises(UserError, match=message):
            found.tell(suggestion, values)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one of them must be given"):
        found.tell(suggestion, 0.1, error="both")
    with pytest.raises(UserError, match="is not in its plan"):
        found.tell(dataclasses.replace(suggestion, trial="0" * 12), 0.1)
    found.tell(suggestion, np.float32(0.25))
    other = found.ask()
    assert other is not None
    found.tell(other, error=OSError("undecodable \udcff"))
    assert found.state.known[other.trial].error == "OSError: undecodable ?"
    assert "OSError: undecodable ?" in found.report().read_text()
    with pytest.raises(UserError, match=r"is finished, and tell\(\) takes each trial"):
        found.tell(suggestion, 0.1)
    with pytest.raises(UserError, match="no such study"):
        study.load("nothing", str(found.folder.parent))


def test_trials_that_were_told_stay_finished_in_a_repaired_ledger(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The ledger has only the last epoch of each."""
    found = study.create(tiny("told-repaired", f"storage={tmp_path / 'told'}"))
    while (suggestion := found.ask()) is not None:
        found.tell(suggestion, 0.25)
    before = [(trial.id, trial.reports) for trial in found.state.trials]
    lines = (found.folder / FILE).read_bytes().splitlines(keepends=True)
    (found.folder / FILE).write_bytes(b"".join([*lines[:-1], lines[-1][:-9] + b"0" * 8 + b"\n"]))
    assert repair(found.folder, None).lost
    assert found.state.counts() == {FINISHED: 2}
    assert [(trial.id, trial.reports) for trial in found.state.trials] == before


def test_a_study_that_runs_is_not_asked(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = study.create(tiny("busy", *SEARCH), search={"num_samples": 2})
    monkeypatch.setattr("study.engines.ask_tell.LOCK_SECONDS", 0.1)
    with Ledger(found.folder), pytest.raises(UserError, match="is running this study"):
        found.ask()


@pytest.mark.slow
def test_mlflow_gets_what_was_told(tracked: Tiny) -> None:
    import mlflow

    found = study.create(tracked("told-mlflow", *SEARCH), search={"num_samples": 2})
    for error in (0.25, 0.5):
        suggestion = found.ask()
        assert suggestion is not None
        found.tell(suggestion, error)
        found.report()
    client = mlflow.MlflowClient(found.config.tracking)
    experiment = client.get_experiment_by_name("told-mlflow")
    assert experiment is not None
    runs = [
        run
        for run in client.search_runs([experiment.experiment_id])
        if run.data.tags.get("trial") in {trial.id for trial in found.state.trials}
    ]
    assert sorted(run.data.metrics["validation/error"] for run in runs) == [0.25, 0.5]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert fold(read_ledger(found.folder)).outcome == "finished"
