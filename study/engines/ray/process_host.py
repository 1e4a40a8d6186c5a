"""The worker processes of one node of a Ray cluster, behind an actor that takes no CPU.

Each node has one :class:`ProcessHost`. Its fork server has torch, the kernels and the data loaded,
so a trial's process starts in milliseconds. The trials' supervisors
(:mod:`study.engines.ray.trial_supervisor`) hold the CPUs and GPUs. Each requests a process from the
host of its node, and forwards the process's messages.

A *run* is a trial, or one rank of a gang, in a process. A process is reused for the next run with
the same resources, and several small trials may share a process on a GPU
(:mod:`trainers.workers.packed`). A process that ran a gang's rank or the user's code is not reused.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainers.config import TrialConfig
from trainers.workers.messages import (
    CHECKED,
    DIED,
    ENDED,
    HELLO,
    LEAVE,
    REPORT,
    Answer,
    Checked,
    Died,
    FromWorker,
    ToWorker,
)
from trainers.workers.node import Node, versions
from trainers.workers.resources import WorkerResources

LISTEN_SECONDS = 1.0
"""Timeout of one read of the processes' messages (seconds)."""


@dataclass(eq=False, kw_only=True)
class _Process:
    """A process and its runs."""

    key: int
    shape: WorkerResources
    gpus: str
    pid: int | None = None
    runs: list[_Run] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class _Run:
    """A run and its unread messages."""

    trial: str
    process: _Process
    said: asyncio.Queue[FromWorker] = field(default_factory=asyncio.Queue)
    reason: str = ""
    """Reason given by the caller that ended the run."""


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """Result of a node's check.

    Attributes:
        host: name of the machine.
        versions: see :func:`trainers.workers.node.versions`.
        data: result of :meth:`trainers.workers.node.Node.examine`; None without data sets.
    """

    host: str
    versions: dict[str, str]
    data: Checked | Died | None


