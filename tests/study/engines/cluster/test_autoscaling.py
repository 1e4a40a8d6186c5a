"""Studies on a Ray cluster that grows: a head without CPUs and Ray's own autoscaler, whose nodes
are raylets on this machine (its provider ``fake_multinode``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.ray_head import TOKEN
from tests.study.raylets import ROOT, python_path, raylet, started
from tests.study.servers import free_port

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""The head's id in Ray's second autoscaler, KubeRay's."""
SECOND = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
}
PROVIDER = {
    "type": "external",  # Ray's wheel lacks the file that its second autoscaler reads for the other
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    "launch_multiple": True,
    "head_node_id": HEAD,
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
AWS = yaml.safe_load((ROOT / "conf" / "cluster" / "aws.yaml").read_text())


def autoscaling(kinds: dict[str, Any], address: str, provider: dict[str, Any]) -> dict[str, Any]:
    """Return an autoscaler's config for these kinds of nodes, with these keys added to its
    provider."""
    named = {"ray.head.default": kinds["head"], "workers": kinds["workers"]}
    return {
        "cluster_name": "growing",
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            **provider,
        },
        "available_node_types": {
            name: {**kind, "node_config": {}, "max_workers": 2 * (name == "workers")}
            for name, kind in named.items()
        },
        "head_node_type": "ray.head.default",
        **{
            name: {} if name in ("auth", "docker", "file_mounts") else []
            for name in (
                "auth", "docker", "file_mounts", "cluster_synced_files", "rsync_exclude",
                "rsync_filter", "initialization_commands", "setup_commands",
                "head_setup_commands", "worker_setup_commands", "head_start_ray_commands",
                "worker_start_ray_commands",
            )
        },
        "file_mounts_sync_continuously": False,
    }  # fmt: skip


@pytest.fixture
def growing(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The address of a cluster with the node kinds of ``conf/cluster/aws.yaml``, whose workers have
    two CPUs here; with Ray's second autoscaler if ``param`` is true."""
    second = getattr(request, "param", False)
    kinds = AWS["available_node_types"]
    kinds["workers"]["resources"] = {"CPU": 2}
    config = tmp_path_factory.mktemp("autoscaling") / "config.yaml"
    folder, port = Path("/tmp") / f"lns-grow-{os.getpid()}", free_port()
    config.write_text(
        json.dumps(autoscaling(kinds, f"127.0.0.1:{port}", PROVIDER if second else {}))
    )
    (token := config.with_name("token")).write_text(TOKEN)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    before = {process.pid for process in psutil.process_iter()}
    words = [
        "start", "--head", f"--num-cpus={kinds['head']['resources']['CPU']}", f"--port={port}",
        f"--autoscaling-config={config}", "--include-dashboard=false", f"--temp-dir={folder}",
        "--node-ip-address=127.0.0.1", f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
    ]  # fmt: skip
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    fake |= SECOND if second else {}
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env=os.environ | fake,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    yield f"127.0.0.1:{port}"
    mine = [each for each in psutil.process_iter() if each.pid not in before and of(each, folder)]
    for process in mine:
        process.kill()
    psutil.wait_procs(mine, timeout=20)
    shutil.rmtree(folder, ignore_errors=True)


def of(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process belongs to the Ray in a folder."""
    try:
        return str(folder) in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("words", [[], ["trial.workers=2", "gang=train"]], ids=["", "train"])
def test_a_study_on_a_head_without_cpus_gets_its_nodes_from_the_autoscaler(
    growing: str, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    process = started(tmp_path, f"address={growing}", *words)
    try:
        said, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, said
    state = fold(read_ledger(tmp_path / "studies" / "tiny"))
    assert [trial.status for trial in state.trials] == [FINISHED] * 2


@pytest.mark.parametrize("growing", [True], indirect=True)
def test_a_node_that_is_refused_does_not_keep_the_autoscaler_from_others(
    growing: str, tmp_path: Path
) -> None:
    """An old node with another torch, according to its metadata, which exists from the start."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (about := tmp_path / "old" / "torch-2.0.1.dist-info").mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    old = os.environ | python_path(about.parent)
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={growing}"]
    with raylet(SimpleNamespace(address=growing), about.parent, env=old, cpus=3):
        deadline = time.monotonic() + 120
        while "/3.0 CPU" not in subprocess.run(status, capture_output=True, text=True).stdout:
            assert time.monotonic() < deadline
        process = started(tmp_path, f"address={growing}")
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert "Refused: the node " in said
    assert "has torch 2.0.1" in said
    state = fold(read_ledger(tmp_path / "studies" / "tiny"))
    assert [trial.status for trial in state.trials] == [FINISHED] * 2
