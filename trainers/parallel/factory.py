"""Which layouts cut tensors, and by what; loaded here and not sooner, since torch takes a while to
load what they need."""

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
    """This worker's parts of ``model``, which is cut in place; None where the layout cuts no
    tensors.

    Args:
        model: whole, the same on every worker.
        place: this worker's.
        replicas: collectives of the replicas; None with one.
        within: of the workers of one replica; None where each has one.
        wire: how gradients travel between replicas.
        seed: the trial's.
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