class ProcessHost:
    """The processes of this node, as an asynchronous Ray actor: every call may wait.

    Args:
        data: data sets to load once, each as the keys of a ``DataConfig``.
    """

    def __init__(self, data: Sequence[dict[str, Any]]) -> None:
        self._node = Node(data=data)
        self._keys = itertools.count(1)
        self._processes: dict[int, _Process] = {}
        self._runs: dict[str, _Run] = {}
        self._opened: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set once a run is open: Ray may bring calls of an asynchronous actor in any order."""
        self._admitted = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    async def check(self, modules: Sequence[str], trials: Sequence[TrialConfig]) -> NodeCheck:
        """Return this node's versions and the digests of its data.

        Must be called once, before all other methods. The check reads the processes' messages
        itself, so runs may be opened only after :meth:`admit`.
        """
        found = None
        if trials:
            environment = {"CUDA_VISIBLE_DEVICES": ""}
            found = await asyncio.to_thread(self._node.examine, trials, environment)
            assert found.kind in (CHECKED, DIED)
        self._listener = asyncio.create_task(self._listen())
        return NodeCheck(
            host=os.uname().nodename,
            versions=await asyncio.to_thread(versions, modules),
            data=found,
        )

    async def admit(self, log: Path | None) -> None:
        """Allow runs on this node; their processes' output goes to ``log``, None discards it."""
        if log is not None:
            self._node.log(log)
        self._admitted.set()

    async def name(self) -> str:
        """Wait until the node is admitted, then return the machine's name."""
        await self._admitted.wait()
        return os.uname().nodename

    async def open(
        self, run: str, trial: str, shape: WorkerResources, gpus: str, messages: Sequence[ToWorker]
    ) -> None:
        """Start a run in a process; creates a process if none can be reused.

        Args:
            run: unique name of the run.
            trial: the trial's id.
            shape: the run's resources; runs with the same shape can reuse a process.
            gpus: value of ``CUDA_VISIBLE_DEVICES``.
            messages: first messages for the process.
        """
        process = self._process_for(shape, gpus)
        self._runs[run] = _Run(trial=trial, process=process)
        self._opened[run].set()
        process.runs.append(self._runs[run])
        for message in messages:
            self._node.send(process.key, pickle.dumps(message))

    async def send(self, run: str, message: ToWorker) -> None:
        """Send a message to a run's process; ignored after the run has ended."""
        await self._opened[run].wait()
        if run in self._runs:
            self._node.send(self._runs[run].process.key, pickle.dumps(message))

    async def receive(self, run: str) -> list[FromWorker]:
        """Wait for messages of a run and return them."""
        await self._opened[run].wait()
        said = self._runs[run].said
        found = [await said.get()]
        while not said.empty():
            found.append(said.get_nowait())
        return found

    async def leave(self, runs: Sequence[str]) -> None:
        """Ask runs to write a checkpoint after their current epoch and to end."""
        for run in runs:
            if run in self._runs:
                await self.send(run, Answer(LEAVE, self._runs[run].trial))

    async def end(self, runs: Sequence[str], why: str) -> None:
        """Kill the processes of runs; ``why`` becomes the reason in their last message."""
        for run in runs:
            if run in self._runs:
                self._runs[run].reason = why
                self._node.kill(self._runs[run].process.key)

    async def close(self, run: str) -> None:
        """Drop a run; kills its process if the run has not ended."""
        await self._opened[run].wait()
        del self._opened[run]
        found = self._runs.pop(run, None)
        if found is not None and found in found.process.runs:
            self._drop(found.process)

    async def live(self) -> None:
        """Block forever: the call fails when this actor ends, which informs the caller."""
        await asyncio.Event().wait()

    def _process_for(self, shape: WorkerResources, gpus: str) -> _Process:
        """Return a process for a run of that shape: one with a free lane, or a new one."""
        rank = shape.processes > 1
        same = [p for p in self._processes.values() if (p.shape, p.gpus) == (shape, gpus)]
        free = [p for p in same if len(p.runs) < shape.lanes and not rank and not shape.own]
        if free:
            return max(free, key=lambda process: len(process.runs))
        idle = [process for process in self._processes.values() if not process.runs]
        beside = [process for process in idle if gpus and process.gpus == gpus]
        for process in beside or idle[:1]:
            self._drop(process)
        process = _Process(key=next(self._keys), shape=shape, gpus=gpus)
        self._processes[process.key] = process
        environment = {k: v for k, v in os.environ.items() if k.startswith("RAY_")}
        self._node.start(process.key, environment | {"CUDA_VISIBLE_DEVICES": gpus}, shape.lanes)
        return process

    def _drop(self, process: _Process) -> None:
        self._processes.pop(process.key, None)
        self._node.kill(process.key)

    async def _listen(self) -> None:
        while True:
            for key, content in await asyncio.to_thread(self._node.events, LISTEN_SECONDS):
                if (process := self._processes.get(key)) is not None:
                    self._hear(process, pickle.loads(content))

    def _hear(self, process: _Process, message: FromWorker) -> None:
        if message.kind == HELLO:
            process.pid = message.payload
        elif message.kind == DIED:
            self._processes.pop(process.key, None)
            for run in process.runs:
                why = run.reason or message.payload
                run.said.put_nowait(Died(DIED, run.trial, why))
            process.runs.clear()
        else:
            self._pass_on(process, message)

    def _pass_on(self, process: _Process, message: FromWorker) -> None:
        run = next((r for r in process.runs if message.trial in ("", r.trial)), None)
        if run is None:
            return
        if message.kind == REPORT:
            where = {"pid": process.pid, "host": os.uname().nodename}
            message = replace(message, payload=message.payload | where)
        if message.kind == ENDED:
            process.runs.remove(run)
            if message.payload["retire"]:
                self._processes.pop(process.key, None)  # it ends by itself, with what it has
                self._lose_others(process, message.payload["retire"])
            elif process.shape.own or process.shape.processes > 1:
                self._drop(process)
        run.said.put_nowait(message)

    def _lose_others(self, process: _Process, why: str) -> None:
        """Report the death of the other runs of a process that one run has ended."""
        for run in process.runs:
            text = f"its process ended with another trial's: {why}"
            run.said.put_nowait(Died(DIED, run.trial, text))
        process.runs.clear()
