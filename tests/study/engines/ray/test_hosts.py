"""Which nodes of a cluster are checked, used, refused and released, and the requests to an
autoscaler. Ray is made up, except in the last test."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from study.engines.ray.free_resources import Room
from study.engines.ray.hosts import IDLE_SECONDS, NODE_LABEL, Hosts
from study.engines.ray.process_host import NodeCheck
from study.engines.ray.trials import ASK_SECONDS, TuneTrials
from trainers.workers.messages import DIED, Message
from trainers.workers.resources import WorkerResources


class Actors:
    """Replaces Ray: hosts are created, and only answer when a test lets them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def options(self, **options: Any) -> Actors:
        self.made.append(options["scheduling_strategy"])
        return self

    def remote(self, *arguments: Any) -> Actors:
        return self

    def __getattr__(self, name: str) -> Actors:
        return self


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors()
    monkeypatch.setattr("ray.remote", lambda cls: actors)
    affinity = "ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy"
    monkeypatch.setattr(affinity, lambda node, soft: node)  # Ray's wants long ids
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr("ray.wait", lambda references, timeout: ([], references))
    return actors


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def node(name: str, cpus: float = 2.0, gpus: float = 0.0) -> dict[str, Any]:
    resources = {"CPU": cpus, "GPU": gpus}
    return {"NodeID": name, "NodeManagerHostname": name, "Alive": True, "Draining": False,
            "Resources": resources}  # fmt: skip


def answers(hosts: Hosts, name: str, **versions: str) -> None:
    """Let a node's host answer its check with this machine's versions, or with others."""
    found = NodeCheck(host=name, versions=hosts._versions | versions, data=None)
    hosts._judge(hosts._hosts[name], found)


def test_a_refused_node_is_named_once_not_asked_again_and_no_trials_place(
    actors: Actors, now: list[float]
) -> None:
    said: list[str] = []
    nodes = [node("old"), node("good")]
    hosts = Hosts((), lambda: nodes, said.append)
    hosts.poll(True, ())
    assert actors.made == ["old", "good"]
    assert hosts.labels == {NODE_LABEL: "!in(good,old)"}  # not known yet
    answers(hosts, "old", torch="1.0")
    answers(hosts, "good")
    for _ in range(3):
        now[0] += 100.0
        hosts.poll(True, ())
    assert actors.made == ["old", "good"]
    assert [room.node for room in hosts.rooms] == ["good"]
    assert hosts.labels == {NODE_LABEL: "!in(old)"}
    (line,) = said
    assert line.startswith("Refused: the node old has torch 1.0, and this study runs on Python ")


def test_a_node_without_cpus_gets_no_host_and_no_trial(actors: Actors, now: list[float]) -> None:
    """Such as a head: a supervisor that holds no CPU would wait there forever for a host."""
    hosts = Hosts((), lambda: [node("head", cpus=0.0), node("worker")])
    hosts.poll(True, ())
    assert actors.made == ["worker"]
    answers(hosts, "worker")
    assert hosts.labels == {NODE_LABEL: "!in(head)"}


def test_a_host_that_is_idle_while_no_trial_waits_ends_and_is_made_once_one_waits(
    actors: Actors, now: list[float]
) -> None:
    """The node of a running trial is kept."""
    nodes = [node("busy"), node("idle")]
    hosts = Hosts((), lambda: nodes)

    def used(waiting: bool, seconds: float) -> list[str]:
        now[0] += seconds
        hosts.poll(waiting, {"busy"})
        return [room.node for room in hosts.rooms]

    used(True, 0.0)
    answers(hosts, "busy")
    answers(hosts, "idle")
    assert used(True, 2 * IDLE_SECONDS) == ["busy", "idle"]  # a gang waits for both
    assert used(False, IDLE_SECONDS - 1.0) == ["busy", "idle"]
    assert used(False, 2.0) == ["busy"]
    nodes.append(node("new"))
    assert used(False, 1.0) == ["busy"]
    assert actors.made == ["busy", "idle"]  # no host is created while no trial waits
    used(True, 1.0)
    assert actors.made == ["busy", "idle", "idle", "new"]


def test_a_host_that_was_started_long_before_the_first_trial_is_kept(
    actors: Actors, now: list[float]
) -> None:
    """Hosts start while the driver checks the trials, which may take minutes."""
    hosts = Hosts((), lambda: [node("early")])
    hosts.start()
    now[0] += 3 * IDLE_SECONDS
    hosts.poll(False, ())
    answers(hosts, "early")
    hosts.poll(True, ())
    assert [room.node for room in hosts.rooms] == ["early"]
    assert actors.made == ["early"]


