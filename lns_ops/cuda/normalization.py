"""Normalizations on NVIDIA GPUs: in a single kernel, or only the elementwise part.

A group is the set of values that are averaged together. A thread block takes groups, and keeps
their sums in shared memory. This is not possible if a group's terms are in too many places or too
many, and not efficient if there are so few large groups that most of the GPU would be idle. Then
sums are separate kernels (:mod:`lns_ops.cuda.sums`), and the elementwise part is another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lns_ops.cuda.elementwise import MOST_CODES, elementwise_kernel, repetition
from lns_ops.cuda.indexed import function_table
from lns_ops.cuda.runtime import (
    THREADS,
    alignment_flag,
    device_tables,
    grid_of,
    multiprocessor_count,
    pointer_of,
)
from lns_ops.cuda.sums import plan_of
from lns_ops.spec.format import LNSFormat, logarithm
from lns_ops.spec.reference import BLOCK, LONG_SUM

_MOST_ALONE = 1 << 17
"""Number of terms of a group above which every multiprocessor must have a group."""


class Cut(NamedTuple):
    """How the kernels split a tensor of one shape into groups.

    Attributes:
        kept: shape of the statistics.
        groups: number of groups.
        numbers: the kernels' parameters for this split; the last is ``columns``, the number of
            groups that a thread block takes at a time.
        wide: whether vectors of 8 terms are aligned if the tensor is.
    """

    kept: tuple[int, ...]
    groups: int
    numbers: tuple[int, ...]
    wide: bool


@lru_cache(maxsize=4096)
def cut_of(
    shape: torch.Size, dims: tuple[int, ...], stages: tuple[int, ...], fraction_bits: int,
    device: int,
) -> Cut | None:  # fmt: skip
    """Return how the kernels split contiguous tensors of a shape; None if they cannot.

    Args:
        dims: dimensions that are averaged over, ascending.
        stages: numbers of terms of the means that are computed in turn.
    """
    strides = torch.empty(shape, device="meta").stride()
    plan = plan_of(tuple(shape), strides, None, dims, device)
    if plan is None or not plan.terms or not plan.sums:
        return None
    lengths = [n for n in stages if n != 1] or [1]
    length, pieces = lengths[0], math.prod(lengths[1:])
    crowded = plan.terms > _MOST_ALONE and plan.sums < multiprocessor_count(device)
    if len(lengths) > 2 or length > LONG_SUM or pieces > MOST_CODES or crowded:
        return None
    columns = _columns(plan.terms, plan.sums, length, plan.places[1], device)
    if not columns:
        return None
    shifts = [-logarithm(n, fraction_bits) for n in (length, pieces)]
    kept = tuple(1 if d in dims else n for d, n in enumerate(shape))
    numbers = (plan.terms, plan.sums, *plan.places, length, *shifts, columns)
    wide = plan.wide and (pieces == 1 or length % 8 == 0)  # also at the start of each mean
    return Cut(kept, plan.sums, numbers, wide)


def _columns(terms: int, groups: int, length: int, stride: int, device: int) -> int:
    """Return the number of groups that a thread block takes at a time; 0 if it cannot take one.

    A group needs as many threads as its longest sum has blocks; 8 adjacent groups are read
    together.
    """
    most = 1  # blocks of a mean, or of the sum for a gradient of weight or bias
    for n in (min(length, terms), -(-terms // length), min(LONG_SUM, terms), -(-terms // LONG_SUM)):
        most = max(most, -(-n // BLOCK))
    columns = THREADS // (1 << (most - 1).bit_length())
    while columns * -(-terms // min(length, LONG_SUM)) > MOST_CODES:
        columns //= 2
    least = 1 if stride == 1 else 8
    while columns > least and columns * 2 * multiprocessor_count(device) > groups:
        columns //= 2
    return columns


def normalization(
    cut: Cut, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: int, centred: bool,
    bits: int, fraction_bits: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ``y``, ``y weight + bias``, mean, rest, variance and scale, as the operator does.

    Args:
        cut: result of :func:`cut_of`.
        weight, bias: with a shape that broadcasts to ``x``, or absent.
        eps: a positive code in the format of squares.
    """
    x, affine = x.contiguous(), weight is not None or bias is not None
    y = torch.empty_like(x)
    out = torch.empty_like(x) if affine else x.new_empty(0)
    mean, rest = (x.new_empty(cut.kept if centred else 0) for _ in range(2))
    variance, scale = x.new_empty(cut.kept), x.new_empty(cut.kept)
    operands = [_repeated(codes, x) for codes in (weight, bias)]
    device = x.get_device()
    powers = function_table("power", (-0.5,), LNSFormat(bits, fraction_bits).of_squares, device)
    _of_groups(
        "normalization", cut, (x, y, out if affine else None),
        (*((mean, rest) if centred else (None, None)), variance, scale),
        (*(value for triple, _ in operands for value in triple), powers.data_ptr(), eps),
        bits, fraction_bits,
    )  # fmt: skip
    return y, out, mean, rest, variance, scale


