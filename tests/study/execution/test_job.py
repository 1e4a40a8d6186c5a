"""``ray job submit -- lns-study run`` on a real Ray head with token authentication: code and config
travel, a stopped job is continued."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from study.config import StudyConfig
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]
Submit = Callable[..., subprocess.CompletedProcess[str]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray(*words: str, env: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A head of two CPUs, its dashboard on loopback: where jobs go, and the environment that has
    its token."""
    folder = Path("/tmp") / f"lns-job-{os.getpid()}"  # Ray's sockets want short paths
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("0123456789abcdef" * 4)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    port, dashboard = free_port(), free_port()
    before = {process.pid for process in psutil.process_iter()}
    started = ray(
        "start", "--head", "--num-cpus=2", f"--port={port}", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
        f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}",
        env=env,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    yield f"http://127.0.0.1:{dashboard}", env
    mine = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before and _of(process, folder)
    ]
    for process in mine:
        process.kill()
    psutil.wait_procs(mine, timeout=20)


def _of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(process.info["cmdline"] or []) or str(folder) in json.dumps(
            process.environ()
        )
    except psutil.Error:
        return False


def submit(
    head: tuple[str, dict[str, str]], folder: Path, *overrides: str, wait: bool = True
) -> subprocess.CompletedProcess[str]:
    address, env = head
    words = [] if wait else ["--no-wait"]
    run = [
        "python",
        "-m",
        "study",
        "run",
        "tiny.yaml",
        "--plain",
        "address=auto",
        "tracking_uri=none",
        *overrides,
    ]
    command = [
        "job",
        "submit",
        "--address",
        address,
        "--working-dir",
        str(folder),
        *words,
        "--",
        *run,
    ]
    deadline = time.monotonic() + 60
    done = ray(*command, env=env, timeout=400)
    # the head has only just begun
    while "No available agent" in done.stdout + done.stderr and time.monotonic() < deadline:
        time.sleep(1)
        done = ray(*command, env=env, timeout=400)
    return done


def test_a_job_runs_a_study_and_a_stopped_one_is_continued(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tiny.yaml").write_text(TINY)
    overrides = [f"storage={tmp_path}", "trial.epochs=40"]
    begun = submit(head, tmp_path / "code", *overrides, wait=False)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    (job,) = set(re.findall(r"raysubmit_\w+", begun.stdout))
    ledger = tmp_path / "tiny" / "ledger.jsonl"
    deadline = time.monotonic() + 240
    while not (ledger.exists() and b'"report"' in ledger.read_bytes()):
        assert time.monotonic() < deadline, ray(
            "job", "logs", "--address", head[0], job, env=head[1]
        ).stdout
        time.sleep(0.05)
    stopped = ray("job", "stop", "--address", head[0], job, env=head[1])
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    again = submit(head, tmp_path / "code", *overrides)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Resuming: " in again.stdout
    events = read_ledger(tmp_path / "tiny")
    state = fold(events)
    assert [trial.status for trial in state.trials] == [FINISHED] * 2
    assert all(sorted(trial.reports) == list(range(1, 41)) for trial in state.trials)
    assert sum(event["event"] == "finished" for event in events) == 2
    assert sum(event["event"] == "planned" for event in events) == 2


def test_ray_client_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"address='ray://head:10001': .* use `ray job submit"):
        StudyConfig(address="ray://head:10001")


LOOP = """
from trainers import report


def train(config):
    report({"validation/error": 0.5})
"""


def test_a_job_brings_a_loop_of_the_users_own(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "loop.py").write_text(LOOP)
    study = "{name: own, trainable: 'loop.py:train', trial: {epochs: 1}}"
    (tmp_path / "code" / "tiny.yaml").write_text(study)
    done = submit(head, tmp_path / "code", f"storage={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = fold(read_ledger(tmp_path / "own")).trials
    assert trial.status == FINISHED
