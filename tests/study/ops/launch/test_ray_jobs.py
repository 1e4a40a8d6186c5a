"""``lns-study launch --to ray`` on a real Ray head with token authentication."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from study.cli import main
from study.ledger.events import Event
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.ray_head import ADDRESS, FOLDER, TOKEN, head, ray, started_head
from tests.study.raylets import SLOW_NET, wait_until

__all__ = ["head"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PASSWORD = "correct-horse-battery-staple"


def launch(
    head: tuple[str, dict[str, str]], folder: Path, *overrides: str
) -> subprocess.Popen[str]:
    address, env = head
    words = ["launch", "tiny.yaml", "--to", "ray", "--address", address, "tracking_uri=none"]
    return subprocess.Popen(
        [sys.executable, "-m", "study", *words, f"storage={folder / 'studies'}", *overrides],
        cwd=folder,
        env=env | {"MLFLOW_TRACKING_PASSWORD": PASSWORD},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _paste(command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a terminal without the launch's variables."""
    bare = {name: value for name, value in env.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["bash", "-c", command]
    return subprocess.run(
        words, env=bare | {"PATH": path}, capture_output=True, text=True, timeout=300
    )


def test_a_launched_study_outlives_its_follower_and_is_continued(
    head: tuple[str, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, env = head
    (tmp_path / "tiny.yaml").write_text(TINY)
    follower = launch(head, tmp_path, "trial.epochs=20", "limits.trials=1")
    assert follower.stdout is not None
    alarm = threading.Timer(300, follower.kill)
    alarm.start()
    lines = []
    for line in follower.stdout:
        lines.append(line)
        if "epoch" in line:  # the job's log arrives
            break
    follower.send_signal(signal.SIGINT)
    lines.append(follower.communicate(timeout=60)[0])
    alarm.cancel()
    printed = "".join(lines)
    assert follower.returncode == 0, printed
    (again,) = re.findall(r"Follow it again: (.+)", printed)
    followed = _paste(again, env)
    assert "limits.trials=1 reached" in followed.stdout, followed.stdout + followed.stderr
    (job,) = set(re.findall(r"--follow --address \S+ (\S+)", printed))
    status = ray("job", "status", "--address", address, job, env=env)
    # it ended with a trial left: exit code 3 of `run`
    assert "succeeded" in status.stdout + status.stderr, status.stdout + status.stderr
    listed = ray("job", "list", "--address", address, env=env).stdout
    assert job in listed
    assert PASSWORD not in listed + printed
    assert TOKEN not in listed + printed

    whole = launch(head, tmp_path, "trial.epochs=20")
    assert whole.communicate(timeout=400)[0].count("Resuming: ") == 1
    assert whole.returncode == 0
    events = read_ledger(tmp_path / "studies" / "tiny")
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * 2
    versions = [
        event["provenance"]["versions"]["lns-study"]
        for event in events
        if event["event"] == "planned"
    ]
    _check_stages(events, tmp_path / "studies", capsys)
    wheel = next((tmp_path / ".lns-study").glob("*/*.whl")).name.split("-")[1]
    assert versions == [wheel] * 2  # it ran from the wheel, not from the node's package
    for path in (tmp_path / ".lns-study").rglob("*"):
        assert not path.is_file() or PASSWORD.encode() not in path.read_bytes()


def _check_stages(events: list[Event], storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each launch's times are sent with its job, and `status` shows the last launch's in order."""
    plans = [event for event in events if event["event"] == "planned"]
    for plan in plans:
        times = plan["launch"]
        assert times["packing"] > 0
        ordered = [times["submitted"], times["started"], times["loaded"], plan["time"]]
        assert ordered == sorted(ordered)
    assert plans[1]["launch"]["submitted"] > plans[0]["time"]
    assert main(["status", "tiny", "--storage", str(storage)]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines are cut at 80 characters
    stages = ("packed in", "until the job started", "until its code was loaded",
              "until the study was planned", "after the command", "until one reported")  # fmt: skip
    places = [shown.find(stage) for stage in stages]
    assert -1 not in places
    assert places == sorted(places)


def test_a_launched_study_is_stopped_and_goes_on_elsewhere(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """On a node of the cluster. Once the job's folder with a file of its own is gone, ``run`` in
    the study's folder continues without the cluster."""
    _, env = head
    slow = tmp_path / "slow"
    (tmp_path / "net.py").write_text(SLOW_NET.format(slow=slow))
    (tmp_path / "tiny.yaml").write_text(TINY.replace("model: {hidden: [16]}, ", ""))

    def study(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "study", *words],
            cwd=tmp_path,
            env=env | {"RAY_ADDRESS": env[ADDRESS]},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def stop_in_trial(number: int, process: subprocess.Popen[str]) -> int:
        """Stop a study in one of its trials, which the trial ends; return its exit code."""
        slow.touch()
        wait_until(
            process,
            folder,
            lambda events: len({e["trial"] for e in events if e["event"] == "report"}) == number,
        )
        stopped = study("stop", *there)
        assert stopped.wait(120) == 0
        slow.unlink()
        printed = process.communicate(timeout=300)[0]
        ended = [trial.status for trial in fold(read_ledger(folder)).trials]
        assert ended.count(FINISHED) == number, printed
        return process.returncode

    folder = tmp_path / "studies" / "tiny"
    there = ("tiny", "--storage", str(folder.parent))
    words = ["rows=[{label: a}]", "baseline=null", "seeds=[0,1,2]", "trial.epochs=100"]
    words += ["trial.model.name=net.py:net", "max_concurrent=1"]
    assert stop_in_trial(1, launch(head, tmp_path, *words)) == 0  # a job that ended in order
    assert stop_in_trial(2, study("run", "--resume", *there, "address=auto")) == 3

    for copy in FOLDER.glob("session_*/runtime_resources/working_dir_files/*"):
        shutil.rmtree(copy, ignore_errors=True)
    refused = study("run", "--resume", *there, "address=null")
    assert "there is no file" in refused.communicate(timeout=120)[0]
    assert refused.returncode == 2
    went_on = study("run", "tiny.yaml", f"storage={folder.parent}", "tracking_uri=none", *words)
    printed = went_on.communicate(timeout=300)[0]
    assert went_on.returncode == 0, printed
    assert [trial.status for trial in fold(read_ledger(folder)).trials] == [FINISHED] * 3


def test_a_failed_job_is_a_failure(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def make():\n    raise RuntimeError('no such net')\n")
    (tmp_path / "tiny.yaml").write_text(TINY.replace("model: {hidden: [16]}", "seed: 0"))
    failing = launch(head, tmp_path, "trial.model.name=net.py:make", "max_failures=0")
    printed = failing.communicate(timeout=300)[0]
    assert failing.returncode == 1, printed
    assert "no such net" in printed


def test_a_head_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(TOKEN)
    token.chmod(0o644)
    refused = launch(("http://127.0.0.1:9", env | {"HOME": str(tmp_path)}), tmp_path)
    printed = refused.communicate(timeout=120)[0]
    assert refused.returncode == 2, printed
    assert "--address http://127.0.0.1:9: takes no job" in printed
    assert token.stat().st_mode & 0o777 == 0o600  # Ray lets everybody read it
    request = json.loads(next((tmp_path / ".lns-study").glob("*/ray-job.json")).read_text())
    assert set(request["runtime_env"]) == {"working_dir", "py_modules"}


def test_a_job_runs_with_the_python_of_the_heads_ray(tmp_path: Path) -> None:
    """With any ``python`` on the PATH of the user who started the head; the job's log names the one
    that is used."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho another python\nexit 7\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    (folder := tmp_path / "study").mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    with started_head(tmp_path, PATH=path) as head:
        launched = launch(head, folder, "trial.epochs=1")
        printed = launched.communicate(timeout=300)[0]
    assert launched.returncode == 0, printed
    assert f"Python: {sys.executable}" in printed
    assert "another python" not in printed
