"""The trainable of a study under Ray Tune: it supervises a trial, which trains in other processes.

Tune creates one supervisor actor per trial. The supervisor holds the trial's CPUs and GPUs,
requests a worker process from its node's process host (:mod:`study.engines.ray.process_host`),
and returns the process's reports as Tune results. A trial with several workers has one bundle per
rank in Tune's placement group; its supervisor requests a process on each bundle's node and
connects the ranks.

Each result contains the metrics of the trial's last epoch and, under :data:`MESSAGES`, the
processes' messages for the study's loop. Does not import torch.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import tune
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainers.workers.messages import (
    BEGAN,
    DIED,
    DONE,
    ENDED,
    GO,
    JOIN,
    JOINED,
    LEFT,
    MEET,
    NAMESPACE,
    PLACED,
    REPORT,
    STOP,
    STOPPED,
    TRAIN,
    UNPLACED,
    Answer,
    Died,
    Ended,
    Ending,
    ForLoop,
    FromWorker,
    Join,
    Joining,
    Placed,
    Places,
    Train,
    Unplaced,
    WorkerPlan,
)
from trainers.workers.resources import RAY_TRAIN, WorkerResources

JOB = "job"
"""Key of a trial's config with its :class:`Job`."""
MESSAGES = "messages"
"""Key of a result with the messages of the trial's processes, a list."""
LAST = (ENDED, DIED, UNPLACED)
"""Kinds of the last message of a trial's start."""
SLIVER = {"memory": 1.0}
"""Resources of a supervisor whose workers are placed by Ray Train: one byte of memory, because Tune
rejects an empty request. A share of a CPU would block workers that need all CPUs of a cluster."""
HOST_SECONDS = 60.0
"""Timeout for the process host of a new node (seconds)."""
FOLLOWS_SECONDS = 0.01
"""Time during which further messages are added to the same result (seconds)."""
END_SECONDS = 5.0
"""Time for a process to stop its trial before it is killed (seconds)."""


