"""What a study does to Ray's processes when it starts them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from study.ray_session import _own_process_groups, keep_token

LEADS_A_GROUP = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]


def leads_a_group() -> bool:
    """Whether a process started as Ray starts its own is out of reach of signals to our group."""
    return subprocess.run(LEADS_A_GROUP, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: None).stdout == "True\n"


def test_only_rays_own_processes_leave_our_group() -> None:
    assert not leads_a_group()
    with _own_process_groups():
        assert leads_a_group()
    assert not leads_a_group()


def modes(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_rays_token_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray" / "auth_token"
    keep_token(path)
    assert modes(path.parent, path) == [0o700, 0o600]
    token = path.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    keep_token(path)
    assert modes(path.parent, path) == [0o700, 0o600]
    assert path.read_text() == token
    assert os.listdir(path.parent) == ["auth_token"]
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    keep_token(tmp_path / "other" / "auth_token")
    assert not (tmp_path / "other").exists()


def test_a_local_ray_takes_the_token_and_asks_for_it(tmp_path: Path) -> None:
    """A process of its own: Ray reads its settings once."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {"HOME": str(tmp_path)}
    code = (
        "from study.config import StudyConfig; from study.ray_session import asks_nobody, ray_session\n"
        "with ray_session(StudyConfig(cpus=1)) as address: print('asks nobody:', asks_nobody(address))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "asks nobody: False" in done.stdout, done.stderr
    assert modes(tmp_path / ".ray", tmp_path / ".ray" / "auth_token") == [0o700, 0o600]


@pytest.mark.slow
def test_a_cluster_that_asks_nobody_is_refused_unless_told(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    if "RAY_AUTH_MODE" in os.environ:
        pytest.skip("this process has a Ray with tokens already")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        code = (
            "import sys; from study.config import StudyConfig; from study.ray_session import ray_session\n"
            "with ray_session(StudyConfig(address=sys.argv[1], insecure=sys.argv[2] == 'insecure')) as address: print('in')"
        )

        def join(how: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-c", code, cluster.address, how]
            return subprocess.run(words, capture_output=True, text=True, timeout=120)

        refused = join("safe")
        assert refused.returncode != 0
        assert "asks nobody for a token" in refused.stderr
        assert "insecure=true" in refused.stderr
        assert join("insecure").stdout == "in\n"
    finally:
        cluster.shutdown()
