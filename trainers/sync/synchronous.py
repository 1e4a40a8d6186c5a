"""Synchronous data parallelism: every step updates by the gradients summed over all replicas."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from trainers.comm.collectives import Collectives
from trainers.config.wire import WireConfig
from trainers.sync.all_reduce import GradientSync
from trainers.sync.base import Synchroniser
from trainers.sync.buckets import BucketSync
from trainers.sync.powersgd import PowerSGD


class Synchronous(Synchroniser):
    """The synchroniser that sums every step's gradients over the replicas.

    All replicas make the same update, and so remain identical.

    Args:
        wire: how gradients travel.
        collectives: collectives of the replicas.
        seed: seed of PowerSGD's first factors.
        parameters: the model's parameters, for buckets.
        tree: whether the replicas' gradients are added in pairs (:mod:`trainers.sync.pairwise`).
    """

    def __init__(
        self,
        wire: WireConfig,
        collectives: Collectives,
        seed: int,
        parameters: Iterable[Tensor] = (),
        *,
        tree: bool = False,
    ) -> None:
        self._sum: PowerSGD | GradientSync
        if wire.name == "powersgd":
            self._sum = PowerSGD(wire, collectives, seed)
        elif wire.bucket_cap_mb is not None:
            self._sum = BucketSync(wire, collectives, parameters)
        else:
            self._sum = GradientSync(wire, collectives, tree=tree)

    def begin_step(self, micro_batches: int) -> None:
        """Let buckets be sent from now on."""
        if isinstance(self._sum, BucketSync):
            self._sum.begin_step(micro_batches)

    def gradients(self, parameters: Iterable[Tensor], *, finite: bool) -> bool:
        """Sum the gradients; return False on every rank if they are not finite on one."""
        return self._sum(parameters, finite=finite)

    def state(self) -> dict[str, Tensor]:
        """Return the residues of error feedback."""
        return self._sum.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the residues that :meth:`state` returned."""
        self._sum.load_state(state)
