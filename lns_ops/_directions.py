"""Compiled kernels of the composed optimizers: what they descend along, and weights that are multiplied, in one pass each.

They are the operations that :mod:`lns_ops.optim` composes, in its order, on signs and fields that stay in registers
(:mod:`lns_ops._elementwise` has these operations); :mod:`lns_ops.directions` calls them. A direction is stored, and SGD's kernel descends
along it: one more pass over two bytes a weight, instead of each kernel three times, once for every rounding of a weight.

Kernels return 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int16, int32, int64
from numpy.typing import NDArray

from lns_ops._elementwise import _average, _bounded, _decayed, _root, add_fields, code_of, mul_fields
from lns_ops._jit import get, helper, kernel, look_up, put

_I16 = NDArray[np.int16]
_U16 = NDArray[np.uint16]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]


@helper
def _blend(x: Any, y: Any, table: _I32, last: Any, bias: Any, mask: Any, keep: Any, rest: Any) -> Any:
    """The pair of ``keep x + rest y`` of codes, both factors positive."""
    fx, fy = mul_fields(x & mask, keep, bias, mask), mul_fields(y & mask, rest, bias, mask)
    return add_fields(x >> 31, fx, y >> 31, fy, table, last, mask)


@kernel
def nesterov(
    weight: _I16, grad: _I16, buffer: _I16, out: _I16, table: _I32, last: int, bias: int, mask: int, momentum: int, decay: int,
    use_decay: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """``g = grad + decay weight; buffer = momentum buffer + g; out = g + momentum buffer``."""
    last_, bias_, mask_, mu = int32(last), int32(bias), int32(mask), int32(momentum)
    for i in range(start, stop):
        sg, fg = _decayed(grad, weight, i, table, last_, bias_, mask_, int32(decay), use_decay)
        sb, fb = _average(buffer, i, sg, fg, table, last_, bias_, mask_, mu, bias_)
        so, fo = add_fields(sg, fg, sb, mul_fields(fb, mu, bias_, mask_), table, last_, mask_)
        put(out, i, code_of(so, fo, mask_))
    return 0


@kernel
def lion(
    weight: _I16, grad: _I16, average: _I16, out: _I16, table: _I32, last: int, bias: int, mask: int, keep: int, rest: int,
    average_keep: int, average_rest: int, decay: int, use_decay: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """``out = sign(keep average + rest grad) + decay weight; average = average_keep average + average_rest grad``."""
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    for i in range(start, stop):
        g, m = int32(get(grad, i)), int32(get(average, i))
        so, field = _blend(m, g, table, last_, bias_, mask_, int32(keep), int32(rest))
        fo = bias_ if field > 0 else int32(0)
        if use_decay:
            w = int32(get(weight, i))
            so, fo = add_fields(so, fo, w >> 31, mul_fields(w & mask_, int32(decay), bias_, mask_), table, last_, mask_)
        put(out, i, code_of(so, fo, mask_))
        sm, fm = _blend(m, g, table, last_, bias_, mask_, int32(average_keep), int32(average_rest))
        put(average, i, code_of(sm, fm, mask_))
    return 0


@kernel
def normed(
    weight: _I16, grad: _I16, root: _I16, residue: _I16, out: _I16, table: _I32, squares: _I32, last: int, bias: int, mask: int,
    decay: int, use_decay: bool, first: int, keep: int, take: int, eps: int, factor: int, bound: int, start: int, stop: int,
) -> int:  # fmt: skip
    """``g = grad + decay weight``; the root follows it by the table ``squares``; ``out = (g / (root + eps)) factor``, at most ``bound``."""
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    first_, end = int32(first), int32(first + len(squares) - 1)
    for i in range(start, stop):
        sg, fg = _decayed(grad, weight, i, table, last_, bias_, mask_, int32(decay), use_decay)
        old, lacks = int32(get(root, i)), int64(get(residue, i))
        rounded = _root(old, fg, lacks, int64(1 << 15), squares, first_, end, int64(keep), int64(take), bias_)
        fr = _bounded(rounded, int64(bias), mask_)
        inside = (fr > 0) & ((rounded >> 16) + bias <= mask)
        put(root, i, int16(fr))
        put(residue, i, int16((rounded & 0xFFFF) - (1 << 15)) if inside else int16(0))
        _, below = add_fields(int32(0), fr, int32(0), int32(eps), table, last_, mask_)
        quotient = max(min(int32(int32(fg - below) + bias_), mask_), int32(0)) if fg > 0 else int32(0)
        put(out, i, code_of(sg, min(mul_fields(quotient, int32(factor), bias_, mask_), int32(bound)), mask_))
    return 0


@kernel
def multiply(
    weight: _I16,
    x: _I16,
    residue: _I16,
    bits: _U16,
    table: _I64,
    words: int,
    bias: int,
    mask: int,
    highest: int,
    start: int,
    stop: int,
) -> int:
    """``weight *= 2^(-sign(weight) table[x])``, as :func:`lns_ops.moments.multiply_`; ``highest`` is a field, zero weights stay."""
    for i in range(start, stop):
        w = int64(get(weight, i))
        field = w & mask
        octaves = look_up(table, int32(int32(get(x, i)) & int32(words)))
        moved = ((field - bias) << 16) + (octaves if w < 0 else -octaves) + int64(get(residue, i))
        rounded = ((moved + int64(get(bits, i))) >> 16) + bias
        new = min(max(rounded, int64(1)), int64(highest))
        put(residue, i, int16(moved - ((rounded - bias) << 16)) if (new == rounded) & (field > 0) else int16(0))
        put(weight, i, int16(new | (w & ~int64(mask))) if field > 0 else int16(0))
    return 0
