"""Compiled elementwise kernels: LNS operations, encoding and decoding, on flat arrays.

Each kernel takes contiguous one-dimensional arrays, format constants as integers, and a range
``start .. stop``. The compiler vectorizes the loops, with one table look-up (a gather) for each
Gaussian logarithm. Tables and limits are arguments, never globals.

Explicit casts keep integers at 32 bits (numba would widen every sum to 64 bits and halve the vector
length).

Encoding and decoding are exact. A float32's fraction is divided into ``2^(f+1)`` cells, narrower
than the distance between two thresholds, so a cell has at most one. A single addition of
``shift[cell]`` carries into the rounded logarithm exactly if the fraction is above that threshold.
Everything is integer arithmetic on bit patterns, including subnormals, so the processor's
flush-to-zero mode has no effect.

The primitives work on (sign, field) pairs, which the fused updates
(:mod:`lns_ops.cpu.kernels.updates`) keep in registers between operations. The sign of a zero field
is meaningless: it affects no sum and packs to code 0.

Kernels return 0, or 1 if the wrapper must raise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int16, int32, int64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, look_up, put
from lns_ops.cpu.compiler.object_cache import kernel

_I16 = NDArray[np.int16]
_U16 = NDArray[np.uint16]
_I32 = NDArray[np.int32]


@helper
def add_fields(sx: Any, fx: Any, sy: Any, fy: Any, table: _I32, last: Any, mask: Any) -> Any:
    """Return the LNS sum of two (sign, field) pairs of int32, as a pair.

    A sign is 0 or -1; field 0 is zero.
    """
    larger, smaller = max(fx, fy), min(fx, fy)
    distance = min(int32(larger - smaller), last)
    index = int32(distance + ((sx ^ sy) & int32(last + 1)))
    looked_up = look_up(table, index)  # unconditional, because a branch would prevent vectorization
    correction = looked_up if smaller > 0 else int32(0)
    field = max(min(int32(larger + correction), mask), int32(0))
    return (sx if fx >= fy else sy), field


@helper
def add_fields_stochastic(
    sx: Any, fx: Any, sy: Any, fy: Any, bits: Any, table: _I32, last: Any, mask: Any
) -> Any:
    """Return :func:`add_fields` rounded at random by 16 uniform ``bits``.

    ``table`` has 16 bits below the ulp.
    """
    larger, smaller = max(fx, fy), min(fx, fy)
    distance = min(int32(larger - smaller), last)
    looked_up = int32(look_up(table, int32(distance + ((sx ^ sy) & int32(last + 1)))) + bits) >> 16
    correction = looked_up if smaller > 0 else int32(0)
    field = max(min(int32(larger + correction), mask), int32(0))
    return (sx if fx >= fy else sy), field


@helper
def mul_fields(fx: Any, fy: Any, bias: Any, mask: Any) -> Any:
    """Return the field of a product; the sign is the XOR of the signs."""
    field = max(min(int32(int32(fx + fy) - bias), mask), int32(0))
    return field if min(fx, fy) > 0 else int32(0)


@helper
def code_of(sign: Any, field: Any, mask: Any) -> Any:
    """Join a sign (0 or -1) and a field; a zero field gives code 0 for both signs."""
    return int16(int32(field | (sign & ~mask))) if field > 0 else int16(0)


@kernel
def add(
    x: _I16, y: _I16, out: _I16, table: _I32, last: int, mask: int, flip: int, start: int, stop: int
) -> int:
    """Store ``out = x + y``, or ``x - y`` with ``flip = -1``."""
    last_, mask_, flip_ = int32(last), int32(mask), int32(flip)
    for i in range(start, stop):
        cx, cy = int32(get(x, i)), int32(get(y, i))
        sign, field = add_fields(
            cx >> 31, cx & mask_, (cy >> 31) ^ flip_, cy & mask_, table, last_, mask_
        )
        put(out, i, code_of(sign, field, mask_))
    return 0


@kernel
def repeat(x: _I16, out: _I16, length: int, start: int, stop: int) -> int:
    """Fill ``out`` with runs of ``length`` equal codes, one run for each code of ``x`` in turn."""
    size, first = x.size, start
    while length == 1 and first < stop:
        at = first % size
        count = min(size - at, stop - first)
        for i in range(count):
            put(out, first + i, get(x, at + i))
        first += count
    for r in range(first, stop):
        code = get(x, r % size)
        for i in range(r * length, r * length + length):
            put(out, i, code)
    return 0


@kernel
def mul(x: _I16, y: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """Store ``out = x y``."""
    bias_, mask_ = int32(bias), int32(mask)
    for i in range(start, stop):
        cx, cy = int32(get(x, i)), int32(get(y, i))
        put(
            out,
            i,
            code_of((cx ^ cy) >> 31, mul_fields(cx & mask_, cy & mask_, bias_, mask_), mask_),
        )
    return 0


@kernel
def div(x: _I16, y: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """Store ``out = x / y``; return 1 if a ``y`` is zero."""
    bias_, mask_ = int32(bias), int32(mask)
    bad = int32(0)
    for i in range(start, stop):
        cx, cy = int32(get(x, i)), int32(get(y, i))
        fx, fy = cx & mask_, cy & mask_
        bad |= int32(fy == 0)
        field = max(min(int32(int32(fx - fy) + bias_), mask_), int32(0))
        put(out, i, code_of((cx ^ cy) >> 31, field if fx > 0 else int32(0), mask_))
    return int(bad)


@kernel
def sqrt(x: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """Store ``out = sqrt(x)``, half the logarithm rounded half to even.

    Return 1 if an ``x`` is negative.
    """
    bias_, mask_ = int32(bias), int32(mask)
    bad = int32(0)
    for i in range(start, stop):
        field = int32(get(x, i)) & mask_
        bad |= int32((get(x, i) < 0) & (field > 0))
        log = int32(field - bias_)
        half = log >> 1
        rounded = int32(int32(half + (log & half & 1)) + bias_)
        put(out, i, int16(rounded) if field > 0 else int16(0))
    return int(bad)


@helper
def nearest_field(magnitude: Any, shift: _I32, down: Any, f: Any, offset: Any) -> Any:
    """Return the field nearest to a positive float32's bits, not yet limited to the range."""
    # Subnormals of 2^-127 and 2^-128 are shifted by one and two bits; smaller ones are below every
    # format.
    once, twice = (
        int32(int32(magnitude << 1) - int32(1 << 23)),
        int32(int32(magnitude << 2) - int32(2 << 23)),
    )
    subnormal = once if magnitude >= int32(0x400000) else twice
    normal = magnitude if magnitude >= int32(0x800000) else subnormal
    fraction = int32(normal & int32(0x7FFFFF))
    rounded = int32(fraction + look_up(shift, int32(fraction >> down))) >> down
    return int32(int32(int32((normal >> 23) << f) + rounded) + offset)


