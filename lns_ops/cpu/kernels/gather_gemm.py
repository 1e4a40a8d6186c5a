"""Compiled sums and matrix products in the contract's order, for any format on any processor.

Word: a signed logarithm is one 32-bit integer ``w = 4 log + s`` (``s`` = 1 for negative); zero is a
word far below all others (``NOTHING``). The larger of two words is then the larger magnitude *with
its sign*, and their distance is ``4 |d| + {-1, 0, 1}``, which is odd exactly if the signs differ.
One table indexed by that distance holds ``4 G+`` at ``4 d``, and ``4 G-`` at ``4 d - 1`` and ``4 d
+ 1``. So an addition is max, min, subtract, gather, add, without a case for the signs. Exact
cancellation has distance 1, where the entry moves the result below every logarithm.

The accumulator's limits are applied after each addition: logarithms below ``ACC_MIN`` become
NOTHING, logarithms above ``ACC_MAX`` saturate. If a call's operands cannot reach the limits
(``clamp`` false, decided by the caller from the largest and smallest logarithms), this step is
skipped; results are the same.

Layout: in products ``y`` is widened once to words, a row of ``x`` is a scalar per step (zeros cost
one branch), and a strip of ``STRIP`` columns of accumulators stays in the first-level cache.

Shapes: M rows, N columns, K the reduced index. Everything is contiguous; ranges ``start .. stop``
count work units.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import int16, int32, int64, uint16
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, look_up, put, scratch
from lns_ops.cpu.compiler.object_cache import kernel
from lns_ops.spec.gaussian_log import CANCEL, gaussian_tables
from lns_ops.spec.reference import ACC_MAX, ACC_MIN

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]

STRIP = 128
_COUNTABLE = 1 << 14
NOTHING = -(1 << 28)
_CANCELLED = -(1 << 29)
LOWEST, HIGHEST = 4 * ACC_MIN, 4 * ACC_MAX
"""The accumulator's limits as words."""


@lru_cache(maxsize=32)
def distance_table(fraction_bits: int) -> _I32:
    """Return ``4 G(distance)`` by the distance of two words, int32.

    The last entry is 0, and is used for all larger distances.
    """
    plus, minus = gaussian_tables(fraction_bits)
    table = np.zeros(4 * len(plus), np.int32)
    minus_words = np.where(minus == CANCEL, _CANCELLED, 4 * minus.astype(np.int64))
    table[0::4] = 4 * plus
    table[1::4] = minus_words
    table[3::4] = np.append(minus_words[1:], 0)
    return table


@helper
def word_of_code(code: Any, bias: Any, mask: Any) -> Any:
    """Return the word of a code."""
    field = int32(int32(code) & mask)
    return int32((int32(field - bias) << 2) + int32(code < 0)) if field > 0 else int32(NOTHING)


@helper
def code_of_word(word: Any, bias: Any, mask: Any) -> Any:
    """Return the code of a word: saturated above the format's range, zero below it."""
    field = int32((word >> 2) + bias)
    stored = int32(min(field, mask) | (~mask if word & 1 else int32(0)))
    return int16(stored) if field > 0 else int16(0)


@helper
def add_words(x: Any, y: Any, table: _I32, last: Any) -> Any:
    """Return the sum of two words, unclamped."""
    larger, smaller = max(x, y), min(x, y)
    return int32(larger + look_up(table, min(int32(larger - smaller), last)))


@helper
def clamp_word(word: Any, lowest: Any, highest: Any) -> Any:
    """Apply the accumulator's limits, given as words of positive numbers."""
    high = int32(highest | (word & 1))
    word = high if word > high else word
    return int32(NOTHING) if word < lowest else word


@kernel
def widen(x: _I16, out: _I32, bias: int, mask: int, start: int, stop: int) -> int:
    """Convert codes to words."""
    for i in range(start, stop):
        put(out, i, word_of_code(get(x, i), int32(bias), int32(mask)))
    return 0


