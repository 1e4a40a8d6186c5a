"""A study on a Ray cluster of several nodes (raylets on this machine): gangs that span nodes, and a
node that dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.object_store import BUCKET, Line, s3, s3_server  # noqa: F401
from tests.study.sleeping import most_at_once
from trainers.object_store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
EPOCHS = 400
GANG = [
    "trial.workers=2",
    "rows=[{label: a, overrides: {precision.format: lns12}}]",
    "baseline=null",
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes of one CPU each: a gang of two must span both."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def python_path(*folders: Path) -> dict[str, str]:
    """The variable that puts folders before those that are on ``sys.path`` already."""
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *known])}


def command(folder: Path, address: str, *overrides: str) -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        "study",
        "run",
        "tiny.yaml",
        "--plain",
        f"address={address}",
        "insecure=true",
        "tracking_uri=none",
        *overrides,
    ]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SLEEPERS = """
import sys
from study.config.compose import load
from study.api import run_study
from tests.study.conftest import SilentView
from tests.study.sleeping import executor
with executor():
    outcome = run_study(load("tiny.yaml", sys.argv[1:]), SilentView(), print)
sys.exit(outcome.failed)
"""


@pytest.fixture
def three() -> Iterator[Any]:
    """Three nodes of eight declared CPUs each, the head among them."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=8)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def sleepers(folder: Path, cluster: Any, *overrides: str) -> subprocess.Popen[str]:
    """A study of trials that sleep, on the cluster."""
    common = [
        f"address={cluster.address}",
        "insecure=true",
        "tracking_uri=none",
        "rows=[{label: a}]",
        "baseline=null",
        "trial.epochs=1",
    ]
    (folder / "tiny.yaml").write_text(TINY)
    words = [sys.executable, "-c", SLEEPERS, *common, *overrides]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | python_path(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(
    process: subprocess.Popen[str], folder: Path, happened: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """The ledger's events once something has happened in it."""
    deadline = time.monotonic() + 240
    while not happened(events := read_ledger(folder)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return events


def test_three_nodes_are_full_and_the_loss_of_one_loses_nothing(three: Any, tmp_path: Path) -> None:
    """Of 24 slots all are in use; a node dies in the middle of the full house, and a new one brings
    its slots within seconds."""
    folder = tmp_path / "studies" / "full"
    process = sleepers(
        tmp_path, three, "name=full", f"seeds={list(range(96))}", "trial.optimizer.lr=3.0"
    )
    wait_until(
        process, folder, lambda events: sum(event["event"] == "finished" for event in events) >= 24
    )
    three.remove_node(three.worker_nodes.copy().pop(), allow_graceful=False)
    wait_until(
        process, folder, lambda events: any(event["event"] == "restarted" for event in events)
    )
    lost = time.time()
    three.add_node(num_cpus=8)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    events = read_ledger(folder)
    trials = fold(events).trials
    assert [trial.status for trial in trials] == [FINISHED] * 96
    assert sum(event["event"] == "finished" for event in events) == 96
    assert most_at_once(events) == 24
    assert 1 <= sum(trial.restarts for trial in trials) <= 8
    capacity = [event["cpus"] for event in events if event["event"] == "capacity"]
    assert max(capacity) == 24
    assert 16 in capacity[capacity.index(24) :]
    after = [event for event in events if event["event"] == "capacity" and event["time"] > lost]
    assert after[-1]["cpus"] == 24


def test_a_study_outlives_the_node_that_it_has_joined(three: Any, tmp_path: Path) -> None:
    process = sleepers(
        tmp_path, three, "name=joins", f"seeds={list(range(60))}", "trial.optimizer.lr=3.0"
    )
    folder = tmp_path / "studies" / "joins"
    wait_until(
        process, folder, lambda events: sum(event["event"] == "finished" for event in events) >= 4
    )
    three.head_node.kill_raylet(check_alive=False)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert [trial.status for trial in fold(read_ledger(folder)).trials] == [FINISHED] * 60


def test_a_study_ends_in_order_when_the_control_store_stays_silent(
    three: Any, tmp_path: Path
) -> None:
    process = sleepers(
        tmp_path, three, "name=silent", f"seeds={list(range(600))}", "trial.optimizer.lr=3.0"
    )
    folder = tmp_path / "studies" / "silent"
    wait_until(
        process, folder, lambda events: sum(event["event"] == "finished" for event in events) >= 4
    )
    address = three.address
    three.head_node.kill_gcs_server(check_alive=False)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"its control store at {address} does not answer; waiting for it" in said
    assert "the same command goes on once the cluster is back" in said
    assert read_ledger(folder)[-1]["event"] == "ended"


def test_a_node_that_others_use_in_part_gives_what_it_has(three: Any, tmp_path: Path) -> None:
    """Another job holds five CPUs of one node: the study gets the other 19."""
    holder = (
        "import sys, time, ray; ray.init(address=sys.argv[1],"
        " log_to_driver=False)\n@ray.remote(num_cpus=5)\nclass Holder:\n    def here(self): return"
        " True\nholder = Holder.remote(); ray.get(holder.here.remote()); print('held', flush=True);"
        " time.sleep(600)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holder, three.address], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        while (line := other.stdout.readline()) != "held\n":
            assert line, "the other job ended"
        process = sleepers(
            tmp_path, three, "name=part", f"seeds={list(range(76))}", "trial.optimizer.lr=4.0"
        )
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    finally:
        other.kill()
        other.wait()
    events = read_ledger(tmp_path / "studies" / "part")
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * 76
    assert max(event["cpus"] for event in events if event["event"] == "capacity") == 19
    assert most_at_once(events) == 19


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
    trials = [
        fold(read_ledger(tmp_path / "studies" / name)).trials[0] for name in ("whole", "killed")
    ]
    assert [trial.status for trial in trials] == [FINISHED] * 2
    untimed = [
        [
            {k: v for k, v in event["metrics"].items() if k != "samples_per_second"}
            for _, event in sorted(trial.reports.items())
        ]
        for trial in trials
    ]
    assert untimed[0] == untimed[1]


MINE = """
import pathlib

import torch
from neighbour import layers
from sklearn.datasets import load_digits


def digits(train):
    bunch = load_digits()
    x, y = torch.tensor(bunch.images).float().flatten(1), torch.tensor(bunch.target)
    x = x / float((pathlib.Path(__file__).parent / "parts" / "scale.txt").read_text())
    return (x[:300], y[:300]) if train else (x[300:400], y[300:400])


def make_net(inputs, classes):
    return layers(64, classes)
"""
NEIGHBOUR = """
from torch import nn


def layers(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
"""
MINE_STUDY = """
name: sent
trial:
  {model: {name: "mine.py:make_net"}, data: {name: "mine.py:digits"}, epochs: 2, batch_size: 30}
seeds: [0, 1, 2]
"""


@pytest.fixture
def head() -> Iterator[Any]:
    """A head without CPUs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    yield cluster
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


def said_until(process: subprocess.Popen[str], word: str) -> str:
    """What a study prints until it says something."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(said)


@pytest.fixture
def elsewhere(head: Any, tmp_path: Path) -> Iterator[Any]:
    """A cluster with a raylet of one CPU that was started in another folder."""
    (tmp_path / "elsewhere").mkdir()
    with raylet(head, tmp_path / "elsewhere"):
        yield head


def test_a_node_that_lacks_the_users_files_trains_with_those_that_are_sent(
    elsewhere: Any, tmp_path: Path
) -> None:
    """All nodes of the test see one file system: the files are taken away once they were sent."""
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    (code / "mine.py").write_text(MINE)
    (code / "neighbour.py").write_text(NEIGHBOUR)
    (code / "parts" / "scale.txt").write_text("16")
    (tmp_path / "code" / "tiny.yaml").write_text(MINE_STUDY)
    folder = tmp_path / "studies" / "sent"
    process = command(code, elsewhere.address, f"storage={tmp_path / 'studies'}")
    wait_until(process, folder, lambda events: any(each["event"] == "report" for each in events))
    code.rename(tmp_path / "gone")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    events = read_ledger(folder)
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * 3
    assert len([each for each in events if each["event"] == "started"]) == 3


def other_installation(folder: Path) -> Path:
    """The Python of a virtual environment with this one's packages, in which a wheel of this
    package with one comment more is installed."""
    other = folder / "other"
    for package in ("lns_ops", "trainers", "study", "conf"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("*.pyc"))
    with (other / "trainers" / "files.py").open("a") as file:
        file.write("# another version\n")
    words = ["launch", "tiny.yaml", "--to", "slurm", "--dry-run", f"storage={folder}"]
    packed = [sys.executable, "-m", "study", *words, "tracking_uri=none"]
    env = os.environ | python_path(other)
    subprocess.run(packed, cwd=folder, env=env, check=True, stdout=subprocess.PIPE)
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (wheel,) = folder.glob(".lns-study/*/*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    return folder / "venv" / "bin" / "python"


def test_a_node_with_another_version_is_refused_before_it_computes(
    head: Any, tmp_path: Path
) -> None:
    """A raylet of another installation, whose package differs by a comment, and later one that has
    the same."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    python = other_installation(tmp_path)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = "from importlib import metadata; print(metadata.version('lns-study'))"
    found = subprocess.run(
        [python, "-c", asked], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert "+code." in found.stdout, found.stderr
    with raylet(head, tmp_path / "venv", python, env, cpus=2):
        process = command(tmp_path, head.address, "rows=[{label: a}]", "baseline=null")
        said = said_until(process, "Refused")
        assert "lns-study code" in said, said
        assert not any(e["event"] == "started" for e in read_ledger(tmp_path / "studies" / "tiny"))
        head.add_node(num_cpus=1)
        rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + rest
    assert "Refused" not in rest
    events = read_ledger(tmp_path / "studies" / "tiny")
    assert {e["cpus"] for e in events if e["event"] == "capacity"} == {1.0}
    assert [trial.status for trial in fold(events).trials] == [FINISHED]


PACKAGE = """
from torch import nn


def make_net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
PACKAGE_STUDY = """
name: tiny
trial: {model: {name: "mine.net:make_net"}, data: {name: digits}, epochs: 1, batch_size: 30}
"""


@pytest.mark.parametrize("theirs", ["nothing", "another version"])
def test_a_node_without_the_users_package_is_refused_before_it_computes(
    head: Any, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lacks it or has other code, and later one that has what the driver has."""
    for place in ("ours", "nothing", "another version"):
        (tmp_path / place / "mine").mkdir(parents=True)
    for place, comment in (("ours", ""), ("another version", "# a comment more\n")):
        (tmp_path / place / "mine" / "__init__.py").touch()
        (tmp_path / place / "mine" / "net.py").write_text(PACKAGE + comment)
    (tmp_path / "tiny.yaml").write_text(PACKAGE_STUDY)
    theirs_env = os.environ | python_path(tmp_path / theirs)
    for name, value in python_path(tmp_path / "ours").items():
        monkeypatch.setenv(name, value)
    with raylet(head, tmp_path / theirs, env=theirs_env, cpus=2):
        process = command(tmp_path, head.address)
        said = said_until(process, "Refused")
        have = "mine.net:make_net missing" if theirs == "nothing" else "mine.net:make_net code"
        assert f"has {have}" in said, said
        assert "install the same there" in said
        assert not any(e["event"] == "started" for e in read_ledger(tmp_path / "studies" / "tiny"))
        with raylet(head, tmp_path / "ours"):
            rest, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + rest
    assert "Refused" not in rest
    assert [trial.status for trial in fold(read_ledger(tmp_path / "studies" / "tiny")).trials] == [
        FINISHED
    ]


def last_weights(names: list[str]) -> dict[str, str]:
    """The tensor file of the last epoch, which its digest names, by trial."""
    found = [name.split("/") for name in names if f"/{EPOCHS:06d}/tensors-" in name]
    return {trial: file for trial, _, file in found}


def test_the_head_is_lost_and_a_new_cluster_goes_on_from_an_object_store_alone(
    s3: Line,  # noqa: F811
    tmp_path: Path,
) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "tiny.yaml").write_text(TINY)
    place, epochs = f"s3://{BUCKET}/studies", f"trial.epochs={EPOCHS}"
    words = [sys.executable, "-m", "study", "run", "tiny.yaml", "--plain", epochs]
    subprocess.run([*words, "tracking_uri=none"], cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    kept = tmp_path / "studies" / "tiny" / "checkpoints"
    expected = last_weights([path.relative_to(kept).as_posix() for path in kept.rglob("*")])
    assert len(expected) == 2

    def made() -> Any:
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        return cluster

    cluster = made()
    try:
        process = command(tmp_path, cluster.address, epochs, f"storage={place}")
        assert process.stdout is not None
        assert any(f"/{EPOCHS}, validation" in line for line in process.stdout)
        # Its nodes end with it: workers without a head would train on for as long as Ray waits for
        # one, and on a busy machine that is long enough to finish.
        for node in [cluster.head_node, *cluster.worker_nodes]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        said, _ = process.communicate(timeout=300)
        assert process.returncode != 0, said
    finally:
        cluster.shutdown()
    shutil.rmtree(tmp_path / "cache")
    assert set(last_weights(Store(f"{place}/tiny/checkpoints").names())) < set(expected)
    cluster = made()
    try:
        again = command(tmp_path, cluster.address, epochs, f"storage={place}")
        said, _ = again.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert again.returncode == 0, said
    assert "Resuming: " in said
    assert last_weights(Store(f"{place}/tiny/checkpoints").names()) == expected