@kernel
def encode32(
    x: _I32, out: _I16, shift: _I32, fraction_bits: int, bias: int, mask: int, start: int, stop: int
) -> int:
    """Store the codes of float32 bit patterns ``x``; return 1 if one is NaN or infinite."""
    mask_, f = int32(mask), int32(fraction_bits)
    down = int32(22 - fraction_bits)
    offset = int32(bias - (127 << fraction_bits))
    largest = int32(0)
    for i in range(start, stop):
        pattern = get(x, i)
        magnitude = int32(pattern & int32(0x7FFFFFFF))
        largest = max(largest, magnitude)
        field = nearest_field(magnitude, shift, down, f, offset)
        # Zero also comes out below the range. A conditional expression would be a branch and
        # prevent vectorization.
        put(out, i, code_of(pattern >> 31, max(min(field, mask_), int32(0)), mask_))
    return int(largest >= int32(0x7F800000))


@kernel
def encode32_stochastic(
    x: _I32, bits: _U16, out: _I16, base: _I32, mantissas: _I32, reciprocals: NDArray[np.int64],
    fraction_bits: int, bias: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store the codes of finite float32 bit patterns ``x``, rounded at random.

    ``base`` holds the last significand at or below each cell's start.
    """
    f, down = fraction_bits, 22 - fraction_bits
    for i in range(start, stop):
        pattern = get(x, i)
        magnitude = int64(pattern & int32(0x7FFFFFFF))
        # Subnormals of 2^-127 and 2^-128 are shifted by one and two bits; smaller ones are below
        # every format.
        shift = (
            int64(0) if magnitude >= 0x800000 else int64(1) if magnitude >= 0x400000 else int64(2)
        )
        magnitude = magnitude << shift
        fraction = magnitude & 0x7FFFFF
        j = int64(look_up(base, int32(fraction >> down)))
        j += int64(fraction >= int64(look_up(mantissas, int32(j + 1))))
        chance = (fraction - int64(look_up(mantissas, int32(j)))) * look_up(
            reciprocals, int32(j)
        ) >> 24
        field = (
            (((magnitude >> 23) - 127 - shift) << f)
            + j
            + ((chance + int64(get(bits, i))) >> 16)
            + bias
        )
        field = max(min(field, int64(mask)), int64(0)) if magnitude >= 0x800000 else int64(0)
        put(out, i, code_of(pattern >> 31, int32(field), int32(mask)))
    return 0


@kernel
def encode64(
    x: NDArray[np.int64], out: _I16, threshold: NDArray[np.int64], base: _I32, fraction_bits: int,
    bias: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store the codes of float64 bit patterns ``x``; return 1 if one is NaN or infinite.

    Subnormals underflow in every format.
    """
    mask_ = int64(mask)
    down = int64(51 - fraction_bits)
    offset = int64(bias - (1023 << fraction_bits))
    bad = int64(0)
    for i in range(start, stop):
        magnitude = get(x, i) & int64(0x7FFFFFFFFFFFFFFF)
        bad |= int64(magnitude >= int64(0x7FF0000000000000))
        fraction = magnitude & int64(0xFFFFFFFFFFFFF)
        cell = fraction >> down
        rounded = int64(look_up(base, int32(cell))) + int64(
            fraction > look_up(threshold, int32(cell))
        )
        field = ((magnitude >> 52) << fraction_bits) + rounded + offset
        field = max(min(field, mask_), int64(0))
        put(out, i, code_of(int32(get(x, i) >> 63), int32(field), int32(mask)))
    return int(bad)


@kernel
def decode32(
    x: _I16, out: _I32, table: _I32, fraction_bits: int, bias: int, mask: int, start: int, stop: int
) -> int:
    """Store the float32 bit patterns of the codes.

    ``table`` holds significand fields, then the subnormal results of two exponents.
    """
    mask_, f = int32(mask), int32(fraction_bits)
    low = int32((1 << fraction_bits) - 1)
    # counts logarithms from 2^-128, where exponent 0 and 1 are subnormal
    offset = int32((128 << fraction_bits) - bias)
    for i in range(start, stop):
        code = int32(get(x, i))
        field = code & mask_
        log = int32(field + offset)
        exponent = log >> f
        normal = exponent >= 2
        index = log & low if normal else int32(log + (low + 1))
        value = int32(look_up(table, index) + (int32(exponent - 1) << 23 if normal else int32(0)))
        value |= code & int32(-0x80000000)
        put(out, i, value if field > 0 else int32(0))
    return 0


@kernel
def decode64(
    x: _I16,
    out: NDArray[np.int64],
    table: NDArray[np.int64],
    fraction_bits: int,
    bias: int,
    mask: int,
    start: int,
    stop: int,
) -> int:
    """Store the float64 bit patterns of the codes.

    Every format is inside float64's normal range.
    """
    mask_ = int64(mask)
    low = int64((1 << fraction_bits) - 1)
    for i in range(start, stop):
        code = int64(get(x, i))
        field = code & mask_
        log = field - bias
        value = look_up(table, int32(log & low)) + ((log >> fraction_bits) << 52)
        value |= code & int64(-0x8000000000000000)
        put(out, i, value if field > 0 else int64(0))
    return 0
