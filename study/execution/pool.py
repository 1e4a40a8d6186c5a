"""The processes that train a study's trials, all its leases' together: where a trial fits, which
process takes it, what comes of it.

A trial holds CPUs and a share of GPUs from when it is handed to processes until it has ended. A
process is kept for the next trial of its shape, and ended where one of another shape takes its
place; it costs milliseconds to make one (:mod:`trainers.workers.fork_server`). So as many trials
run as there is room for, from the first moment on. A trial of several workers has a *gang*: a
process a rank, started together, or not at all. Small trials may share a process, one a GPU
(:mod:`trainers.workers.packed`).

Whatever ends a process, every trial in it is told as :data:`~trainers.workers.messages.DIED`, and
its resources are free; a gang ends with the first of its processes.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import pickle
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from study.execution.leases import EPSILON, Call, Lease
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    GO,
    HELLO,
    JOIN,
    JOINED,
    MEET,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Message,
)  # fmt: skip
from trainers.workers.resources import WorkerResources

Spot = tuple[Lease, int | None]
"""Where a rank computes: the machine, and the GPU's place among its lease's."""


class Machines(Protocol):
    """Where leases come from; see :mod:`study.execution.leases`."""

    @property
    def leases(self) -> list[Lease]:
        """Those that are held now."""

    def poll(self, waiting: bool) -> None:
        """Look for more; ``waiting`` where trials wait."""

    def close(self) -> None:
        """Give all back."""


@dataclass(eq=False, kw_only=True)
class Running:
    """A trial that processes train.

    Attributes:
        slots: a number for every rank, the lowest that were free: the trial's place in a picture of
            the study.
        spots: where each rank computes.
        ended: processes in which it has ended; ``result`` is what the first of them said,
            ``retire`` why one of them ends with it.
    """

    trial: str
    shape: WorkerResources
    spots: list[Spot]
    slots: list[int]
    plan: dict[str, Any]
    ended: set[int] = field(default_factory=set)
    result: dict[str, Any] = field(default_factory=dict)
    retire: str = ""


@dataclass(eq=False, kw_only=True)
class _Group:
    """Processes that train together: one, or a gang's, each at the spot of its rank. ``ready`` once
    they may be given trials."""

    shape: WorkerResources
    spots: list[Spot]
    keys: list[int]
    running: dict[str, Running] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    ready: bool = False


class Pool:
    """See the module.

    Args:
        said: what threads of leases put in: the lease, and what its processes said, or None where
            it has ended.
    """

    def __init__(
        self, said: queue.SimpleQueue[tuple[Lease, list[tuple[int, bytes]] | None]]
    ) -> None:
        self._said = said
        self._machines: Machines | None = None
        self._groups: dict[int, _Group] = {}
        self._trials: dict[str, _Group] = {}
        self._pids: dict[int, int] = {}
        self._calls: dict[Lease, list[Call]] = defaultdict(list)
        self._keys = itertools.count(1)
        self._idle: list[_Group] = []
        self._free_slots: list[int] = []
        self._new_slots = itertools.count()
        self._reasons: dict[str, str] = {}

    def use(self, machines: Machines | None) -> None:
        """Take resources from there, and give back what there was."""
        self.close()
        self._machines = machines

    def leave(self) -> None:
        """Ask nothing more of machines that cannot be reached, not even to end."""
        self._machines = None

    @property
    def running(self) -> list[str]:
        """Ids of the trials that processes train."""
        return list(self._trials)

    @property
    def leases(self) -> list[Lease]:
        """What there is."""
        return self._machines.leases if self._machines else []

    @property
    def idle_resources(self) -> tuple[float, float]:
        """CPUs and GPUs that no trial holds."""
        return sum(lease.free for lease in self.leases), sum(
            sum(lease.gpus) for lease in self.leases
        )

    def could_fit(self, shape: WorkerResources) -> bool:
        """Whether there would be room for a trial if no other ran."""
        empty = [dataclasses.replace(lease, gpus=[1.0] * lease.gpu_count) for lease in self.leases]
        return _find(shape, empty) is not None

    @property
    def idle(self) -> bool:
        """Whether there is a CPU that no trial holds."""
        return any(lease.free >= 1.0 - EPSILON for lease in self.leases)

    def capacity(self) -> tuple[float, int, int]:
        """CPUs, GPUs and machines of all leases."""
        leases = self.leases
        return (
            sum(lease.cpus for lease in leases),
            sum(lease.gpu_count for lease in leases),
            len({lease.host for lease in leases}),
        )

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], dict[str, Any]]
    ) -> Running | None:
        """Have a trial trained, if there is room for it now.

        Args:
            make_plan: makes what a worker process needs, see
                :mod:`trainers.workers.worker_process`.
        """
        group = None if shape.packed else self._idle_group(shape)
        spots = group.spots if group else self._place(shape)
        if spots is None:
            return None
        group = group or self._shared_group(shape, spots) or self._make(shape, spots)
        running = Running(
            trial=trial,
            shape=shape,
            spots=spots,
            slots=self._take_slots(len(spots)),
            plan=make_plan(),
        )
        self._take(running, 1.0)
        group.running[trial] = running
        if group in self._idle:
            self._idle.remove(group)
        self._trials[trial] = group
        if group.ready:
            self._train(group, running)
        self.flush()
        return running

    def answer(self, trial: str, go: bool) -> None:
        """Whether a trial whose plan has it wait goes on after a report."""
        group = self._trials.get(trial)
        if group is not None:
            self._tell(group, Message(GO if go else STOP, trial))

    def kill(self, trial: str, why: str) -> None:
        """End the processes of a trial; its death will be told, with this reason."""
        group = self._trials.get(trial)
        if group is not None:
            self._reasons[trial] = why
            for key, (lease, _) in zip(group.keys, group.spots, strict=False):
                self._calls[lease].append(("kill", (key,)))
            self.flush()

    def end_all(self, why: str) -> None:
        """End every process; the deaths of trials will be told, with this reason."""
        for group in list(self._idle):
            self._end(group)
        for trial in self.running:
            self.kill(trial, why)
        self.flush()

    def wait(self, seconds: float, *, waiting: bool, poll: bool = True) -> list[Message]:
        """What came of trials: began, report, ended, died; as soon as there is something, or after
        ``seconds``.

        A report also has ``pid`` and ``host`` of the process that speaks for the trial.

        Args:
            waiting: whether trials wait for resources.
            poll: look for machines that came or went.
        """
        if poll and self._machines is not None:
            self._machines.poll(waiting)
        found: list[Message] = []
        until = time.monotonic() + seconds
        while not found:
            try:
                lease, events = self._said.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            found += self._hear(lease, events)
            while not self._said.empty():
                found += self._hear(*self._said.get())
            self.flush()  # what a gang's ranks are told next
            if not events:
                break  # a lease came or went: there may be room now
        return found

    def flush(self) -> None:
        """Pass on what processes are to be told."""
        for lease, calls in self._calls.items():
            lease.call(calls)
        self._calls.clear()

    def close(self) -> None:
        """End all processes and give back what they used."""
        if self._machines is not None:
            self._machines.close()

    def _idle_group(self, shape: WorkerResources) -> _Group | None:
        """Processes of this shape without a trial, where their resources are free."""
        return next(
            (group for group in self._idle if group.shape == shape and _fits(shape, group.spots)),
            None,
        )

    def _shared_group(self, shape: WorkerResources, spots: list[Spot]) -> _Group | None:
        """A process at this place that trains others of this shape and takes one more."""
        if not shape.packed:
            return None
        groups = self._groups.values()
        return next(
            (
                g
                for g in groups
                if g.shape == shape and g.spots == spots and len(g.running) < shape.lanes
            ),
            None,
        )

    def _place(self, shape: WorkerResources) -> list[Spot] | None:
        """Free places for all ranks, on one machine if any has room for them, else over several;
        None if there are none.

        The emptiest machines and GPUs come first, so that few trials do not share what many could.
        """
        leases = sorted(self.leases, key=lambda lease: -lease.free)
        for among in [*([lease] for lease in leases), leases]:
            spots = _find(shape, among)
            if spots is not None:
                return spots
        return None

    def _make(self, shape: WorkerResources, spots: list[Spot]) -> _Group:
        keys = [next(self._keys) for _ in range(shape.processes)]
        group = _Group(shape=shape, spots=spots, keys=keys, ready=shape.processes == 1)
        for key, (lease, gpu) in zip(keys, spots, strict=False):
            self._make_room(lease, gpu)
            self._groups[key] = group
            self._calls[lease].append(("start", (key, lease.environment(gpu), shape.lanes)))
        return group

    def _make_room(self, lease: Lease, gpu: int | None) -> None:
        """End processes without trials on this machine, on this GPU first: one for each that is
        made, as many as there were."""
        here = [group for group in self._idle if any(spot[0] is lease for spot in group.spots)]
        same = [group for group in here if gpu is not None and (lease, gpu) in group.spots]
        for group in same or here[:1]:
            self._end(group)

    def _train(self, group: _Group, running: Running) -> None:
        self._tell(group, Message(TRAIN, running.trial, running.plan))

    def _tell(self, group: _Group, message: Message) -> None:
        content = pickle.dumps(message)
        for key, (lease, _) in zip(group.keys, group.spots, strict=False):
            self._calls[lease].append(("send", (key, content)))

    def _hear(self, lease: Lease, events: list[tuple[int, bytes]] | None) -> list[Message]:
        if events is None:
            groups = {
                id(g): g for g in self._groups.values() if any(spot[0] is lease for spot in g.spots)
            }.values()
            return [
                message
                for group in groups
                for message in self._lose(group, f"the node {lease.host} is gone")
            ]
        found = []
        for key, content in events:
            group = self._groups.get(key)
            if group is not None:
                found += self._react(group, key, pickle.loads(content))
        return found

    def _react(self, group: _Group, key: int, message: Message) -> list[Message]:
        speaks = key == group.keys[0]
        if message.kind == HELLO:
            self._pids[key] = message.payload
            if group.shape.processes > 1 and speaks:
                self._join(group, [0], 0)
        elif message.kind == MEET:
            self._join(group, range(1, group.shape.processes), message.payload)
        elif message.kind == JOINED:
            group.joined.add(key)
            if len(group.joined) == group.shape.processes:
                group.ready = True
                for running in group.running.values():
                    self._train(group, running)
        elif message.kind == DIED:
            return self._lose(group, message.payload)
        elif message.kind == ENDED:
            return self._note_end(group, key, message)
        elif speaks and message.kind == BEGAN:
            return [message]
        elif speaks and message.kind == REPORT:
            where = {"pid": self._pids.get(key), "host": group.spots[0][0].host}
            return [message._replace(payload=message.payload | where)]
        return []

    def _join(self, group: _Group, ranks: Iterable[int], port: int) -> None:
        """Have ranks meet at rank 0's; with port 0 rank 0 opens one."""
        together = len({spot[0].address for spot in group.spots}) == 1
        address = "127.0.0.1" if together else group.spots[0][0].address
        backend = "nccl" if group.shape.device == "cuda" else "gloo"
        for rank in ranks:
            values = {
                "rank": rank,
                "workers": group.shape.processes,
                "address": address,
                "port": port,
                "backend": backend,
            }
            self._calls[group.spots[rank][0]].append(
                ("send", (group.keys[rank], pickle.dumps(Message(JOIN, payload=values))))
            )

    def _note_end(self, group: _Group, key: int, message: Message) -> list[Message]:
        """A trial has ended once it has in all its processes; where one failed, the others wait for
        it in vain."""
        running = group.running.get(message.trial)
        if running is None:
            return []
        running.ended.add(key)
        running.result = running.result or message.payload
        running.retire = running.retire or message.payload["retire"]
        well = message.payload["how"] in (DONE, STOPPED)
        if well and len(running.ended) < len(group.keys):
            return []
        self._release(group, running)
        self._reasons.pop(message.trial, None)
        ended = Message(ENDED, message.trial, running.result)
        if running.retire or (not well and group.shape.processes > 1):
            return [
                ended,
                *self._lose(group, f"its process ended with another trial's: {running.retire}"),
            ]
        if not group.running:
            self._idle.append(group)
        return [ended]

    def _lose(self, group: _Group, why: str) -> list[Message]:
        """A process of the group is gone: so is the group, and every trial in it has died."""
        lost = list(group.running.values())
        self._end(group)
        for running in lost:
            self._release(group, running)
        return [
            Message(DIED, running.trial, self._reasons.pop(running.trial, "") or why)
            for running in lost
        ]

    def _end(self, group: _Group) -> None:
        """Kill the group's processes; what they say from now on is nobody's."""
        for key, (lease, _) in zip(group.keys, group.spots, strict=False):
            self._calls[lease].append(("kill", (key,)))
            self._groups.pop(key, None)
            self._pids.pop(key, None)
        if group in self._idle:
            self._idle.remove(group)

    def _release(self, group: _Group, running: Running) -> None:
        del group.running[running.trial]
        del self._trials[running.trial]
        self._take(running, -1.0)
        for slot in running.slots:
            heapq.heappush(self._free_slots, slot)

    def _take(self, running: Running, sign: float) -> None:
        for (lease, gpu), bundle in zip(running.spots, running.shape.bundles, strict=True):
            lease.free -= sign * bundle["CPU"]
            if gpu is not None:
                lease.gpus[gpu] -= sign * bundle["GPU"]

    def _take_slots(self, count: int) -> list[int]:
        while len(self._free_slots) < count:
            heapq.heappush(self._free_slots, next(self._new_slots))
        return [heapq.heappop(self._free_slots) for _ in range(count)]


