"""Tensor parallelism: the workers of one replica hold parts of its linear layers and compute every
example together.

``layout.tp=T``, by torch's ``parallelize_module``. Linear layers are taken in pairs, ``y = f(x A +
a)`` and ``z = y B + b`` with f elementwise. Worker k has a T-th of the columns of A and a, so of y,
and the rows of B that belong to these; its product is one of T terms of z::

    y_k = f(x A_k + a_k),   z = sum_k y_k B_k + b        x: [B, I], A_k: [I, H / T], B_k: [H / T, O]

Forwards one all-reduce a pair, of z; backwards one, of the gradient of x, which has a term from
each worker as well. If the number of linear layers is odd, the last is whole on every worker: it is
the one with few outputs, the classes, and its columns, cut, would have to be gathered forwards and
the gradient of its input summed backwards, to save ``I classes`` weights. So are the biases b.

*Bytes.* With E examples of a step to a replica and P pairs of inputs I_p and outputs O_p, a worker
sends a step, e bytes a value (4, with ``autocast=bfloat16`` 2), ``2 (T - 1) / T (e E (sum_{p=1..P}
O_p + sum_{p=2..P} I_p) + 8)``: the data need no gradient, and in a word of 8 bytes the workers
agree that all is finite. With activation checkpoints the sums in what is computed again are sent
again. torch's own sums would be neither counted nor timed, so the layers hand on the terms and two
functions here sum them (:class:`trainers.comm.collectives.Collectives`).

*Numbers.* Sums of T terms instead of one are rounded elsewhere, so weights are those of one process
within float32 rounding. An all-reduce gives the same bits to all, so what every worker has whole
remains the same without being sent. *Replicas* sum the gradients of their parts, each worker with
those that have the same part, through any wire format. Of those that treat values alike or in
tensors all travel together; in the others (:data:`trainers.config.wire.JOINT`) what is whole would
be rounded by what lies beside it, differently on every worker, and travels by itself.

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
    """The sum over the workers; backwards every term has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, collectives: Collectives) -> Tensor:
        return collectives.all_reduce_(term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradients(torch.autograd.Function):
    """The identity; backwards the sum over the workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.collectives.all_reduce_(grad.clone(memory_format=torch.contiguous_format)), None


class TensorParallel(PartitionedModel):
    """One worker's parts of a chain of layers.

    Args:
        model: float32, the same on every worker; its linear layers are cut in place.
        mesh: the workers of this replica, one dimension; each width between the layers of a pair
            must be a multiple of their number.
        collectives: of the same.
        replicas: of the workers that have this part, one a replica; None with one replica.
        wire: how gradients travel between replicas.
        seed: of PowerSGD's first factors.
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
            model.get_submodule(rows).register_forward_hook(partial(_leave, collectives))
        for columns, _ in pairs[1:]:
            model.get_submodule(columns).register_forward_pre_hook(
                partial(_enter, collectives, mesh), prepend=True
            )
        self._dimensions = {
            name: _dimension(parameter) for name, parameter in model.named_parameters()
        }
        super().__init__(model, shapes, collectives)
        self.formulas = {
            op: _of_parts(flop_registry[op]) for op in (torch.ops.aten.mm, torch.ops.aten.addmm)
        }
        self._replicas, self._wire, self._seed = replicas, wire or WireConfig(), seed

    def synchroniser(self) -> TensorParallelSync:
        """What the training loop calls."""
        sums: dict[str, tuple[Synchroniser, list[Tensor]]] = {}
        for name, members in self._travelling().items() if self._replicas is not None else ():
            assert self._replicas is not None
            sums[name] = Synchronous(self._wire, self._replicas, self._seed), members
        return TensorParallelSync(self._model, self.own, self._collectives, sums)

    def _travelling(self) -> dict[str, list[Tensor]]:
        """Parameters whose gradients go to the other replicas together."""
        if self._wire.name not in JOINT:
            return {"all": list(self.own.parameters())}
        own = dict(self.own.named_parameters())
        cut = [name for name in own if self._dimensions[name] is not None]
        return {
            "cut": [own[name] for name in cut],
            "whole": [own[name] for name in own if name not in cut],
        }

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        dimension = self._dimensions[name]
        if dimension is None:
            return part
        device = self._collectives.device
        gathered_NB = self._collectives.all_gather(
            part.to(device).contiguous().view(-1).view(torch.uint8)
        )
        return torch.cat([row.view(part.dtype).view(part.shape) for row in gathered_NB], dimension)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        dimension = self._dimensions[name]
        return (
            whole
            if dimension is None
            else whole.chunk(self._collectives.size, dimension)[self._collectives.rank].clone()
        )


class TensorParallelSync(Synchroniser):
    """The workers of one replica, each of which sums gradients with those that have its part in the
    other replicas.

    Args:
        model: that has been cut.
        own: the module of its parts.
        collectives: of the workers of this replica.
        sums: by name, what sums gradients over replicas, and of which parameters of ``own``.
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
        """Forget the model's gradients; an optimizer clears those of the parts alone."""
        self._model.zero_grad(set_to_none=True)

    def gradients(self, parameters: Iterable[Tensor], finite: bool) -> bool:
        """Hand the optimizer its parts, summed over the replicas; False on every worker where one
        of them is not finite."""
        hand_gradients_(self._own, parameters)
        for synchroniser, members in self._sums.values():
            finite = synchroniser.gradients(members, finite)
        return self._collectives.all_true(finite)

    def state(self) -> dict[str, Tensor]:
        """The residues of error feedback."""
        return {
            f"{name}/{path}": value
            for name, (sync, _) in self._sums.items()
            for path, value in sync.state().items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue with them."""
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
    """``DTensor.from_local``, whose own backward pass would sum the gradient's terms, uncounted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad.to_local(), None


def pairs_of(model: nn.Sequential) -> list[tuple[str, str]]:
    """The names of the linear layers that are cut by columns, each with that of the next, cut by
    rows."""
    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    return list(pairwise(names))[::2]


def _enter(
    collectives: Collectives, mesh: DeviceMesh, layer: nn.Module, arguments: tuple[Tensor]
) -> DTensor:
    """What enters a layer cut by columns: the same on every worker, its gradient a term from
    each."""
    x = _SumGradients.apply(arguments[0], collectives)  # type: ignore[no-untyped-call]
    replica: DTensor = _AsReplica.apply(x, mesh)  # type: ignore[no-untyped-call]
    return replica


def _leave(
    collectives: Collectives, layer: nn.Module, arguments: tuple[Tensor], term: Tensor
) -> Tensor:
    """What leaves a layer cut by rows: the sum of all workers' terms."""
    summed: Tensor = _SumOutputs.apply(term, collectives)  # type: ignore[no-untyped-call]
    return summed


def _dimension(parameter: Tensor) -> int | None:
    """That the parameter is cut along; None if it is whole."""
    placement: Placement = (
        parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
    )
    return placement.dim if isinstance(placement, Shard) else None


def _of_parts(formula: Callable[..., int]) -> Callable[..., int]:
    """``formula`` of the operations that this worker does; torch's counter sees those of whole
    tensors."""

    @torch.no_grad()
    def count(*arguments: Any, out_val: Any, **options: Any) -> int:
        own = [x.to_local() if isinstance(x, DTensor) else x for x in (*arguments, out_val)]
        return formula(*own[:-1], out_val=own[-1], **options)

    return of_tensors(count)
