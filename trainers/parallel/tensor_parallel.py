"""Tensor parallelism: a replica's workers hold parts of its linear layers, and compute every
example together.

``layout.tp=T`` uses torch's ``parallelize_module``. Linear layers are taken in pairs, ``y = f(x A +
a)`` and ``z = y B + b`` with f elementwise. Worker k has 1 / T of the columns of A and the entries
of a, hence of y, and the corresponding rows of B; its product is one of T terms of z::

    y_k = f(x A_k + a_k),   z = sum_k y_k B_k + b        x: [B, I], A_k: [I, H / T], B_k: [H / T, O]

A pair needs one all-reduce in forward, of z, and one in backward, of the gradient of x, which is
also a sum of one term per worker. If the number of linear layers is odd, the last layer is whole on
every worker. It has few outputs, the classes; dividing its columns would save ``I classes``
weights, but need a gather in forward and a sum of its input's gradient in backward. The biases b
are also whole on every worker.

*Bytes.* Let a replica have E examples per step, P pairs with inputs I_p and outputs O_p, and e
bytes per value (4, with ``autocast=bfloat16`` 2). In each step a worker sends ``2 (T - 1) / T (e E
(sum_{p=1..P} O_p + sum_{p=2..P} I_p) + 8)`` bytes: the data need no gradient, and the 8 bytes are a
flag by which the workers agree that all values are finite. With activation checkpoints, recomputed
sums are sent again. torch's own sums would be neither counted nor timed, so the layers return their
terms and two functions here sum them (:class:`trainers.comm.collectives.Collectives`).

*Numbers.* A sum of T terms has different rounding, so weights equal the weights of one process
within float32 rounding. An all-reduce gives the same bits to all workers, so tensors that are whole
on every worker stay equal without communication. *Replicas* sum the gradients of their
parts, each worker with the workers that have the same part, through any wire format. In formats
that encode values, or tensors, independently, all gradients travel together. In the others
(:data:`trainers.config.wire.JOINT`) the encoding of a whole tensor would depend on the parts that
travel with it, which differ between the workers, so whole tensors travel by themselves.

Optimizer and checkpoints: :mod:`trainers.parallel.partitioned`. Source: M. Shoeybi et al. 2019,
"Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.flop_counter import flop_registry

from trainers._compat import of_tensors
from trainers.comm.collectives import Collectives
from trainers.config.wire import JOINT, WireConfig
from trainers.parallel.partitioned import PartitionedModel, hand_gradients_, shapes_of
from trainers.sync.base import Synchroniser
from trainers.sync.synchronous import Synchronous


class _SumOutputs(torch.autograd.Function):
    """The sum over the workers in forward; in backward every term gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, collectives: Collectives) -> Tensor:
        """Return the sum of all workers' ``term``."""
        return collectives.all_reduce_(term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grad, None


class _SumGradients(torch.autograd.Function):
    """The identity in forward; in backward the sum over the workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        """Return a view of ``x``."""
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all workers' gradients."""
        return ctx.collectives.all_reduce_(grad.clone(memory_format=torch.contiguous_format)), None


class TensorParallel(PartitionedModel):
    """One worker's parts of a chain of layers.

    Args:
        model: float32, the same on every worker; its linear layers are cut in place.
        mesh: workers of this replica, one dimension; each width between the layers of a pair must
            be a multiple of their number.
        collectives: collectives of the same workers.
        replicas: collectives of the workers that have this part, one a replica; None with one
            replica.
        wire: how gradients travel between replicas.
        seed: seed of PowerSGD's first factors.
    """

    def __init__(
        self,
        model: nn.Sequential,
        mesh: DeviceMesh,
        collectives: Collectives,
        replicas: Collectives | None = None,
        wire: WireConfig | None = None,
        seed: int = 0,
    ) -> None:
        shapes = shapes_of(model)
        pairs = pairs_of(model)
        styles: dict[str, ParallelStyle] = {}
        for columns, rows in pairs:
            styles |= {columns: ColwiseParallel(), rows: RowwiseParallel(output_layouts=Partial())}
        parallelize_module(model, mesh, styles, src_data_rank=None)
        for _, rows in pairs:
            model.get_submodule(rows).register_forward_hook(partial(_summed_output, collectives))
        for columns, _ in pairs[1:]:
            model.get_submodule(columns).register_forward_pre_hook(
                partial(_replicated_input, collectives, mesh), prepend=True
            )
        self._cut_dimensions = {
            name: _cut_dimension(parameter) for name, parameter in model.named_parameters()
        }
        super().__init__(model, shapes, collectives)
        self.formulas = {
            op: _on_local_parts(flop_registry[op])
            for op in (torch.ops.aten.mm, torch.ops.aten.addmm)
        }
        self._replicas, self._wire, self._seed = replicas, wire or WireConfig(), seed

    def synchroniser(self) -> TensorParallelSync:
        """Return the synchroniser that sums each part's gradients over the replicas."""
        sums: dict[str, tuple[Synchroniser, list[Tensor]]] = {}
        for name, members in self._gradient_groups().items() if self._replicas is not None else ():
            assert self._replicas is not None
            sums[name] = Synchronous(self._wire, self._replicas, self._seed), members
        return TensorParallelSync(self._model, self.own, self._collectives, sums)

    def _gradient_groups(self) -> dict[str, list[Tensor]]:
        """Return the parameters whose gradients go to the other replicas together, by group."""
        if self._wire.name not in JOINT:
            return {"all": list(self.own.parameters())}
        own = dict(self.own.named_parameters())
        cut = [name for name in own if self._cut_dimensions[name] is not None]
        return {
            "cut": [own[name] for name in cut],
            "whole": [own[name] for name in own if name not in cut],
        }

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor like parameter ``name`` from the parts of all workers."""
        dimension = self._cut_dimensions[name]
        if dimension is None:
            return part
        device = self._collectives.device
        gathered_NB = self._collectives.all_gather(
            part.to(device).contiguous().view(-1).view(torch.uint8)
        )
        return torch.cat([row.view(part.dtype).view(part.shape) for row in gathered_NB], dimension)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """Return a copy of this worker's part of ``whole``, or ``whole`` where it is not cut."""
        dimension = self._cut_dimensions[name]
        return (
            whole
            if dimension is None
            else whole.chunk(self._collectives.size, dimension)[self._collectives.rank].clone()
        )


class TensorParallelSync(Synchroniser):
    """The synchroniser of one replica's workers, each of which has a part of the layers.

    A worker sums its gradients with the workers that have the same part in the other replicas.

    Args:
        model: the partitioned model.
        own: module of this worker's parts.
        collectives: collectives of the workers of this replica.
        sums: synchronisers that sum gradients over replicas, by name, each with the parameters of
            ``own`` whose gradients it sums.
    """

    def __init__(
        self,
        model: nn.Module,
        own: nn.Module,
        collectives: Collectives,
        sums: dict[str, tuple[Synchroniser, list[Tensor]]],
    ) -> None:
        self._model, self._own, self._collectives, self._sums = model, own, collectives, sums

    def begin_step(self, micro_batches: int) -> None:
        """Reset the model's gradients; the optimizer only resets the parts' gradients."""
        self._model.zero_grad(set_to_none=True)

    def gradients(self, parameters: Iterable[Tensor], *, finite: bool) -> bool:
        """Give the optimizer its parts of the gradients, summed over the replicas.

        Return False on every worker where the gradients of one are not finite.
        """
        hand_gradients_(self._own, parameters)
        for synchroniser, members in self._sums.values():
            finite = synchroniser.gradients(members, finite=finite)
        return self._collectives.all_true(finite)

    def state(self) -> dict[str, Tensor]:
        """Return the residues of error feedback."""
        return {
            f"{name}/{path}": value
            for name, (sync, _) in self._sums.items()
            for path, value in sync.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the residues that :meth:`state` returned."""
        for name, (synchroniser, _) in self._sums.items():
            prefix = f"{name}/"
            synchroniser.load_state(
                {
                    path.removeprefix(prefix): v
                    for path, v in state.items()
                    if path.startswith(prefix)
                }
            )


class _AsReplica(torch.autograd.Function):
    """``DTensor.from_local`` without its backward pass, which would sum the gradients uncounted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return ``x`` as a replicated DTensor."""
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        """Return the local tensor of the gradient."""
        return grad.to_local(), None


def pairs_of(model: nn.Sequential) -> list[tuple[str, str]]:
    """Return the linear layers' names in pairs: the first cut by columns, the second by rows."""
    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    return list(pairwise(names))[::2]


def _replicated_input(
    collectives: Collectives, mesh: DeviceMesh, layer: nn.Module, arguments: tuple[Tensor]
) -> DTensor:
    """Return the replicated input of a layer cut by columns; its gradient is a sum over workers."""
    x = _SumGradients.apply(arguments[0], collectives)  # type: ignore[no-untyped-call]
    replica: DTensor = _AsReplica.apply(x, mesh)  # type: ignore[no-untyped-call]
    return replica


def _summed_output(
    collectives: Collectives, layer: nn.Module, arguments: tuple[Tensor], term: Tensor
) -> Tensor:
    """Return the output of a layer cut by rows: the sum of all workers' terms."""
    summed: Tensor = _SumOutputs.apply(term, collectives)  # type: ignore[no-untyped-call]
    return summed


def _cut_dimension(parameter: Tensor) -> int | None:
    """Return the dimension that the parameter is cut along; None if it is whole."""
    placement: Placement = (
        parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    )
    return placement.dim if isinstance(placement, Shard) else None


def _on_local_parts(formula: Callable[..., int]) -> Callable[..., int]:
    """Return ``formula`` for the operation that this worker does on its parts.

    torch's counter would pass whole tensors.
    """

    @torch.no_grad()
    def count(*arguments: Any, out_val: Any, **options: Any) -> int:
        own = [x.to_local() if isinstance(x, DTensor) else x for x in (*arguments, out_val)]
        return formula(*own[:-1], out_val=own[-1], **options)

    return of_tensors(count)
