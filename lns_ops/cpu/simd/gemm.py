"""Matrix products on 16-bit vector lanes: exact, 32 multiply-accumulates at a time, no gathers.

Words. A signed logarithm is one int16, ``w = u (log - top - 1) + s``. ``u`` is a power of two that
leaves room for the sign bit ``s`` (:mod:`lns_ops.cpu.simd.piecewise_avx512`), and ``top`` is an
upper bound of all results of the call, so words are negative. The larger of two words is the larger
magnitude with its sign. A product is one addition, because ``y`` is packed twice, with its sign and
with the sign flipped, and a row of ``x`` selects one of the two. 32 products take about 23
instructions at f = 6 and 26 at f = 7 with AVX-512 (:mod:`lns_ops.cpu.simd.avx512`), and 68 and 87
with AVX2 (:mod:`lns_ops.cpu.simd.avx2`), which has half the width and no large tables.

Zero is the lowest word, -32768. Products with zero stay there by saturation, and so does the sum of
words that cancel. Sums of zeros may rise by a few octaves (the *zone*) before the end of a block,
where :func:`~lns_ops.cpu.simd.avx512.settle` resets them. All words of nonzero values are above the
zone by more than the length of the G tables, so a zero never changes a sum.

All this must fit into 32,768 words, and the accumulator's limits must be out of reach. :func:`plan`
decides this from the smallest and largest logarithms of the operands. It always holds for lns12,
and for lns16 if the products span less than about 90 octaves; otherwise the caller uses gathers,
which support any range.

Layout: ``y`` is stored in panels of 256 columns (8 vectors), with both signs for each step of k.
``x`` is stored as lists of its nonzero elements per row and block, so zeros cost nothing. A unit of
work is a panel times 8 rows, block by block, so that the rows share a block of the panel in the
nearest caches. Panels with at most 128 or 32 columns at the right edge use fewer vectors.

Shapes: M rows, K the reduced index, N columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import int16, int32
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, put, scratch
from lns_ops.cpu.compiler.object_cache import Kernel, kernel
from lns_ops.cpu.simd import avx2, avx512
from lns_ops.cpu.simd.avx512 import PANEL
from lns_ops.cpu.simd.piecewise_avx2 import ENTRIES, pieces
from lns_ops.cpu.simd.piecewise_avx512 import CANCEL_WORD, LANES, segments
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import gaussian_tables
from lns_ops.spec.reference import ACC_MAX, ACC_MIN, BLOCK

_STEP = 2 * PANEL

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]


class WordLayout(NamedTuple):
    """The map from one call's logarithms to words.

    Attributes:
        unit_shift: log2 of the unit.
        x_top: field of ``x`` whose word is 0.
        y_top: field of ``y`` whose word would be 0.
        top_field: field (of the result's format, unclamped) of a result word of 0.
        zone: words below it are zero.
        constants: rows of :mod:`lns_ops.cpu.simd.avx512`, int16 (ROWS * 32,), and the tables of
            :mod:`lns_ops.cpu.simd.avx2`.
        extra: additional argument of the addition: a mask for AVX-512, the address of the tables
            for AVX2.
        mapped: which form to use: None for direct, True for mapped (the type selects the compiled
            kernel).
        kernel: the product.
    """

    unit_shift: int
    x_top: int
    y_top: int
    top_field: int
    zone: int
    constants: _I16
    extra: int
    mapped: bool | None
    kernel: Kernel


def _bytes_as_words(low_then: NDArray[Any]) -> _I16:
    """Return 64 bytes as 32 lanes."""
    return np.ascontiguousarray(low_then.astype(np.uint8)).view(np.int16)


def _zone(fraction_bits: int, unit_shift: int) -> int:
    """Return the word below which all words are zero.

    It is above the lowest word by as much as a block of sums of zeros can rise.
    """
    growth = 6 * (1 << fraction_bits) + BLOCK // 2 + 1
    return (growth << unit_shift) + 2 - (1 << 15)


@lru_cache(maxsize=8)
def _constants(fraction_bits: int) -> _I16:
    """Return the rows of constants that :mod:`lns_ops.cpu.simd.avx512` names."""
    pieces = segments(fraction_bits)
    shape = pieces.shape
    rows = np.zeros((avx512.ROWS, 32), np.int64)
    # For multishift: byte i of a register gets eight bits of its own 16-bit lane, starting at bit
    # `window`.
    lanes = np.arange(64) % 8 // 2 * 16 + max(shape.window, 0)
    rows[avx512.REACH] = shape.reach
    rows[avx512.ONE] = 1
    rows[avx512.SCALE] = shape.scale
    rows[avx512.SPREAD] = _bytes_as_words(lanes) if shape.window >= 0 else 0x0101
    for row, table in ((avx512.OFFSET_LOW, pieces.offset), (avx512.SLOPE_LOW, pieces.slope)):
        rows[row], rows[row + 1] = _bytes_as_words(table & 0xFF), _bytes_as_words(table >> 8 & 0xFF)
    rows[avx512.EXACT_0], rows[avx512.EXACT_1] = pieces.exact[:32], pieces.exact[32:]
    rows[avx512.TO_DISTANCE] = 1 << (16 - shape.unit_shift)
    rows[avx512.NEAR] = pieces.near << shape.unit_shift
    rows[avx512.UNITS] = -(1 << shape.unit_shift)
    rows[avx512.CELL_PLUS], rows[avx512.CELL_MINUS] = (
        _bytes_as_words(cells) for cells in pieces.cell_of
    )
    rows[avx512.NOTHING] = CANCEL_WORD
    rows[avx512.ZONE] = _zone(fraction_bits, shape.unit_shift)
    return rows.astype(np.int16).reshape(-1)


def _registers(table: _I64) -> _I16:
    """Return a table of bytes as registers of 32 bytes, each with 16 bytes of the table twice.

    All registers except the first are XORed with the one before.
    """
    parts = (table & 0xFF).astype(np.uint8).reshape(-1, 1, ENTRIES)
    parts[1:] ^= parts[:-1].copy()
    return np.ascontiguousarray(np.repeat(parts, 2, axis=1)).reshape(-1).view(np.int16)


@lru_cache(maxsize=8)
def _constants_avx2(fraction_bits: int) -> _I16:
    """Return the rows that :mod:`lns_ops.cpu.simd.avx2` uses, and its tables."""
    made = pieces(fraction_bits)
    cut, unit = made.cut, 1 << made.cut.unit_shift
    rows = np.zeros((avx512.ROWS, 32), np.int64)
    values = {
        avx512.REACH: cut.reach, avx512.ONE: 1, avx512.SCALE: cut.scale,
        avx2.MULTIPLIER: cut.multiplier, avx512.UNITS: -unit, avx512.NOTHING: CANCEL_WORD,
        avx512.ZONE: _zone(fraction_bits, cut.unit_shift),
    }  # fmt: skip
    for row, value in values.items():
        rows[row] = value
    # (D + 222 + 1 >> 1) is d + 112 for D = 2 d + 1, and at least 128 if d >= 16; for D = 4 d + 1, D
    # is halved before.
    masks = [
        np.full(ENTRIES, value)
        for value in (
            15 if cut.large else 14,
            ENTRIES,
            *((222, 0) if cut.unit_shift == 1 else (0, 222)),
        )
    ]
    # A large cut has a register of coarse windows for each sign; in a small cut both alternate in
    # one register.
    coarse = [
        t.reshape(-1) if cut.large else np.append(t[::-1, :8].T, np.zeros(ENTRIES, np.int64))
        for t in (made.base, made.mask)
    ]
    words = (
        part for table in (made.change, made.offset, made.slope) for part in (table, table >> 8)
    )
    tables = [*masks, *coarse, *words]
    return np.concatenate(
        [rows.astype(np.int16).reshape(-1), *(_registers(table) for table in tables)]
    )


class _Method(NamedTuple):
    """The addition that a plan uses, with the length of its tables in words."""

    unit_shift: int
    length: int
    constants: _I16
    extra: int
    mapped: bool | None
    kernel: Kernel


@lru_cache(maxsize=16)
def _method(fraction_bits: int, use_avx2: bool) -> _Method:
    if use_avx2:
        made, constants = pieces(fraction_bits), _constants_avx2(fraction_bits)
        large = True if made.cut.cells > 32 else None
        address = constants[avx512.ROWS * LANES :].ctypes.data
        return _Method(made.cut.unit_shift, made.length, constants, address, large, avx2.matmul)
    shape = segments(fraction_bits).shape
    mapped = True if shape.window >= 0 else None
    return _Method(
        shape.unit_shift,
        shape.reach,
        _constants(fraction_bits),
        avx512.HIGH_BYTES,
        mapped,
        avx512.matmul,
    )


def _bounds(
    x_span: tuple[int, int], y_span: tuple[int, int], K: int, fmt: LNSFormat
) -> tuple[int, int]:
    """Return the smallest and largest logarithm that products and sums can have.

    The spans are the ranges of the operands' nonzero fields, inclusive. A sum is below its larger
    term by at most ``G-(1)``, so block totals and their sum are below the smallest product by at
    most ``2 G-(1)``. A sum of n terms exceeds the largest by at most log2(n) octaves, plus half an
    ulp of rounding per term.
    """
    octave, blocks = 1 << fmt.fraction_bits, -(-K // BLOCK)
    growth = 6 * octave + BLOCK // 2 + (blocks - 1).bit_length() * octave + (blocks + 1) // 2
    lowest = (
        x_span[0] + y_span[0] - 2 * fmt.bias + 2 * int(gaussian_tables(fmt.fraction_bits).minus[1])
    )
    return lowest, x_span[1] + y_span[1] - 2 * fmt.bias + growth


def within_accumulator(
    x_span: tuple[int, int], y_span: tuple[int, int], K: int, fmt: LNSFormat
) -> bool:
    """Return whether the accumulator's limits are out of reach, so that kernels can skip them."""
    lowest, highest = _bounds(x_span, y_span, K, fmt)
    return lowest >= ACC_MIN and highest <= ACC_MAX


def plan(
    x_span: tuple[int, int], y_span: tuple[int, int], K: int, fmt: LNSFormat, use_avx2: bool = False
) -> WordLayout | None:
    """Return the word layout for operands with these spans, or None if 16 bits are not enough.

    The spans are the ranges of the operands' nonzero fields, inclusive. ``use_avx2`` selects the
    instruction set.
    """
    f = fmt.fraction_bits
    method = _method(f, use_avx2)
    zone = _zone(f, method.unit_shift)
    lowest, highest = _bounds(x_span, y_span, K, fmt)
    if not within_accumulator(x_span, y_span, K, fmt):
        return None
    if zone + method.length + (highest - lowest + 3 << method.unit_shift) > 0:
        return None
    return WordLayout(
        unit_shift=method.unit_shift, x_top=x_span[1], y_top=highest + 1 + 2 * fmt.bias - x_span[1],
        top_field=highest + 1 + fmt.bias, zone=zone, constants=method.constants, extra=method.extra,
        mapped=method.mapped, kernel=method.kernel,
    )  # fmt: skip


@kernel
def pack_x(
    x: _I16, K: int, mask: int, top: int, unit_shift: int, block: int, counts: _I32, steps: _I32,
    words: _I32, start: int, stop: int,
) -> int:  # fmt: skip
    """Pack the nonzero elements of rows ``start .. stop`` to the front of each block's place.

    ``counts`` (M, blocks) gets their numbers; ``steps`` the offsets into a panel, and ``words`` the
    word twice (both (M, K)).
    """
    mask_, top_, shift_ = int32(mask), int32(top), int32(unit_shift)
    blocks = (K + block - 1) // block
    block_steps, block_words = scratch(block, int32), scratch(block, int32)
    for i in range(start, stop):
        for b in range(blocks):
            first = i * K + b * block
            length = min(block, K - b * block)
            zeros = int32(0)
            for k in range(length):
                code = int32(get(x, first + k))
                field = int32(code & mask_)
                word = int32(int32(field - top_) << shift_)
                put(
                    block_steps,
                    k,
                    int32(
                        int32((b * block + k) * _STEP) + (int32(PANEL) if code < 0 else int32(0))
                    ),
                )
                # The low bit marks zeros until they are dropped; words of x are multiples of the
                # unit.
                put(
                    block_words,
                    k,
                    int32((word & 0xFFFE) | (word << 16) | (int32(1) if field == 0 else int32(0))),
                )
                zeros += int32(1) if field == 0 else int32(0)
            place = 0
            if zeros == 0:
                for k in range(length):
                    put(steps, first + k, get(block_steps, k))
                    put(words, first + k, get(block_words, k))
                place = length
            else:
                for k in range(length):
                    put(steps, first + place, get(block_steps, k))
                    put(words, first + place, get(block_words, k))
                    place += 1 - (get(block_words, k) & 1)
            counts[i * blocks + b] = place
    return 0


@kernel
def pack_y(
    y: _I16,
    K: int,
    N: int,
    mask: int,
    top: int,
    unit_shift: int,
    panels: _I16,
    start: int,
    stop: int,
) -> int:
    """Store the words of panels ``start .. stop``: (panel, K, sign plane, 256).

    Columns beyond N are zero.
    """
    mask_, top_, shift_ = int32(mask), int32(top), int32(unit_shift)
    for panel in range(start, stop):
        width = min(PANEL, N - panel * PANEL)
        for k in range(K):
            source, target = k * N + panel * PANEL, (panel * K + k) * _STEP
            for j in range(width):
                code = int32(get(y, source + j))
                field = int32(code & mask_)
                word = int32(int32(field - top_) << shift_)
                sign = int32(1) if code < 0 else int32(0)
                put(
                    panels,
                    target + j,
                    int16(int32(word + sign)) if field > 0 else int16(CANCEL_WORD),
                )
                put(
                    panels,
                    target + PANEL + j,
                    int16(int32(word + 1 - sign)) if field > 0 else int16(CANCEL_WORD),
                )
            for j in range(width, PANEL):
                put(panels, target + j, int16(CANCEL_WORD))
                put(panels, target + PANEL + j, int16(CANCEL_WORD))
    return 0
