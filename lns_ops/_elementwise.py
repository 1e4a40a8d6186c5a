"""Compiled elementwise kernels: LNS operations, encoding and decoding on flat arrays.

Each kernel takes contiguous one-dimensional arrays, format constants as integers, and a range ``start .. stop``; the compiler
turns the loops into vector code, with one table look-up (a gather) where a Gaussian logarithm is needed. Tables and limits
are arguments, never globals: numba's on-disk cache does not notice that a value in another module has changed.

Integers are kept at 32 bits by explicit casts (numba would widen every sum to 64 and halve the vector).

Encoding and decoding are exact. A float32's fraction is cut into ``2^(f+1)`` cells, narrower than the distance of two
thresholds, so a cell holds at most one; a single addition of ``shift[cell]`` carries into the rounded logarithm exactly when
the fraction is above that threshold. Subnormal inputs are normalised by an integer-to-float conversion, and subnormal outputs
come from the table, so the processor's flush-to-zero mode makes no difference.

Kernels return 0, or 1 where the wrapper must raise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int16, int32, int64, types
from numpy.typing import NDArray

from lns_ops._jit import intrinsic, kernel

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The bit pattern of a float32 as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@kernel
def add_fields(sx: Any, fx: Any, sy: Any, fy: Any, table: _I32, last: Any, mask: Any) -> Any:
    """One LNS addition on (sign, field) pairs of int32: sign is 0 or -1, field is 0 for zero. Returns a pair."""
    larger, smaller = max(fx, fy), min(fx, fy)
    distance = min(int32(larger - smaller), last)
    index = int32(distance + ((sx ^ sy) & int32(last + 1)))
    correction = table[index] if smaller > 0 else int32(0)
    field = max(min(int32(larger + correction), mask), int32(0))
    return (sx if fx >= fy else sy), field


@kernel
def mul_fields(fx: Any, fy: Any, bias: Any, mask: Any) -> Any:
    """Field of a product; the sign is the XOR of the signs."""
    field = max(min(int32(int32(fx + fy) - bias), mask), int32(0))
    return field if min(fx, fy) > 0 else int32(0)


@kernel
def code_of(sign: Any, field: Any, mask: Any) -> Any:
    """Join a sign (0 or -1) and a field; a zero field gives code 0 whatever the sign."""
    return int16(int32(field | (sign & ~mask))) if field > 0 else int16(0)


@kernel
def add(x: _I16, y: _I16, out: _I16, table: _I32, last: int, mask: int, flip: int, start: int, stop: int) -> int:
    """``out = x + y``, or ``x - y`` with ``flip = -1``."""
    last_, mask_, flip_ = int32(last), int32(mask), int32(flip)
    for i in range(start, stop):
        cx, cy = int32(x[i]), int32(y[i])
        sign, field = add_fields(cx >> 31, cx & mask_, (cy >> 31) ^ flip_, cy & mask_, table, last_, mask_)
        out[i] = code_of(sign, field, mask_)
    return 0


@kernel
def mul(x: _I16, y: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """``out = x y``."""
    bias_, mask_ = int32(bias), int32(mask)
    for i in range(start, stop):
        cx, cy = int32(x[i]), int32(y[i])
        out[i] = code_of((cx ^ cy) >> 31, mul_fields(cx & mask_, cy & mask_, bias_, mask_), mask_)
    return 0


@kernel
def div(x: _I16, y: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """``out = x / y``; returns 1 where some ``y`` is zero."""
    bias_, mask_ = int32(bias), int32(mask)
    bad = int32(0)
    for i in range(start, stop):
        cx, cy = int32(x[i]), int32(y[i])
        fx, fy = cx & mask_, cy & mask_
        bad |= int32(fy == 0)
        field = max(min(int32(int32(fx - fy) + bias_), mask_), int32(0))
        out[i] = code_of((cx ^ cy) >> 31, field if fx > 0 else int32(0), mask_)
    return int(bad)


@kernel
def sqrt(x: _I16, out: _I16, bias: int, mask: int, start: int, stop: int) -> int:
    """``out = sqrt(x)``, half the logarithm rounded half to even; returns 1 where some ``x`` is negative."""
    bias_, mask_ = int32(bias), int32(mask)
    bad = int32(0)
    for i in range(start, stop):
        field = int32(x[i]) & mask_
        bad |= int32((x[i] < 0) & (field > 0))
        log = int32(field - bias_)
        half = log >> 1
        rounded = int32(int32(half + (log & half & 1)) + bias_)
        out[i] = int16(rounded) if field > 0 else int16(0)
    return int(bad)


@kernel
def sign_op(x: _I16, out: _I16, mask: int, keep: int, flip: int, start: int, stop: int) -> int:
    """``out`` = the magnitude of ``x`` with sign ``(sign & keep) ^ flip``: negation, absolute value."""
    mask_, keep_, flip_ = int32(mask), int32(keep), int32(flip)
    for i in range(start, stop):
        code = int32(x[i])
        out[i] = code_of(((code >> 31) & keep_) ^ flip_, code & mask_, mask_)
    return 0


@kernel
def order_key(x: _I16, out: _I16, mask: int, start: int, stop: int) -> int:
    """``out`` = field with the sign applied."""
    mask_ = int32(mask)
    for i in range(start, stop):
        sign = int32(x[i]) >> 31
        out[i] = int16(int32(((int32(x[i]) & mask_) ^ sign) - sign))
    return 0


@kernel
def gate(x: _I16, by: _I16, out: _I16, start: int, stop: int) -> int:
    """``out = x where by > 0 else 0``: relu (``by`` is ``x``) and its derivative."""
    for i in range(start, stop):
        out[i] = x[i] if by[i] > 0 else int16(0)
    return 0


@kernel
def encode32(x: _I32, out: _I16, shift: _I32, fraction_bits: int, bias: int, mask: int, start: int, stop: int) -> int:
    """Codes of float32 bit patterns ``x``; returns 1 where one is NaN or infinite."""
    mask_, f = int32(mask), int32(fraction_bits)
    down = int32(22 - fraction_bits)
    offset = int32(bias - (127 << fraction_bits))
    bad = int32(0)
    for i in range(start, stop):
        pattern = x[i]
        magnitude = pattern & int32(0x7FFFFFFF)
        bad |= int32(magnitude >= int32(0x7F800000))
        # A subnormal's pattern is its integer multiple of 2^-149: as a float32 that integer is exact and normal.
        scaled = int32(bits_of(float32(magnitude)) - int32(149 << 23))
        normal = magnitude if magnitude >= int32(0x800000) else scaled
        fraction = normal & int32(0x7FFFFF)
        rounded = int32(fraction + shift[fraction >> down]) >> down
        field = int32(int32(int32((normal >> 23) << f) + rounded) + offset)
        field = min(field, mask_) if field > 0 else int32(0)
        out[i] = code_of(pattern >> 31, field if magnitude > 0 else int32(0), mask_)
    return int(bad)


@kernel
def encode64(
    x: NDArray[np.int64], out: _I16, threshold: NDArray[np.int64], base: _I32, fraction_bits: int, bias: int, mask: int,
    start: int, stop: int,
) -> int:  # fmt: skip
    """Codes of float64 bit patterns ``x``; returns 1 where one is NaN or infinite. Subnormals underflow in every format."""
    mask_ = int64(mask)
    down = int64(51 - fraction_bits)
    offset = int64(bias - (1023 << fraction_bits))
    bad = int64(0)
    for i in range(start, stop):
        magnitude = x[i] & int64(0x7FFFFFFFFFFFFFFF)
        bad |= int64(magnitude >= int64(0x7FF0000000000000))
        fraction = magnitude & int64(0xFFFFFFFFFFFFF)
        cell = fraction >> down
        rounded = int64(base[cell]) + int64(fraction > threshold[cell])
        field = ((magnitude >> 52) << fraction_bits) + rounded + offset
        field = min(field, mask_) if field > 0 else int64(0)
        out[i] = code_of(int32(x[i] >> 63), int32(field), int32(mask))
    return int(bad)


@kernel
def decode32(x: _I16, out: _I32, table: _I32, fraction_bits: int, bias: int, mask: int, start: int, stop: int) -> int:
    """float32 bit patterns of the codes. ``table``: significand fields, then the subnormal results of two exponents."""
    mask_, f = int32(mask), int32(fraction_bits)
    low = int32((1 << fraction_bits) - 1)
    offset = int32((128 << fraction_bits) - bias)  # counts logarithms from 2^-128, where exponent 0 and 1 are subnormal
    for i in range(start, stop):
        code = int32(x[i])
        field = code & mask_
        log = int32(field + offset)
        exponent = log >> f
        normal = exponent >= 2
        index = log & low if normal else int32(log + (low + 1))
        value = int32(table[index] + (int32(exponent - 1) << 23 if normal else int32(0)))
        value |= code & int32(-0x80000000)
        out[i] = value if field > 0 else int32(0)
    return 0


@kernel
def decode64(
    x: _I16, out: NDArray[np.int64], table: NDArray[np.int64], fraction_bits: int, bias: int, mask: int, start: int, stop: int
) -> int:
    """float64 bit patterns of the codes; every format lies inside float64's normal range."""
    mask_ = int64(mask)
    low = int64((1 << fraction_bits) - 1)
    for i in range(start, stop):
        code = int64(x[i])
        field = code & mask_
        log = field - bias
        value = table[log & low] + ((log >> fraction_bits) << 52)
        value |= code & int64(-0x8000000000000000)
        out[i] = value if field > 0 else int64(0)
    return 0