def normalization_backward(
    cut: Cut, grad: Tensor, y: Tensor, scale: Tensor, weight: Tensor | None, centred: bool,
    wanted: Sequence[bool], bits: int, fraction_bits: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x``, weight and bias; gradients that are not ``wanted`` are empty.

    Weight and bias have an element for each group, or both are absent.
    """
    grad, y, scale = grad.contiguous(), y.contiguous(), scale.contiguous()
    of_x = torch.empty_like(grad) if wanted[0] else grad.new_empty(0)
    of_weight, of_bias = (grad.new_empty(cut.groups if want else 0) for want in wanted[1:])
    weight = None if weight is None else weight.contiguous()
    made = [g if want else None for g, want in zip((of_weight, of_bias), wanted[1:], strict=True)]
    _of_groups(
        "normalization_backward", cut, (grad, y, of_x if wanted[0] else None),
        (scale, *made, weight), (int(centred),), bits, fraction_bits,
    )  # fmt: skip
    return of_x, of_weight, of_bias


def _of_groups(
    name: str,
    cut: Cut,
    arrays: tuple[Tensor, Tensor, Tensor | None],
    more: tuple[Tensor | None, ...],
    rest: tuple[int, ...],
    bits: int,
    fraction_bits: int,
) -> None:
    """Launch a kernel that computes a whole normalization."""
    device = arrays[0].get_device()
    tables, kernel = (
        device_tables(fraction_bits, device),
        elementwise_kernel(name, bits, fraction_bits, device),
    )
    pointers = [pointer_of(array) for array in arrays]
    blocks = -(-cut.groups // cut.numbers[-1])
    kernel(
        (min(blocks, 8 * kernel.resident(device)), 1, 1), THREADS, device, *pointers,
        *map(pointer_of, more), *cut.numbers, cut.wide and alignment_flag(*pointers), *rest,
        tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip


def _repeated(codes: Tensor | None, like: Tensor) -> tuple[tuple[int, int, int], Tensor | None]:
    """Return pointer, ``div`` and ``mod`` of an operand, and the tensor to keep alive."""
    if codes is None:
        return (0, 1, 1), None
    codes = codes.contiguous()
    found = repetition(codes.shape, like.shape)
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
    """Return ``y = (x - mean) scale``, and ``y weight + bias``, empty without weight and bias."""
    x, affine = x.contiguous(), weight is not None or bias is not None
    y = torch.empty_like(x)
    out = torch.empty_like(x) if affine else x.new_empty(0)
    if x.numel():
        operands = [_repeated(codes, x) for codes in (mean, scale, weight, bias)]
        _launch("normalize", x, (x, y, out if affine else None), operands, bits, fraction_bits)
    return y, out


def normalize_backward(
    grad: Tensor, y: Tensor, along: Tensor, scale: Tensor, bits: int, fraction_bits: int
) -> Tensor:
    """Return ``(grad - y along) scale``."""
    grad, y = grad.contiguous(), y.contiguous()
    out = torch.empty_like(grad)
    if grad.numel():
        operands = [_repeated(codes, grad) for codes in (along, scale)]
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
    pointers = [pointer_of(array) for array in arrays]
    kernel(
        grid_of(x.numel(), device, kernel=kernel), THREADS, device, *pointers, x.numel(),
        *(value for triple, _ in operands for value in triple), alignment_flag(*pointers),
        tables.signed.data_ptr(), tables.gauss.data_ptr(),
    )  # fmt: skip


def track_(
    averages: Sequence[Tensor | None], mean: Tensor, rest: Tensor, variance: Tensor, unbiased: int,
    momentum: float, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    """Update running averages, contiguous float32, from the codes of a mean and a variance.

    ``average = (1 - momentum) average + momentum value``. The values are ``mean + rest``, and the
    variance times ``unbiased``; these two are codes in the format of squares.
    """
    mean, rest, variance = mean.contiguous(), rest.contiguous(), variance.contiguous()
    device = mean.get_device()
    if mean.numel():
        elementwise_kernel("track", bits, fraction_bits, device)(
            grid_of(mean.numel(), device), THREADS, device, mean.data_ptr(), rest.data_ptr(),
            variance.data_ptr(), *map(pointer_of, averages), mean.numel(), unbiased, 1 - momentum,
            momentum, device_tables(fraction_bits, device).significands.data_ptr(),
        )  # fmt: skip
