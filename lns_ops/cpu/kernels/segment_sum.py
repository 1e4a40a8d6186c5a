"""Compiled kernels with an index: table look-ups, and sums of terms with the same destination.

A table of results has ``2^bits`` entries, indexed by the low bits of a code. It stays in the first
or second cache level, so plain loads keep up with memory. The entry ``undefined`` marks arguments
without a value.

Sums by destination follow the contract: the terms of one destination in ascending order of their
position, in blocks of 64, then the block totals. Words, limits and their arithmetic are as in
:mod:`lns_ops.cpu.kernels.gather_gemm`.
"""

from __future__ import annotations

import numpy as np
from numba import int16, int32, int64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, look_up, put, scratch
from lns_ops.cpu.compiler.object_cache import kernel
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
def lookup(
    x: _I16, out: _I16, table: _I16, word: int, undefined: int, start: int, stop: int
) -> int:
    """Store ``out = table[x & word]``; return 1 if an entry is ``undefined``."""
    word_, undefined_ = int32(word), int16(undefined)
    bad = int32(0)
    for i in range(start, stop):
        value = look_up(table, int32(get(x, i)) & word_)
        bad |= int32(value == undefined_)
        put(out, i, value)
    return int(bad)


@kernel
def segment_sum(
    x: _I16, out: _I16, order: _I64, starts: _I64, table: _I32, width: int, bias: int, mask: int,
    lowest: int, highest: int, block: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store in row ``r`` of ``out`` (rows, width) the sum of its terms.

    Its terms are the rows ``order[starts[r] : starts[r + 1]]`` of ``x``; a unit is one row ``r``.
    """
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    bias_, mask_ = int32(bias), int32(mask)
    total, part = scratch(STRIP, int32), scratch(STRIP, int32)
    for r in range(start, stop):
        for first in range(0, width, STRIP):
            columns = min(STRIP, width - first)
            total[:columns] = NOTHING
            for k0 in range(get(starts, r), get(starts, r + 1), block):
                part[:columns] = NOTHING
                for k in range(k0, min(get(starts, r + 1), k0 + block)):
                    row = get(order, k) * width + first
                    for j in range(columns):
                        put(
                            part,
                            j,
                            clamp_word(
                                add_words(
                                    get(part, j),
                                    word_of_code(get(x, row + j), bias_, mask_),
                                    table,
                                    last,
                                ),
                                low,
                                high,
                            ),
                        )
                for j in range(columns):
                    put(
                        total,
                        j,
                        clamp_word(add_words(get(total, j), get(part, j), table, last), low, high),
                    )
            for j in range(columns):
                put(out, r * width + first + j, code_of_word(get(total, j), bias_, mask_))
    return 0


@kernel
def exact_sums(
    x: _I16, totals: _I64, highest: _I64, order: _I64, starts: _I64, rows: _I64, units: _I64,
    width: int, bias: int, mask: int, fraction_bits: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store exact sums of the terms of ``rows``, in units of 2^-30 of ``2^highest``.

    ``2^highest`` is the power of two at or below the largest term; a unit of work is one of
    ``rows``. :func:`lns_ops.spec.reference.exact_sum` is the specification.
    """
    bias_, mask_, f = int32(bias), int32(mask), int32(fraction_bits)
    peak, total = scratch(STRIP, int32), scratch(STRIP, int64)
    for n in range(start, stop):
        r = get(rows, n)
        for first in range(0, width, STRIP):
            columns = min(STRIP, width - first)
            peak[:columns] = 0
            total[:columns] = 0
            for k in range(get(starts, r), get(starts, r + 1)):
                row = get(order, k) * width + first
                for j in range(columns):
                    put(peak, j, max(get(peak, j), int32(get(x, row + j)) & mask_))
            for k in range(get(starts, r), get(starts, r + 1)):
                row = get(order, k) * width + first
                for j in range(columns):
                    code = int32(get(x, row + j))
                    log = int32((code & mask_) - bias_)
                    down = (int32(get(peak, j) - bias_) >> f) - (log >> f)
                    term = get(units, log & int32((1 << f) - 1)) >> min(down, int32(62))
                    term = term if (code & mask_) > 0 else int64(0)
                    put(total, j, get(total, j) + (-term if code < 0 else term))
            for j in range(columns):
                put(totals, n * width + first + j, get(total, j))
                put(highest, n * width + first + j, int64(int32(get(peak, j) - bias_) >> f))
    return 0
