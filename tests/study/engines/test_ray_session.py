"""The Ray of a study: it consists of its own processes, is noticed and restarted when it dies, and
ends with the process that started it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from study.engines import ray_token
from study.engines.ray import own_ray
from study.engines.ray.own_ray import OwnRay
from study.engines.ray_session import Joined, JoinedOwn
from study.engines.ray_token import asks_nobody, check_token, keep_token, users_of
from study.errors import UserError
from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.ray_head import ADDRESS, TOKEN, head  # noqa: F401
from tests.study.raylets import started

ALL_STARTED = "Ray runtime started"
"""`ray start` prints it last."""
GANG = ["trial.workers=2", "rows=[{label: a}]", "baseline=null", "trial.epochs=40", "gang=train"]


def parts(of: int, name: str) -> list[psutil.Process]:
    """Return the Ray processes below a process; ``agents`` are a raylet's."""
    below = psutil.Process(of).children(recursive=True)
    if name != "agents":
        return [child for child in below if child.name() == name]
    own = [child for raylet in below if raylet.name() == "raylet" for child in raylet.children()]
    return [child for child in own if "agent" in " ".join(child.cmdline()).lower()]


def until(seen: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_of_our_own_is_missed_and_started_again(name: str) -> None:
    # of the tests' own Ray
    others = {kind: parts(os.getpid(), kind) for kind in ("raylet", "gcs_server")}

    def ours(kind: str) -> list[psutil.Process]:
        return [part for part in parts(os.getpid(), kind) if part not in others[kind]]

    ray = OwnRay(2, 0, dashboard=False)
    try:
        first = ray.address
        ray.look()
        assert not ray.lost
        (part,) = ours(name)
        part.kill()
        until(lambda: ray.look() or ray.lost, 10)
        ray.renew()
        ray.look()
        assert not ray.lost
        assert ray.address != first
        assert len(ours("raylet")) == len(ours("gcs_server")) == 1
    finally:
        ray.close()
    until(lambda: not ours("raylet"), 10)


@pytest.mark.slow
def test_ray_start_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a call to its dead control store; here it is stopped."""
    monkeypatch.setattr(own_ray, "END_SECONDS", 3.0)
    others = set(psutil.Process().children())  # including the tests' own Ray
    ray = OwnRay(1, 0, dashboard=False)
    try:
        ray.look()
        ours = set(psutil.Process().children()) - others
        (start,) = (child for child in ours if "--head" in child.cmdline())
        below = start.children(recursive=True)
        start.suspend()
        next(part for part in below if part.name() == "gcs_server").kill()
        until(lambda: ray.look() or ray.lost, 10)
        ray.renew()
        _, alive = psutil.wait_procs(below, timeout=10)
        assert not alive
        ray.look()
        assert not ray.lost
    finally:
        ray.close()


@pytest.mark.slow
def test_a_ray_of_our_own_dies_with_us() -> None:
    code = (
        "import time; from study.engines.ray.own_ray import OwnRay; r = OwnRay(1, 0,"
        " dashboard=False); print('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    below = psutil.Process(process.pid).children(recursive=True)
    assert any(child.name() == "raylet" for child in below)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive


DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
DRAINS = f"""
import psutil
from study.config import StudyConfig
from study.engines.ray_session import ray_session
with ray_session(StudyConfig(cpus=1)):
    (start,) = (each for each in psutil.Process().children() if "--head" in each.cmdline())
    print(start.environ()["{DRAIN}"])
"""


@pytest.mark.slow
def test_a_ray_of_our_own_that_ends_drains_no_node() -> None:
    """Ray's own default is 30 s, for services with other nodes as an alternative."""
    env = {name: value for name, value in os.environ.items() if name != DRAIN}
    said = subprocess.run(
        [sys.executable, "-c", DRAINS], env=env, check=True, capture_output=True, text=True
    )
    assert said.stdout.split()[-1] == "0"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [["raylet"], ["gcs_server", "raylet"], ["agents"]])
