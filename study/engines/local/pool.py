"""The pool of worker processes on this machine: where a trial fits, which process takes it, what it
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

import itertools
import pickle
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from study.engines.engine import EPSILON, Slots
from study.engines.local.machine import Machine, Place
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
    MOMENT,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    Answer,
    Died,
    Ended,
    Ending,
    ForLoop,
    FromWorker,
    Join,
    Joining,
    ToWorker,
    Train,
    WorkerPlan,
)
from trainers.workers.node import Node
from trainers.workers.resources import WorkerResources


@dataclass(eq=False, kw_only=True)
class Running:
    """A trial that processes train.

    Attributes:
        slots: number of each rank, the lowest that were free: its place in a picture of the study.
        places: place of each rank.
        hosts: machine of each rank.
        plan: what a worker process needs to train the trial.
        ended: processes in which the trial has ended.
        result: result reported by the first process in which it ended.
        retire: reason for which a process ends with the trial; "" if none does.
    """

    trial: str
    shape: WorkerResources
    places: list[Place]
    slots: list[int]
    hosts: list[str]
    plan: WorkerPlan
    ended: set[int] = field(default_factory=set)
    result: Ending | None = None
    retire: str = ""


@dataclass(eq=False, kw_only=True)
class _Group:
    """Processes that train together: one process, or a gang with one per rank.

    They may be given trials once ``ready``.
    """

    shape: WorkerResources
    places: list[Place]
    keys: list[int]
    running: dict[str, Running] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    ready: bool = False
    secret: str = field(default_factory=secrets.token_hex)


class Pool:
    """The processes of one study.

    Args:
        machine: what they may use.
        node: makes and ends them; closed with the pool.
    """

    def __init__(self, machine: Machine, node: Node) -> None:
        self._machine, self._node = machine, node
        self._groups: dict[int, _Group] = {}
        self._trials: dict[str, _Group] = {}
        self._pids: dict[int, int] = {}
        self._keys, self._slots = itertools.count(1), Slots()
        self._idle: list[_Group] = []
        self._reasons: dict[str, str] = {}

    @property
    def running(self) -> list[str]:
        """Ids of the trials that processes train."""
        return list(self._trials)

    @property
    def moving(self) -> list[str]:
        """Ids of the trials on machines that are about to end: none, as this one is not."""
        return []

    @property
    def idle_resources(self) -> tuple[float, float]:
        """CPUs and GPUs that no trial holds."""
        return self._machine.free, sum(self._machine.gpus)

    def could_fit(self, shape: WorkerResources) -> bool:
        """Tell whether there would be room for a trial if no other ran."""
        return Machine(self._machine.cpus, self._machine.names).find(shape) is not None

    @property
    def idle(self) -> bool:
        """Whether there is a CPU that no trial holds."""
        return self._machine.free >= 1.0 - EPSILON

    def capacity(self) -> tuple[float, int, int]:
        """Return the CPUs, GPUs and machines: one."""
        return self._machine.cpus, len(self._machine.gpus), 1

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], WorkerPlan]
    ) -> Running | None:
        """Start a trial if there is room for it now; else return None.

        Args:
            trial: id of the trial.
            shape: resources of its workers.
            make_plan: makes what a worker process needs (:mod:`trainers.workers.worker_process`).
        """
        group = None if shape.packed else self._idle_group(shape)
        places = group.places if group else self._machine.find(shape)
        if places is None:
            return None
        group = group or self._shared_group(shape, places) or self._make(shape, places)
        running = Running(
            trial=trial,
            shape=shape,
            places=places,
            slots=self._slots.take(len(places)),
            hosts=[self._machine.host] * len(places),
            plan=make_plan(),
        )
        self._machine.take(shape, places)
        group.running[trial] = running
        if group in self._idle:
            self._idle.remove(group)
        self._trials[trial] = group
        if group.ready:
            self._train(group, running)
        return running

    def answer(self, trial: str, go: bool) -> None:
        """Answer a trial that waits after a report: whether it continues."""
        group = self._trials.get(trial)
        if group is not None:
            self._tell(group, Answer(GO if go else STOP, trial))

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Ask trials to write a checkpoint after their current epoch and then end."""
        for trial in trials:
            self._tell(self._trials[trial], Answer(LEAVE, trial))

    def kill(self, trial: str, why: str) -> None:
        """End the processes of a trial; its death will be reported with this reason."""
        group = self._trials.get(trial)
        if group is not None:
            self._reasons[trial] = why
            for key in group.keys:
                self._node.kill(key)

    def wait(self, seconds: float) -> list[ForLoop]:
        """Return the messages of trials (began, report, moment, ended, died) once there are any.

        Returns after ``seconds`` at the latest. A report also has ``pid`` and ``host`` of its
        process.
        """
        found: list[ForLoop] = []
        until = time.monotonic() + seconds
        while not found:
            events = self._node.events(max(0.0, until - time.monotonic()))
            if not events:
                break
            for key, content in events:
                if (group := self._groups.get(key)) is not None:
                    found += self._react(group, key, pickle.loads(content))
        return found

    def close(self) -> None:
        """End all processes."""
        self._node.close()

    def _idle_group(self, shape: WorkerResources) -> _Group | None:
        """Return processes of this shape without a trial whose resources are free, or None."""
        same = (group for group in self._idle if group.shape == shape)
        return next((group for group in same if self._machine.fits(shape, group.places)), None)

    def _shared_group(self, shape: WorkerResources, places: list[Place]) -> _Group | None:
        """Return a process at this place with trials of this shape and room for one more."""
        if not shape.packed:
            return None
        same = (g for g in self._groups.values() if g.shape == shape and g.places == places)
        return next((group for group in same if len(group.running) < shape.lanes), None)

    def _make(self, shape: WorkerResources, places: list[Place]) -> _Group:
        keys = [next(self._keys) for _ in range(shape.processes)]
        group = _Group(shape=shape, places=places, keys=keys, ready=shape.processes == 1)
        for key, place in zip(keys, places, strict=True):
            self._make_room(place)
            self._groups[key] = group
            self._node.start(key, self._machine.environment(place), shape.lanes)
        return group

    def _make_room(self, place: Place) -> None:
        """End an idle group, or all on this GPU, before one is made."""
        same = [group for group in self._idle if place is not None and place in group.places]
        for group in same or self._idle[:1]:
            self._end(group)

    def _train(self, group: _Group, running: Running) -> None:
        self._tell(group, Train(TRAIN, running.trial, running.plan))

    def _tell(self, group: _Group, message: ToWorker) -> None:
        content = pickle.dumps(message)
        for key in group.keys:
            self._node.send(key, content)

    def _react(self, group: _Group, key: int, message: FromWorker) -> list[ForLoop]:
        speaks = key == group.keys[0]
        if message.kind == HELLO:
            self._pids[key] = message.payload
            if group.shape.processes > 1 and speaks:
                self._join(group, [0])
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
        elif speaks and message.kind in (BEGAN, MOMENT):
            return [message]
        elif speaks and message.kind == REPORT:
            process = {"pid": self._pids.get(key), "host": self._machine.host}
            return [replace(message, payload=message.payload | process)]
        return []

    def _join(self, group: _Group, ranks: Iterable[int], store: int | str = "") -> None:
        """Let the ranks rendezvous in rank 0's in-memory store, which rank 0 opens first."""
        for rank in ranks:
            values: Joining = {
                "rank": rank,
                "workers": group.shape.processes,
                "address": "",
                "store": store,
                "secret": group.secret,
                "backend": "nccl" if group.shape.device == "cuda" else "gloo",
            }
            self._node.send(group.keys[rank], pickle.dumps(Join(JOIN, payload=values)))

    def _note_end(self, group: _Group, key: int, message: Ended) -> list[ForLoop]:
        """Record the end of a trial in one process; the trial ends with its last process.

        If one process failed, the trial ends at once, because the others would wait for it forever.
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
        ended = Ended(ENDED, message.trial, running.result)
        if running.retire or group.shape.own or (not well and group.shape.processes > 1):
            return [
                ended,
                *self._lose(group, f"its process ended with another trial's: {running.retire}"),
            ]
        if not group.running:
            self._idle.append(group)
        return [ended]

    def _lose(self, group: _Group, why: str) -> list[ForLoop]:
        """End a group that has lost a process; return the deaths of its trials."""
        lost = list(group.running.values())
        self._end(group)
        for running in lost:
            self._release(group, running)
        return [
            Died(DIED, running.trial, self._reasons.pop(running.trial, "") or why)
            for running in lost
        ]

    def _end(self, group: _Group) -> None:
        """Kill the group's processes; later messages of theirs are ignored."""
        for key in group.keys:
            self._node.kill(key)
            self._groups.pop(key, None)
            self._pids.pop(key, None)
        if group in self._idle:
            self._idle.remove(group)

    def _release(self, group: _Group, running: Running) -> None:
        del group.running[running.trial]
        del self._trials[running.trial]
        self._machine.give_back(running.shape, running.places)
        self._slots.give_back(running.slots)
