"""A study on a Ray cluster of several nodes (raylets on this machine): gangs that span nodes, and a node that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from study.ledger import read_ledger
from study.state import FINISHED, fold
from tests.study.conftest import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GANG = ["trial.workers=2", "rows=[{label: a, overrides: {precision.format: lns12}}]", "baseline=null"]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes of one CPU each: a gang of two must span both."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def command(folder: Path, address: str, *overrides: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "study", "run", "tiny.yaml", "--plain", f"address={address}", "tracking_uri=none", *overrides]
    return subprocess.Popen(words, cwd=folder, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_gang_spans_nodes_and_outlives_one(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    whole = command(tmp_path, cluster.address, *GANG, "name=whole", "trial.epochs=5")
    said, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    process = command(tmp_path, cluster.address, *GANG, "name=killed", "trial.epochs=5")
    ledger = tmp_path / "studies" / "killed" / "ledger.jsonl"
    deadline = time.monotonic() + 240
    while not (ledger.exists() and b'"report"' in ledger.read_bytes()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    trials = [fold(read_ledger(tmp_path / "studies" / name)).trials[0] for name in ("whole", "killed")]
    assert [trial.status for trial in trials] == [FINISHED] * 2
    untimed = [
        [{k: v for k, v in event["metrics"].items() if k != "samples_per_second"} for _, event in sorted(trial.reports.items())]
        for trial in trials
    ]
    assert untimed[0] == untimed[1]
