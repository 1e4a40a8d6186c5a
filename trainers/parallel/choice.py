"""The choice of how a layout partitions tensors: FSDP, tensor parallelism or neither.

What each of them needs is imported only where it is used, since torch takes a while to load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from trainers.comm.collectives import Collectives
from trainers.comm.mesh import Place
from trainers.config.wire import WireConfig

if TYPE_CHECKING:
    from trainers.parallel.partitioned import PartitionedModel


def make_parts(
    model: nn.Module,
    place: Place,
    replicas: Collectives | None,
    within: Collectives | None,
    wire: WireConfig,
    seed: int,
) -> PartitionedModel | None:
    """Partition ``model`` in place and return this worker's parts; None where tensors stay whole.

    Args:
        model: the whole model, the same on every worker.
        place: this worker's place in the layout.
        replicas: collectives of the replicas; None with one.
        within: collectives of the workers of one replica; None where each replica has one worker.
        wire: how gradients travel between replicas.
        seed: the trial's seed.
    """
    if place.shards is not None:
        from trainers.parallel.fsdp import Sharding

        assert replicas is not None
        return Sharding(model, place.shards, replicas)
    if place.parts is not None:
        from trainers.parallel.tensor_parallel import TensorParallel

        assert within is not None
        assert isinstance(model, nn.Sequential)
        return TensorParallel(model, place.parts, within, replicas, wire, seed)
    return None
