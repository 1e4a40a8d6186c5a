"""A study on a Ray cluster of several nodes (raylets on this machine): gangs that span nodes, and a
node that dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY
from tests.study.object_store import BUCKET, Line, s3, s3_server  # noqa: F401
from tests.study.raylets import (
    ROOT,
    SLOW_NET,
    cluster_of,
    command,
    python_path,
    said_until,
    wait_until,
)
from tests.study.sleeping import most_at_once
from trainers.object_store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EPOCHS = 400
GANG = [
    "trial.workers=2",
    "gang=forked",
    "rows=[{label: a, overrides: {precision.format: lns12}}]",
    "baseline=null",
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one CPU each: a gang of two must use both."""
    with cluster_of(0, 1, 1) as cluster:
        yield cluster


SLEEPERS = """
import sys
from study.config.compose import load
from study.lifecycle import run_study
from tests.study.conftest import SilentView
from study.engines.ray import hosts
from tests.study.sleeping import executor
hosts.IDLE_SECONDS = 2.0
with executor():
    outcome = run_study(load("tiny.yaml", sys.argv[1:]), SilentView(), print)
sys.exit(outcome.failed)
"""


@pytest.fixture
def three() -> Iterator[Any]:
    """Three nodes with eight declared CPUs each, including the head."""
    with cluster_of(8, 8, 8) as cluster:
        yield cluster


def sleepers(folder: Path, cluster: Any, *overrides: str) -> subprocess.Popen[str]:
    """A study with sleeping trials, on the cluster."""
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


def test_three_nodes_are_full_and_the_loss_of_one_loses_nothing(three: Any, tmp_path: Path) -> None:
    """All 24 slots are in use; then a node dies, and a new one adds its slots within seconds."""
    folder = tmp_path / "studies" / "full"
    process = sleepers(
        tmp_path, three, "name=full", f"seeds={list(range(200))}", "trial.optimizer.lr=3.0"
    )
    wait_until(process, folder, lambda events: most_at_once(events) == 24)
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
    assert [trial.status for trial in trials] == [FINISHED] * 200
    assert sum(event["event"] == "finished" for event in events) == 200
    assert most_at_once(events) == 24
    assert 1 <= sum(trial.restarts for trial in trials) <= 8
    capacity = [event["cpus"] for event in events if event["event"] == "capacity"]
    assert max(capacity) == 24
    assert 16 in capacity[capacity.index(24) :]
    after = [event for event in events if event["event"] == "capacity" and event["time"] > lost]
    assert max(event["cpus"] for event in after) == 24  # Ray may count a slot late at the end


def test_nodes_that_no_trial_needs_any_more_are_given_back(three: Any, tmp_path: Path) -> None:
    """One trial lasts longer than the others: only its node is kept, and another job gets the
    rest."""
    rows = "rows=[{label: short}, {label: long, overrides: {optimizer.lr: 40.0}}]"
    whole = ["trial.threads=8", "seeds=[0]", "trial.optimizer.lr=3.0"]  # one node each
    process = sleepers(tmp_path, three, "name=tail", rows, *whole)
    folder = tmp_path / "studies" / "tail"
    capacity = lambda events: [e["cpus"] for e in events if e["event"] == "capacity"]  # noqa: E731
    wait_until(process, folder, lambda events: capacity(events)[-2:] == [16, 8])
    other = (
        "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "@ray.remote(num_cpus=8)\nclass Job:\n    def here(self): return True\n"
        "jobs = [Job.remote() for _ in range(2)]; ray.get([job.here.remote() for job in jobs])"
    )
    subprocess.run([sys.executable, "-c", other, three.address], check=True, timeout=60)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    events = read_ledger(folder)
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * 2
    used = capacity(events)
    assert used[used.index(24) :] == [24, 16, 8]  # no node is given back before its trial begins
    assert events[-1]["time"] - events[0]["time"] > 40.0  # it ran all the time


def drain(cluster: Any, node: Any) -> None:
    """Have Ray drain a node, as before a preemption."""
    words = ["drain-node", f"--address={cluster.address}", f"--node-id={node.node_id}"]
    words += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
    words += ["--deadline-remaining-seconds=120"]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_trials_leave_a_node_that_ray_drains_with_a_checkpoint(
    cluster: Any, tmp_path: Path, workers: int
) -> None:
    """A spot instance has its notice: no epoch is repeated, and the node is released."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    seeds = [0, 1] if workers == 1 else [0]
    long = ["trial.epochs=80", "checkpoint_every=80", f"seeds={seeds}"]
    process = command(
        tmp_path, cluster.address, "name=drained", *GANG, f"trial.workers={workers}", *long
    )
    folder = tmp_path / "studies" / "drained"
    running = lambda events: {e["trial"] for e in events if e["event"] == "report"}  # noqa: E731
    wait_until(process, folder, lambda events: len(running(events)) == len(seeds))
    node = cluster.worker_nodes.copy().pop()
    cluster.add_node(num_cpus=1)
    drain(cluster, node)
    said = said_until(process, "Ray drains the node")
    (raylet,) = node.all_processes["raylet"]
    raylet.process.wait(120)  # a drained node ends once nothing on it is in use
    assert process.poll() is None
    ended, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said + ended
    events = read_ledger(folder)
    assert [event["error"] for event in events if event["event"] == "restarted"] == [
        "its node is drained"
    ]
    assert not any("repeated" in event for event in events)  # no epoch was repeated
    assert [trial.status for trial in fold(events).trials] == [FINISHED] * len(seeds)


SLOW_LOOP = """
def loop(context):
    for epoch in range(context.resume["epoch"] if context.resume else 0, 100):
        time.sleep(1.0 if SLOW.exists() else 0.0)
        context.report({{"validation/error": 0.5}}, checkpoint={{"epoch": epoch + 1}})
    return {{"test/error": 0.5}}
