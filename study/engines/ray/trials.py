"""The running trials of the ray engine.

:class:`TuneTrials` has the same interface for the study's loop (:mod:`study.engines.loop`) as the
process pool on one machine. A trial that the loop starts is queued here until Tune's searcher takes
it (:mod:`study.engines.ray.engine`). The processes' messages come back in Tune's results, and
the loop's answer becomes Tune's decision.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from study.engines.engine import EPSILON, Slots
from study.engines.ray.free_resources import Room
from study.engines.ray.hosts import Hosts
from study.engines.ray.trial_supervisor import LAST, Job
from trainers.workers.messages import ENDED, PLACED, STOPPED, Ended, Ending, ForLoop, WorkerPlan
from trainers.workers.resources import WorkerResources

DEAF_SECONDS = 15.0
"""Time for a supervisor to report its killed process before it is killed too (seconds)."""
ASK_SECONDS = 10.0
"""Seconds between two requests for the same resources from the autoscaler."""


@dataclass(eq=False, kw_only=True)
class Handed:
    """A trial that was queued for Tune or is running.

    Attributes:
        job: description for its supervisor.
        slots: slot number of each rank.
        nodes: Ray node id of each rank; empty until Ray has placed the trial.
        goes_on: whether it continues after its last report.
        over: whether it has ended; Tune may process its end later.
        killed: time when its processes were killed; None before.
        hosts: always empty: the machines are unknown when a trial starts.
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
        hosts: the nodes' process hosts.
        ask: requests resources for these bundles in total from the autoscaler.
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
        """Ids of the queued and running trials."""
        return list(self._trials)

    @property
    def moving(self) -> list[str]:
        """Ids of the trials on draining nodes."""
        draining = self._hosts.draining
        return [name for name, trial in self._trials.items() if draining.intersection(trial.nodes)]

    @property
    def used(self) -> set[str]:
        """Ids of the nodes that run trials."""
        return {node for trial in self._trials.values() for node in trial.nodes}

    @property
    def started(self) -> bool:
        """Whether a trial has not been placed yet."""
        return any(not trial.nodes for trial in self._trials.values())

    @property
    def idle(self) -> bool:
        """Whether at least one CPU is free."""
        return self.room.free[0] >= 1.0 - EPSILON

    @property
    def idle_resources(self) -> tuple[float, float]:
        """Free CPUs and GPUs."""
        return self.room.free

    def could_fit(self, shape: WorkerResources) -> bool:
        """Return whether a trial would fit if no other trial of the study ran."""
        return self.room.could_fit(shape)

    def capacity(self) -> tuple[float, int, int]:
        """Return the number of CPUs, GPUs and machines that the study can use."""
        (cpus, gpus), others = self.room.total, self.room.others
        machines = len({node.host for node in self.room.nodes})
        return cpus - others[0], int(gpus - others[1]), machines

    def start(
        self, trial: str, shape: WorkerResources, make_plan: Callable[[], WorkerPlan]
    ) -> Handed | None:
        """Queue a trial for Tune if its resources are free; else return None."""
        if not self.room.take(trial, shape):
            return None
        self._starts[trial] += 1
        labels = self._hosts.labels
        job = Job(
            engine=self._hosts.engine,
            run=f"{trial}-{self._starts[trial]}",
            trial=trial,
            shape=shape,
            plan=make_plan() | {"labels": labels},
            labels=labels,
        )
        handed = Handed(job=job, slots=self._slots.take(shape.workers))
        self._trials[trial] = handed
        self._waiting.append(handed)
        return handed

    def next(self) -> Handed | None:
        """Return the next queued trial, or None."""
        return self._waiting.popleft() if self._waiting else None

    def answer(self, trial: str, go: bool) -> None:
        """Set whether a trial continues after its last report."""
        if trial in self._trials:
            self._trials[trial].goes_on = go

    def leave_after_epoch(self, trials: Iterable[str]) -> None:
        """Ask trials to write a checkpoint after their current epoch and to end."""
        self._tell(trials, "leave")

    def kill(self, trial: str, why: str) -> None:
        """Kill a trial's processes; ``why`` becomes the reason of its death.

        A trial that Ray has not placed has no processes and stays pending.
        """
        handed = self._trials.get(trial)
        if handed is not None and handed.nodes and handed.killed is None:
            handed.killed = time.monotonic()
            self._tell([trial], "end", why)

    def end_all(self, why: str) -> None:
        """Kill the processes of all trials."""
        self._waiting.clear()
        for trial in self.running:
            self.kill(trial, why)

    def forget_all(self) -> None:
        """Drop all trials: their actors end with Tune's run."""
        self._waiting.clear()
        self._trials.clear()

    def deaf(self) -> list[str]:
        """Return killed trials whose supervisors have not reported the death in time."""
        now = time.monotonic()
        return [
            name
            for name, trial in self._trials.items()
            if trial.killed is not None and now - trial.killed > DEAF_SECONDS
        ]

    def hear(self, handed: Handed, messages: list[ForLoop]) -> list[ForLoop]:
        """Update a trial from its messages; return the messages for the loop."""
        if handed.over:
            return []
        for message in messages:
            if message.kind == PLACED:
                handed.nodes = message.payload["nodes"]
                self.room.place(handed.job.trial, handed.nodes)
            elif message.kind in LAST:
                self._release(handed)
        return messages

    def note_stop(self, handed: Handed) -> list[ForLoop]:
        """Record that Tune stops a trial early; return the messages for the loop."""
        end: Ending = {"how": STOPPED, "text": "", "retire": ""}
        return self.hear(handed, [Ended(ENDED, handed.job.trial, end)])

    def ask_for(self, waiting: WorkerResources | None) -> None:
        """Request the resources of all trials and of the next waiting trial from the autoscaler.

        The request is withdrawn when no trial is waiting.
        """
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
