"""Compiled kernel of matrix products whose running sums are rounded to a binary float.

It has the same bits as its definition, :func:`lns_ops.nn.products.rounded_sums.reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import double_of, get, helper, pattern_of_double, put, scratch
from lns_ops.cpu.compiler.object_cache import kernel

STRIP = 64
"""Number of result columns that a unit of work computes."""
LEVELS = 33
"""Maximum depth of an addition tree, for up to 2^32 terms."""
_F32 = NDArray[np.float32]


@helper
def rounded(v: Any, shift: Any, lowest: Any, limit: Any, beyond: Any) -> Any:
    """Return the nearest value of a binary float, ties to even, or ``beyond`` above ``limit``.

    ``shift`` is 52 minus the number of mantissa bits. ``lowest`` is the exponent field of the
    smallest normal number in float64.
    """
    field = int64((pattern_of_double(v) >> int64(52)) & int64(0x7FF))
    scale = int64(max(field, lowest) + shift)
    # 1.5 * 2^52 steps: adding to it rounds to whole steps.
    rounder = double_of(int64((scale << int64(52)) | int64(1 << 51)))
    near = v + rounder - rounder
    found = v if field == int64(0x7FF) else near
    found = beyond if found > limit else found
    return -beyond if found < -limit else found


@helper
def add_in_pairs(
    part: Any, waiting: Any, index: Any, width: Any, shift: Any, lowest: Any, limit: Any,
    beyond: Any,
) -> None:  # fmt: skip
    """Add the term ``index`` of each column to the waiting sums of equally many terms.

    A sum of ``2^level`` terms is waiting for each one bit of the binary number ``index``.
    """
    level = int64(0)
    while (int64(index) >> level) & int64(1):
        for j in range(width):
            v = get(waiting, level * STRIP + j) + get(part, j)
            put(part, j, rounded(v, shift, lowest, limit, beyond))
        level += int64(1)
    for j in range(width):
        put(waiting, level * STRIP + j, get(part, j))


@helper
def add_waiting(
    part: Any, waiting: Any, count: Any, width: Any, shift: Any, lowest: Any, limit: Any,
    beyond: Any,
) -> None:  # fmt: skip
    """Add the remaining waiting sums after ``count`` terms, the smallest first."""
    found = int64(0)
    for level in range(LEVELS):
        if (int64(count) >> int64(level)) & int64(1):
            for j in range(width):
                v = get(waiting, level * STRIP + j)
                if found:
                    v = rounded(v + get(part, j), shift, lowest, limit, beyond)
                put(part, j, v)
            found = int64(1)


@kernel
def matmul(
    x: _F32, y: _F32, out: _F32, M: int, K: int, N: int, shift: int, lowest: int, limit: int,
    beyond: int, block: int, promote: int, tree: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Multiply (M, K) by (K, N) into (M, N).

    ``limit`` and ``beyond`` are bit patterns of float64. A unit is one row of a strip of columns.
    """
    shift_, lowest_ = int64(shift), int64(lowest)
    limit_, beyond_ = double_of(int64(limit)), double_of(int64(beyond))
    total, part = scratch(STRIP, float64), scratch(STRIP, float64)
    waiting = scratch(STRIP * LEVELS, float64)
    for unit in range(start, stop):
        i, first = unit % M, unit // M * STRIP
        width = min(STRIP, N - first)
        for j in range(width):
            put(total, j, float64(0.0))
        for k0 in range(0, K, block):
            for j in range(width):
                put(part, j, float64(0.0))
            for k in range(k0, min(K, k0 + block)):
                factor = float64(get(x, i * K + k))
                for j in range(width):
                    before = float64(0.0) if tree == 1 else get(part, j)
                    v = before + factor * float64(get(y, k * N + first + j))
                    put(part, j, rounded(v, shift_, lowest_, limit_, beyond_))
                if tree == 1:
                    add_in_pairs(part, waiting, k - k0, width, shift_, lowest_, limit_, beyond_)
            if tree == 1:
                count = min(K, k0 + block) - k0
                add_waiting(part, waiting, count, width, shift_, lowest_, limit_, beyond_)
            for j in range(width):
                v = get(total, j) + get(part, j)
                if promote == 1:
                    put(total, j, float64(float32(v)))
                else:
                    put(total, j, rounded(v, shift_, lowest_, limit_, beyond_))
        for j in range(width):
            put(out, i * N + first + j, float32(get(total, j)))
    return 0
