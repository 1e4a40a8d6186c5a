"""Studies on Ray clusters whose nodes are raylets on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from study.ledger.log import read_ledger

ROOT = Path(__file__).resolve().parents[2]
SLOW_NET = """
import pathlib
import time
from torch import nn

SLOW = pathlib.Path("{slow}")

class Net(nn.Sequential):
    def forward(self, x):
        time.sleep(0.03 if SLOW.exists() else 0.0)
        return super().forward(x)

def net():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""
"""A network that is slow while a file exists."""


@contextmanager
def cluster_of(head: int, *nodes: int) -> Iterator[Any]:
    """A cluster whose head and nodes declare these numbers of CPUs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False}
    )
    for cpus in nodes:
        cluster.add_node(num_cpus=cpus)
    cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def raylet(
    cluster: Any,
    folder: Path,
    python: str | Path = sys.executable,
    env: Mapping[str, str] = os.environ,
    cpus: int = 1,
) -> Iterator[None]:
    """A node of the cluster, with its own folder, Python and variables."""
    start = [str(python), "-m", "ray.scripts.scripts", "start", f"--num-cpus={cpus}", "--block"]
    process = subprocess.Popen(
        [*start, f"--address={cluster.address}"],
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def python_path(*folders: Path) -> dict[str, str]:
    """The variable that puts folders before those already on ``sys.path``."""
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *known])}


def started(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Run the study of ``tiny.yaml`` as a separate command."""
    words = ["run", "tiny.yaml", "--plain", "tracking_uri=none", *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "study", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def command(folder: Path, address: str, *overrides: str) -> subprocess.Popen[str]:
    """The same on a cluster."""
    return started(folder, f"address={address}", "insecure=true", *overrides)


def wait_until(
    process: subprocess.Popen[str], folder: Path, happened: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Wait for a condition, and return the ledger's events."""
    deadline = time.monotonic() + 240
    while not happened(events := read_ledger(folder)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return events


def said_until(process: subprocess.Popen[str], word: str) -> str:
    """Return a study's output up to a text."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    process.kill()
    raise AssertionError(said)
