"""``lns-study launch --to kuberay`` with the real ``kubectl``, against an API server with the
limits of Kubernetes (:mod:`tests.study.ops.launch.machines.kubernetes_api`)."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from study.cli import main
from study.engines.launch_times import VARIABLE
from study.ops.launch import kuberay
from tests.study.conftest import TINY
from tests.study.ops.launch.machines.kubernetes_api import (
    MOST_ANNOTATIONS,
    KubernetesApi,
    kubeconfig,
    kubernetes_api,
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = ["launch", "tiny.yaml", "--to", "kuberay", "storage=/studies", "tracking_uri=none"]
ENDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """The server that ``kubectl`` asks."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl's cache and configuration
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (tmp_path / ".kube").mkdir()
    monkeypatch.setattr(kuberay, "LOOK_SECONDS", 0.0)
    with kubernetes_api() as server:
        (tmp_path / ".kube" / "config").write_text(kubeconfig(server))
        server.status = ENDED
        yield server


def kubectl(*words: str) -> str:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cluster_takes_the_package_which_a_client_side_apply_cannot_bring(
    api: KubernetesApi, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0, capfd.readouterr()
    (data,), (job,) = api.of_kind("ConfigMap"), api.of_kind("RayJob")
    assert len(data["binaryData"][kuberay.ARCHIVE]) > MOST_ANNOTATIONS
    assert set(data["metadata"]["annotations"]) == {"lns-study/code"}
    assert data["metadata"]["name"] == job["metadata"]["name"]
    assert re.fullmatch(
        rf"env {VARIABLE}=[\d.]+,[\d.]+ {kuberay.ENTRYPOINT}", job["spec"]["entrypoint"]
    )
    # the server can tell: a client-side apply of the launch's file is refused
    api.objects.clear()
    (written,) = Path(".lns-study").glob("*/kuberay.yaml")
    client = ["kubectl", "apply", "-f", str(written)]
    refused = subprocess.run(client, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "metadata.annotations: Too long" in refused.stderr


def test_a_second_launch_begins_anew_what_ended_and_takes_over_what_runs(
    api: KubernetesApi, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(WORDS) == 0, capfd.readouterr()
    (first,) = api.of_kind("RayJob")
    assert main(WORDS) == 0, capfd.readouterr()
    (second,) = api.of_kind("RayJob")
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    name, written = second["metadata"]["name"], copy.deepcopy(second["spec"])
    kubectl("patch", "rayjob", name, "--type=merge", "--patch", '{"spec": {"backoffLimit": 9}}')
    (edited,) = api.of_kind("RayJob")
    assert edited["spec"]["backoffLimit"] == 9
    edited["status"] = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    assert main(WORDS) == 0, capfd.readouterr()
    (third,) = api.of_kind("RayJob")
    assert third["metadata"]["uid"] == second["metadata"]["uid"]
    assert third["spec"] == written


def test_a_package_that_is_there_is_taken_whatever_the_umask_or_the_compressor(
    api: KubernetesApi, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ConfigMap is immutable; elsewhere the same code may be compressed differently."""
    assert main(WORDS) == 0, capfd.readouterr()
    shutil.rmtree(".lns-study")
    before = os.umask(0o077)
    try:
        Path("tiny.yaml").unlink()
        Path("tiny.yaml").write_text(TINY)
        assert main([*WORDS, "--dry-run"]) == 0, capfd.readouterr()
        (written,) = Path(".lns-study").glob("*/kuberay.yaml")
        kubectl("apply", "--server-side", "--force-conflicts", "-f", str(written))
        (data,) = api.of_kind("ConfigMap")
        data["binaryData"][kuberay.ARCHIVE] = "b3RoZXI="
        assert main(WORDS) == 0, capfd.readouterr()
    finally:
        os.umask(before)
    assert [each["binaryData"] for each in api.of_kind("ConfigMap")] == [data["binaryData"]]
