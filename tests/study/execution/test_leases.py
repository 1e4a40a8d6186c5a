"""What Ray's autoscaler is asked for, by trials that Ray Train places and by a study's own leases,
and what is left where GPUs or nodes are lost."""

from __future__ import annotations

import math
import pickle
import queue
import threading
from typing import Any

import pytest

from study.execution.local.leases import IDLE_SECONDS, NODE_LABEL, Cluster, Lease, _Request
from study.execution.local.of_ray import AGAIN_SECONDS, OfRay
from study.execution.local.pool import Pool
from trainers.workers.messages import DONE, ENDED, Message
from trainers.workers.resources import WorkerResources


class Idle:
    """A node on which nothing happens."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def events(self, seconds: float) -> list[Any]:
        self._ended.wait(0.01)
        return []

    def call(self, calls: list[Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._ended.set()


def test_a_waiting_trial_is_asked_for_beyond_those_that_run_until_none_waits() -> None:
    asked: list[list[dict[str, float]]] = []
    have = {"CPU": 0.0, "GPU": 0.0}
    idle: Any = Idle()
    of_ray = OfRay(idle, lambda *what: None, lambda: have, (2.0, 0.0), 2, asked.append)
    bundle = {"CPU": 2.0}

    def look(waiting: bool) -> None:
        of_ray._asked = -math.inf  # a second has passed
        of_ray.poll(waiting)

    assert asked.pop() == []  # what a killed driver asked for
    look(True)
    look(True)  # the same is asked for once
    assert asked == [[bundle] * 2]
    of_ray._demanded -= AGAIN_SECONDS
    look(True)  # but for what another study may have put in its place
    assert asked.pop() == [bundle] * 2
    have["CPU"] = 4.0
    look(True)
    of_ray.leases[0].free -= 4.0  # both workers run, and another trial waits
    look(True)
    assert asked[1:] == [[bundle] * 4]
    look(False)
    of_ray._demanded -= AGAIN_SECONDS
    look(False)  # nothing is asked for once
    of_ray.close()
    assert asked[2:] == [[]]


def test_where_ray_has_lost_gpus_trials_wait_for_those_that_hold_them() -> None:
    have = {"CPU": 8.0, "GPU": 4.0}
    of_ray = OfRay(Idle(), lambda *what: None, lambda: have)  # type: ignore[arg-type]
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pool = Pool(inbox)
    pool.use(of_ray)

    def look() -> None:
        of_ray._asked = -math.inf  # a second has passed
        of_ray.poll(False)

    shape = WorkerResources(workers=1, threads=1, device="cuda")
    running = [pool.start(f"t{n}", shape, dict) for n in range(3)]
    assert None not in running
    have["GPU"] = 2.0
    look()
    assert pool.start("more", shape, dict) is None
    assert pool.capacity()[1] == 2
    assert pool.idle_resources[1] == -1.0
    for trial in ("t0", "t1"):
        for key in pool._trials[trial].keys:
            over = Message(ENDED, trial, {"how": DONE, "retire": ""})
            inbox.put((of_ray.leases[0], [(key, pickle.dumps(over))]))
        pool.wait(1.0, waiting=False, poll=False)  # its process is kept for another
    assert pool.start("first", shape, dict) is not None
    assert pool.start("second", shape, dict) is None  # t2 has the other
    have["GPU"] = 4.0
    look()
    assert pool.start("second", shape, dict) is not None
    pool.close()


class Actors:
    """Stands where Ray and its actors do; notes the options of those that are asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.versions = self

    def __call__(self, cls: type) -> Actors:
        return self

    def options(self, **options: Any) -> Actors:
        self.asked.append(options)
        return self

    def remote(self, *arguments: Any) -> Actors:
        return self


def test_refused_nodes_are_not_asked_again_and_those_that_join_put_the_demand_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node of before stops no growth; an autoscaler is not made to start one wrong node after the
    other."""
    actors, now = Actors(), [1000.0]
    monkeypatch.setattr("ray.remote", lambda **options: actors)
    monkeypatch.setattr("ray.kill", lambda actor: None)  # it would start a Ray
    monkeypatch.setattr("study.execution.local.leases.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Cluster, "_follow", lambda self, request: None)
    monkeypatch.setattr(Cluster, "_answer", lambda self, reference: {"torch": "1"})
    old, *wrong = (f"{number:056x}" for number in range(1, 5))
    nodes = [{"NodeID": old, "Alive": True, "Draining": False, "Resources": {"CPU": 1.0}}]
    cluster = Cluster((1.0, 0.0), (4.0, 0.0), (), lambda *what: None, lambda: nodes)
    cluster._versions = {"torch": "2"}

    def look(seconds: float = 1.0) -> list[dict[str, str] | None]:
        """The labels that nodes must have which are asked for now."""
        actors.asked.clear()
        now[0] += seconds + 0.1
        cluster.poll(True)
        return [options.get("label_selector") for options in actors.asked]

    def refuse(node: str) -> None:
        first = next(each for each in cluster._requests if each.node in (node, None))
        first.node, first.since = node, math.inf
        assert cluster._refuses(first, node)

    refuse(old)
    assert look() == [{NODE_LABEL: f"!in({old})"}]
    for count, (node, wait) in enumerate(zip(wrong, (60.0, 120.0, 240.0), strict=True), 2):
        refuse(node)  # joined since
        assert look() == look(wait - 3.0) == []
        assert look(2.0) == [{NODE_LABEL: f"!in({','.join([old, *wrong][:count])})"}]


def test_what_is_idle_while_no_trial_waits_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node, and a demand for one more; the node on which a trial runs is kept."""

    def request(self: Cluster, node: str | None, cpus: float, gpus: float) -> None:
        make = {"host": "", "address": "", "gpus": [], "names": [], "call": print}
        lease = Lease(cpus=cpus, **make) if node else None  # type: ignore[arg-type]
        self._requests.append(_Request(node, cpus, gpus, None, self._asked, self._asked, lease))

    monkeypatch.setattr(Cluster, "_request", request)
    monkeypatch.setattr("ray.kill", lambda actor: None)  # it would start a Ray
    nodes = [
        {"NodeID": name, "Alive": True, "Draining": False, "Resources": {"CPU": 2.0}}
        for name in ("busy", "idle")
    ]
    cluster = Cluster((1.0, 0.0), (5.0, 0.0), (), lambda *what: None, lambda: nodes)

    def asked(waiting: bool, seconds: float) -> list[str | None]:
        cluster._asked = -math.inf  # a second has passed
        for each in cluster._requests:
            each.needed -= seconds
        cluster.poll(waiting)
        return [each.node for each in cluster._requests]

    assert asked(True, 0.0) == ["busy", "idle", None]
    cluster._requests[0].lease.free -= 1.0  # type: ignore[union-attr]
    assert asked(True, 2 * IDLE_SECONDS) == ["busy", "idle", None]  # a gang waits for both
    assert asked(False, IDLE_SECONDS - 1.0) == ["busy", "idle", None]
    idle = cluster._requests[1].lease
    assert asked(False, IDLE_SECONDS) == ["busy"]
    assert idle is not None
    assert idle.draining  # its idle processes take no trial that comes just now
    nodes.append(nodes[1] | {"NodeID": "new"})
    assert asked(False, 0.0) == ["busy"]
    assert asked(True, 0.0) == ["busy", "idle", "new"]
