"""``ray job submit -- lns-study run`` on a real Ray head with token authentication: code and config
are sent, a stopped job is continued."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from study.config import StudyConfig
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.ray_head import head, ray

__all__ = ["head"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Submit = Callable[..., subprocess.CompletedProcess[str]]


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
    # the head has only just started
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
