"""Gathers by index have scatters as gradients; sums of what meets at one place are in the contract's order, on every device.

torch's own kernels add such terms with atomics or in the order of threads; here :func:`lns_ops.indexed.index_sum` sorts them first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.format import LNSFormat
from lns_ops.indexed import index_sum
from lns_ops.tensor import LNSTensor, aten, handles, operands


@handles(aten.embedding.default)
def _embedding(func: Any, weight: LNSTensor, indices: Tensor, *args: Any) -> LNSTensor:
    return LNSTensor(weight.codes.index_select(0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[1]), weight.fmt)


@handles(aten.embedding_dense_backward.default)
def _embedding_backward(func: Any, grad: LNSTensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> LNSTensor:
    flat, fmt = indices.reshape(-1), grad.fmt
    if padding >= 0:
        flat = torch.where(flat == padding, rows, flat)  # beyond the last row: left out
    total = index_sum(grad.codes.reshape(flat.numel(), -1), flat, rows, fmt)
    if by_frequency:
        counts = torch.bincount(flat, minlength=rows)[:rows].clamp_min(1)
        total = lns.div(total, lns.encode(counts.to(torch.float64), fmt)[:, None], fmt)
    return LNSTensor(total, fmt)


def _destinations(shape: Sequence[int], indices: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The flat positions that ``x[indices]`` reads of a tensor of ``shape``."""
    return torch.arange(math.prod(shape), device=device).reshape(tuple(shape))[
        tuple(slice(None) if i is None else i for i in indices)
    ]


def _added(x: Tensor, source: Tensor, positions: Tensor, fmt: LNSFormat) -> Tensor:
    """``x`` plus the sums of ``source`` at flat ``positions``."""
    source = source.expand(positions.shape)
    total = index_sum(source.reshape(-1), positions.reshape(-1), x.numel(), fmt).reshape(x.shape)
    return lns.add(x, total, fmt)


@handles(aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl_.default)
def _index_put(func: Any, x: LNSTensor, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> LNSTensor:
    codes, source, fmt = operands("index_put", x, values)
    if not accumulate:
        result = aten.index_put.default(codes, indices, source)
    elif len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.int64 and codes.dim() > 1:
        rows = torch.where(indices[0] < 0, indices[0] + codes.shape[0], indices[0])
        terms = source.expand(*rows.shape, *codes.shape[1:]).reshape(rows.numel(), -1)
        result = lns.add(codes, index_sum(terms, rows, codes.shape[0], fmt).reshape(codes.shape), fmt)
    else:
        result = _added(codes, source, _destinations(codes.shape, indices, codes.device), fmt)
    if func is aten._index_put_impl_.default:
        codes.copy_(result)
        return x
    return LNSTensor(result, fmt)


def _along(shape: Sequence[int], dim: int, index: Tensor) -> Tensor:
    """Flat positions of the elements of a tensor of ``shape`` that ``gather(dim, index)`` reads."""
    if not shape:
        return torch.zeros_like(index)
    positions = torch.zeros_like(index)
    stride = 1
    for d in reversed(range(len(shape))):
        place = torch.arange(index.shape[d], device=index.device).reshape(-1, *[1] * (len(shape) - 1 - d))
        positions = positions + (index if d == dim % len(shape) else place) * stride
        stride *= shape[d]
    return positions


@handles(aten.scatter_add.default)
def _scatter_add(func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("scatter_add", x, source)
    if codes.dim() and index.dim():
        terms = terms[tuple(slice(0, size) for size in index.shape)]
    return LNSTensor(_added(codes, terms.reshape(index.shape), _along(codes.shape, dim, index), fmt), fmt)


@handles(aten.scatter.src, aten.scatter.value)
def _scatter(func: Any, x: LNSTensor, dim: int, index: Tensor, source: Any) -> LNSTensor:
    codes, terms, fmt = operands("scatter", x, source)
    return LNSTensor(torch.scatter(codes, dim, index, terms.expand(index.shape) if terms.dim() == 0 else terms), fmt)


@handles(aten.index_copy.default)
def _index_copy(func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("index_copy", x, source)
    return LNSTensor(func(codes, dim, index, terms), fmt)


@handles(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(func: Any, x: LNSTensor, dim: int, index: Tensor, value: Any) -> LNSTensor:
    codes, filling, fmt = operands("index_fill", x, value)
    return LNSTensor(aten.index_fill.int_Scalar(codes, dim, index, int(filling)), fmt)


@handles(aten.scatter_reduce.two)
def _scatter_reduce(
    func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Of ``sum`` that includes the tensor itself."""
    if reduce != "sum" or not include_self:
        raise NotImplementedError(
            f"scatter_reduce of {reduce!r}, include_self={include_self} has no LNS form: 'sum' with itself has"
        )
    return _scatter_add(func, x, dim, index, source)


@handles(aten.index_add.default)
def _index_add(func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor, *, alpha: Any = 1) -> LNSTensor:
    codes, terms, fmt = operands("index_add", x, source)
    if alpha != 1:
        terms = lns.mul(*operands("index_add", LNSTensor(terms, fmt), alpha))
    if not codes.dim():
        return LNSTensor(_added(codes.reshape(1), terms.reshape(-1), index.reshape(-1), fmt).reshape(()), fmt)
    moved = codes.movedim(dim, 0)
    rows = terms.reshape(terms.shape or (1,)).movedim(dim, 0).reshape(index.numel(), -1)
    total = index_sum(rows, index.reshape(-1), moved.shape[0], fmt).reshape(moved.shape)
    return LNSTensor(lns.add(moved, total, fmt).movedim(0, dim).contiguous(), fmt)


@handles(aten.unfold_backward.default)
def _unfold_backward(func: Any, grad: LNSTensor, sizes: list[int], dim: int, size: int, step: int) -> LNSTensor:
    zeros = torch.zeros(sizes, dtype=torch.int16, device=grad.codes.device)
    positions = torch.arange(zeros.numel(), device=zeros.device).reshape(sizes).unfold(dim, size, step)
    return LNSTensor(_added(zeros, grad.codes, positions, grad.fmt), grad.fmt)


@handles(aten.masked_scatter.default)
def _masked_scatter(func: Any, x: LNSTensor, mask: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("masked_scatter", x, source)
    return LNSTensor(func(codes, mask, terms), fmt)
