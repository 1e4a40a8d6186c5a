"""Elementwise sums and reductions on 16-bit vector lanes, with operands in plain arrays.

The addition comes from :mod:`lns_ops.cpu.simd.avx512`. Words are as in matrix products
(:mod:`lns_ops.cpu.simd.gemm`), for products by one. :func:`plan` decides whether the operands'
logarithms fit 16 bits. If they do not, or on processors without vectors, the gathers of
:mod:`lns_ops.cpu.kernels.elementwise` and :mod:`lns_ops.cpu.kernels.gather_gemm` are used, with the
same results.

Chunks of 256 elements are processed at a time: codes become words in a few kilobytes of scratch
memory, eight vectors are added at once, and the results become codes again (or words of
:mod:`lns_ops.cpu.kernels.gather_gemm`, which adds the block totals of sums). Sums along a row
process 256 rows or blocks side by side: 32 x 32 codes at a time are transposed in registers, in
five stages of two-operand permutations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int16, int32, int64, types
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, intrinsic, put, scratch
from lns_ops.cpu.compiler.object_cache import Kernel, kernel
from lns_ops.cpu.kernels.gather_gemm import NOTHING
from lns_ops.cpu.simd import avx2, avx512, gemm, piecewise_avx2, piecewise_avx512
from lns_ops.cpu.simd.avx512 import LOWEST_WORD, PANEL, load, load_like, settle, store_all
from lns_ops.spec.format import LNSFormat

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]

LANES = 32
WORTH = 1 << 13
"""Number of elements above which a pass over the operands' range is worthwhile."""


@helper
def _to_words(
    x: Any, at: Any, words: Any, to: Any, count: Any, top: Any, unit: Any, mask: Any, flip: Any
) -> None:
    """Store the words of ``count`` codes, their signs flipped if ``flip`` is 1.

    ``top`` is the field whose word would be 0.
    """
    top_, unit_, mask_, flip_ = int16(top), int16(unit), int16(mask), int16(flip)
    for j in range(count):
        code = get(x, at + j)
        field = int16(code & mask_)
        sign = int16((int16(1) if code < 0 else int16(0)) ^ flip_)
        word = int16(int16(int16(field - top_) * unit_) + sign)
        put(words, to + j, word if field != 0 else int16(LOWEST_WORD))


@helper
def _from_words(
    words: Any, out: Any, to: Any, count: Any, zone: Any, top: Any, shift: Any, mask: Any
) -> None:
    """Store the codes of ``count`` words: saturated above the format's range, zero below it."""
    zone_, mask_, top_ = int16(zone), int16(mask), int16(top)
    above, below = int16(min(mask - top, 32767)), int16(max(-top, -32768))
    negative = int16(~mask)
    for j in range(count):
        word = get(words, j)
        # Shifts by constants stay in 16 bits; the units are 2 to 16.
        two, one = shift & 2, shift & 1
        ulps = (
            int16(word >> 4)
            if shift == 4
            else (
                int16(word >> 3)
                if two & (one << 1)
                else int16(word >> 2)
                if two
                else int16(word >> 1)
            )
        )
        field = mask_ if ulps >= above else int16(ulps + top_)
        code = int16(field | (negative if word & 1 else int16(0)))
        put(out, to + j, code if (word >= zone_) & (ulps > below) else int16(0))


@helper
def _to_gathers(words: Any, out: Any, to: Any, count: Any, zone: Any, top: Any, shift: Any) -> None:
    """Store words of :mod:`lns_ops.cpu.kernels.gather_gemm` (``4 log + s``).

    ``top`` is the logarithm whose word here would be 0.
    """
    for j in range(count):
        word = int32(get(words, j))
        log = int32((word >> int32(shift)) + int32(top))
        put(out, to + j, int32((log << 2) + (word & 1)) if word >= int32(zone) else int32(NOTHING))


