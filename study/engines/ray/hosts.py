"""The process hosts of a study: one actor on each usable node of the Ray cluster.

Every node is checked once before a trial runs there. Its Python, torch, lns-study code, user
packages and data must equal the driver's. A node with other versions is rejected permanently. A
node on which the host does not start, or which has other data, is retried with exponential
backoff. Either way the user sees the reason and the remedy once.

A node that Ray drains gets no new trials. An idle host ends after :data:`IDLE_SECONDS` if no trial
is waiting, so that an autoscaler can remove its node, and starts again with the next waiting trial.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.engines.ray.process_host import NodeCheck, ProcessHost
from study.engines.ray.trial_supervisor import host_name
from trainers.config import TrialConfig
from trainers.workers.messages import NAMESPACE, last_line
from trainers.workers.node import differing, versions

IDLE_SECONDS = 60.0
"""Seconds for which a host may be idle while no trial waits, before it is ended."""
POLL_SECONDS = 1.0
"""Seconds between looks at the nodes, and the first wait before one that cannot be used is asked
again."""
LONGEST_SECONDS = 60.0
"""Longest wait before a node that cannot be used is asked again."""
NODE_LABEL = "ray.io/node-id"
"""Label by which Ray knows a node."""
LOST_SECONDS = 30.0
"""Longest delay until Ray marks a lost node as dead (seconds)."""
CALLS = 10_000
"""Maximum number of concurrent calls to a host: two for each run."""


@dataclass(eq=False, kw_only=True)
class _Host:
    """The host of a node.

    Attributes:
        node, name: Ray's node id, and the machine's name in Ray.
        actor: handle of the actor.
        checked: pending call of the node's check, or None after it.
        lives: call that returns only when the actor ends.
        ready: whether trials may run on the node.
        needed: time when the host last had a trial or a trial was waiting.
    """

    node: str
    name: str
    actor: Any
    checked: Any
    needed: float
    lives: Any = None
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeRoom:
    """A usable node: its id, its machine's name, and its CPUs and GPUs in Ray."""

    node: str
    host: str
    cpus: float
    gpus: float


