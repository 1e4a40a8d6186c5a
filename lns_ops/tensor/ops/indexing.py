"""Gathers by index, and their gradients, which are scatters.

Terms with the same destination are summed in the contract's order, on every device. torch's own
kernels add them with atomics or in the order of threads;
:func:`lns_ops.functional.indexed.index_sum` sorts them first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction
from lns_ops.functional import unclamped
from lns_ops.functional.indexed import index_sum
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor, operands
from lns_ops.tensor.ops.ordering import finite
from lns_ops.tensor.ops.products.chains import OverCounts, are_chained
from lns_ops.tensor.registry import aten, handles, replaces


@handles(aten.embedding.default)
def _embedding(func: Any, weight: LNSTensor, indices: Tensor, *args: Any) -> LNSTensor:
    return LNSTensor(
        weight.codes.index_select(0, indices.reshape(-1)).reshape(*indices.shape, weight.shape[1]),
        weight.fmt,
    )


@handles(aten.embedding_dense_backward.default)
def _embedding_backward(
    func: Any, grad: LNSTensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> LNSTensor:
    flat, fmt = indices.reshape(-1), grad.fmt
    if padding >= 0:
        flat = torch.where(flat == padding, rows, flat)  # beyond the last row: ignored
    codes = grad.codes.reshape(flat.numel(), grad.shape[-1])
    if by_frequency:
        counts = torch.bincount(flat, minlength=rows)[:rows].clamp_min(1)
        return LNSTensor(_mean_by_index(codes, flat, counts, fmt), fmt)
    return LNSTensor(index_sum(codes, flat, rows, fmt), fmt)


def _mean_by_index(codes: Tensor, index: Tensor, counts: Tensor, fmt: LNSFormat) -> Tensor:
    """Return sums of rows by index divided by a count for each row, clamped once."""
    total = unclamped.total_by_index(codes, index, len(counts), fmt)
    counts = counts.reshape(-1, *[1] * (codes.dim() - 1))
    return unclamped.packed(unclamped.over_counts(total, counts, fmt), fmt)


_MEAN, _MAX = 1, 2
"""torch's codes for two modes of embedding_bag; 0 is the sum."""