"""


@pytest.mark.parametrize(
    "kind",
    [
        ["trainable=own.py:loop"],
        ["gang=train", "trial.workers=2", "trial.model.name=own.py:net"],
        ["trial.workers=2", "trial.sync={name: asynchronous, straggler_seconds: 0.005}"],
    ],
)
def test_trials_that_cannot_leave_a_drained_node_go_on_from_the_checkpoints_that_they_have(
    tmp_path: Path, kind: list[str]
) -> None:
    """The node is drained, then removed."""
    (tmp_path / "tiny.yaml").write_text(TINY.replace("model: {hidden: [16]}, ", ""))
    (slow := tmp_path / "slow").touch()
    (tmp_path / "own.py").write_text((SLOW_NET + SLOW_LOOP).format(slow=slow))
    words = ["name=drained", "rows=[{label: a}]", "baseline=null", "trial.epochs=100", *kind]
    folder = tmp_path / "studies" / "drained"
    with cluster_of(0, 2) as cluster:
        process = command(tmp_path, cluster.address, *words)
        three = lambda events: any(event.get("epoch") == 3 for event in events)  # noqa: E731
        seen = wait_until(process, folder, three)
        (node,) = cluster.worker_nodes
        drain(cluster, node)
        (raylet,) = node.all_processes["raylet"]
        theirs = psutil.Process(raylet.process.pid).children(recursive=True)
        cluster.remove_node(node, allow_graceful=False)
        assert not psutil.wait_procs(theirs, timeout=60)[1]  # or the trial could end there
        assert len(fold(read_ledger(folder)).trials[0].reports) < 100
        slow.unlink()
        cluster.add_node(num_cpus=2)
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    events = read_ledger(folder)
    (trial,) = fold(events).trials
    assert (trial.status, len(trial.reports)) == (FINISHED, 100)
    assert trial.restarts == 1 or "gang=train" in kind  # it starts new workers by itself
    assert min(e["epoch"] for e in events[len(seen) :] if e["event"] == "checkpoint") >= 3


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
    assert "the same command continues once the cluster is back" in said
    assert read_ledger(folder)[-1]["event"] == "ended"


def test_a_node_that_others_use_in_part_gives_what_it_has(three: Any, tmp_path: Path) -> None:
    """Another job holds five CPUs of one node; the study gets the other 19."""
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


def last_weights(names: list[str]) -> dict[str, str]:
    """By trial, the tensor file of the last epoch; its digest is in the name."""
    found = [name.split("/") for name in names if f"/{EPOCHS:06d}/tensors-" in name]
    return {trial: file for trial, _, file in found}


def test_the_head_is_lost_and_a_new_cluster_goes_on_from_an_object_store_alone(
    s3: Line,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    place, epochs = f"s3://{BUCKET}/studies", f"trial.epochs={EPOCHS}"
    words = [sys.executable, "-m", "study", "run", "tiny.yaml", "--plain", epochs]
    subprocess.run([*words, "tracking_uri=none"], cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    kept = tmp_path / "studies" / "tiny" / "checkpoints"
    expected = last_weights([path.relative_to(kept).as_posix() for path in kept.rglob("*")])
    assert len(expected) == 2

    with cluster_of(0, 2) as cluster:
        process = command(tmp_path, cluster.address, epochs, f"storage={place}")
        assert process.stdout is not None
        assert any(f"/{EPOCHS}, validation" in line for line in process.stdout)
        # Its nodes end with it. Workers without a head would continue for as long as Ray waits for
        # one; on a busy machine that is long enough to finish.
        for node in [cluster.head_node, *cluster.worker_nodes]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        said, _ = process.communicate(timeout=300)
        assert process.returncode != 0, said
    shutil.rmtree(tmp_path / "cache")
    assert set(last_weights(Store(f"{place}/tiny/checkpoints").names())) < set(expected)
    with cluster_of(0, 2) as cluster:
        again = command(tmp_path, cluster.address, epochs, f"storage={place}")
        said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert "Resuming: " in said
    assert last_weights(Store(f"{place}/tiny/checkpoints").names()) == expected
