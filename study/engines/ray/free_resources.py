"""The CPUs and GPUs of a cluster that a study can use now.

Ray places the trials. This module counts their resources, so that a study hands Tune only trials
that can start at once. A pending trial cannot be withdrawn from Tune, and a gang would have to wait
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from study.engines.engine import EPSILON
from study.engines.ray.hosts import NodeRoom
from trainers.workers.resources import WorkerResources

LOOKS = 3
"""Number of polls whose minimum estimates the resources that other users hold."""


@dataclass(eq=False)
class Room:
    """The CPUs and GPUs of a cluster, and the part that a study's trials hold.

    Attributes:
        nodes: the usable nodes.
        others: CPUs and GPUs that other users hold.
        kept: CPUs and GPUs reserved for a pending request of another user.
        held: node, CPUs and GPUs of each rank by trial; the node is None until Ray has placed it.
    """

    nodes: Sequence[NodeRoom] = ()
    others: tuple[float, float] = (0.0, 0.0)
    kept: tuple[float, float] = (0.0, 0.0)
    held: dict[str, list[tuple[str | None, float, float]]] = field(default_factory=dict)
    _seen: list[tuple[float, float]] = field(default_factory=list)
    """Resources of other users at the last polls."""
    _known: set[str] = field(default_factory=set)
    """Nodes at the last poll."""

    @property
    def free(self) -> tuple[float, float]:
        """Free CPUs and GPUs of all nodes together."""
        cpus, gpus = self.total
        mine = [rank for ranks in self.held.values() for rank in ranks if self._is_here(rank[0])]
        return (
            cpus - self.others[0] - self.kept[0] - sum(rank[1] for rank in mine),
            gpus - self.others[1] - self.kept[1] - sum(rank[2] for rank in mine),
        )

    @property
    def total(self) -> tuple[float, float]:
        """CPUs and GPUs of all usable nodes."""
        return sum(node.cpus for node in self.nodes), sum(node.gpus for node in self.nodes)

    def note_others(
        self, free: Mapping[str, tuple[float, float]], ours: tuple[float, float]
    ) -> None:
        """Estimate the resources that other users hold: all that is neither free nor ours.

        A trial's placement group takes its CPUs a moment before Ray shows it, and a gang of Ray
        Train's is counted before Ray has placed it, so the estimate is the minimum over
        :data:`LOOKS` polls. It is reset when a node joins.

        Args:
            free: free CPUs and GPUs of each node.
            ours: CPUs and GPUs that this study holds on all nodes.
        """
        cpus, gpus = self.total
        there = {node.node for node in self.nodes}
        for node in self.nodes:
            left = free.get(node.node, (node.cpus, node.gpus))
            cpus, gpus = cpus - left[0], gpus - left[1]
        self._seen.append((max(0.0, cpus - ours[0]), max(0.0, gpus - ours[1])))
        if not there <= self._known:
            self._seen = self._seen[-1:]
        self._known, self._seen = there, self._seen[-LOOKS:]
        self.others = min(each[0] for each in self._seen), min(each[1] for each in self._seen)

    def take(self, trial: str, shape: WorkerResources) -> bool:
        """Allocate a trial's resources if they are free; return whether they were."""
        free, found = self.free, self._find(shape, empty=False)
        if found is None or free[0] + EPSILON < shape.cpus:
            return False
        if free[1] + EPSILON < shape.gpus_in_all:
            return False
        self.held[trial] = found
        return True

    def place(self, trial: str, nodes: Sequence[str]) -> None:
        """Record the nodes of a trial's ranks."""
        if trial in self.held and len(nodes) == len(self.held[trial]):
            ranks = zip(nodes, self.held[trial], strict=True)
            self.held[trial] = [(node, cpus, gpus) for node, (_, cpus, gpus) in ranks]

    def release(self, trial: str) -> None:
        """Free a trial's resources."""
        self.held.pop(trial, None)

    def could_fit(self, shape: WorkerResources) -> bool:
        """Return whether a trial would fit if no other trial of the study ran."""
        return self._find(shape, empty=True) is not None

    def _is_here(self, node: str | None) -> bool:
        return node is None or any(each.node == node for each in self.nodes)

    def _find(
        self, shape: WorkerResources, empty: bool
    ) -> list[tuple[str | None, float, float]] | None:
        """Return a node for each rank, using few nodes; None if the trial does not fit."""
        free = {node.node: [node.cpus, node.gpus] for node in self.nodes}
        held = [] if empty else [rank for ranks in self.held.values() for rank in ranks]
        for node, cpus, gpus in held:
            if node in free:
                free[node][0] -= cpus
                free[node][1] -= gpus
        found: list[tuple[str | None, float, float]] = []
        order = sorted(free, key=lambda node: -free[node][0])
        for bundle in shape.bundles:
            cpus, gpus = bundle["CPU"], bundle.get("GPU", 0.0)
            node = next(
                (n for n in order if free[n][0] + EPSILON >= cpus and free[n][1] + EPSILON >= gpus),
                None,
            )
            if node is None:
                return None
            free[node][0] -= cpus
            free[node][1] -= gpus
            found.append((node, cpus, gpus))
        return found
