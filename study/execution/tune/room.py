"""Where the trials of a study fit on a cluster, by what Ray says of its nodes.

Ray places trials. This counts what they hold, so that a study hands Ray no more of them than can
start: what else waits could not be taken back, and a gang would wait behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from study.execution.engine import EPSILON
from study.execution.tune.hosts import NodeRoom
from trainers.workers.resources import WorkerResources

LOOKS = 3
"""Looks of which the least is taken for what others hold."""


@dataclass(eq=False)
class Room:
    """The CPUs and GPUs of a cluster, and what a study's trials hold of them.

    Attributes:
        nodes: the nodes that may be used.
        others: CPUs and GPUs that somebody else holds.
        kept: CPUs and GPUs that are kept free for somebody else who waits.
        held: node of each rank by trial, and the ranks' CPUs and GPUs; the node None where nobody
            knows it yet.
    """

    nodes: Sequence[NodeRoom] = ()
    others: tuple[float, float] = (0.0, 0.0)
    kept: tuple[float, float] = (0.0, 0.0)
    held: dict[str, list[tuple[str | None, float, float]]] = field(default_factory=dict)
    _seen: list[tuple[float, float]] = field(default_factory=list)
    """What others held at the last looks."""
    _known: set[str] = field(default_factory=set)
    """Nodes of the last look."""

    @property
    def free(self) -> tuple[float, float]:
        """CPUs and GPUs that nobody holds, of all nodes together."""
        cpus, gpus = self.total
        mine = [rank for ranks in self.held.values() for rank in ranks if self._is_here(rank[0])]
        return (
            cpus - self.others[0] - self.kept[0] - sum(rank[1] for rank in mine),
            gpus - self.others[1] - self.kept[1] - sum(rank[2] for rank in mine),
        )

    @property
    def total(self) -> tuple[float, float]:
        """CPUs and GPUs of the nodes that may be used."""
        return sum(node.cpus for node in self.nodes), sum(node.gpus for node in self.nodes)

    def note_others(
        self, free: Mapping[str, tuple[float, float]], ours: tuple[float, float]
    ) -> None:
        """Note what others hold: the least of the last looks, since what has just begun or ended
        is in one figure before it is in the other. What a node that has just joined lacks is all
        theirs.

        Args:
            free: CPUs and GPUs of each node that nobody holds.
            ours: CPUs and GPUs that this study holds on all nodes.
        """
        used = {}
        for node in self.nodes:
            cpus, gpus = free.get(node.node, (node.cpus, node.gpus))
            used[node.node] = node.cpus - cpus, node.gpus - gpus
        new = [node for node in used if node not in self._known]
        self._known = set(used)
        if new:
            self._seen.clear()
            self.others = _sums([self.others, *(used[node] for node in new)])
            return
        cpus, gpus = _sums(used.values())
        self._seen = [*self._seen, (max(0.0, cpus - ours[0]), max(0.0, gpus - ours[1]))][-LOOKS:]
        if len(self._seen) == LOOKS:
            self.others = min(each[0] for each in self._seen), min(each[1] for each in self._seen)

    def take(self, trial: str, shape: WorkerResources) -> bool:
        """Have a trial hold what it needs, if there is room; tell whether there was."""
        free, found = self.free, self._find(shape, empty=False)
        if found is None or free[0] + EPSILON < shape.cpus:
            return False
        if free[1] + EPSILON < shape.gpus_in_all:
            return False
        self.held[trial] = found
        return True

    def place(self, trial: str, nodes: Sequence[str]) -> None:
        """Note on which nodes the ranks of a trial are."""
        if trial in self.held and len(nodes) == len(self.held[trial]):
            ranks = zip(nodes, self.held[trial], strict=True)
            self.held[trial] = [(node, cpus, gpus) for node, (_, cpus, gpus) in ranks]

    def release(self, trial: str) -> None:
        """Note that a trial holds nothing any more."""
        self.held.pop(trial, None)

    def could_fit(self, shape: WorkerResources) -> bool:
        """Tell whether there would be room for a trial if no other ran."""
        return self._find(shape, empty=True) is not None

    def _is_here(self, node: str | None) -> bool:
        return node is None or any(each.node == node for each in self.nodes)

    def _find(
        self, shape: WorkerResources, empty: bool
    ) -> list[tuple[str | None, float, float]] | None:
        """Return a node with room for each rank, as few nodes as that takes; None without room."""
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


def _sums(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    pairs = list(pairs)
    return sum(each[0] for each in pairs), sum(each[1] for each in pairs)
