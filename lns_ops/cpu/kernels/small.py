"""Compiled kernels for small operands, one call for a whole operation: a matrix product, a sum, and
elementwise arithmetic with broadcasting.

Calling a kernel takes as long as thousands of additions, and so does inspecting operands or copying
them into another order. So these kernels read operands in place, by strides, and use table look-ups
for every range. Words, order of additions and bits are as in
:mod:`lns_ops.cpu.kernels.gather_gemm`; :mod:`lns_ops.cpu.small` defines which operands are small.
"""

from __future__ import annotations

import numpy as np
from numba import int32
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, put, scratch
from lns_ops.cpu.compiler.object_cache import kernel
from lns_ops.cpu.kernels.elementwise import add_fields, code_of, mul_fields
from lns_ops.cpu.kernels.gather_gemm import (
    NOTHING,
    STRIP,
    add_words,
    clamp_word,
    code_of_word,
    word_of_code,
)

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]


@kernel
def matmul(
    x: _I16, y: _I16, out: _I16, table: _I32, M: int, K: int, N: int, x_row: int, x_column: int,
    y_row: int, y_column: int, bias: int, mask: int, lowest: int, highest: int, block: int,
    start: int, stop: int,
) -> int:  # fmt: skip
    """Multiply batches of (M, K) by (K, N) into (M, N), with the given strides within a matrix.

    A unit is one product of the batch.
    """
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    bias_, mask_ = int32(bias), int32(mask)
    words, total, part = scratch(K * N, int32), scratch(STRIP, int32), scratch(STRIP, int32)
    for b in range(start, stop):
        for k in range(K):
            for j in range(N):
                code = get(y, b * K * N + k * y_row + j * y_column)
                put(words, k * N + j, word_of_code(code, bias_, mask_))
        for unit in range(M * ((N + STRIP - 1) // STRIP)):
            i, first = unit % M, unit // M * STRIP
            width = min(STRIP, N - first)
            for j in range(width):
                put(total, j, int32(NOTHING))
            for k0 in range(0, K, block):
                for j in range(width):
                    put(part, j, int32(NOTHING))
                for k in range(k0, min(K, k0 + block)):
                    code = get(x, b * M * K + i * x_row + k * x_column)
                    scalar = word_of_code(code, bias_, mask_)
                    if scalar == NOTHING:
                        continue
                    sign = int32(scalar & 1)
                    scalar = int32(scalar - sign)
                    row = k * N + first
                    for j in range(width):
                        product = int32(int32(scalar + get(words, row + j)) ^ sign)
                        product = int32(NOTHING) if product < low else product
                        added = add_words(get(part, j), product, table, last)
                        put(part, j, clamp_word(added, low, high))
                for j in range(width):
                    added = add_words(get(total, j), get(part, j), table, last)
                    put(total, j, clamp_word(added, low, high))
            for j in range(width):
                place = (b * M + i) * N + first + j
                put(out, place, code_of_word(get(total, j), bias_, mask_))
    return 0


@kernel
def sum_codes(
    x: _I16, out: _I16, table: _I32, K: int, inner: int, shift: int, bias: int, mask: int,
    lowest: int, highest: int, block: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Sum a flat (outer, K, inner) array over K into (outer, inner), times 2^(shift ulps).

    A unit is a strip of one outer index, or of several outer indices if ``inner`` is 1.
    """
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    bias_, mask_ = int32(bias), int32(mask)
    row = out.size if inner == 1 else inner
    step = K if inner == 1 else 1
    strips = (row + STRIP - 1) // STRIP
    total, part = scratch(STRIP, int32), scratch(STRIP, int32)
    for unit in range(start, stop):
        first = unit % strips * STRIP
        width = min(STRIP, row - first)
        origin = unit // strips * K * inner + first * step
        for j in range(width):
            put(total, j, int32(NOTHING))
        for k0 in range(0, K, block):
            for j in range(width):
                put(part, j, int32(NOTHING))
            for k in range(k0, min(K, k0 + block)):
                at = origin + k * inner
                for j in range(width):
                    word = word_of_code(get(x, at + j * step), bias_, mask_)
                    added = add_words(get(part, j), word, table, last)
                    put(part, j, clamp_word(added, low, high))
            for j in range(width):
                added = add_words(get(total, j), get(part, j), table, last)
                put(total, j, clamp_word(added, low, high))
        place = unit // strips * row + first
        for j in range(width):
            put(out, place + j, code_of_word(int32(get(total, j) + 4 * shift), bias_, mask_))
    return 0


@kernel
def add(
    x: _I16, y: _I16, out: _I16, table: _I32, form: _I64, last: int, mask: int, flip: int,
    start: int, stop: int,
) -> int:  # fmt: skip
    """Store ``out = x + y``, or ``x - y`` with ``flip = -1``, broadcast.

    ``form`` has the sizes of ``out`` in three dimensions and the strides of ``x`` and of ``y``; a
    unit is one index of the first two dimensions.
    """
    last_, mask_, flip_ = int32(last), int32(mask), int32(flip)
    columns, width, x_step, y_step = form[1], form[2], form[5], form[8]
    for unit in range(start, stop):
        p, q = unit // columns, unit % columns
        at_x, at_y = p * form[3] + q * form[4], p * form[6] + q * form[7]
        for r in range(width):
            cx, cy = int32(get(x, at_x + r * x_step)), int32(get(y, at_y + r * y_step))
            sign, field = add_fields(
                cx >> 31, cx & mask_, (cy >> 31) ^ flip_, cy & mask_, table, last_, mask_
            )
            put(out, unit * width + r, code_of(sign, field, mask_))
    return 0


@kernel
def mul(
    x: _I16, y: _I16, out: _I16, form: _I64, bias: int, mask: int, start: int, stop: int
) -> int:
    """Store ``out = x y``, broadcast as in :func:`add`."""
    bias_, mask_ = int32(bias), int32(mask)
    columns, width, x_step, y_step = form[1], form[2], form[5], form[8]
    for unit in range(start, stop):
        p, q = unit // columns, unit % columns
        at_x, at_y = p * form[3] + q * form[4], p * form[6] + q * form[7]
        for r in range(width):
            cx, cy = int32(get(x, at_x + r * x_step)), int32(get(y, at_y + r * y_step))
            field = mul_fields(cx & mask_, cy & mask_, bias_, mask_)
            put(out, unit * width + r, code_of((cx ^ cy) >> 31, field, mask_))
    return 0
