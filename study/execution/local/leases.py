"""Leases: machines, or parts of them, that a study may use.

A *lease* is a number of CPUs and some GPUs of one machine, with the
:class:`~trainers.workers.node.Node` that runs worker processes there. A study on one machine has
one lease, of all that it may use, and needs no Ray. On a Ray cluster a lease is an actor that holds
these resources, so that Ray, its autoscaler and other users see them as taken: one per node, of all
that the node has. If others hold a part of the node, such an actor waits; after
:data:`PATIENCE_SECONDS` two actors for half as much replace it, and so on down to what one worker
needs. Nodes that join get a lease within a second or so, unless their Python, torch, code of this
package or installed packages of the user's differ from the driver's: those are given back before
they compute. A node on which our code does not start, or whose data are not the study's, is asked
again after ever longer waits, and its reason is said once. While trials wait and nothing is free,
one more small lease is requested on any node but those that were refused, which an autoscaler takes
as demand; each refused node that joins meanwhile doubles the wait before the next, from
:data:`LONGEST_SECONDS` on, so that not one after the other is started in vain. (Ray's first
autoscaler, that of ``ray up``, counts what a refused node has free, and starts none.) A node that
Ray drains (a spot instance with its notice) gets no more trials, and is given back once its own
left. So is what has been idle for :data:`IDLE_SECONDS` while no trial waited, and any demand for
more: a long last trial keeps no other node from the autoscaler or from others.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from study.execution.engine import EPSILON
from trainers.config import TrialConfig
from trainers.workers.messages import last_line
from trainers.workers.node import Node, differing, versions

POLL_SECONDS = 1.0
"""Seconds between looks at the nodes, and for which a call for events waits."""
PATIENCE_SECONDS = 10.0
"""Seconds for which a lease waits for all that its node has before it asks for less: longer than a
process takes to start on a busy or cold machine, which nothing tells from resources in use."""
IDLE_SECONDS = 60.0
"""Seconds for which a lease may be idle while no trial waits, before it is given back."""
LONGEST_SECONDS = 60.0
"""Longest wait before a node that cannot be used is asked again."""
END_SECONDS = 10.0
"""Seconds for which the end waits for a node that no longer answers."""
NODE_LABEL = "ray.io/node-id"
"""Label by which Ray knows a node."""
Call = tuple[str, tuple[Any, ...]]
OnEvents = Callable[["Lease", "list[tuple[int, bytes]] | None"], None]
"""Function called with the messages of a lease's processes; with None when the lease ends."""