@kernel
def narrow(x: _I32, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """Convert words to codes."""
    for i in range(start, stop):
        put(out, i, code_of_word(get(x, i), int32(bias), int32(mask)))
    return 0


@kernel
def survey(x: _I16, found: _I64, mask: int, start: int, stop: int) -> int:
    """Store in ``found`` the smallest and largest field of the nonzero codes, and their number.

    If all codes are zero, the fields are 2^16 and 0.
    """
    low, high, nonzero, mask_ = uint16(0xFFFF), int16(0), int64(0), int16(mask)
    for first in range(start, stop, _COUNTABLE):
        count = int16(0)  # 16 bits throughout, so that a vector holds 32 codes
        for i in range(first, min(stop, first + _COUNTABLE)):
            field = int16(get(x, i) & mask_)
            high = max(high, field)
            low = min(low, uint16(field - 1))  # minus one, so that zero becomes the largest
            count = int16(count + (int16(1) if field != 0 else int16(0)))
        nonzero += int64(count)
    found[0], found[1], found[2] = int64(low) + 1, high, nonzero
    return 0


@kernel
def sum_columns(
    x: _I16, out: _I32, K: int, inner: int, table: _I32, bias: int, mask: int, lowest: int,
    highest: int, block: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Sum a flat (outer, K, inner) array over K into words (outer, inner).

    A unit is one strip of one outer index.
    """
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    bias_, mask_ = int32(bias), int32(mask)
    strips = (inner + STRIP - 1) // STRIP
    total, part = scratch(STRIP, int32), scratch(STRIP, int32)
    for unit in range(start, stop):
        first = unit % strips * STRIP
        width = min(STRIP, inner - first)
        origin = unit // strips * K * inner + first
        total[:] = NOTHING
        for k0 in range(0, K, block):
            part[:] = NOTHING
            for k in range(k0, min(K, k0 + block)):
                row = origin + k * inner
                for j in range(width):
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
            for j in range(width):
                put(
                    total,
                    j,
                    clamp_word(add_words(get(total, j), get(part, j), table, last), low, high),
                )
        place = unit // strips * inner + first
        for j in range(width):
            put(out, place + j, get(total, j))
    return 0


@kernel
def sum_rows(
    x: _I16,
    out: _I32,
    K: int,
    table: _I32,
    bias: int,
    mask: int,
    lowest: int,
    highest: int,
    block: int,
    start: int,
    stop: int,
) -> int:
    """Sum the blocks of a flat (rows, K) array into words (blocks, rows).

    A unit is a strip of STRIP (row, block) pairs. Additions within one row depend on each other, so
    STRIP of them are transposed into columns and run side by side.
    """
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    bias_, mask_ = int32(bias), int32(mask)
    blocks = (K + block - 1) // block
    rows = x.size // K
    part, terms = scratch(STRIP, int32), scratch(block * STRIP, int32)
    for unit in range(start, stop):
        first = unit * STRIP
        width = min(STRIP, rows * blocks - first)
        part[:] = NOTHING
        longest = 0
        for j in range(width):
            k0 = (first + j) // rows * block
            origin = (first + j) % rows * K + k0
            length = min(block, K - k0)
            longest = max(longest, length)
            for k in range(length):
                put(terms, k * STRIP + j, word_of_code(get(x, origin + k), bias_, mask_))
            for k in range(length, block):
                put(terms, k * STRIP + j, NOTHING)
        for k in range(longest):
            for j in range(width):
                put(
                    part,
                    j,
                    clamp_word(
                        add_words(get(part, j), get(terms, k * STRIP + j), table, last), low, high
                    ),
                )
        for j in range(width):
            put(out, first + j, get(part, j))
    return 0


@kernel
def sum_totals(
    x: _I32, out: _I32, rows: int, table: _I32, lowest: int, highest: int, start: int, stop: int
) -> int:
    """Add words (blocks, rows) over the blocks, ascending; a unit is one row."""
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    for j in range(start, stop):
        put(out, j, NOTHING)
    for b in range(x.size // rows):
        for j in range(start, stop):
            put(
                out,
                j,
                clamp_word(add_words(get(out, j), get(x, b * rows + j), table, last), low, high),
            )
    return 0


@kernel
def matmul(
    x: _I32, y: _I32, out: _I16, K: int, N: int, table: _I32, bias: int, mask: int, lowest: int,
    highest: int, clamp: bool, block: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Multiply words (M, K) by words (K, N) into codes (M, N); a unit is one strip of one row."""
    last, low, high = int32(table.size - 1), int32(lowest), int32(highest)
    rows = x.size // max(K, 1)
    total, part = scratch(STRIP, int32), scratch(STRIP, int32)
    for unit in range(start, stop):
        i, first = unit % rows, unit // rows * STRIP
        width = min(STRIP, N - first)
        total[:] = NOTHING
        for k0 in range(0, K, block):
            part[:] = NOTHING
            for k in range(k0, min(K, k0 + block)):
                scalar = get(x, i * K + k)
                if scalar == NOTHING:
                    continue
                sign = int32(scalar & 1)
                scalar = int32(scalar - sign)
                row = k * N + first
                if clamp:
                    for j in range(width):
                        product = int32(int32(scalar + get(y, row + j)) ^ sign)
                        product = int32(NOTHING) if product < low else product
                        put(
                            part,
                            j,
                            clamp_word(add_words(get(part, j), product, table, last), low, high),
                        )
                else:
                    for j in range(width):
                        put(
                            part,
                            j,
                            add_words(
                                get(part, j),
                                int32(int32(scalar + get(y, row + j)) ^ sign),
                                table,
                                last,
                            ),
                        )
            for j in range(width):
                settled = clamp_word(get(part, j), low, high)
                put(total, j, clamp_word(add_words(get(total, j), settled, table, last), low, high))
        for j in range(width):
            put(out, i * N + first + j, code_of_word(get(total, j), int32(bias), int32(mask)))
    return 0
