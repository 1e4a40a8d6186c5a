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
    kept, fmt = [d for d in range(x.dim()) if d not in dims], (bits, fraction_bits)
    terms = math.prod(x.shape[d] for d in dims)
    repeated: tuple[int, int] | None = (1, 1)
    if y is not None:
        x, y = x.contiguous(), y.contiguous()
        repeated = repetition(y, x.shape) if kind == "squares" else repeated
    summed, rest = _levels(x, dims), _levels(x, kept)
    if max(len(summed), len(rest)) > 2 or (len(summed) == 2 and terms >= _LONGEST) or not repeated:
        if y is None:
            x = x.permute(*dims, *kept).contiguous()
            return sum(x, None, range(len(dims)), "plain", *fmt, shift)
        x = mul(x, y, *fmt) if kind == "products" else sub(x, y, *fmt)  # the terms by themselves
        x = mul(x, x, *fmt) if kind == "squares" else x
        return sum(x, None, dims, "plain", *fmt, shift)
    shape = [max(1, -(-terms // LONG_SUM)), *(x.shape[d] for d in kept)]
    if terms == 0 or 0 in shape:
        return x.new_zeros(shape)
    out = torch.empty(shape, dtype=torch.int16, device=x.device)
    places = (*_strides(summed), *_strides(rest))
    _, stride, outer, _, *kept_strides = places
    wide = stride == 1 and not any(n % 8 for n in (outer, *kept_strides))
    if len(summed) == 2:
        wide = wide and summed[-1][0] % 8 == 0
    columns, device = _columns(terms, out.numel(), stride, x.get_device()), x.get_device()
    tables = device_tables(fraction_bits, device)
    kernel = elementwise_kernel("sum", *fmt, device)
    kernel(
        (min(-(-out.numel() // columns), 8 * kernel.resident(device)), 1, 1), THREADS, device,
        x.data_ptr(), pointer_of(y), out.data_ptr(), terms, out[0].numel(), *places, *repeated,
        KINDS.index(kind), columns, shift,
        wide and alignment_flag(x, y if kind == "products" else None),
        tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip
    return out


def _strides(levels: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the size and stride of the inner level, and the stride of the outer one or 0."""
    return *levels[-1], levels[0][1] if len(levels) == 2 else 0


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
