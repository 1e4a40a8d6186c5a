"""Fully sharded data parallelism (FSDP2).

Every replica keeps a shard of the parameters, of their gradients and of the optimizer's state.

``layout.fsdp=true``. torch's ``fully_shard`` cuts every tensor of a layer along its first
dimension, ``ceil(rows / N)`` rows to each of N replicas, fewer or none to the last ones. A layer's
parameters are gathered before it computes, in forward and in backward, and released after; the
gradients of backward are summed over the replicas, each of which gets its own rows. So N replicas
hold a model N times as large, beside one whole layer at a time. torch would take the mean of
gradients; here losses and gradients are sums.

*Bytes.* With B the bytes of the parameters (rows rounded up to a multiple of N) and m
micro-batches, a rank sends ``3 m (N - 1) / N B`` a step: an all-gather in forward, an all-gather in
backward and a reduce-scatter. With two ranks and m = 1 these are 6 bytes a parameter; replicas that
keep everything send 4. The bytes are counted where they are sent.

Optimizer and checkpoints: :mod:`trainers.parallel.partitioned`.

On a GPU transfers run beside the computation, on streams of torch's; telemetry cannot tell which of
them are waited for and leaves a step's time undivided.

Source: Y. Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277); S. Rajbhandari et al. 2020, "ZeRO"
(arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainers import _compat
from trainers.comm.collectives import Collectives
from trainers.parallel.partitioned import PartitionedModel, hand_gradients_, shapes_of
from trainers.sync.base import Synchroniser


class _Allocating:
    """Base of FSDP's two collectives here, which torch calls: allocates plain memory.

    Holds the trial's collectives, which count bytes.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with all ranks' ``input_tensor``."""
        assert not async_op
        self._collectives.all_gather_into(output_tensor, input_tensor)


class _SumScatter(_Allocating):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with this rank's part of the sum of all ``input_tensor``."""
        assert not async_op
        assert op == dist.ReduceOp.SUM
        self._collectives.reduce_scatter_into(output_tensor, input_tensor)


class Sharding(PartitionedModel):
    """One replica's shards of a model.

    Args:
        model: float32, the same on every replica; sharded in place, each of its layers by itself.
        mesh: mesh of the replicas.
        collectives: collectives of the replicas.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, collectives: Collectives) -> None:
        shapes = shapes_of(model)
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        super().__init__(model, shapes, collectives)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._sum_and_count_(module)

    def _sum_and_count_(self, module: FSDPModule) -> None:
        """Let ``module`` sum gradients, not take their mean, through collectives that count."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_Gather(self._collectives))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(_SumScatter(self._collectives))  # type: ignore[arg-type]

    def synchroniser(self) -> ShardedSync:
        """Return the synchroniser of sharded replicas."""
        assert isinstance(self._model, FSDPModule)
        return ShardedSync(self._model, self.own, self._collectives)

    def _rows(self, shape: torch.Size) -> int:
        """Return the number of rows per shard for ``shape``; the last shards may have fewer."""
        return -(-shape[0] // self._collectives.size)

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor like parameter ``name`` from the shards of all replicas."""
        shape = self._shapes[name]
        padded = torch.zeros(
            self._rows(shape), *shape[1:], dtype=part.dtype, device=self._collectives.device
        )
        padded[: len(part)] = part
        gathered_NB = self._collectives.all_gather(padded.view(-1).view(torch.uint8))
        return gathered_NB.view(-1).view(part.dtype).view(-1, *shape[1:])[: shape[0]]

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this replica's rows of ``whole``."""
        rows = self._rows(whole.shape)
        return whole[self._collectives.rank * rows : (self._collectives.rank + 1) * rows].clone()


class ShardedSync(Synchroniser):
    """The synchroniser of replicas whose gradients backward has already summed and sharded.

    Args:
        model: the sharded model.
        own: module of this replica's shards.
        collectives: collectives of the replicas.
    """

    together = True

    def __init__(self, model: FSDPModule, own: nn.Module, collectives: Collectives) -> None:
        self._model, self._own, self._collectives = model, own, collectives

    def begin_step(self, micro_batches: int) -> None:
        """Reset the model's gradients; the optimizer only resets the shards' gradients."""
        assert isinstance(self._model, nn.Module)
        self._model.zero_grad(set_to_none=True)

    def gradients(self, parameters: Iterable[Tensor], *, finite: bool) -> bool:
        """Give the optimizer its shards of the gradients.

        Return False on every rank where a rank's loss is not finite.
        """
        if not self._collectives.all_true(finite):
            return False
        hand_gradients_(self._own, parameters)
        return True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give a context for forward passes without backward, whose order torch forgets after it.

        Otherwise the next backward would gather layers ahead in that order.
        """
        try:
            yield
        finally:
            _forget_forward(self._model)


def _forget_forward(model: FSDPModule) -> None:
    """Call ``reset_iter_state``, which torch has since 2.13, or do the same for an older torch.

    It releases gathered parameters, as torch does after complete forward passes.
    """
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    assert isinstance(model, nn.Module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            _compat.forget_forward_order(module)