@handles(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _embedding_bag(
    func: Any, weight: LNSTensor, indices: Tensor, offsets: Tensor, by_frequency: bool = False,
    mode: int = 0, sparse: bool = False, factors: Any = None, include_last_offset: bool = False,
    padding: int = -1,
) -> tuple[LNSTensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return sums, means or maxima over bags ``[B, D]``, and what the backward pass needs.

    These are the bag of each index (B for ignored ones), the number of indices per bag, and the
    rows of the maxima.
    """
    if type(offsets) is Tensor and not offsets.is_cuda and offsets.numel() and offsets[0] != 0:
        raise ValueError(
            f"embedding_bag with offsets[0]={int(offsets[0])}: the first bag must start at 0; make"
            " it 0"
        )
    if type(offsets) is Tensor and not offsets.is_cuda and (offsets > len(indices)).any():
        raise ValueError(
            f"embedding_bag with offsets[-1]={int(offsets[-1])}: a bag must not start after the"
            f" {len(indices)} indices"
        )
    if type(offsets) is Tensor and not offsets.is_cuda and (offsets.diff() < 0).any():
        raise ValueError(
            f"embedding_bag with offsets={offsets.tolist()}: must not decrease, because each bag"
            " starts where the one before it ends"
        )
    fmt, bags, count = weight.fmt, len(offsets) - include_last_offset, len(indices)
    places = torch.arange(count, device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, places, right=True).sub_(1)
    bag = torch.where(indices == padding, bags, bag)
    sizes = torch.zeros(bags + 1, dtype=torch.int64, device=bag.device).index_add(
        0, bag, torch.ones_like(bag)
    )[:-1]
    rows = weight.codes.index_select(0, indices)
    if mode == _MAX:
        out, largest = _largest_of_bags(rows, bag, bags, fmt)
        return LNSTensor(out, fmt), bag, sizes, pad(indices, (0, 1), value=-1)[largest]
    if factors is not None:
        rows = lns.mul(rows, operands("embedding_bag", factors, weight)[0][:, None], fmt)
    if mode == _MEAN:
        total = _mean_by_index(rows, bag, sizes.clamp_min(1), fmt)
    else:
        total = index_sum(rows, bag, bags, fmt)
    return LNSTensor(total, fmt), bag, sizes, sizes.new_empty(0)


def _largest_of_bags(rows: Tensor, bag: Tensor, bags: int, fmt: LNSFormat) -> tuple[Tensor, Tensor]:
    """Return the largest value of each bag and column, and its row; the first one if equal.

    An empty bag has the value 0, and its row is the number of rows.
    """
    keys, at, count = lns.order_key(rows, fmt), bag[:, None].expand(rows.shape), len(rows)
    lowest = keys.new_full((bags + 1, rows.shape[1]), torch.iinfo(torch.int16).min)
    largest = lowest.scatter_reduce(0, at, keys, "amax")
    places = torch.arange(count, device=rows.device)[:, None].expand(rows.shape)
    places = torch.where(keys == largest.gather(0, at), places, count)
    first = torch.full_like(largest, count, dtype=torch.int64).scatter_reduce(
        0, at, places, "amin"
    )[:-1]
    return lns.select(first < count, lns.from_key(largest[:-1], fmt), 0), first


@handles(aten._embedding_bag_backward.default)
def _embedding_bag_backward(
    func: Any, grad: LNSTensor, indices: Tensor, offsets: Tensor, bag: Tensor, sizes: Tensor,
    largest: Tensor, rows: int, by_frequency: bool, mode: int, sparse: bool, factors: Any,
    padding: int = -1,
) -> LNSTensor:  # fmt: skip
    if sparse:
        raise NotImplementedError(
            "embedding_bag with sparse=True: LNS gradients are dense; use sparse=False"
        )
    codes, fmt = grad.codes, grad.fmt
    if mode == _MAX:
        columns = torch.arange(codes.shape[1], device=codes.device)
        at = torch.where(largest >= 0, largest * codes.shape[1] + columns, -1)
        total = index_sum(codes.reshape(-1), at.reshape(-1), rows * codes.shape[1], fmt)
        return LNSTensor(total.reshape(rows, -1), fmt)
    own = bag.clamp(max=len(sizes) - 1)
    kept = torch.where(bag < len(sizes), indices, rows)
    if mode == _MEAN:  # terms are summed before they are clamped to the range
        wide, counts = unclamped.roomiest(fmt), sizes.clamp_min(1)[:, None]
        share = unclamped.over_counts(unclamped.unpacked(codes, fmt), counts, fmt)
        terms = unclamped.packed(share, wide).index_select(0, own)
        uses = torch.bincount(kept, minlength=rows)[:rows].clamp_min(1) if by_frequency else None
        added = unclamped.total_by_index(terms, kept, rows, wide)
        if uses is not None:
            added = unclamped.over_counts(added, uses[:, None], fmt)
        return LNSTensor(unclamped.packed(added, fmt), fmt)
    terms = codes.index_select(0, own)
    if factors is not None:
        terms = lns.mul(terms, operands("embedding_bag", factors, grad)[0][:, None], fmt)
    return _embedding_backward(func, LNSTensor(terms, fmt), kept, rows, -1, by_frequency)


@handles(aten._embedding_bag_per_sample_weights_backward.default)
def _embedding_bag_factors_backward(
    func: Any,
    grad: LNSTensor,
    weight: LNSTensor,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    mode: int,
    padding: int = -1,
) -> LNSTensor:
    """Return each factor's gradient: its row times its bag's gradient, or 0 if it is ignored."""
    codes, rows, fmt = operands("embedding_bag", grad, weight)
    products = lns.mul(
        codes.index_select(0, bag.clamp(max=len(codes) - 1)), rows.index_select(0, indices), fmt
    )
    return LNSTensor(lns.select(bag < len(codes), lns.sum(products, [1], fmt), 0), fmt)


def _destinations(
    shape: Sequence[int], indices: Sequence[Tensor | None], device: torch.device
) -> Tensor:
    """Return the flat positions that ``x[indices]`` reads from a tensor of ``shape``."""
    return torch.arange(math.prod(shape), device=device).reshape(tuple(shape))[
        tuple(slice(None) if i is None else i for i in indices)
    ]


def _added(x: Tensor, source: Tensor, positions: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x`` plus the sums of ``source`` at flat ``positions``."""
    source = source.expand(positions.shape)
    total = index_sum(source.reshape(-1), positions.reshape(-1), x.numel(), fmt).reshape(x.shape)
    return lns.add(x, total, fmt)


@handles(aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl_.default)
def _index_put(
    func: Any,
    x: LNSTensor,
    indices: Any,
    values: Any,
    accumulate: bool = False,
    unsafe: bool = False,
) -> LNSTensor:
    codes, source, fmt = operands("index_put", x, values)
    if not accumulate:
        result = aten.index_put.default(codes, indices, source)
    elif (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype == torch.int64
        and codes.dim() > 1
    ):
        _check_places("index_put", indices[0], len(codes), 0, codes.dim(), -len(codes))
        rows = torch.where(indices[0] < 0, indices[0] + codes.shape[0], indices[0])
        terms = source.expand(*rows.shape, *codes.shape[1:])
        terms = terms.reshape(rows.numel(), math.prod(codes.shape[1:]))
        result = lns.add(
            codes, index_sum(terms, rows, codes.shape[0], fmt).reshape(codes.shape), fmt
        )
    else:
        result = _added(codes, source, _destinations(codes.shape, indices, codes.device), fmt)
    if func is aten._index_put_impl_.default:
        codes.copy_(result)
        return x
    return LNSTensor(result, fmt)


def _check_places(name: str, index: Tensor, size: int, dim: int, rank: int, low: int = 0) -> None:
    """Check a dimension, and on a CPU check that indices are in low .. size - 1.

    Raises:
        IndexError: as torch does.
    """
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise IndexError(f"{name}: dimension {dim} does not exist, the tensor has {rank}")
    if type(index) is Tensor and not index.is_cuda and index.numel():
        least, most = (int(bound) for bound in index.aminmax())
        if least < low or most >= size:
            wrong = least if least < low else most
            raise IndexError(
                f"{name}: index {wrong} is out of bounds for dimension {dim} with size {size}"
            )


def _along(shape: Sequence[int], dim: int, index: Tensor) -> Tensor:
    """Return the flat positions that ``gather(dim, index)`` reads from a tensor of ``shape``."""
    if not shape:
        return torch.zeros_like(index)
    positions = torch.zeros_like(index)
    stride = 1
    for d in reversed(range(len(shape))):
        place = torch.arange(index.shape[d], device=index.device).reshape(
            -1, *[1] * (len(shape) - 1 - d)
        )
        positions = positions + (index if d == dim % len(shape) else place) * stride
        stride *= shape[d]
    return positions


@handles(aten.scatter_add.default)
def _scatter_add(func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("scatter_add", x, source)
    sizes = codes.shape or (1,)
    _check_places("scatter_add", index, sizes[dim % len(sizes)], dim, codes.dim())
    for other, (length, most) in enumerate(zip(index.shape, codes.shape, strict=False)):
        if other != dim % len(sizes) and length > most:
            raise RuntimeError(
                f"scatter_add: index of shape {tuple(index.shape)} must not be larger than"
                f" {tuple(codes.shape)} except in dimension {dim}"
            )
    if codes.dim() and index.dim():
        terms = terms[tuple(slice(0, size) for size in index.shape)]
    return LNSTensor(
        _added(codes, terms.reshape(index.shape), _along(codes.shape, dim, index), fmt), fmt
    )


@handles(aten.scatter.src, aten.scatter.value)
def _scatter(func: Any, x: LNSTensor, dim: int, index: Tensor, source: Any) -> LNSTensor:
    codes, terms, fmt = operands("scatter", x, finite(source, x.fmt))
    if not isinstance(source, Tensor):  # a number; its code is on the CPU
        return LNSTensor(torch.scatter(codes, dim, index, int(terms)), fmt)
    return LNSTensor(
        torch.scatter(codes, dim, index, terms.expand(index.shape) if terms.dim() == 0 else terms),
        fmt,
    )


@handles(aten.index_copy.default)
def _index_copy(func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("index_copy", x, source)
    return LNSTensor(func(codes, dim, index, terms), fmt)


@handles(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def _index_fill(func: Any, x: LNSTensor, dim: int, index: Tensor, value: Any) -> LNSTensor:
    codes, filling, fmt = operands("index_fill", x, finite(value, x.fmt))
    return LNSTensor(aten.index_fill.int_Scalar(codes, dim, index, int(filling)), fmt)


@handles(aten.scatter_reduce.two)
def _scatter_reduce(
    func: Any,
    x: LNSTensor,
    dim: int,
    index: Tensor,
    source: LNSTensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """Scatter with the reduction ``sum`` in LNS, with other reductions in float32, encoded once.

    ``amax`` and ``amin`` are therefore exact.
    """
    if reduce == "sum" and include_self:
        return _scatter_add(func, x, dim, index, source)
    codes, terms, fmt = operands("scatter_reduce", x, source)
    values = func(
        lns.decode(codes, fmt),
        dim,
        index,
        lns.decode(terms, fmt),
        reduce,
        include_self=include_self,
    )
    return LNSTensor(lns.encode(values, fmt), fmt)


class _ScatteredMean(torch.autograd.Function):
    """``scatter_reduce`` with ``mean``, with a gradient that counts terms as integers.

    torch's formula counts them by a sum of ones, which sticks and saturates in narrow formats.
    """

    @staticmethod
    def forward(
        ctx: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor, include_self: bool
    ) -> LNSTensor:
        counts = torch.full(x.shape, int(include_self), device=index.device)
        counts = counts.scatter_add(dim, index, torch.ones_like(index))
        ctx.save_for_backward(index, counts)
        ctx.options = dim, include_self, source.shape
        operator = aten.scatter_reduce.two
        made: LNSTensor = _scatter_reduce(
            operator, x, dim, index, source, "mean", include_self=include_self
        )
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, counts = ctx.saved_tensors
        dim, include_self, shape = ctx.options
        share: Tensor = OverCounts.apply(grad, counts.clamp_min(1))  # type: ignore[no-untyped-call]
        kept = share if include_self else share.masked_fill(counts > 0, 0.0)
        part = share.gather(dim, index)
        sizes = zip(shape[::-1], index.shape[::-1], strict=True)
        behind = [n for most, size in sizes for n in (0, most - size)]
        return kept, None, None, pad(part, behind) if any(behind) else part, None


@replaces(torch.scatter_reduce, Tensor.scatter_reduce)
def scatter_reduce(
    input: Any, dim: int, index: Tensor, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Return ``torch.scatter_reduce``; the mean has its own gradient formula."""
    both = isinstance(input, LNSTensor) and isinstance(src, LNSTensor) and input.fmt == src.fmt
    if reduce == "mean" and both and are_chained(input, src):
        given = input, dim, index, src, include_self
        return _ScatteredMean.apply(*given)  # type: ignore[no-untyped-call]
    with DisableTorchFunction():
        return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)


@handles(aten.index_add.default)
def _index_add(
    func: Any, x: LNSTensor, dim: int, index: Tensor, source: LNSTensor, *, alpha: Any = 1
) -> LNSTensor:
    codes, terms, fmt = operands("index_add", x, source)
    if alpha != 1:
        terms = lns.mul(*operands("index_add", LNSTensor(terms, fmt), alpha))
    if not codes.dim():
        return LNSTensor(
            _added(codes.reshape(1), terms.reshape(-1), index.reshape(-1), fmt).reshape(()), fmt
        )
    _check_places("index_add", index, codes.shape[dim % codes.dim()], dim, codes.dim())
    moved = codes.movedim(dim, 0)
    if not index.numel():
        return LNSTensor(codes.clone(), fmt)
    rows = terms.reshape(terms.shape or (1,)).movedim(dim, 0).reshape(index.numel(), -1)
    total = index_sum(rows, index.reshape(-1), moved.shape[0], fmt).reshape(moved.shape)
    return LNSTensor(lns.add(moved, total, fmt).movedim(0, dim).contiguous(), fmt)


@handles(aten.unfold_backward.default)
def _unfold_backward(
    func: Any, grad: LNSTensor, sizes: list[int], dim: int, size: int, step: int
) -> LNSTensor:
    zeros = torch.zeros(sizes, dtype=torch.int16, device=grad.codes.device)
    positions = (
        torch.arange(zeros.numel(), device=zeros.device).reshape(sizes).unfold(dim, size, step)
    )
    return LNSTensor(_added(zeros, grad.codes, positions, grad.fmt), grad.fmt)


@handles(aten.masked_scatter.default)
def _masked_scatter(func: Any, x: LNSTensor, mask: Tensor, source: LNSTensor) -> LNSTensor:
    codes, terms, fmt = operands("masked_scatter", x, source)
    return LNSTensor(func(codes, mask, terms), fmt)


@handles(aten.masked_scatter_backward.default)
def _masked_scatter_backward(
    func: Any, grad: LNSTensor, mask: Tensor, sizes: list[int]
) -> LNSTensor:
    return LNSTensor(func(grad.codes, mask, sizes), grad.fmt)


@handles(aten.put.default)
def _put(
    func: Any, x: LNSTensor, index: Tensor, source: LNSTensor, accumulate: bool = False
) -> LNSTensor:
    codes, terms, fmt = operands("put", x, source)
    if not accumulate:
        return LNSTensor(func(codes, index, terms), fmt)
    positions = torch.where(index < 0, index + codes.numel(), index)
    return LNSTensor(_added(codes, terms, positions, fmt), fmt)


def _segments(
    lengths: Tensor | None, offsets: Tensor | None, axis: int, count: int, unsafe: bool
) -> tuple[Tensor, Tensor]:
    """Return the sizes ``[..., S]`` of segments, and the row in ``[..., S + 1]`` for each of the
    ``count`` values ``[...]``; values outside all segments get the last row.

    Raises:
        ValueError: neither lengths nor offsets, or lengths that do not add up to ``count``.
    """
    bounds = offsets if lengths is None else pad(lengths.cumsum(-1), (1, 0))
    if bounds is None or bounds.dim() != axis + 1:
        raise ValueError(
            "segment_reduce needs lengths or offsets of axis + 1 dimensions; for indices use"
            " index_add or scatter_reduce"
        )
    sizes = bounds.diff()
    if not (unsafe or lengths is None) and ((sizes < 0).any() or (bounds[..., -1] != count).any()):
        raise ValueError(
            f"segment_reduce with lengths={lengths.tolist()}: must not be negative and must sum to"
            f" {count}, the number of values"
        )
    places = torch.arange(count, device=bounds.device, dtype=bounds.dtype)
    places = places.expand(*bounds.shape[:-1], count).contiguous()
    row = torch.searchsorted(bounds.contiguous(), places, right=True) - 1
    row, width = torch.where(row < 0, sizes.shape[-1], row), bounds.shape[-1]
    first = width * torch.arange(bounds[..., 0].numel(), device=bounds.device)
    return sizes, (row.reshape(len(first), count) + first[:, None]).reshape(-1)


class _SegmentMean(torch.autograd.Function):
    """Means of rows by index: sums divided by counts. The gradient is divided before the gather."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, index: Tensor, counts: Tensor) -> LNSTensor:
        ctx.save_for_backward(index, counts)
        return LNSTensor(_mean_by_index(x.codes, index, counts, x.fmt), x.fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, counts = ctx.saved_tensors
        counts = counts.reshape(-1, *[1] * (grad.dim() - 1))
        share: Tensor = OverCounts.apply(grad, counts)  # type: ignore[no-untyped-call]
        return share.index_select(0, index), None, None


@replaces(torch.segment_reduce)
def segment_reduce(
    data: LNSTensor, reduce: str, *, lengths: Tensor | None = None, indices: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> Tensor:  # fmt: skip
    """Return ``torch.segment_reduce``; sums are computed as by ``index_add``, in contract order.

    Raises:
        ValueError: invalid segments (:func:`_segments`), or the maximum, minimum or mean of an
            empty segment.
    """
    axis %= data.dim()
    sizes, at = _segments(lengths, offsets, axis, data.shape[axis], unsafe)
    if initial is None and reduce not in ("sum", "prod") and not sizes.all():
        raise ValueError(
            f"segment_reduce of an empty segment: its {reduce} is undefined, and LNS has no NaN"
            " or infinity; pass initial"
        )
    added, product = reduce in ("sum", "mean"), 1.0 if initial is None else initial
    # the start value differs from all terms, because an equal one would get part of the gradient
    starts = {"max": -data.fmt.largest, "min": data.fmt.largest, "prod": product}
    outer, rest = sizes.shape[:-1], data.shape[axis + 1 :]
    terms = data.reshape(-1, *rest)
    out = data.new_full((outer.numel() * (sizes.shape[-1] + 1), *rest), starts.get(reduce, 0.0))
    if reduce == "mean":
        counts = pad(sizes, (0, 1), value=1).reshape(-1).clamp_min(1)
        out = _SegmentMean.apply(terms, at, counts)  # type: ignore[no-untyped-call]
    elif added:
        out = out.index_add(0, at, terms)
    else:
        spread = at.reshape(-1, *[1] * len(rest)).expand(terms.shape)
        name = {"max": "amax", "min": "amin"}.get(reduce, reduce)
        out = out.scatter_reduce(0, spread, terms, name, include_self=reduce == "prod")
    out = out.reshape(*outer, -1, *rest).narrow(axis, 0, sizes.shape[-1])
    if reduce == "mean" and initial is not None:
        first = torch.full_like(out, initial)
        counts = sizes.clamp_min(1).reshape(*sizes.shape, *[1] * len(rest))
        out = out + OverCounts.apply(first, counts)  # type: ignore[no-untyped-call]
    elif added and initial is not None:
        out = out + initial
    elif reduce in ("max", "min") and initial is not None:
        # an equal initial value gets no part of the gradient
        beyond = out < initial if reduce == "max" else out > initial
        empty = (sizes == 0).reshape(*sizes.shape, *[1] * len(rest))
        out = torch.where(beyond | empty, torch.full_like(out, initial), out)
    return out
