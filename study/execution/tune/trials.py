"""The trials of a study as Ray Tune has them: the pool of the ray engine.

:class:`TuneTrials` is to the study's loop (:mod:`study.execution.loop`) what the pool of processes
is on one machine. A trial that the loop starts waits here until Tune asks its searcher for one
(:mod:`study.execution.tune.engine`), which is at once. What a trial's processes say comes back as
messages in Tune's results; what the loop answers becomes Tune's decision.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from study.execution.engine import EPSILON, Slots
from study.execution.tune.hosts import Hosts
from study.execution.tune.room import Room
from study.execution.tune.supervisor import LAST, Job
from trainers.workers.messages import ENDED, PLACED, STOPPED, Message
from trainers.workers.resources import WorkerResources

DEAF_SECONDS = 15.0
"""Seconds after which a supervisor is killed that does not tell of its process's end."""
ASK_SECONDS = 10.0
"""Seconds after which an autoscaler is told its demand again."""


@dataclass(eq=False, kw_only=True)
class Handed:
    """A trial that Tune has, or will be given.

    Attributes:
        job: what its supervisor needs.
        slots: number of each rank, the lowest that were free.
        nodes: Ray's ids of the nodes of its ranks, once they are known.
        goes_on: answer to its last report.
        over: whether it has ended here; Tune's trial may live on for a moment.
        killed: when its processes were told to end.
        hosts: machines of its ranks; unknown when it starts.
    """

    job: Job
    slots: list[int]
    nodes: list[str] = field(default_factory=list)
    goes_on: bool = True
    over: bool = False
    killed: float | None = None
    hosts: list[str] = field(default_factory=list)


class TuneTrials:
    """The trials of one run of a study under Tune.

    Args:
        hosts: process hosts of the nodes.
        ask: asks the cluster's autoscaler for room for these workers in all.
    """

    def __init__(self, hosts: Hosts, ask: Callable[[list[dict[str, float]]], None]) -> None:
        self._hosts, self._ask = hosts, ask
        self.room = Room()
        self._trials: dict[str, Handed] = {}
        self._waiting: deque[Handed] = deque()
        self._starts: Counter[str] = Counter()
        self._slots = Slots()
        self._asked: tuple[float, list[dict[str, float]]] = (0.0, [])

    @property
    def running(self) -> list[str]:
        """Ids of the trials that were started and have not ended."""
        return list(self._trials)

    @property
    def moving(self) -> list[str]:
        """Ids of the trials on nodes that are about to end."""
        draining = self._hosts.draining
        return [name for name, trial in self._trials.items() if draining.intersection(trial.nodes)]

    @property
    def used(self) -> set[str]:
        """Nodes with trials."""
        return {node for trial in self._trials.values() for node in trial.nodes}

    @property
    def started(self) -> bool:
        """Whether Tune has, or will be given, a trial whose place nobody knows yet."""
        return any(not trial.nodes for trial in self._trials.values())

    @property
    def idle(self) -> bool:
        """Whether there is a CPU that nobody holds."""
        return self.room.free[0] >= 1.0 - EPSILON

    @property
    def idle_resources(self) -> tuple[float, float]:
        """CPUs and GPUs that nobody holds."""
        return self.room.free

    def could_fit(self, shape: WorkerResources) -> bool:
        """Tell whether there would be room for a trial if no other ran."""
        return self.room.could_fit(shape)

    def capacity(self) -> tuple[float, int, int]:
        """Return the CPUs, GPUs and machines of the nodes that may be used."""
        (cpus, gpus), others = self.room.total, self.room.others
        machines = len({node.host for node in self.room.nodes})
        return cpus - others[0], int(gpus - others[1]), machines

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], dict[str, Any]]
    ) -> Handed | None:
        """Have Tune start a trial if there is room for it now; else return None."""
        if not self.room.take(trial, shape):
            return None
        self._starts[trial] += 1
        job = Job(
            engine=self._hosts.engine,
            run=f"{trial}-{self._starts[trial]}",
            trial=trial,
            shape=shape,
            plan=make_plan(),
            labels=self._hosts.labels,
        )
        handed = Handed(job=job, slots=self._slots.take(shape.workers))
        self._trials[trial] = handed
        self._waiting.append(handed)
        return handed

    def next(self) -> Handed | None:
        """Return the next trial that was started and that Tune has not been given, or None."""
        return self._waiting.popleft() if self._waiting else None

    def answer(self, trial: str, go: bool) -> None:
        """Note whether a trial goes on after its last report."""
        if trial in self._trials:
            self._trials[trial].goes_on = go

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Have trials write a checkpoint after the epoch under way and end there."""
        self._tell(trials, "leave")

    def kill(self, trial: str, why: str) -> None:
        """End the processes of a trial; its death will be reported with this reason.

        One that Ray has not placed yet has none, and goes on waiting.
        """
        handed = self._trials.get(trial)
        if handed is not None and handed.nodes and handed.killed is None:
            handed.killed = time.monotonic()
            self._tell([trial], "end", why)

    def end_all(self, why: str) -> None:
        """End the processes of all trials."""
        self._waiting.clear()
        for trial in self.running:
            self.kill(trial, why)

    def forget_all(self) -> None:
        """Forget all trials: their actors end with Tune's run."""
        self._waiting.clear()
        self._trials.clear()

    def deaf(self) -> list[str]:
        """Return the trials whose processes were ended a while ago and that say nothing of it."""
        now = time.monotonic()
        return [
            name
            for name, trial in self._trials.items()
            if trial.killed is not None and now - trial.killed > DEAF_SECONDS
        ]

    def hear(self, handed: Handed, messages: list[Message]) -> list[Message]:
        """Take in what a trial has said; return what the loop is to hear of it."""
        if handed.over:
            return []
        for message in messages:
            if message.kind == PLACED:
                handed.nodes = message.payload["nodes"]
                self.room.place(handed.job.trial, handed.nodes)
            elif message.kind in LAST:
                self._release(handed)
        return messages

    def note_stop(self, handed: Handed) -> list[Message]:
        """Note that Tune ends a trial early; return what the loop is to hear of it."""
        end = {"how": STOPPED, "text": "", "retire": ""}
        return self.hear(handed, [Message(ENDED, handed.job.trial, end)])

    def ask_for(self, waiting: WorkerResources | None) -> None:
        """Ask an autoscaler for what the trials hold, and one that waits if there is one."""
        wanted: list[dict[str, float]] = []
        if waiting is not None:
            shapes = [*(trial.job.shape for trial in self._trials.values()), waiting]
            wanted = [bundle for shape in shapes for bundle in shape.bundles]
        since, before = self._asked
        again = bool(wanted) and time.monotonic() - since > ASK_SECONDS
        if again or len(wanted) != len(before):
            self._asked = time.monotonic(), wanted
            self._ask(wanted)

    def _tell(self, trials: Iterable[str], method: str, *arguments: Any) -> None:
        for name in trials:
            trial = self._trials[name]
            for rank, node in enumerate(trial.nodes):
                self._hosts.call(node, method, [f"{trial.job.run}/{rank}"], *arguments)

    def _release(self, handed: Handed) -> None:
        handed.over = True
        trial = handed.job.trial
        self._trials.pop(trial, None)
        self.room.release(trial)
        self._slots.give_back(handed.slots)
