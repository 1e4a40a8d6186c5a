"""The pool of worker processes on all leases: where a trial fits, which process takes it, what it
reports.

A trial holds CPUs and a share of GPUs from when it is handed to processes until it has ended. A
process is kept for the next trial of its shape, and ended when one of another shape takes its
place; it costs milliseconds to make one (:mod:`trainers.workers.fork_server`). One in which code
of the user's ran ends with its trial. So as many trials run as there is room for, from the first
moment on. A trial of several workers has a *gang*: one process per rank, started together or not at
all. Small trials may share a process, one per GPU (:mod:`trainers.workers.packed`).

Whatever ends a process, every trial in it is reported as :data:`~trainers.workers.messages.DIED`,
and its resources are free; a gang ends with the first of its processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import queue
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from study.execution.engine import EPSILON, Slots
from study.execution.local.leases import Call, Lease
from study.execution.local.places import Spot, find, fits
from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    GO,
    HELLO,
    JOIN,
    JOINED,
    LEAVE,
    LEFT,
    MEET,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Message,
)  # fmt: skip
from trainers.workers.resources import WorkerResources


class Machines(Protocol):
    """A source of leases (:mod:`study.execution.local.leases`)."""

    @property
    def leases(self) -> list[Lease]:
        """Leases that are held now."""

    def poll(self, waiting: bool) -> None:
        """Look for more machines; ``waiting`` tells whether trials wait for resources."""

    def close(self) -> None:
        """Give back all leases."""


@dataclass(eq=False, kw_only=True)
class Running:
    """A trial that processes train.

    Attributes:
        slots: number of each rank, the lowest that were free: its place in a picture of the study.
        spots: place of each rank.
        plan: what a worker process needs to train the trial.
        ended: processes in which the trial has ended.
        result: result reported by the first process in which it ended.
        retire: reason for which a process ends with the trial; "" if none does.
    """

    trial: str
    shape: WorkerResources
    spots: list[Spot]
    slots: list[int]
    plan: dict[str, Any]
    ended: set[int] = field(default_factory=set)
    result: dict[str, Any] = field(default_factory=dict)
    retire: str = ""

    @property
    def hosts(self) -> list[str]:
        """Machine of each rank."""
        return [lease.host for lease, _ in self.spots]


@dataclass(eq=False, kw_only=True)
class _Group:
    """Processes that train together: one process, or a gang with one per rank.

    They may be given trials once ``ready``.
    """

    shape: WorkerResources
    spots: list[Spot]
    keys: list[int]
    running: dict[str, Running] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    ready: bool = False
    secret: str = field(default_factory=secrets.token_hex)


class Pool:
    """The processes of one study.

    Args:
        inbox: queue of (lease, messages of its processes), filled by the leases' threads; the
            messages are None when a lease has ended.
    """

    def __init__(
        self, inbox: queue.SimpleQueue[tuple[Lease, list[tuple[int, bytes]] | None]]
    ) -> None:
        self._inbox = inbox
        self._machines: Machines | None = None
        self._groups: dict[int, _Group] = {}
        self._trials: dict[str, _Group] = {}
        self._pids: dict[int, int] = {}
        self._calls: dict[Lease, list[Call]] = defaultdict(list)
        self._keys, self._slots = itertools.count(1), Slots()
        self._idle: list[_Group] = []
        self._reasons: dict[str, str] = {}

    def use(self, machines: Machines | None) -> None:
        """Take resources from ``machines``; give back those of the machines used before."""
        self.close()
        self._machines = machines

    def leave(self) -> None:
        """Forget machines that cannot be reached, without asking them to end."""
        self._machines = None

    @property
    def running(self) -> list[str]:
        """Ids of the trials that processes train."""
        return list(self._trials)

    @property
    def leases(self) -> list[Lease]:
        """Leases of all machines that trials may be given to."""
        return [lease for lease in self._all_leases if not lease.draining]

    @property
    def moving(self) -> list[str]:
        """Ids of the trials that processes train on a machine that is about to end."""
        ending = {id(lease) for lease in self._all_leases if lease.draining}
        groups = self._trials.items() if ending else []
        return [trial for trial, group in groups if any(id(on) in ending for on, _ in group.spots)]

    @property
    def idle_resources(self) -> tuple[float, float]:
        """CPUs and GPUs that no trial holds."""
        return sum(each.free for each in self.leases), sum(each.free_gpus for each in self.leases)

    def could_fit(self, shape: WorkerResources) -> bool:
        """Tell whether there would be room for a trial if no other ran."""
        empty = [dataclasses.replace(lease, gpus=[1.0] * lease.gpu_count) for lease in self.leases]
        return find(shape, empty) is not None

    @property
    def idle(self) -> bool:
        """Whether there is a CPU that no trial holds."""
        return any(lease.free >= 1.0 - EPSILON for lease in self.leases)

    def capacity(self) -> tuple[float, int, int]:
        """Return the CPUs, GPUs and machines of all leases; of a machine that is about to end, what
        trials hold there."""
        leases = self._all_leases
        return (
            sum(each.cpus - each.free if each.draining else each.cpus for each in leases),
            sum(
                math.ceil(each.gpu_count - sum(each.gpus)) if each.draining else each.gpu_count
                for each in leases
            ),
            len({each.host for each in leases}),
        )

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], dict[str, Any]]
    ) -> Running | None:
        """Start a trial if there is room for it now; else return None.

        Args:
            trial: id of the trial.
            shape: resources of its workers.
            make_plan: makes what a worker process needs (:mod:`trainers.workers.worker_process`).
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
            slots=self._slots.take(len(spots)),
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
        """Tell a trial that waits after a report whether it goes on."""
        group = self._trials.get(trial)
        if group is not None:
            self._tell(group, Message(GO if go else STOP, trial))

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Have trials write a checkpoint after the epoch under way and end there."""
        for trial in trials:
            self._tell(self._trials[trial], Message(LEAVE, trial))
        self.flush()

    def kill(self, trial: str, why: str) -> None:
        """End the processes of a trial; its death will be reported with this reason."""
        group = self._trials.get(trial)
        if group is not None:
            self._reasons[trial] = why
            for key, (lease, _) in zip(group.keys, group.spots, strict=False):
                self._calls[lease].append(("kill", (key,)))
            self.flush()

    def end_all(self, why: str) -> None:
        """End every process; the deaths of trials will be reported with this reason."""
        for group in list(self._idle):
            self._end(group)
        for trial in self.running:
            self.kill(trial, why)
        self.flush()

    def wait(self, seconds: float, *, waiting: bool, poll: bool = True) -> list[Message]:
        """Return the messages of trials (began, report, ended, died) once there are any.

        Returns after ``seconds`` at the latest. A report also has ``pid`` and ``host`` of its
        process.

        Args:
            seconds: longest time to wait.
            waiting: whether trials wait for resources.
            poll: whether to look for machines that joined or left.
        """
        if poll and self._machines is not None:
            self._machines.poll(waiting)
        found: list[Message] = []
        until = time.monotonic() + seconds
        while not found:
            try:
                lease, events = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            found += self._hear(lease, events)
            while not self._inbox.empty():
                found += self._hear(*self._inbox.get())
            self.flush()  # what a gang's ranks are told next
            if not events:
                break  # a lease came or went: there may be room now
        return found

    def flush(self) -> None:
        """Send the collected messages to the processes."""
        for lease, calls in self._calls.items():
            lease.call(calls)
        self._calls.clear()

    def close(self) -> None:
        """End all processes and give back their resources."""
        if self._machines is not None:
            self._machines.close()

    @property
    def _all_leases(self) -> list[Lease]:
        return self._machines.leases if self._machines else []

    def _idle_group(self, shape: WorkerResources) -> _Group | None:
        """Return processes of this shape without a trial whose resources are free, or None."""
        same = (group for group in self._idle if group.shape == shape)
        return next((group for group in same if fits(shape, group.spots)), None)

    def _shared_group(self, shape: WorkerResources, spots: list[Spot]) -> _Group | None:
        """Return a process at this place with trials of this shape and room for one more."""
        if not shape.packed:
            return None
        same = (g for g in self._groups.values() if g.shape == shape and g.spots == spots)
        return next((group for group in same if len(group.running) < shape.lanes), None)

    def _place(self, shape: WorkerResources) -> list[Spot] | None:
        """Return free places for all ranks, on one machine if possible, else on several, or None.

        The emptiest machines and GPUs come first, so that few trials do not crowd into one place.
        """
        leases = sorted(self.leases, key=lambda lease: -lease.free)
        for among in [*([lease] for lease in leases), leases]:
            spots = find(shape, among)
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
        """End an idle group on this machine, or all on this GPU, before one is made."""
        idle = [group for group in self._idle if any(spot[0] is lease for spot in group.spots)]
        same = [group for group in idle if gpu is not None and (lease, gpu) in group.spots]
        for group in same or idle[:1]:
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
                self._join(group, [0], "")
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
            process = {"pid": self._pids.get(key), "host": group.spots[0][0].host}
            return [message._replace(payload=message.payload | process)]
        return []

    def _join(self, group: _Group, ranks: Iterable[int], store: int | str) -> None:
        """Have ranks meet in rank 0's store, which rank 0 opens."""
        together = len({spot[0].address for spot in group.spots}) == 1
        address = "" if together else group.spots[0][0].address
        backend = "nccl" if group.shape.device == "cuda" else "gloo"
        for rank in ranks:
            values = {
                "rank": rank, "workers": group.shape.processes, "address": address, "store": store,
                "secret": group.secret, "backend": backend,
            }  # fmt: skip
            self._calls[group.spots[rank][0]].append(
                ("send", (group.keys[rank], pickle.dumps(Message(JOIN, payload=values))))
            )

    def _note_end(self, group: _Group, key: int, message: Message) -> list[Message]:
        """Note the end of a trial in one process; the trial ends once it has in all of them.

        If one process failed, the trial ends at once: the others would wait for it in vain.
        """
        running = group.running.get(message.trial)
        if running is None:
            return []
        running.ended.add(key)
        running.result = running.result or message.payload
        running.retire = running.retire or message.payload["retire"]
        well = message.payload["how"] in (DONE, STOPPED, LEFT)
        if well and len(running.ended) < len(group.keys):
            return []
        self._release(group, running)
        self._reasons.pop(message.trial, None)
        ended = Message(ENDED, message.trial, running.result)
        if running.retire or group.shape.own or (not well and group.shape.processes > 1):
            return [
                ended,
                *self._lose(group, f"its process ended with another trial's: {running.retire}"),
            ]
        if not group.running:
            self._idle.append(group)
        return [ended]

    def _lose(self, group: _Group, why: str) -> list[Message]:
        """End a group that has lost a process; return the deaths of its trials."""
        lost = list(group.running.values())
        self._end(group)
        for running in lost:
            self._release(group, running)
        return [
            Message(DIED, running.trial, self._reasons.pop(running.trial, "") or why)
            for running in lost
        ]

    def _end(self, group: _Group) -> None:
        """Kill the group's processes; later messages of theirs are ignored."""
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
        self._slots.give_back(running.slots)

    def _take(self, running: Running, sign: float) -> None:
        for (lease, gpu), bundle in zip(running.spots, running.shape.bundles, strict=True):
            lease.free -= sign * bundle["CPU"]
            if gpu is not None:
                lease.gpus[gpu] -= sign * bundle["GPU"]