@intrinsic
def _transpose(
    typing_context: Any, x: Any, origins: Any, first: Any, k: Any, out: Any, to: Any
) -> Any:
    """Store ``out[to + 256 j + i] = x[origins[first + i] + k + j]`` for i and j below 32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, places, start, column, target, base = args
        at = context.make_array(signature.args[1])(context, builder, places).data
        data = context.make_array(signature.args[0])(context, builder, source).data
        rows = []
        for i in range(LANES):
            origin = builder.load(builder.gep(at, [builder.add(start, ir.Constant(start.type, i))]))
            place = builder.gep(data, [builder.add(origin, column)])
            rows.append(builder.load(builder.bitcast(place, avx512.WORDS.as_pointer()), align=2))
        columns = _transposed(builder, rows)
        result = context.make_array(signature.args[4])(context, builder, target).data
        for j, value in enumerate(columns):
            place = builder.gep(result, [builder.add(base, ir.Constant(base.type, PANEL * j))])
            builder.store(value, builder.bitcast(place, avx512.WORDS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.none(x, origins, types.int64, types.int64, out, types.int64), generate


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 32 x 32 words: blocks of 16, 8, ... 1 are swapped across the diagonal."""
    size = LANES // 2
    while size:
        low = [j if not j & size else LANES + j - size for j in range(LANES)]
        high = [j + size if not j & size else LANES + j for j in range(LANES)]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), LANES), mask) for mask in (low, high)]
        for i in range(LANES):
            if not i & size:
                pair = rows[i], rows[i + size]
                rows[i], rows[i + size] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        size //= 2
    return rows


@helper
def _block(x: Any, origins: Any, terms: Any, lengths: Any, longest: Any, furthest: Any) -> None:
    """Store the codes of 256 blocks of at most 64 terms, term by term: ``terms[256 k + i]``.

    A shorter block is padded with zeros.
    """
    for k in range(0, longest, LANES):
        for first in range(0, PANEL, LANES):
            if furthest + k + LANES <= x.size:
                _transpose(x, origins, int64(first), int64(k), terms, int64(k * PANEL + first))
            else:
                for i in range(first, first + LANES):
                    for j in range(k, min(k + LANES, lengths[i])):
                        put(terms, j * PANEL + i, get(x, origins[i] + j))
    for i in range(PANEL):
        for j in range(lengths[i], longest):
            put(terms, j * PANEL + i, int16(0))


class _Kernels(NamedTuple):
    """The kernels for one kind of addition."""

    add: Kernel
    sum_rows: Kernel
    sum_columns: Kernel