def test_a_study_goes_on_after_its_ray_has_died(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    process = started(tmp_path, *GANG)
    folder = tmp_path / "studies" / "tiny"
    until(lambda: any(event["event"] == "report" for event in read_ledger(folder)), 200)
    found = [parts(process.pid, name) for name in names]
    assert all(found)
    for part in (part for each in found for part in each):
        with contextlib.suppress(psutil.NoSuchProcess):  # a raylet ends with the head's server
            part.kill()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "Starting Ray on this machine ..." in said
    assert "Ray: one of its processes died; waiting for it" in said
    assert "Ray is back." in said
    (trial,) = fold(read_ledger(folder)).trials
    assert (trial.status, trial.epoch) == (FINISHED, 40)
    # twice if it was restarted before its Ray was missed
    assert trial.restarts in (1, 2)


OUTLIVES = """
import time, psutil
from study.config import StudyConfig
from study.engines.ray_session import ray_session
with ray_session(StudyConfig(cpus=1)) as session:
    for part in psutil.Process().children(recursive=True):
        if part.name() == "gcs_server":
            part.kill()
    time.sleep(3)  # a call waits for the dead control store
    session.look()
    assert session.lost
    assert session.renew()
    time.sleep(65)
    session.look()
    print("here", session.lost or session.silent)
"""


@pytest.mark.slow
def test_a_driver_outlives_the_minute_after_which_ray_would_end_it() -> None:
    said = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, text=True)
    assert said.stdout.split() == ["here"], said.stderr


@pytest.mark.slow
def test_rays_of_our_own_start_beside_each_other() -> None:
    """By default every Ray uses the same ports for its dashboard, client server and agent."""
    first = OwnRay(1, 0, dashboard=True)
    try:
        second = OwnRay(1, 0, dashboard=True)
        try:
            for ray in (first, second):
                log = ray._printed
                until(lambda log=log: ALL_STARTED in log.read_text())  # type: ignore[misc]
                ray.look()
                assert not ray.lost
        finally:
            second.close()
    finally:
        first.close()


@pytest.mark.slow
def test_no_folder_of_a_ray_that_died_is_made_again_within_reach_of_others(tmp_path: Path) -> None:
    """Agents and workers outlive their raylet for a while, and create Ray's folder again, writable
    for all users, wherever it was."""
    ray = OwnRay(1, 0, dashboard=False)
    top = ray._folder
    try:
        until(lambda: ALL_STARTED in ray._printed.read_text())
        first = [process.pid for process in own_ray._writers(top)]
        assert len(first) > 3  # the control store, the raylet, its agents
        (raylet,) = parts(ray._process.pid, "raylet")
        raylet.kill()
        until(lambda: not own_ray._runs(raylet))
        ray.renew()
        assert modes(top) == [0o700]
        assert not set(first) & set(psutil.pids())
        code = (
            "import os, sys, time; log = open(sys.argv[1], 'w'); print(flush=True); time.sleep(600)"
        )
        words = [sys.executable, "-c", code, str(top / "late.log")]
        late = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert late.stdout is not None
        late.stdout.readline()
    finally:
        ray.close()
    late.wait(10)
    assert not top.exists()