@dataclass(eq=False, kw_only=True)
class Lease:
    """Resources of one machine.

    Attributes:
        host: name of the machine.
        address: address at which ranks on other machines reach a rank on this one.
        cpus, free: CPUs in all, and those not in use.
        gpus: free share of each GPU.
        names: names of the GPUs for CUDA_VISIBLE_DEVICES; empty if processes see all that this one
            sees.
        call: passes calls on to the node, in order, without waiting.
        draining: whether the machine is about to end.
        lost: GPUs among ``gpus`` that are no longer there.
    """

    host: str
    address: str
    cpus: float
    gpus: list[float]
    names: list[str]
    call: Callable[[list[Call]], Any]
    free: float = field(init=False)
    draining: bool = False
    lost: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.free = self.cpus

    def environment(self, gpu: int | None) -> dict[str, str]:
        """Return the environment variables of a process that computes on ``gpu``, or on none."""
        # those of a Ray that began after the fork server
        found = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        if self.names:
            found["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else self.names[gpu]
        return found

    @property
    def gpu_count(self) -> int:
        """Number of GPUs, in use or not."""
        return len(self.gpus) - self.lost

    @property
    def free_gpus(self) -> float:
        """Free shares of all GPUs together; below 0 where trials hold more than there is."""
        return sum(self.gpus) - self.lost


class Local:
    """This machine, as one lease from the start.

    Args:
        cpus: number of CPUs that may be used.
        gpus: names of the GPUs.
        node: node that runs the processes.
        on_events: called with the processes' messages, from a thread.
    """

    def __init__(self, cpus: float, gpus: list[str], node: Node, on_events: OnEvents) -> None:
        self._node = node
        self.leases = [
            Lease(
                host=os.uname().nodename,
                address="127.0.0.1",
                cpus=cpus,
                gpus=[1.0] * len(gpus),
                names=gpus,
                call=node.call,
            )
        ]
        self._ended, self._on_events = False, on_events
        self._thread = threading.Thread(target=self._listen, daemon=True, name="events")
        self._thread.start()

    def poll(self, waiting: bool) -> None:
        """Do nothing: the resources of this machine do not change."""

    def close(self) -> None:
        """End the processes."""
        self._ended = True
        self._node.close()
        self._thread.join()

    def _listen(self) -> None:
        while not self._ended:
            events = self._node.events(POLL_SECONDS)
            if events and not self._ended:
                self._on_events(self.leases[0], events)


@dataclass(eq=False)
class _Request:
    """An actor that holds, or waits to hold, resources of a node; ``node`` None for any node.

    ``needed`` is when it was last in use, or a trial waited.
    """

    node: str | None
    cpus: float
    gpus: float
    actor: Any
    since: float
    needed: float
    lease: Lease | None = None


class Cluster:
    """Leases on the nodes of the Ray cluster that this process has joined.

    Args:
        unit: CPUs and GPUs of the largest worker.
        most: CPUs and GPUs that the study's trials can use at most.
        make: arguments of :class:`~trainers.workers.node.Node`.
        on_events: called with the processes' messages, and with None at the end of a lease, from
            threads.
        nodes: returns the nodes as :meth:`~study.execution.ray_session.Session.nodes` does.
        say: prints a line for the user.
        modules: code of the user's that a node must have, as ``package.module:name``.
        data: a trial for each data set that a node must have, and the SHA-256 of the examples of
            all (:attr:`trainers.data.DatasetInfo.files`).
    """

    def __init__(
        self,
        unit: tuple[float, float],
        most: tuple[float, float],
        make: tuple[Any, ...],
        on_events: OnEvents,
        nodes: Callable[[], list[dict[str, Any]]],
        say: Callable[[str], None] = lambda line: None,
        modules: Sequence[str] = (),
        data: tuple[Sequence[TrialConfig], Collection[str]] = ((), ()),
    ) -> None:
        self._data, self._checked = data, set[str | None]()
        self._unit, self._most, self._make = unit, most, make
        self._on_events, self._nodes = on_events, nodes
        self._say, self._modules, self._versions = say, modules, versions(modules)
        self._refused: set[str] = set()
        self._first: set[str] = set()
        self._draining: set[str | None] = set()
        self._gave_back = False
        self._waits: dict[str | None, tuple[float, float]] = {}
        """Wait after the last failure of a node, None for any, and the time when it ends."""
        self._requests: list[_Request] = []
        self._lock = threading.Lock()
        self._asked = -math.inf
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.poll(True)

    @property
    def leases(self) -> list[Lease]:
        """Leases that are held now."""
        with self._lock:
            return [request.lease for request in self._requests if request.lease is not None]

    def poll(self, waiting: bool) -> None:
        """Look for nodes that joined or left, and for requests that have waited too long.

        Args:
            waiting: whether trials wait for resources.
        """
        if time.monotonic() - self._asked < POLL_SECONDS:
            return
        self._asked = time.monotonic()
        self._give_back_idle(waiting)
        nodes = self._nodes()
        self._first = self._first or {node["NodeID"] for node in nodes}
        for node in nodes:
            if node["NodeID"] in self._draining or node.get("Draining"):
                self._drain(node)
            elif node["Alive"] and node["NodeID"] not in self._refused and not self._gave_back:
                self._claim(node["NodeID"], node["Resources"])
        unmet = [r for r in self._requests if r.lease is None]
        for request in unmet:
            if request.node and self._asked - request.since > PATIENCE_SECONDS:
                self._halve(request)
        pending = [r for r in unmet if r.node is None or r.since == math.inf]  # or is checked
        if waiting and not pending and self._wanted()[0] > EPSILON:
            self._request(None, *self._unit)

    def close(self) -> None:
        """Give back all resources; then no thread waits for Ray, which may be left."""
        import ray

        self._closed = True
        with self._lock:
            requests, self._requests = self._requests, []
        for request in requests:
            with contextlib.suppress(Exception):  # Ray may be gone
                ray.kill(request.actor)
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _wanted(self) -> tuple[float, float]:
        """Return the CPUs and GPUs that could be used beyond those requested."""
        cpus, gpus = self._most
        asked = [request for request in self._requests if request.node not in self._draining]
        return cpus - sum(each.cpus for each in asked), gpus - sum(each.gpus for each in asked)

    def _claim(self, node: str, have: dict[str, float]) -> None:
        """Request the resources of a node that this study has not requested yet."""
        asked, cpus, gpus = self._left(node, have)
        if min(cpus, gpus) < -EPSILON:  # one for any node has landed on it: those that wait would
            for request in asked:  # wait for what it holds
                if request.since < math.inf:
                    self._drop(request)
            _, cpus, gpus = self._left(node, have)
        most = self._wanted()
        cpus, gpus = min(cpus, most[0]), min(gpus, math.ceil(most[1]))
        if cpus + EPSILON >= self._unit[0] and (
            gpus + EPSILON >= self._unit[1] or not self._unit[1]
        ):
            self._request(node, cpus, gpus if self._unit[1] else 0.0)

    def _left(self, node: str, have: dict[str, float]) -> tuple[list[_Request], float, float]:
        """Return the requests of a node, and the CPUs and whole GPUs beyond those."""
        asked = [request for request in self._requests if request.node == node]
        cpus = have.get("CPU", 0.0) - sum(request.cpus for request in asked)
        return asked, cpus, math.floor(have.get("GPU", 0.0)) - sum(each.gpus for each in asked)

    def _drain(self, node: dict[str, Any]) -> None:
        """Keep further trials from a node that is about to end; give it back once it is idle."""
        asked = [request for request in self._requests if request.node == node["NodeID"]]
        if node["NodeID"] not in self._draining and asked:
            self._say(
                f"Ray drains the node {node['NodeManagerHostname']}: its trials finish the epoch"
                " under way, write a checkpoint and go on elsewhere, those that can"
            )
        self._draining.add(node["NodeID"])
        for request in asked:
            if request.lease is not None:
                request.lease.draining = True
            if request.lease is None or request.lease.free + EPSILON >= request.lease.cpus:
                self._drop(request)

    def _give_back_idle(self, waiting: bool) -> None:
        """Give back what has been idle for a while in which no trial waited.

        Nothing is claimed then until one does.
        """
        self._gave_back = self._gave_back and not waiting
        for request in list(self._requests):
            lease = request.lease
            if waiting or (lease is not None and lease.free + EPSILON < lease.cpus):
                request.needed = self._asked
            elif self._asked - request.needed > IDLE_SECONDS:
                self._gave_back = True
                if lease is not None:
                    lease.draining = True  # a process that is idle there gets no trial meanwhile
                self._drop(request)

    def _halve(self, request: _Request) -> None:
        """Replace a request by two for half as much each.

        If half is too little for a worker, one request for just one worker goes on waiting.
        """
        cpus, gpus = math.floor(request.cpus / 2), math.floor(request.gpus / 2)
        if cpus + EPSILON >= self._unit[0] and gpus + EPSILON >= self._unit[1]:
            self._drop(request)
            self._request(request.node, cpus, gpus)
            self._request(request.node, request.cpus - cpus, request.gpus - gpus)
        elif request.cpus > self._unit[0] + EPSILON or request.gpus > self._unit[1] + EPSILON:
            self._drop(request)
            self._request(request.node, *self._unit)

    def _request(self, node: str | None, cpus: float, gpus: float) -> None:
        if node in self._waits and time.monotonic() < self._waits[node][1]:
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}
        if node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        elif self._refused:  # it could only land there again, and is to be met by another node
            options["label_selector"] = {NODE_LABEL: f"!in({','.join(sorted(self._refused))})"}
        groups = {"calls": 1, "events": 1}  # each in order, neither waits for the other
        actor = ray.remote(concurrency_groups=groups)(Node).options(**options).remote(*self._make)
        now = time.monotonic()
        request = _Request(node, cpus, gpus, actor, now, now)
        with self._lock:
            self._requests.append(request)
        thread = threading.Thread(target=self._follow, args=(request,), daemon=True, name="events")
        self._threads.append(thread)
        thread.start()

    def _drop(self, request: _Request) -> None:
        import ray

        with self._lock:
            if request in self._requests:
                self._requests.remove(request)
        with contextlib.suppress(Exception):
            ray.kill(request.actor)

    def _answer(self, reference: Any) -> Any:
        """Return the result of a call.

        Raises:
            EOFError: everything has been given back meanwhile.
        """
        import ray

        while not self._closed:
            if ray.wait([reference], timeout=POLL_SECONDS)[0]:
                return ray.get(reference)
        raise EOFError

    def _refuses(self, request: _Request, host: str) -> bool:
        """Give a node back that has other versions or code than this machine, and say so once."""
        try:
            theirs = self._answer(request.actor.versions.remote(self._modules))
        except (AttributeError, TypeError):
            theirs = {"lns-study": "of a version before this check"}
        ours = self._versions
        if not (wrong := differing(theirs, ours)):
            return False
        assert request.node is not None
        news = request.node not in self._refused
        self._refused.add(request.node)
        self._drop(request)
        if news:
            self._ask_others(request.node)
            wanted = ", ".join(f"{name} {version}" for name, version in ours.items())
            self._say(
                f"Refused: the node {host} has {', '.join(wrong)}, and this study runs on {wanted}:"
                " its trials could fail or get other bits; install the same there, and restart its"
                " Ray"
            )
        return True

    def _ask_others(self, refused: str) -> None:
        """Have another node asked for than one that was just refused.

        Where that one joined meanwhile, an autoscaler may have started it for us, and more of its
        kind: the demand then waits, twice as long for each of them.
        """
        for request in list(self._requests):
            if request.node is None:
                self._drop(request)
        if refused not in self._first:
            wait = 2 * max(self._waits.get(None, (0.0, 0.0))[0], LONGEST_SECONDS / 2)
            self._waits[None] = wait, time.monotonic() + wait

    def _follow(self, request: _Request) -> None:
        """Pass on the messages of a node from its start to its end."""
        lease: Lease | None = None
        try:
            host, address, names, node = self._answer(request.actor.describe.remote())
            asked, request.node, request.since = request.node, node, math.inf  # waits no more
            if self._refuses(request, host):
                return
            if problem := self._lacks_data(request):
                self._put_off(node, problem)
                self._waits[asked] = self._waits[node]  # one for any node would land here again
                self._drop(request)
                return
            self._waits.pop(node, None)
            self._waits.pop(asked, None)
            lease = Lease(
                host=host,
                address=address,
                cpus=request.cpus,
                gpus=[1.0] * len(names),
                names=names,
                call=lambda calls: _pass_on(request.actor, calls),
            )
            request.lease = lease
            self._on_events(lease, [])
            while True:
                if events := self._answer(
                    request.actor.events.options(concurrency_group="events").remote(POLL_SECONDS)
                ):
                    self._on_events(lease, events)
        # the actor or its node has died, we have killed it, or (SystemExit) left Ray
        except BaseException as error:
            if lease is None and request in self._requests and not self._closed:
                self._wait_longer(request.node, error)
            self._drop(request)
            if lease is not None:
                self._on_events(lease, None)

    def _lacks_data(self, request: _Request) -> str:
        """Return what forbids a node's data; "" if they are the study's.

        One of its processes reads them, once: their digests are kept beside them.
        """
        trials, files = self._data
        if not trials or request.node in self._checked:
            return ""
        examine = request.actor.examine.options(concurrency_group="calls")
        message = self._answer(examine.remote(trials, {"CUDA_VISIBLE_DEVICES": ""}))
        if isinstance(message.payload, str):  # also how its process died
            return f"the data cannot be read ({message.payload}); bring there what this machine has"
        if not (
            other := [info for info in message.payload.data.values() if info.files not in files]
        ):
            self._checked.add(request.node)
            return ""
        found = ", ".join(f"{info.source}, sha256 {info.files[:16]}" for info in other)
        return f"the data are not this study's ({found}); bring the same files there"

    def _wait_longer(self, node: str | None, error: BaseException) -> None:
        """Put a node off on which our code did not start."""
        from ray.exceptions import RayError

        if isinstance(error, RayError):
            what = last_line(str(error)) or type(error).__name__
            problem = f"this study's code does not start ({what})"
            self._put_off(node, f"{problem}; install there what this machine has")

    def _put_off(self, node: str | None, problem: str) -> None:
        """Ask a node again after a while; say why, the first time."""
        wait = min(2 * self._waits.get(node, (POLL_SECONDS / 2, 0.0))[0], LONGEST_SECONDS)
        news = node is not None and node not in self._waits
        self._waits[node] = wait, time.monotonic() + wait
        if news:
            hosts = {each["NodeID"]: each["NodeManagerHostname"] for each in self._nodes()}
            name = hosts.get(node, node)
            self._say(f"Not used: on the node {name} {problem}, and it is tried again")


def _pass_on(actor: Any, calls: list[Call]) -> None:
    """Send calls to a node without waiting.

    The death of the node shows where its events are read.
    """
    with contextlib.suppress(Exception):
        actor.call.options(concurrency_group="calls").remote(calls)