def _find(shape: WorkerResources, leases: list[Lease]) -> list[Spot] | None:
    """Places for all ranks on some machines."""
    cpus = {id(lease): lease.free for lease in leases}
    gpus = {id(lease): list(lease.gpus) for lease in leases}
    spots: list[Spot] = []
    for bundle in shape.bundles:
        spot = next(
            (
                spot
                for lease in leases
                for spot in [_spot(lease, bundle, cpus[id(lease)], gpus[id(lease)])]
                if spot
            ),
            None,
        )
        if spot is None:
            return None
        spots.append(spot)
        lease, gpu = spot
        cpus[id(lease)] -= bundle["CPU"]
        if gpu is not None:
            gpus[id(lease)][gpu] -= bundle["GPU"]
    return spots


def _spot(lease: Lease, bundle: dict[str, float], cpus: float, gpus: list[float]) -> Spot | None:
    if cpus + EPSILON < bundle["CPU"]:
        return None
    if "GPU" not in bundle:
        return lease, None
    gpu = max(range(len(gpus)), key=lambda index: gpus[index], default=None)
    return (lease, gpu) if gpu is not None and gpus[gpu] + EPSILON >= bundle["GPU"] else None


def _fits(shape: WorkerResources, spots: list[Spot]) -> bool:
    """Whether these very places are free."""
    need: dict[tuple[int, int | None], float] = defaultdict(float)
    for (lease, gpu), bundle in zip(spots, shape.bundles, strict=True):
        need[id(lease), None] += bundle["CPU"]
        if gpu is not None:
            need[id(lease), gpu] += bundle["GPU"]
    return all(
        need[id(lease), None] <= lease.free + EPSILON
        and (gpu is None or need[id(lease), gpu] <= lease.gpus[gpu] + EPSILON)
        for lease, gpu in spots
    )