@pytest.mark.slow
def test_a_ray_that_dies_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` prints its address before its client server finds that its port is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        dashboard, _, agent = own_ray._free_ports(3)
        monkeypatch.setattr(own_ray, "_free_ports", lambda number: [dashboard, port, agent])
        ray = OwnRay(1, 0, dashboard=False)
        try:
            until(lambda: ray._process.poll() is not None)
            with pytest.raises(UserError, match=rf"Ray does not start(.|\n)*{port}"):
                JoinedOwn(ray)
        finally:
            ray.close()


def test_a_ray_that_does_not_start_shows_whole_lines_its_log_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "for n in range(100): print(f'line {n}', 'word ' * 30)\nraise SystemExit(1)"
    monkeypatch.setattr(own_ray, "module_command", lambda name: [sys.executable, "-c", code])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="Ray does not start") as refused:
        OwnRay(1, 0, dashboard=False)
    first, *shown, remedy = str(refused.value).splitlines()
    assert first == "Ray does not start on this machine:"
    assert [line.split()[:2] for line in shown] == [["line", str(n)] for n in range(92, 100)]
    (log,) = tmp_path.glob("ray-start-*.log")  # Ray's own folder is gone
    assert str(log) in remedy
    assert "engine=local" in remedy
    assert len(log.read_text().splitlines()) == 100
    assert list(tmp_path.iterdir()) == [log]


def modes(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def test_rays_token_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o755)
    path.write_text("0" * 64)
    path.chmod(0o644)
    keep_token(path)
    assert modes(path.parent, path) == [0o700, 0o600]
    assert path.read_text() == "0" * 64
    keep_token(tmp_path / "other" / "auth_token")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "disabled", "token"])
def test_a_ray_of_our_own_asks_for_a_token_that_is_in_no_file(mode: str, tmp_path: Path) -> None:
    """In its own process, because Ray reads its settings once. The variables are settings of
    clusters."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {
        "HOME": str(tmp_path)
    }
    env |= {"RAY_AUTH_MODE": mode} if mode else {}
    code = (
        "import os; from study.engines.ray.own_ray import OwnRay\n"
        "from study.engines.ray_token import asks_nobody\n"
        "ray = OwnRay(1, 0, dashboard=False); print('asks nobody:', asks_nobody(ray.address))\n"
        "ray.close(); print('RAY_AUTH_TOKEN' in os.environ, os.environ.get('RAY_AUTH_MODE', ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"asks nobody: False\nFalse {mode}\n", done.stderr
    assert not (tmp_path / ".ray").exists()


@pytest.mark.slow
def test_a_ray_of_our_own_listens_on_loopback_and_answers_nobody_without_the_token() -> None:
    """Ray serves metrics to everybody; its agents do so at their own ports."""
    ours = OwnRay(1, 0, dashboard=True)
    try:

        def listening() -> list[tuple[str, int]]:
            below = psutil.Process(ours._process.pid).children(recursive=True)
            return sorted(
                (socket_.laddr.ip.removeprefix("::ffff:"), socket_.laddr.port)
                for process in below
                for socket_ in process.net_connections("tcp")
                if socket_.status == psutil.CONN_LISTEN
            )

        # the control store, the client's server, the dashboard, the raylet's two, agents'
        until(lambda: len(listening()) >= 7)
        ports = listening()
        assert {host for host, _ in ports} == {"127.0.0.1"}
        for _, port in ports:
            for path in ("/metrics", "/api/cluster_status", "/api/jobs/", "/nodes"):
                there = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                with contextlib.suppress(http.client.HTTPException, OSError):  # gRPC's ports
                    there.request("GET", path)
                    assert there.getresponse().status in (401, 404), (port, path)
                there.close()
    finally:
        ours.close()


@pytest.mark.slow
def test_a_cluster_that_asks_nobody_is_refused_unless_told(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    if "RAY_AUTH_MODE" in os.environ:
        pytest.skip("this process has a Ray with tokens already")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        code = (
            "import sys; from study.config import StudyConfig; from study.engines.ray_session"
            " import ray_session\nwith ray_session(StudyConfig(address=sys.argv[1],"
            " insecure=sys.argv[2] == 'insecure')) as address: print('in')"
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


@pytest.mark.parametrize("insecure", [False, True])
def test_what_does_not_say_that_it_asks_for_a_token_is_refused(
    insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed port, a server that sends nothing, and a server that is not Ray."""
    grpc = pytest.importorskip("grpc")
    monkeypatch.setattr(ray_token, "ANSWER_SECONDS", 1.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    silent, other = socket.socket(), grpc.server(futures.ThreadPoolExecutor(1))
    with silent:
        silent.bind(("0.0.0.0", 0))  # Ray replaces 127.0.0.1 by the machine's address
        silent.listen()
        ports = {
            "UNAVAILABLE": 1,
            "DEADLINE_EXCEEDED": silent.getsockname()[1],
            "UNIMPLEMENTED": other.add_insecure_port("0.0.0.0:0"),
        }
        other.start()
        try:
            for said, port in ports.items():
                with pytest.raises(ConnectionError, match=said):
                    asks_nobody(f"127.0.0.1:{port}")
                with pytest.raises(UserError, match=rf"no Ray cluster answers \({said}.*--head"):
                    Joined(f"127.0.0.1:{port}", insecure)
        finally:
            other.stop(None).wait()


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_so_to_who_has_none(
    head: tuple[str, dict[str, str]],  # noqa: F811
    tmp_path: Path,
) -> None:
    """The message does not ask to start what already runs, and repeats no token."""
    _, env = head
    code = (
        "import sys; from study.config import StudyConfig; from study.engines.ray_session"
        " import ray_session\nwith ray_session(StudyConfig(address=sys.argv[1])): print('in')"
    )
    without = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")}
    wrong = "f" * 64
    ways = {
        "nothing": without,
        "no mode": without | {"RAY_AUTH_TOKEN_PATH": env["RAY_AUTH_TOKEN_PATH"]},
        "no token": without | {"RAY_AUTH_MODE": "token"},
        "another": without | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": wrong},
    }
    for way in [*ways.values(), env]:
        done = subprocess.run(
            [sys.executable, "-c", code, env[ADDRESS]],
            env=way | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if way is env:
            assert done.stdout == "in\n", done.stderr
        else:
            assert "asks for a token, and this process has no valid one" in done.stderr
            assert "RAY_AUTH_MODE=token" in done.stderr
        assert TOKEN not in done.stderr
        assert wrong not in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of another user")
def test_a_raylet_of_another_user_is_none_of_ours() -> None:
    words = ["raylet", "-c", "sleep 600; :", "--gcs-address=127.0.0.1:1"]
    for user in (65534, os.getuid()):
        process = subprocess.Popen(words, executable="/bin/sh", user=user, cwd="/")
        try:
            until(lambda of=process.pid: psutil.Process(of).cmdline() == words, 10)
            assert users_of("127.0.0.1:1") == {user}
        finally:
            process.kill()
            process.wait()


def test_a_ray_without_a_node_here_is_waited_for_and_none_of_anothers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("study._compat.ray_head", lambda _: "127.0.0.1:1")
    with pytest.raises(ConnectionError, match=r"no node of the Ray at 127.0.0.1:1 runs on this"):
        check_token("auto", insecure=True)


def joined(address: str) -> Joined:
    """A cluster from which this machine's node has been removed, as if it had joined before."""
    cluster = Joined.__new__(Joined)
    cluster.address = address
    cluster._given, cluster._insecure, cluster._environment = address, True, None
    cluster._nodes = [{"NodeID": "n", "Alive": False, "Resources": {"CPU": 4.0}}]
    cluster._node, cluster._left = "n", threading.Event()
    cluster._answered = time.monotonic()
    return cluster


def test_joining_again_is_tried_as_long_as_the_control_store_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Joined) -> None:
        raise RuntimeError("no node of this machine")

    answers = [True]

    def ask(address: str) -> bool:
        if not answers[0]:
            raise ConnectionError("DEADLINE_EXCEEDED")
        return True

    monkeypatch.setattr(Joined, "_join", refuse)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("study.engines.ray_session.asks_nobody", ask)
    cluster, now = joined("127.0.0.1:1"), time.monotonic()
    for later in (0.0, 20.0, 40.0, 90.0):
        monkeypatch.setattr("time.monotonic", lambda at=now + later: at)
        assert not cluster.renew()
        cluster.look()
        assert "has left the cluster" in cluster.lost
    answers[0] = False  # it listens, and is stopped
    monkeypatch.setattr("time.monotonic", lambda: now + 130.0)
    assert not cluster.renew()
    with pytest.raises(UserError, match=r"its control store at .* does not answer"):
        cluster.look()
    assert cluster.resources() == {"CPU": 0.0, "GPU": 0.0}


def test_a_driver_that_was_stopped_does_not_take_its_cluster_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-Z, and ``fg`` an hour later."""
    context = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "n")
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("study.engines.ray_session.check_token", lambda *_: None)
    monkeypatch.setattr(
        "study.engines.ray_session._nodes", lambda: [{"NodeID": "n", "Alive": True}]
    )
    monkeypatch.setattr("study.engines.ray_session._use", lambda: None)
    before = signal.getsignal(signal.SIGCONT)
    with contextlib.closing(Joined("127.0.0.1:1", insecure=True)) as cluster:
        now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: now + 3600.0)
        signal.raise_signal(signal.SIGCONT)
        cluster.look()
        assert not cluster.silent
    assert signal.getsignal(signal.SIGCONT) == before


def test_a_cluster_of_other_versions_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: the cluster has Python 3.11.9")

    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setattr("study.engines.ray_session.check_token", lambda *_: None)
    with pytest.raises(UserError, match=r"cannot join it \(Version mismatch: .*versions"):
        Joined("127.0.0.1:1", insecure=True)