def test_a_node_whose_host_dies_is_asked_again_after_ever_longer_waits(
    actors: Actors, now: list[float]
) -> None:
    said: list[str] = []
    hosts = Hosts((), lambda: [node("sick")], said.append)
    asked = []
    for _ in range(3000):
        now[0] += 0.1
        hosts.poll(True, ())
        if host := hosts._hosts.get("sick"):
            asked.append(now[0])
            hosts._put_off(host, "it is sick")
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0], abs=0.2)
    assert said == ["Not used: on the node sick it is sick, and it is tried again"]


def test_a_waiting_trial_is_asked_for_beyond_those_that_run_until_none_waits(
    actors: Actors, now: list[float]
) -> None:
    asked: list[list[dict[str, float]]] = []
    hosts = Hosts((), lambda: [node("a", 4.0)])
    hosts.poll(True, ())
    answers(hosts, "a")
    trials = TuneTrials(hosts, asked.append)
    gang, bundle = WorkerResources(workers=2, threads=2, device="cpu"), {"CPU": 2.0}
    trials.ask_for(gang)
    trials.ask_for(gang)  # the same request is sent once
    assert asked == [[bundle] * 2]
    now[0] += ASK_SECONDS + 0.1
    trials.ask_for(gang)  # except for what another study may have put in its place
    assert asked.pop() == [bundle] * 2
    hosts.poll(True, ())
    trials.room.nodes = hosts.rooms
    assert trials.start("first", gang, dict)
    trials.ask_for(gang)  # both workers run, and another trial waits
    assert asked[1:] == [[bundle] * 4]
    trials.ask_for(None)
    now[0] += ASK_SECONDS + 0.1
    trials.ask_for(None)  # an empty request is sent once
    assert asked[2:] == [[]]


def test_where_a_node_has_lost_gpus_trials_wait_for_those_that_hold_them(
    actors: Actors, now: list[float]
) -> None:
    nodes = [node("a", 8.0, 4.0)]
    hosts = Hosts((), lambda: nodes)
    hosts.poll(True, ())
    answers(hosts, "a")
    trials = TuneTrials(hosts, lambda bundles: None)

    def look(gpus: float) -> Room:
        nodes[0] = node("a", 8.0, gpus)
        hosts.poll(True, trials.used)
        trials.room.nodes = hosts.rooms
        return trials.room

    shape = WorkerResources(workers=1, threads=1, device="cuda")
    look(4.0)
    for name in ("t0", "t1", "t2"):
        started = trials.start(name, shape, dict)
        assert started is not None
        trials.room.place(name, ["a"])
    assert look(2.0).free[1] == -1.0
    assert trials.capacity()[1] == 2
    assert trials.start("more", shape, dict) is None
    for name in ("t0", "t1"):
        trials.hear(trials._trials[name], [Message(DIED, name, "gone")])
    assert trials.start("first", shape, dict) is not None
    assert trials.start("second", shape, dict) is None  # t2 has the other
    look(4.0)
    assert trials.start("second", shape, dict) is not None


UNSTARTED = """
import sys, time, types, ray
from study.engines.ray.hosts import Hosts
only = types.ModuleType("only_here")
exec("class Data(list): pass", only.__dict__)
only.Data.__module__, sys.modules["only_here"] = "only_here", only
ray.init("local", num_cpus=2, include_dashboard=False)
said = []
nodes = lambda: [node | {"Draining": False} for node in ray.nodes()]
hosts = Hosts((only.Data(),), nodes, said.append)
waits = []
while len(waits) < 3:
    hosts.poll(True, ())
    waits += [wait for wait, _ in list(hosts._waits.values()) if wait not in waits]
    time.sleep(0.1)
hosts.close()
ray.shutdown()
print(sorted(waits), len(said), *said)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_on_which_our_code_does_not_start_says_why_once(tmp_path: Any) -> None:
    """Ray creates the host from a module that only the driver has."""
    env = os.environ | {"HOME": str(tmp_path), "RAY_DEDUP_LOGS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", UNSTARTED], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("[1.0, 2.0, 4.0] 1 Not used: on the node ")
    assert "(ModuleNotFoundError: No module named 'only_here')" in last
