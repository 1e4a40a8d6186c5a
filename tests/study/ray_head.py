"""A real Ray head with token authentication, on loopback, that ends with its test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.study.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "TEST_GCS_ADDRESS"
"""Variable of the head's environment with the address of its control store."""
TOKEN = "0123456789abcdef" * 4
FOLDER = Path("/tmp") / f"lns-job-{os.getpid()}"
"""Ray's folder; its sockets need short paths."""


def ray(*words: str, env: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A head with two CPUs and its dashboard on loopback: the address for jobs, and the environment
    with its token."""
    with started_head(tmp_path_factory.mktemp("token")) as started:
        yield started


@contextmanager
def started_head(folder: Path, **variables: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The same with its token in ``folder``, and with additional variables."""
    token = folder / "token"
    token.write_text(TOKEN)
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
        "--node-ip-address=127.0.0.1", f"--temp-dir={FOLDER}",
        f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}",
        env=env | variables,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    env[ADDRESS] = f"127.0.0.1:{port}"
    yield f"http://127.0.0.1:{dashboard}", env
    mine = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in before and _of(process)
    ]
    for process in mine:
        process.kill()
    psutil.wait_procs(mine, timeout=20)


def _of(process: psutil.Process) -> bool:
    try:
        return str(FOLDER) in " ".join(process.info["cmdline"] or []) or str(FOLDER) in json.dumps(
            process.environ()
        )
    except psutil.Error:
        return False