class Hosts:
    """The hosts of one run of a study.

    Args:
        make: arguments of :class:`~study.engines.ray.process_host.ProcessHost`.
        nodes: returns the nodes as :meth:`~study.engines.ray_session.Session.nodes` does.
        say: prints a line for the user.
        modules: code of the user's that a node must have, as ``package.module:name``.
        data: one trial for each data set that a node must have, and the SHA-256 digests of their
            examples (:attr:`trainers.data.DatasetInfo.files`), which must be there at the first
            :meth:`poll`.
        log: file for the output of trials' processes; None discards it.
    """

    def __init__(
        self,
        make: tuple[Any, ...],
        nodes: Callable[[], list[dict[str, Any]]],
        say: Callable[[str], None] = lambda line: None,
        modules: Sequence[str] = (),
        data: tuple[Sequence[TrialConfig], Collection[str]] = ((), ()),
        log: Path | None = None,
    ) -> None:
        self.engine = uuid.uuid4().hex[:12]
        self._make, self._nodes, self._say = make, nodes, say
        self._modules, self._versions, self._data = modules, versions(modules), data
        self._log = log
        self._hosts: dict[str, _Host] = {}
        self._refused: set[str] = set()
        self._told: set[str] = set()
        self._waits: dict[str, tuple[float, float]] = {}
        """Current backoff of a node and the time when it ends (seconds)."""
        self._lost: dict[str, float] = {}
        """Time when a usable node lost its host."""
        self._looked, self._gave_back = -float("inf"), False
        self.rooms: list[NodeRoom] = []
        """The usable nodes."""
        self.draining: set[str] = set()
        """Nodes that Ray drains."""
        self._without_cpus: set[str] = set()
        """Nodes without CPUs, such as the head of many clusters; they get no host."""

    def start(self) -> None:
        """Start the hosts of the nodes that there are, and their checks, before the first poll."""
        for node in self._nodes():
            if node["Alive"] and not node.get("Draining") and node["Resources"].get("CPU"):
                self._ask(node["NodeID"], str(node["NodeManagerHostname"]))

    def poll(self, waiting: bool, used: Collection[str]) -> None:
        """Update the list of nodes and their hosts; to be called every second.

        Args:
            waiting: whether a trial is waiting for resources, or for Ray to place it.
            used: ids of the nodes that run trials.
        """
        first, self._looked = self._looked < 0, time.monotonic()
        for host in self._hosts.values() if first else ():
            host.needed = self._looked  # idle time counts from the first look
        nodes = {node["NodeID"]: node for node in self._nodes() if node["Alive"]}
        self._drain({n: node for n, node in nodes.items() if node.get("Draining")}, used)
        self._end_idle(waiting, used)
        self._without_cpus = {n for n, node in nodes.items() if not node["Resources"].get("CPU")}
        for name, node in nodes.items() if not self._gave_back else ():
            if name not in self._without_cpus and self._may_ask(name):
                self._ask(name, str(node["NodeManagerHostname"]))
        for host in list(self._hosts.values()):
            if host.node not in nodes:
                del self._hosts[host.node]
            elif host.checked is not None or host.lives is not None:
                self._hear(host)
        self.rooms = [
            NodeRoom(
                node=host.node,
                host=host.name,
                cpus=nodes[host.node]["Resources"].get("CPU", 0.0),
                gpus=nodes[host.node]["Resources"].get("GPU", 0.0),
            )
            for host in self._hosts.values()
            if host.ready and host.node not in self.draining
        ]

    @property
    def labels(self) -> dict[str, str]:
        """Label selector that excludes unusable nodes, for Ray's placement of a trial."""
        known = {node for node, host in self._hosts.items() if not host.ready}
        out = sorted(
            self._refused | self.draining | self._without_cpus | known | self._waits.keys()
        )
        return {NODE_LABEL: f"!in({','.join(out)})"} if out else {}

    def call(self, node: str, method: str, *arguments: Any) -> None:
        """Call a host's method without waiting for the result."""
        if node in self._hosts:
            with contextlib.suppress(Exception):  # it may have died
                getattr(self._hosts[node].actor, method).remote(*arguments)

    def close(self) -> None:
        """End all hosts, and with them all processes."""
        import ray

        for host in self._hosts.values():
            with contextlib.suppress(Exception):  # Ray may be gone
                ray.kill(host.actor)
        self._hosts.clear()

    def _drain(self, nodes: dict[str, dict[str, Any]], used: Collection[str]) -> None:
        """Exclude draining nodes from placement, and end the host of one without trials."""
        for name in nodes.keys() & set(used) - self.draining:
            self._say(
                f"Ray drains the node {nodes[name]['NodeManagerHostname']}: trials that can finish"
                " their epoch, write a checkpoint and continue on another node"
            )
        self.draining = set(nodes)
        for name in self.draining & self._hosts.keys() - set(used):
            self._drop(self._hosts[name])

    def _end_idle(self, waiting: bool, used: Collection[str]) -> None:
        """End idle hosts; they start again when a trial is waiting."""
        self._gave_back = self._gave_back and not waiting
        for host in list(self._hosts.values()):
            if waiting or host.node in used:
                host.needed = self._looked
            elif self._looked - host.needed > IDLE_SECONDS:
                self._gave_back = True
                self._drop(host)

    def _may_ask(self, node: str) -> bool:
        ask = node not in self._hosts and node not in self._refused and node not in self.draining
        return ask and time.monotonic() >= self._waits.get(node, (0.0, 0.0))[1]

    def _ask(self, node: str, name: str) -> None:
        """Start a node's host and its check."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options = {
            "name": host_name(self.engine, node),
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_concurrency": CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor = ray.remote(ProcessHost).options(**options).remote(*self._make)
        checked = actor.check.remote(self._modules, self._data[0])
        self._hosts[node] = _Host(
            node=node, name=name, actor=actor, checked=checked, needed=time.monotonic()
        )

    def _hear(self, host: _Host) -> None:
        """Handle the result of a host's check, or the host's end."""
        import ray

        asked = host.checked if host.checked is not None else host.lives
        if not ray.wait([asked], timeout=0)[0]:
            return
        try:
            found: NodeCheck = ray.get(asked)
        except (AttributeError, TypeError):
            self._refuse(host, {"lns-study": "of a version before this check"})
        except ray.exceptions.RayError as error:
            if host.ready:
                self._lost[host.node] = time.monotonic()
            self._put_off(host, "" if self._may_be_gone(host.node) else _cannot_start(error))
        else:
            self._judge(host, found)

    def _may_be_gone(self, node: str) -> bool:
        """Return whether Ray may still list a lost node as alive."""
        return time.monotonic() - self._lost.get(node, -float("inf")) < LOST_SECONDS

    def _judge(self, host: _Host, found: NodeCheck) -> None:
        host.checked, host.name = None, found.host
        if differing(found.versions, self._versions):
            self._refuse(host, found.versions)
        elif problem := self._lacks(found):
            self._put_off(host, problem)
        else:
            host.actor.admit.remote(self._log)
            host.ready, host.lives = True, host.actor.live.remote()
            self._waits.pop(host.node, None)

    def _lacks(self, found: NodeCheck) -> str:
        """Return why a node's data cannot be used; "" if they equal the study's."""
        if found.data is None:
            return ""
        if isinstance(found.data.payload, str):  # also how its process died
            return (
                f"the data cannot be read ({found.data.payload}); bring there what this machine has"
            )
        infos = found.data.payload.data.values()
        if not (other := [info for info in infos if info.files not in self._data[1]]):
            return ""
        named = ", ".join(f"{info.source}, sha256 {info.files[:16]}" for info in other)
        return f"the data are not this study's ({named}); bring the same files there"

    def _refuse(self, host: _Host, theirs: dict[str, str]) -> None:
        """Reject a node permanently, and print the reason."""
        self._drop(host)
        self._refused.add(host.node)
        wrong = ", ".join(differing(theirs, self._versions))
        wanted = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        self._say(
            f"Refused: the node {host.name} has {wrong}, and this study runs on {wanted}: its"
            " trials could fail or get other bits; install the same there, and restart its Ray"
        )

    def _put_off(self, host: _Host, problem: str) -> None:
        """Retry a node later with exponential backoff; print the problem the first time."""
        self._drop(host)
        wait = min(2 * self._waits.get(host.node, (POLL_SECONDS / 2, 0.0))[0], LONGEST_SECONDS)
        self._waits[host.node] = wait, time.monotonic() + wait
        if problem and host.node not in self._told:
            self._told.add(host.node)
            self._say(f"Not used: on the node {host.name} {problem}, and it is tried again")

    def _drop(self, host: _Host) -> None:
        import ray

        self._hosts.pop(host.node, None)
        with contextlib.suppress(Exception):
            ray.kill(host.actor)


def _cannot_start(error: Exception) -> str:
    what = last_line(str(error)) or type(error).__name__
    return f"this study's code does not start ({what}); install there what this machine has"