def _kernels(addition: Callable[..., Any], suffix: str) -> _Kernels:
    @helper
    def constants_of(constants: Any) -> Any:
        return (
            load(constants, 0), load(constants, 32), load(constants, 64), load(constants, 96),
            load(constants, 128), load(constants, 160), load(constants, 192), load(constants, 224),
            load(constants, 256), load(constants, 288), load(constants, 320), load(constants, 352),
            load(constants, 384), load(constants, 416), load(constants, 448),
        )  # fmt: skip

    def add(
        x: _I16, y: _I16, out: _I16, constants: _I16, extra: int, mapped: bool | None, zone: int,
        top: int, shift: int, mask: int, flip: int, start: int, stop: int,
    ) -> int:  # fmt: skip
        """Store ``out = x + y``, or ``x - y`` with ``flip = 1``; a unit is 256 elements."""
        c, none = constants_of(constants), load(constants, 480)
        empty = (none, none, none, none, none, none, none, none)
        left, right = scratch(PANEL, int16), scratch(PANEL, int16)
        left[:] = LOWEST_WORD
        right[:] = LOWEST_WORD
        unit = 1 << shift
        for chunk in range(start, stop):
            at = chunk * PANEL
            count = min(PANEL, x.size - at)
            _to_words(x, at, left, 0, count, top, unit, mask, 0)
            _to_words(y, at, right, 0, count, top, unit, mask, flip)
            store_all(
                left,
                0,
                addition(load_like(left, 0, empty), load_like(right, 0, empty), c, extra, mapped),
            )
            _from_words(left, out, at, count, zone, top, shift, mask)
        return 0

    def sum_rows(
        x: _I16, out: _I32, K: int, constants: _I16, extra: int, mapped: bool | None, zone: int,
        top: int, shift: int, bias: int, mask: int, block: int, start: int, stop: int,
    ) -> int:  # fmt: skip
        """Sum as :func:`lns_ops.cpu.kernels.gather_gemm.sum_rows` does.

        A unit is 256 (row, block) pairs.
        """
        c, none, floor = constants_of(constants), load(constants, 480), load(constants, 512)
        empty = (none, none, none, none, none, none, none, none)
        terms, line, totals = (
            scratch(block * PANEL, int16),
            scratch(PANEL, int16),
            scratch(PANEL, int16),
        )
        origins, lengths = scratch(PANEL, int64), scratch(PANEL, int64)
        rows = x.size // K
        pairs = rows * ((K + block - 1) // block)
        for strip in range(start, stop):
            first = strip * PANEL
            longest, furthest = 0, 0
            row, k0 = first % rows, first // rows * block
            for i in range(PANEL):
                origins[i], lengths[i] = row * K + k0, min(block, K - k0)
                longest, furthest = max(longest, lengths[i]), max(furthest, origins[i])
                row += 1
                # the next block of the first row; at the very end the last block again
                if row == rows:
                    row, k0 = 0, min(k0 + block, (K - 1) // block * block)
            _block(x, origins, terms, lengths, longest, furthest)
            sums = empty
            for k in range(longest):
                _to_words(terms, k * PANEL, line, 0, PANEL, top, 1 << shift, mask, 0)
                sums = addition(sums, load_like(line, 0, sums), c, extra, mapped)
            store_all(totals, 0, settle(sums, floor, none))
            _to_gathers(totals, out, first, min(PANEL, pairs - first), zone, top - bias, shift)
        return 0

    def sum_columns(
        x: _I16, out: _I32, K: int, inner: int, constants: _I16, extra: int, mapped: bool | None,
        zone: int, top: int, shift: int, bias: int, mask: int, block: int, start: int, stop: int,
    ) -> int:  # fmt: skip
        """Sum as :func:`lns_ops.cpu.kernels.gather_gemm.sum_columns` does.

        A unit is 256 columns of one outer index.
        """
        c, none, floor = constants_of(constants), load(constants, 480), load(constants, 512)
        empty = (none, none, none, none, none, none, none, none)
        line, totals = scratch(PANEL, int16), scratch(PANEL, int16)
        line[:] = LOWEST_WORD
        strips = (inner + PANEL - 1) // PANEL
        for strip in range(start, stop):
            first = strip % strips * PANEL
            width = min(PANEL, inner - first)
            origin = strip // strips * K * inner + first
            totals[:] = LOWEST_WORD
            for k0 in range(0, K, block):
                count = min(block, K - k0)
                sums = empty
                for k in range(k0, k0 + count):
                    _to_words(x, origin + k * inner, line, 0, width, top, 1 << shift, mask, 0)
                    sums = addition(sums, load_like(line, 0, sums), c, extra, mapped)
                sums = addition(
                    load_like(totals, 0, empty), settle(sums, floor, none), c, extra, mapped
                )
                store_all(totals, 0, settle(sums, floor, none))
            _to_gathers(
                totals, out, strip // strips * inner + first, width, zone, top - bias, shift
            )
        return 0

    made = []
    for function in (add, sum_rows, sum_columns):
        function.__qualname__ = f"lanes_{function.__name__}{suffix}"
        made.append(kernel(function))
    return _Kernels(*made)


AVX512, AVX2 = _kernels(avx512.add, ""), _kernels(avx2.add, "_avx2")


def plan(
    spans: list[tuple[int, int]], K: int, fmt: LNSFormat, kernel: str
) -> tuple[_Kernels, gemm.WordLayout] | None:
    """Return kernels and words for sums of K operands, or None if only gathers are possible.

    Args:
        spans: smallest and largest field of each operand's nonzero codes.
        kernel: ``kernel`` of :func:`lns_ops.cpu.kernel_info`.
    """
    narrow = kernel == "simd avx2"
    if kernel == "gather" or not (piecewise_avx2 if narrow else piecewise_avx512).supported(
        fmt.fraction_bits
    ):
        return None
    span = min(low for low, _ in spans), max(high for _, high in spans)
    if span[0] > span[1]:  # all codes are zero
        return None
    made = gemm.plan(span, (fmt.bias, fmt.bias), K, fmt, narrow)
    return None if made is None else (AVX2 if narrow else AVX512, made)
