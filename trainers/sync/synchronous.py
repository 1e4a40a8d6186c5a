"""Synchronous data-parallel training: every step ends with the mean of all replicas' gradients."""

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
    """Every step's gradients are summed over the replicas, which so remain the same.

    Args:
        wire: how gradients travel.
        collectives: of the replicas.
        seed: of PowerSGD's first factors.
        parameters: of the model, for buckets.
    """

    def __init__(
        self,
        wire: WireConfig,
        collectives: Collectives,
        seed: int,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        self._sum: PowerSGD | GradientSync
        if wire.name == "powersgd":
            self._sum = PowerSGD(wire, collectives, seed)
        elif wire.bucket_cap_mb is not None:
            self._sum = BucketSync(wire, collectives, parameters)
        else:
            self._sum = GradientSync(wire, collectives)

    def begin_step(self, micro_batches: int) -> None:
        """Buckets may leave from now on."""
        if isinstance(self._sum, BucketSync):
            self._sum.begin_step(micro_batches)

    def gradients(self, parameters: Iterable[Tensor], finite: bool) -> bool:
        """Sum them; False on every rank where one is not finite."""
        return self._sum(parameters, finite)

    def state(self) -> dict[str, Tensor]:
        """The residues of error feedback."""
        return self._sum.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue with them."""
        self._sum.load_state(state)