def host_name(engine: str, node: str) -> str:
    """Return the name of a node's process host.

    Args:
        engine: name of the run of a study.
        node: Ray's id of the node.
    """
    return f"lns-study-{engine}-{node}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Description of a trial for its supervisor.

    Attributes:
        engine: name of the run of the study.
        run: unique name of this start of the trial.
        trial: id of the trial.
        shape: its workers' resources.
        plan: task of a worker process (:mod:`trainers.workers.worker_process`).
        labels: label selector for its nodes.
    """

    engine: str
    run: str
    trial: str
    shape: WorkerResources
    plan: WorkerPlan = field(repr=False)
    labels: dict[str, str] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Job:
        return self

    @property
    def request(self) -> tune.PlacementGroupFactory:
        """Tune's resource request: one bundle per rank, or :data:`SLIVER` if Ray Train places the
        workers."""
        bundles = [SLIVER] if self.shape.executor == RAY_TRAIN else self.shape.bundles
        labels = {"bundle_label_selector": [self.labels] * len(bundles)} if self.labels else {}
        return tune.PlacementGroupFactory(bundles, strategy="PACK", **labels)


@dataclass(eq=False, kw_only=True)
class _Rank:
    """A rank of a trial: its process host, and the name of its run there."""

    host: Any
    run: str
    node: str
    machine: str
    asked: Any = None
    """Pending call that returns its next messages."""
    ended: bool = False


class TrialSupervisor(tune.Trainable):  # type: ignore[misc]
    """Supervises one trial at a time; Tune reuses the actor for the next trial."""

    def setup(self, config: dict[str, Any]) -> None:
        """Start the first trial."""
        self._job: Job = config[JOB]
        self.config.pop(JOB)  # or every result would bring it back
        self._ranks: list[_Rank] = []
        self._meets = self._waits = False
        self._result: Ending | None = None
        self._figures: dict[str, Any] = {}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End the previous trial and start the next."""
        self.cleanup()
        self.setup(new_config)
        return True

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return Tune's resource request for a trial."""
        job: Job = config[JOB]
        return job.request

    def step(self) -> dict[str, Any]:
        """Return the next result, with all messages since the previous one."""
        messages = self._next() if self._ranks else self._begin()
        self._add_what_follows(messages)
        for message in messages:
            if message.kind == REPORT:
                figures = message.payload
                self._figures = {k: v for k, v in figures.items() if isinstance(v, int | float)}
        return {**self._figures, MESSAGES: messages, "done": messages[-1].kind in LAST}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save nothing: a trial's processes write its checkpoints into the study's storage."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Load nothing: a trial's processes find its checkpoints in the study's storage."""

    def cleanup(self) -> None:
        """Stop the trial if it still runs, and release its processes."""
        ranks, self._ranks = self._ranks, []
        stopping = [rank for rank in ranks if not rank.ended and rank.asked is not None]
        if stopping and self._waits:
            for rank in stopping:
                rank.host.send.remote(rank.run, Answer(STOP, self._job.trial))
            ray.wait(
                [rank.asked for rank in stopping], num_returns=len(stopping), timeout=END_SECONDS
            )
        for rank in ranks:
            rank.host.close.remote(rank.run)

    def _begin(self) -> list[ForLoop]:
        """Start the trial's processes."""
        job = self._job
        try:
            places = _places(job)
        except ray.exceptions.RayError as error:
            return [Died(DIED, job.trial, f"its place is gone: {_first_line(error)}")]
        try:
            hosts = [_host(job.engine, node) for node, _ in places]
        except (ray.exceptions.RayError, ValueError) as error:
            return [Unplaced(UNPLACED, job.trial, _first_line(error))]
        self._ranks = [
            _Rank(run=f"{job.run}/{rank}", node=node, host=host, machine=machine)
            for rank, ((node, _), (host, machine)) in enumerate(zip(places, hosts, strict=True))
        ]
        self._meets = len(places) > 1
        first = [] if self._meets else [Train(TRAIN, job.trial, job.plan)]
        for rank, (_, gpus) in zip(self._ranks, places, strict=True):
            rank.host.open.remote(rank.run, job.trial, job.shape, gpus, first)
        context = ray.get_runtime_context()
        place: Places = {
            "hosts": [rank.machine for rank in self._ranks],
            "nodes": [rank.node for rank in self._ranks],
            "actor": context.get_actor_id(),
            "pid": os.getpid(),
        }
        return [Placed(PLACED, job.trial, place)]

    def _meet(self) -> list[ForLoop]:
        """Connect the ranks and start the training; return the death of a rank, if one died."""
        job, first = self._job, self._ranks[0]
        together = len({rank.node for rank in self._ranks}) == 1
        values: Joining = {
            "rank": 0,
            "store": "" if together else 0,
            "workers": len(self._ranks),
            "address": "" if together else ray.util.get_node_ip_address(),
            "secret": secrets.token_hex(),
            "backend": "nccl" if job.shape.device == "cuda" else "gloo",
        }
        self._join(first, values)
        joined = 0
        while joined < len(self._ranks):
            rank, messages = self._hear()
            for message in messages:
                if message.kind == DIED:
                    return [message]
                joined += message.kind == JOINED
                if message.kind == MEET:
                    for number, other in enumerate(self._ranks[1:], 1):
                        self._join(other, values | {"rank": number, "store": message.payload})
        for rank in self._ranks:
            rank.host.send.remote(rank.run, Train(TRAIN, job.trial, job.plan))
        return []

    def _join(self, rank: _Rank, values: Joining) -> None:
        rank.host.send.remote(rank.run, Join(JOIN, payload=values))

    def _next(self) -> list[ForLoop]:
        """Return the next messages of rank 0, or the end of the trial in any rank."""
        if self._meets:
            self._meets = False
            if died := self._meet():
                return died
        if self._waits:
            self._waits = False
            for rank in self._ranks:
                rank.host.send.remote(rank.run, Answer(GO, self._job.trial))
        found: list[ForLoop] = []
        while not found:
            rank, messages = self._hear()
            for message in messages:
                if message.kind in (ENDED, DIED):
                    found += self._end(rank, message)
                elif rank is self._ranks[0] and message.kind in (BEGAN, REPORT):
                    found.append(message)
        last = found[-1]
        self._waits = last.kind == REPORT and self._job.plan["waits"] and not last.payload["done"]
        if last.kind == REPORT and last.payload["done"]:
            return found + self._next()  # its process ends the trial at once
        return found

    def _add_what_follows(self, messages: list[ForLoop]) -> None:
        """Add messages that follow within :data:`FOLLOWS_SECONDS`, so that a short trial is one
        result."""
        until = time.monotonic() + FOLLOWS_SECONDS
        while not (self._meets or self._waits or messages[-1].kind in LAST):
            if not self._listen(until - time.monotonic()):
                return
            messages += self._next()

    def _hear(self) -> tuple[_Rank, list[FromWorker]]:
        """Return a rank's next messages."""
        (ready, *_) = self._listen(None)
        rank = next(rank for rank in self._ranks if rank.asked == ready)
        rank.asked = None
        try:
            return rank, ray.get(ready)
        except ray.exceptions.RayError as error:
            _host.cache_clear()  # the driver makes another one
            why = f"the processes of {rank.machine} are gone: {_first_line(error)}"
            return rank, [Died(DIED, self._job.trial, why)]

    def _listen(self, seconds: float | None) -> list[Any]:
        """Return the calls that have messages, waiting at most ``seconds``."""
        for rank in self._ranks:
            if rank.asked is None and not rank.ended:
                rank.asked = rank.host.receive.remote(rank.run)
        asked = [rank.asked for rank in self._ranks if rank.asked is not None]
        ready: list[Any] = ray.wait(asked, timeout=seconds and max(0.0, seconds))[0]
        return ready

    def _end(self, rank: _Rank, message: Ended | Died) -> list[ForLoop]:
        """Record the end of the trial in one rank; return the trial's end after the last rank.

        A failed rank ends the trial immediately, because the other ranks would wait for it forever.
        """
        rank.ended = True
        if message.kind == DIED:
            return [replace(message, trial=self._job.trial)]
        self._result = self._result or message.payload
        well = message.payload["how"] in (DONE, STOPPED, LEFT)
        if well and not all(each.ended for each in self._ranks):
            return []
        return [Ended(ENDED, self._job.trial, message.payload if not well else self._result)]


