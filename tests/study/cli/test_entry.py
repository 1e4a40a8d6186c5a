"""The command line for users: help, errors with exit code 2 and no traceback, Ctrl-C, the UI."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from study.cli import main
from study.config.compose import load
from study.evidence.rerun import differences
from study.ledger.log import Ledger, read_ledger
from study.ledger.state import fold
from tests.study.conftest import made_up_events


def lns_study(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "study", *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@dataclass
class Here:
    """Run a command line in this process, in ``folder``; this saves its imports."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return its exit code and its output."""
        self.capture.readouterr()
        code = main(arguments)
        printed = self.capture.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)


@pytest.fixture
def here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Here]:
    monkeypatch.chdir(folder)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    yield Here(folder, capsys)
    signal.signal(signal.SIGTERM, on_sigterm)


def assert_refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("lns-study: error: ")
    assert all(part in done.stderr for part in said), done.stderr


@pytest.mark.parametrize(
    "command", [[], ["run"], ["plan"], ["report"], ["ui"], ["mlflow", "sync"], ["stop"]]
)
def test_help(command: list[str], tmp_path: Path) -> None:
    done = lns_study(*command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "lns-study" in done.stdout


def test_a_reader_who_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "study", "plan", "quickstart", "trial.data.name=digits"],
            cwd=tmp_path, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=100,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_dry_run_prints_every_trial_and_writes_nothing(here: Here) -> None:
    done = here("run", "tiny", "seeds=[0,1]", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seed 0") == done.stdout.count("seed 1") == 2
    assert not (here.folder / "studies").exists()


def test_a_plan_refuses_what_its_data_forbid_as_a_run_does(here: Here) -> None:
    planned, run = (
        here(command, "tiny", "trial.batch_size=5000", "tracking_uri=none")
        for command in ("plan", "run")
    )
    assert (planned.returncode, run.returncode) == (2, 2)
    assert "batch_size=5000: there are" in planned.stderr
    assert planned.stderr == run.stderr


@pytest.mark.parametrize("name", ["mnist", "auto"])
@pytest.mark.parametrize("command", ["run --dry-run", "plan", "plan --slots"])
def test_what_starts_nothing_downloads_nothing_and_says_what_a_run_would(
    here: Here, command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here.folder

    class Mirror(http.server.BaseHTTPRequestHandler):
        asked: ClassVar[list[str]] = []

        def do_GET(self) -> None:
            self.asked.append(self.path)
            self.send_error(404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    nowhere = {
        "LNS_STUDY_DATA": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "LNS_STUDY_MNIST_URL": url,
    }
    for variable, value in nowhere.items():
        monkeypatch.setenv(variable, value)
    command, *options = command.split()
    changes = f"trial.data.name={name}", "trial.data.validation_size=null"
    done = here(command, "tiny", *changes, *options)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    if "--slots" not in options:
        files = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz"
        assert re.search(f"downloads? MNIST first[:,] {files}", done.stdout)
        assert f"from {url}/ to {folder}/cache/lns-study/mnist" in done.stdout
        assert done.stdout.count("seed 0") == 2
    assert Mirror.asked == []
    assert not (folder / "cache").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trial.epoch=3"], ["trial.epoch", "trial.epochs"]),
        (
            ["address=127.0.0.1:9"],
            ["address='127.0.0.1:9'", "no Ray cluster answers", "ray start --head"],
        ),
    ],
)
def test_a_process_refuses_bad_input_before_any_work(
    folder: Path, overrides: list[str], said: list[str]
) -> None:
    assert_refused(lns_study("run", "tiny", *overrides, cwd=folder), *said)
    assert not list(folder.glob("studies/*/ledger.jsonl"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trial.epochs=many"], ["many", "whole number"]),
        (["trial.precision.format=lns(3,7)"], ["fraction_bits=7", "at most 1"]),
        (["trial.data.train_size=99999"], ["train_size=99999", "1200"]),
        (["trial.batch_size=2048"], ["row 'float32'", "batch_size=2048", "1200"]),
        (
            [
                "trial.optimizer.lr=1e-30",
                "baseline=null",
                "rows=[{label: x, overrides: {precision.format: lns12}}]",
            ],
            ["row 'x'", "lr=", "underflows to zero in lns12"],
        ),
        (["trial.workers=64", "trial.batch_size=64"], ["workers=64", "64 CPUs", "cpus=2"]),
        (["storage=/proc/nowhere"], ["/proc/nowhere", "written"]),
        (["address=ray://127.0.0.1:9"], ["address='ray://127.0.0.1:9'", "use `ray job submit"]),
        (
            ["tracking_uri=http://127.0.0.1:9"],
            ["http://127.0.0.1:9", "no MLflow tracking store answers"],
        ),
        (
            ["trial.data.name=mnist", "trial.data.root=/nowhere"],
            ["/nowhere", "train-images-idx3-ubyte"],
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(
    here: Here, overrides: list[str], said: list[str]
) -> None:
    assert_refused(here("run", "tiny", *overrides), *said)
    assert not list(here.folder.glob("studies/*/ledger.jsonl"))


def test_corrupt_mnist_is_refused(here: Here) -> None:
    folder = here.folder
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (folder / name).write_bytes(b"not an IDX file at all")
    done = here(
        "run",
        "tiny",
        "trial.data.name=mnist",
        "trial.data.validation_size=null",
        f"trial.data.root={folder}",
    )
    assert_refused(done, "train-images-idx3-ubyte", "magic number")


def test_unknown_study_in_report(here: Here) -> None:
    assert_refused(here("report", "nothing"), "nothing", "no such study")


def test_a_study_that_another_process_runs_is_refused(folder: Path) -> None:
    with Ledger(folder / "studies" / "tiny"):
        assert_refused(
            lns_study("run", "tiny", cwd=folder), str(os.getpid()), "is running this study"
        )


def test_another_study_in_the_same_folder_is_refused(here: Here) -> None:
    folder = here.folder
    study = load(str(folder / "tiny.yaml"), ["name=a b", f"storage={folder / 'studies'}"])
    with Ledger(study.folder) as ledger:
        ledger.append(
            {key: value for key, value in made_up_events(study)[0].items() if key != "time"}
        )
    assert_refused(
        here("run", "tiny", "name=a-b"), "name='a-b'", str(study.folder), "'a b'", "name='a b'"
    )
    assert len(read_ledger(study.folder)) == 1


def test_a_taken_port_is_refused(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_refused(here("ui", "--port", str(taken.getsockname()[1])), "port=", "--port")


def test_a_study_that_ends_in_order_with_trials_left_exits_with_3(here: Here) -> None:
    many = ["seeds=[0,1,2]", "trial.epochs=1", "tracking_uri=none", "cpus=1"]
    done = here("run", "tiny", "limits.trials=2", *many)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("Loading the study")
    assert "limits.trials=2 reached" in done.stdout
    assert here("run", "tiny", *many).returncode == 0
    assert "3    ended in order with trials left" in lns_study("--help", cwd=here.folder).stdout


def test_report_from_a_ledger_alone_on_a_terminal_without_its_characters(folder: Path) -> None:
    study = load(str(folder / "tiny.yaml"), [f"storage={folder / 'studies'}", "seeds=[0,1]"])
    with Ledger(study.folder) as ledger:
        for event in made_up_events(study):
            ledger.append({key: value for key, value in event.items() if key != "time"})
    done = lns_study("report", "tiny", cwd=folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert " ? " in done.stdout
    assert (study.folder / "report" / "report.html").exists()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://127.0.0.1:9", "no MLflow tracking store answers"),
        ("file:/x", "must start with one of"),
        (None, "must be a folder"),
    ],
)
def test_a_report_that_cannot_work_is_refused_and_writes_nothing(
    here: Here, uri: str | None, said: str
) -> None:
    folder = here.folder
    study = load(str(folder / "tiny.yaml"), [f"storage={folder / 'studies'}"])
    with Ledger(study.folder) as ledger:
        for event in made_up_events(study):
            ledger.append({key: value for key, value in event.items() if key != "time"})
    if uri is None:
        (study.folder / "report").write_text("in the way")
    assert_refused(here("report", "tiny", *(["--tracking-uri", uri] if uri else [])), said)
    assert not list(study.folder.glob("report/*"))
    assert not (folder / "studies" / "mlflow.db").exists()


def test_only_the_users_input_exits_with_2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("study.lifecycle.run_study", break_down)
    monkeypatch.setattr("study.cli.entry.signal.signal", lambda *_: None)
    with pytest.raises(ValueError, match="a bug"):
        main(["run", str(folder / "tiny.yaml")])


@pytest.mark.slow
def test_extend_rerun_and_doctor(folder: Path) -> None:
    """Added epochs continue from the checkpoints and give the bits of a study that had them from
    the start; a repeated trial has the same bits."""
    rows = ["rows=[{label: a, overrides: {precision.format: lns12}}]", "baseline=null"]
    assert lns_study("run", "tiny.yaml", *rows, "trial.epochs=2", cwd=folder).returncode == 0
    done = lns_study(
        "run", "--extend", "tiny", "trial.epochs=4", "seeds=[0,1]", "--plain", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "1 trials continue from the last checkpoint of the same trial with fewer" in done.stdout
    assert "a, seed 0: epoch 1/4" not in done.stdout
    assert "a, seed 0: epoch 3/4" in done.stdout
    extended = fold(read_ledger(folder / "studies" / "tiny")).trials
    assert (
        lns_study("run", "tiny.yaml", *rows, "name=whole", "trial.epochs=4", cwd=folder).returncode
        == 0
    )
    (whole,) = fold(read_ledger(folder / "studies" / "whole")).trials
    assert differences(whole, extended[0]) == []
    assert (whole.epoch, extended[0].epoch, extended[1].epoch) == (4, 4, 4)
    done = lns_study("run", "tiny", "--verify", extended[0].id, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "every figure of 4 epochs came out bit-equal" in done.stdout
    done = lns_study("doctor", cwd=folder)
    assert done.returncode == 0, done.stdout
    assert "BAD" not in done.stdout
    assert "Ray: a local one starts" in done.stdout
    done = lns_study("doctor", "--tracking-uri", "http://127.0.0.1:1", cwd=folder)
    assert done.returncode == 1
    assert "BAD  MLflow: http://127.0.0.1:1" in done.stdout
