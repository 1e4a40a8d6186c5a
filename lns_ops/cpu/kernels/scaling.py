"""Compiled kernels that round to a format with a power-of-two scale for each group of values, or to
saturating floats without a scale.

One call computes the largest magnitude of each group and the power of two that brings it under the
format's largest. Each value is multiplied by the power, rounded, and multiplied by its inverse. The
bits are the same as in :class:`lns_ops.formats.Scaled` with torch operations.

Values are rows of ``width``, divided into groups of ``length``; a row's last group may be shorter.
A unit of work is a row, unless noted. Kernels return 0, or 1 if a value is NaN or infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import float_of, get, helper, look_up, pattern_of, put
from lns_ops.cpu.compiler.object_cache import kernel
from lns_ops.cpu.kernels.elementwise import nearest_field

_I32 = NDArray[np.int32]


@helper
def largest_of(x: _I32, first: Any, end: Any) -> Any:
    """Return the bits of the largest magnitude of a group."""
    largest = int32(0)
    for i in range(first, end):
        largest = max(largest, int32(get(x, i) & int32(0x7FFFFFFF)))
    return largest


@helper
def power_below(largest: Any, limit: Any) -> Any:
    """Return the exponent of the largest power of two, of -126 to 126, whose product with
    ``largest`` is at most ``limit`` (both are bit patterns); 0 for a group of zeros.

    In a float's bits the fraction follows the exponent. So the difference of the exponents, minus
    one if the fraction of ``largest`` is larger, is the difference of the bits after one shift.
    """
    normal, raised = largest, int32(0)
    while int32(0) < normal < int32(0x800000):  # subnormal
        normal, raised = int32(normal << 1), int32(raised + 1)
    shift = int32((int32(limit - normal) >> 23) + raised)
    shift = max(min(shift, int32(126)), int32(-126))
    return shift if largest > 0 else int32(0)


@helper
def power_of_two(exponent: Any) -> Any:
    """Return ``2^exponent`` for exponents of -126 to 127."""
    return float_of(int32(int32(exponent + 127) << 23))


@helper
def scale_of(x: _I32, first: Any, end: Any, limit: Any) -> Any:
    """Return the power of two for a group, its inverse, and 1 if a value is not finite."""
    largest = largest_of(x, first, end)
    power = power_below(largest, limit)
    infinite = int32(largest >= int32(0x7F800000))
    return power_of_two(power), power_of_two(int32(-power)), infinite


@helper
def nearest_float(y: Any, mantissa_bits: Any, lowest: Any) -> Any:
    """Return the float with ``mantissa_bits`` that is nearest to a positive float32, ties to even;
    ``lowest`` is the exponent field of the smallest normal number."""
    field = max(int32(pattern_of(y) >> 23), lowest)
    # 1.5 * 2^23 steps: adding to it rounds to whole steps.
    rounder = float_of(int32(int32(int32(field - mantissa_bits) + 23) << 23) + int32(0x400000))
    return y + rounder - rounder


@kernel
def quantize_floats(
    x: _I32, out: _I32, limit: int, mantissa_bits: int, lowest: int, start: int, stop: int
) -> int:
    """Round to the nearest saturating floats without a scale; ``limit`` is the largest. A unit of
    work is a value."""
    limit_, m, lowest_ = int32(limit), int32(mantissa_bits), int32(lowest)
    largest = int32(0)
    for i in range(start, stop):
        pattern = get(x, i)
        magnitude = int32(pattern & int32(0x7FFFFFFF))
        largest = max(largest, magnitude)
        rounded = pattern_of(nearest_float(float_of(min(magnitude, limit_)), m, lowest_))
        put(out, i, int32(rounded | (pattern & int32(-0x80000000))))
    return int(largest >= int32(0x7F800000))


@kernel
def quantize_scaled_floats(
    x: _I32, out: _I32, width: int, length: int, limit: int, mantissa_bits: int, lowest: int,
    start: int, stop: int,
) -> int:  # fmt: skip
    """Round to the nearest float with ``mantissa_bits``."""
    limit_, m, lowest_ = int32(limit), int32(mantissa_bits), int32(lowest)
    bad = int32(0)
    for row in range(start, stop):
        for first in range(row * width, row * width + width, length):
            end = min(first + length, row * width + width)
            up, down, infinite = scale_of(x, first, end, limit_)
            bad |= infinite
            for i in range(first, end):
                pattern = get(x, i)
                y = float_of(int32(pattern & int32(0x7FFFFFFF))) * up
                rounded = pattern_of(nearest_float(y, m, lowest_) * down)
                put(out, i, int32(rounded | (pattern & int32(-0x80000000))))
    return int(bad)


@kernel
def quantize_scaled_logarithms(
    x: _I32, out: _I32, shift: _I32, table: _I32, width: int, length: int, limit: int,
    fraction_bits: int, bias: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Round to the nearest value of an LNS format; ``shift`` and ``table`` are the tables of
    ``encode32`` and ``decode32``."""
    limit_, f, mask_ = int32(limit), int32(fraction_bits), int32(mask)
    cell, low = int32(22 - fraction_bits), int32((1 << fraction_bits) - 1)
    encoding = int32(bias - (127 << fraction_bits))
    decoding = int32((128 << fraction_bits) - bias)
    bad = int32(0)
    for row in range(start, stop):
        for first in range(row * width, row * width + width, length):
            end = min(first + length, row * width + width)
            up, down, infinite = scale_of(x, first, end, limit_)
            bad |= infinite
            for i in range(first, end):
                pattern = get(x, i)
                y = pattern_of(float_of(int32(pattern & int32(0x7FFFFFFF))) * up)
                field = max(min(nearest_field(y, shift, cell, f, encoding), mask_), int32(0))
                put(out, i, int32(field | (pattern & int32(-0x80000000))))
            # A separate loop: with both tables in one loop the two take a third longer.
            for i in range(first, end):
                signed = get(out, i)
                field = int32(signed & int32(0x7FFFFFFF))
                log = int32(field + decoding)
                exponent = log >> f
                normal = exponent >= 2
                index = log & low if normal else int32(log + (low + 1))
                value = int32(
                    look_up(table, index) + (int32(exponent - 1) << 23 if normal else int32(0))
                )
                value = pattern_of(float_of(value) * down) | (signed & int32(-0x80000000))
                put(out, i, int32(value) if field > 0 else int32(0))
    return int(bad)
