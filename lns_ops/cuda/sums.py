"""Sums in the contract's order, and the elementwise part of normalizations, on NVIDIA GPUs.

A sum reads its terms where they lie: at most two strides over what is summed and two over what is
kept, as all sums over dimensions of a contiguous tensor need that are not interleaved more than
once. Only beyond that is a copy made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lns_ops.cuda.elementwise import elementwise_kernel, mul, repetition, sub
from lns_ops.cuda.runtime import (
    THREADS,
    alignment_flag,
    device_tables,
    grid_of,
    multiprocessor_count,
    pointer_of,
)
from lns_ops.spec.reference import BLOCK, LONG_SUM

KINDS = ("plain", "products", "squares")
_LONGEST = 1 << 32
"""Terms of two strides are numbered in 32 bits."""


def _levels(x: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides of ``dims``, merged where one goes on from the other."""
    levels: list[tuple[int, int]] = []
    for size, stride in ((x.shape[d], x.stride(d)) for d in dims if x.shape[d] != 1):
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels or [(1, 0)]


def _columns(terms: int, sums: int, stride: int, device: int) -> int:
    """Return the number of sums that a thread block of the kernel takes at a time.

    Terms beside each other: as many as keep all threads busy. Else 32, for coalesced loads, and
    more where that leaves threads without terms, as long as every multiprocessor has two thread
    blocks.
    """
    blocks = -(-min(terms, LONG_SUM) // BLOCK)
    if stride == 1:
        return THREADS // (1 << (blocks - 1).bit_length())
    columns = min(32, 1 << (sums - 1).bit_length())
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

    ``kind`` is one of :data:`KINDS`: terms are elements of x, products with y, or squares of what
    x is more than y. ``shift`` ulps are added to a sum's logarithm before it is stored.
    """
    kept = [d for d in range(x.dim()) if d not in dims]
    K, device = math.prod(x.shape[d] for d in dims), x.get_device()
    div, mod = 1, 1
    if y is not None:
        x, y = x.contiguous(), y.contiguous()
        repeated = repetition(y, x.shape) if kind == "squares" else (div, mod)
        if repeated is not None:
            div, mod = repeated
    summed, rest = _levels(x, dims), _levels(x, kept)
    if y is not None and (repeated is None or max(len(summed), len(rest)) > 2):
        terms = (
            mul(x, y, bits, fraction_bits) if kind == "products" else sub(x, y, bits, fraction_bits)
        )
        x = mul(terms, terms, bits, fraction_bits) if kind == "squares" else terms
        return sum(x, None, dims, "plain", bits, fraction_bits, shift)
    if max(len(summed), len(rest)) > 2 or (len(summed) == 2 and K >= _LONGEST):
        x = x.permute(*dims, *kept).contiguous()
        return sum(x, None, range(len(dims)), kind, bits, fraction_bits, shift)
    shape = [max(1, -(-K // LONG_SUM)), *(x.shape[d] for d in kept)]
    if K == 0 or 0 in shape:
        return x.new_zeros(shape)
    out = torch.empty(shape, dtype=torch.int16, device=x.device)
    (inner, stride), outer = summed[-1], summed[0][1] if len(summed) == 2 else 0
    (kept_inner, kept_stride), kept_outer = rest[-1], rest[0][1] if len(rest) == 2 else 0
    lengths = [inner, outer][: len(summed)] if len(summed) == 2 else []
    wide = stride == 1 and not any(n % 8 for n in (*lengths, kept_stride, kept_outer))
    columns = _columns(K, out.numel(), stride, device)
    tables, kernel = (
        device_tables(fraction_bits, device),
        elementwise_kernel("sum", bits, fraction_bits, device),
    )
    groups = -(-out.numel() // columns)
    kernel(
        (min(groups, 8 * kernel.resident(device)), 1, 1), THREADS, device,
        x.data_ptr(), pointer_of(y), out.data_ptr(),
        K, out[0].numel(), inner, stride, outer, kept_inner, kept_stride, kept_outer, div, mod,
        KINDS.index(kind), columns, shift,
        wide and alignment_flag(x, y if kind == "products" else None),
        tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip
    return out


def _repeated(codes: Tensor | None, like: Tensor) -> tuple[tuple[int, int, int], Tensor | None]:
    """Return pointer, ``div`` and ``mod`` of an operand, and what must live as long as they."""
    if codes is None:
        return (0, 1, 1), None
    codes = codes.contiguous()
    found = repetition(codes, like.shape)
    if found is None:
        codes = codes.expand(like.shape).contiguous()
        found = 1, codes.numel()
    return (codes.data_ptr(), *found), codes


def normalize(
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    bits: int,
    fraction_bits: int,
) -> tuple[Tensor, Tensor]:
    """Return ``y = (x - mean) scale`` and ``y weight + bias``; the latter empty without either."""
    x, affine = x.contiguous(), weight is not None or bias is not None
    y = torch.empty_like(x)
    out = torch.empty_like(x) if affine else x.new_empty(0)
    if x.numel():
        operands = [_repeated(codes, x) for codes in (mean, scale, weight, bias)]
        _launch("normalize", x, (x, y, out if affine else None), operands, bits, fraction_bits)
    return y, out


def normalize_backward(
    grad: Tensor,
    y: Tensor,
    mean: Tensor | None,
    along: Tensor,
    scale: Tensor,
    bits: int,
    fraction_bits: int,
) -> Tensor:
    """Return ``((grad - mean) - y along) scale``."""
    grad, y = grad.contiguous(), y.contiguous()
    out = torch.empty_like(grad)
    if grad.numel():
        operands = [_repeated(codes, grad) for codes in (mean, along, scale)]
        _launch("normalize_backward", grad, (grad, y, out), operands, bits, fraction_bits)
    return out


def _launch(
    name: str,
    x: Tensor,
    arrays: Sequence[Tensor | None],
    operands: Sequence[tuple[tuple[int, int, int], Tensor | None]],
    bits: int,
    fraction_bits: int,
) -> None:
    device = x.get_device()
    tables, kernel = (
        device_tables(fraction_bits, device),
        elementwise_kernel(name, bits, fraction_bits, device),
    )
    kernel(
        grid_of(x.numel(), device, kernel=kernel), THREADS, device,
        *map(pointer_of, arrays), x.numel(),
        *(value for triple, _ in operands for value in triple),
        alignment_flag(*arrays), tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip
