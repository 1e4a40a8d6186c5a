"""Sums in the contract's order on NVIDIA GPUs.

A sum reads its terms in place, with at most two strides over the summed dimensions and two over the
others. This covers all sums of a contiguous tensor whose summed and kept dimensions alternate at
most once. Other tensors are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lns_ops.cuda.elementwise import elementwise_kernel, mul, repetition, sub
from lns_ops.cuda.runtime import (
    THREADS,
    alignment_flag,
    device_tables,
    multiprocessor_count,
    pointer_of,
)
from lns_ops.spec.reference import BLOCK, LONG_SUM

KINDS = ("plain", "products", "squares")
_LONGEST = 1 << 32
"""Terms with two strides are numbered in 32 bits."""


class SumPlan(NamedTuple):
    """How the kernel sums tensors of one shape and strides.

    Attributes:
        shape: shape of the result.
        terms, sums: number of terms of a sum, and of sums of a piece.
        places: size and stride of the summed dimensions, and their outer stride; the same for the
            kept dimensions.
        repeated: how the tensor that is subtracted before squaring repeats.
        columns: number of sums that a thread block takes at a time.
        wide: whether vectors of 8 terms are aligned if the tensor is.
    """

    shape: tuple[int, ...]
    terms: int
    sums: int
    places: tuple[int, ...]
    repeated: tuple[int, int]
    columns: int
    wide: bool


def _levels(
    shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]
) -> list[tuple[int, int]]:
    """Return sizes and strides of ``dims``, merged if one continues the other."""
    levels: list[tuple[int, int]] = []
    for size, stride in ((shape[d], strides[d]) for d in dims if shape[d] != 1):
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels or [(1, 0)]


@lru_cache(maxsize=4096)
def plan_of(
    shape: tuple[int, ...], strides: tuple[int, ...], about: tuple[int, ...] | None,
    dims: tuple[int, ...], device: int,
) -> SumPlan | None:  # fmt: skip
    """Return the plan of a sum over ``dims``; None if the kernel cannot read its terms.

    ``about`` is the shape of the tensor that is subtracted before squaring.
    """
    kept = [d for d in range(len(shape)) if d not in dims]
    terms = math.prod(shape[d] for d in dims)
    summed, rest = _levels(shape, strides, dims), _levels(shape, strides, kept)
    repeated = (1, 1) if about is None else repetition(about, shape)
    if max(len(summed), len(rest)) > 2 or (len(summed) == 2 and terms >= _LONGEST) or not repeated:
        return None
    sizes = [shape[d] for d in kept]
    pieces, sums = max(1, -(-terms // LONG_SUM)), math.prod(sizes)
    places = (*_strides(summed), *_strides(rest))
    _, stride, outer, _, *kept_strides = places
    wide = stride == 1 and not any(n % 8 for n in (outer, *kept_strides))
    if len(summed) == 2:
        wide = wide and summed[-1][0] % 8 == 0
    columns = _columns(terms, pieces * sums, stride, device) if terms and sums else 1
    return SumPlan((pieces, *sizes), terms, sums, places, repeated, columns, wide)


def _columns(terms: int, sums: int, stride: int, device: int) -> int:
    """Return the number of sums that a thread block of the kernel takes at a time.

    It is large enough to keep all threads busy, but small if there are few sums, so that all
    multiprocessors take part. If terms are not adjacent, a thread block reads 8 adjacent sums, or
    more if threads would be idle otherwise and every multiprocessor keeps two thread blocks.
    Measured on an H100 for 65 to 6,144 sums (docs/benchmarks/lns_ops_gpu.md).
    """
    blocks = -(-min(terms, LONG_SUM) // BLOCK)
    if stride == 1:
        columns = THREADS // (1 << (blocks - 1).bit_length())
        while columns > 1 and columns * multiprocessor_count(device) > 2 * sums:
            columns //= 2
        return columns
    columns = min(8, 1 << (sums - 1).bit_length())
    while 2 * columns * blocks <= THREADS and 4 * columns * multiprocessor_count(device) <= sums:
        columns *= 2
    return columns


def sum(
    x: Tensor,
    y: Tensor | None,
    dims: Sequence[int],
    kind: str,
    bits: int,
    fraction_bits: int,
    shift: int = 0,
) -> Tensor:
    """Return the sums of pieces of ``LONG_SUM`` terms over ``dims``, ``[pieces, *kept]``.

    ``kind`` is one of :data:`KINDS`: terms are elements of x, products with y, or squares of x
    (minus y, if given). Squares and their sums are codes in the format of squares. ``shift`` ulps
    are added to a sum's logarithm before it is stored.
    """
    fmt = (bits, fraction_bits)
    if y is not None:
        x, y = x.contiguous(), y.contiguous()
    device = x.get_device()
    about = y.shape if kind == "squares" and y is not None else None
    plan = plan_of(x.shape, x.stride(), about, tuple(dims), device)
    if plan is None:
        if y is None:
            kept = [d for d in range(x.dim()) if d not in dims]
            x = x.permute(*dims, *kept).contiguous()
            return sum(x, None, range(len(dims)), kind, *fmt, shift)
        if kind == "squares":
            return sum(sub(x, y, *fmt), None, dims, kind, *fmt, shift)
        return sum(mul(x, y, *fmt), None, dims, "plain", *fmt, shift)  # computes the terms first
    if plan.terms == 0 or plan.sums == 0:
        return x.new_zeros(plan.shape)
    out = torch.empty(plan.shape, dtype=torch.int16, device=x.device)
    tables, kernel = device_tables(fraction_bits, device), elementwise_kernel("sum", *fmt, device)
    groups = -(-plan.shape[0] * plan.sums // plan.columns)
    a, b = x.data_ptr(), pointer_of(y)
    kernel(
        (min(groups, 8 * kernel.resident(device)), 1, 1), THREADS, device, a, b, out.data_ptr(),
        plan.terms, plan.sums, *plan.places, *plan.repeated, KINDS.index(kind), plan.columns,
        shift, plan.wide and alignment_flag(a, b if kind == "products" else 0),
        tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip
    return out


def _strides(levels: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the size and stride of the inner level, and the outer level's stride or 0."""
    return *levels[-1], levels[0][1] if len(levels) == 2 else 0