def _places(job: Job) -> list[tuple[str, str]]:
    """Return the node of each process and the value of its ``CUDA_VISIBLE_DEVICES``."""
    here = str(ray.get_runtime_context().get_node_id())
    if job.shape.processes == 1:
        return [(here, _own_gpus())]
    group = get_current_placement_group()
    assert group is not None
    nodes = placement_group_table(group)["bundles_to_node_id"]
    gpus = [""] * job.shape.processes
    if job.shape.device == "cuda":
        asked = [
            _gpus_of.options(
                num_gpus=bundle["GPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote()
            for index, bundle in enumerate(job.shape.bundles)
            if index > 0
        ]
        gpus = [_own_gpus(), *ray.get(asked)]
    return [(str(nodes[index]), gpus[index]) for index in range(job.shape.processes)]


def _own_gpus() -> str:
    return ",".join(map(str, ray.get_gpu_ids()))


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def _gpus_of() -> str:
    """Return the GPUs of this task's bundle."""
    return _own_gpus()


@functools.cache
def _host(engine: str, node: str) -> tuple[Any, str]:
    """Return a node's process host and the machine's name.

    The driver starts the host when the node joins, checks the node, and kills the host if the node
    is not usable.

    Raises:
        ValueError: the host did not start within :data:`HOST_SECONDS`.
        RayError: the host has ended.
    """
    until = time.monotonic() + HOST_SECONDS
    while True:
        try:
            host = ray.get_actor(host_name(engine, node), namespace=NAMESPACE)
            return host, ray.get(host.name.remote())
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
