"""The arithmetic contract, written to be read: plain integers, no speed. Every kernel equals it bit for bit.

A code is unpacked into a sign (bool) and a logarithm (int64 ulps); zero has the logarithm ``NO_LOG``. Elementwise operations
compute in unbounded integers and clamp once, in :func:`pack`: logarithms above the format's range saturate, below it become
zero. Reductions (:func:`sum`, :func:`matmul`) go in the contract's order:

1. the reduced index is cut into blocks of ``BLOCK = 64``, ascending;
2. inside a block, terms are added one after another, ascending, into an accumulator that starts at zero;
3. block totals are added, ascending, into a second accumulator that starts at zero.

Sequential addition over long rows would stick (4,096 ones sum to 370 at f = 7); blocks make the error that of 64 + K/64 terms.
Both accumulators hold a sign and a 16-bit logarithm in ``ACC_MIN .. ACC_MAX`` in every format: larger logarithms saturate at
``ACC_MAX``, smaller ones are zero, so zero products and products below the range are skipped. The format's own range is
applied once, when the result is stored.

All functions take and return int16 numpy arrays of codes and broadcast like numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lns_ops.format import MANTISSA_BITS, LNSFormat, NonFiniteError, decode_significands, encode_thresholds
from lns_ops.gaussian import gaussian_tables

Codes = NDArray[np.int16]
Logs = NDArray[np.int64]
Signs = NDArray[np.bool_]

BLOCK = 64
NO_LOG = -(1 << 40)
"""Logarithm of zero: so far below every other that no comparison needs a special case."""
ACC_MIN, ACC_MAX = 1 - (1 << 14), (1 << 15) + (1 << 14) - 1
"""The accumulator's logarithms: 16 bits, starting at lns16's smallest and reaching twice as far up."""


def unpack(codes: Codes, fmt: LNSFormat) -> tuple[Signs, Logs]:
    """Sign (True for negative) and logarithm in ulps of each code; zero is ``(False, NO_LOG)``."""
    field = np.asarray(codes).astype(np.int64) & fmt.field_mask
    zero = field == 0
    return (np.asarray(codes) < 0) & ~zero, np.where(zero, NO_LOG, field - fmt.bias)


def pack(sign: Signs, log: Logs, fmt: LNSFormat) -> Codes:
    """The code of ``sign x 2^(log/2^f)``: saturates above the format's range, zero below it."""
    field = np.minimum(log, fmt.max_log) + fmt.bias
    return np.where(log < fmt.min_log, 0, np.where(sign, field | fmt.sign_mask, field)).astype(np.int16)


def add_unpacked(sx: Signs, lx: Logs, sy: Signs, ly: Logs, fraction_bits: int) -> tuple[Signs, Logs]:
    """One LNS addition on unbounded logarithms: the larger magnitude keeps its sign and takes the correction."""
    plus, minus = gaussian_tables(fraction_bits)
    larger, distance = np.maximum(lx, ly), np.minimum(np.abs(lx - ly), len(plus) - 1)
    correction = np.where(sx == sy, plus[distance], minus[distance])
    log = larger + np.where(np.minimum(lx, ly) == NO_LOG, 0, correction)
    cancelled = (sx != sy) & (lx == ly)
    return np.where(lx >= ly, sx, sy) & ~cancelled, np.where(cancelled, NO_LOG, log)


def _accumulator(sign: Signs, log: Logs) -> tuple[Signs, Logs]:
    """Clamp to the accumulator's range."""
    lost = log < ACC_MIN
    return sign & ~lost, np.where(lost, NO_LOG, np.minimum(log, ACC_MAX))


def _accumulate(signs: Signs, logs: Logs, fraction_bits: int) -> tuple[Signs, Logs]:
    """Add up the terms along axis 0, ascending, in one accumulator that starts at zero."""
    sign, log = np.zeros(signs.shape[1:], np.bool_), np.full(signs.shape[1:], NO_LOG, np.int64)
    for term_sign, term_log in zip(signs, logs, strict=True):
        term = _accumulator(term_sign, term_log)
        sign, log = _accumulator(*add_unpacked(sign, log, *term, fraction_bits))
    return sign, log


def _reduce(signs: Signs, logs: Logs, fmt: LNSFormat) -> Codes:
    """Reduce axis 0 in the contract's order and store the result in the format."""
    starts = range(0, signs.shape[0], BLOCK)
    totals = [_accumulate(signs[k : k + BLOCK], logs[k : k + BLOCK], fmt.fraction_bits) for k in starts]
    shape = (len(totals), *signs.shape[1:])
    total_signs = np.array([s for s, _ in totals], np.bool_).reshape(shape)
    total_logs = np.array([log for _, log in totals], np.int64).reshape(shape)
    return pack(*_accumulate(total_signs, total_logs, fmt.fraction_bits), fmt)


def add(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x + y``: max + G+ where the signs agree, max + G- where they differ; ``x + (-x)`` is exact zero."""
    return pack(*add_unpacked(*unpack(x, fmt), *unpack(y, fmt), fmt.fraction_bits), fmt)


def neg(x: Codes, fmt: LNSFormat) -> Codes:
    """``-x``, exact."""
    sign, log = unpack(x, fmt)
    return pack(~sign, log, fmt)


def absolute(x: Codes, fmt: LNSFormat) -> Codes:
    """``|x|``, exact."""
    sign, log = unpack(x, fmt)
    return pack(np.zeros_like(sign), log, fmt)


def sub(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x + (-y)``."""
    return add(x, neg(y, fmt), fmt)


def mul(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x y``: logarithms add; exact but for saturation and underflow."""
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    return pack(sx ^ sy, lx + ly, fmt)


def div(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x / y``: logarithms subtract; exact but for saturation and underflow.

    Raises:
        ValueError: some ``y`` is zero; LNS has no infinity.
    """
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    if np.any(ly == NO_LOG):
        raise ValueError("division by zero: LNS has no infinity; mask zero divisors first")
    return pack(sx ^ sy, np.where(lx == NO_LOG, NO_LOG, lx - ly), fmt)


def sqrt(x: Codes, fmt: LNSFormat) -> Codes:
    """Square root: half the logarithm, rounded half to even.

    Raises:
        ValueError: some ``x`` is negative.
    """
    sign, log = unpack(x, fmt)
    if np.any(sign):
        raise ValueError("square root of a negative number: LNS has no NaN; take the absolute value or clamp first")
    half = log >> 1
    return pack(sign, np.where(log == NO_LOG, NO_LOG, half + (log & 1) * (half & 1)), fmt)


def order_key(x: Codes, fmt: LNSFormat) -> Logs:
    """Integers that compare as the values do: ``key(x) < key(y)`` exactly if ``x < y``."""
    sign, log = unpack(x, fmt)
    field = np.where(log == NO_LOG, 0, log + fmt.bias)
    return np.where(sign, -field, field)


def sum(x: Codes, axis: int, fmt: LNSFormat) -> Codes:
    """Sum along ``axis`` in the contract's order; an empty sum is zero."""
    sign, log = unpack(np.moveaxis(np.asarray(x), axis, 0), fmt)
    return _reduce(sign, log, fmt)


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """``x @ y`` for 2-d operands: exact products, summed over k in the contract's order."""
    (sx, lx), (sy, ly) = unpack(x_MK, fmt), unpack(y_KN, fmt)
    signs = sx.T[:, :, None] ^ sy[:, None, :]
    return _reduce(signs, lx.T[:, :, None] + ly[:, None, :], fmt)


def sgd_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    negative_lr: Codes,
    momentum: Codes | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
) -> tuple[Codes, Codes | None, Codes | None]:
    """One SGD step in which every operation is an LNS operation; returns weight, buffer, compensation.

    ``buffer = momentum * buffer + grad`` (where momentum is given), ``update = -lr * buffer``, then ``weight + update`` or, with
    Kahan compensation (W. Kahan 1965)::

        compensation = compensation + update
        new = weight + compensation
        compensation = compensation - (new - weight)

    ``negative_lr`` and ``momentum`` are codes of scalars.
    """
    step = grad
    if momentum is not None and buffer is not None:
        step = buffer = add(mul(momentum, buffer, fmt), grad, fmt)
    update = mul(negative_lr, step, fmt)
    if compensation is None:
        return add(weight, update, fmt), buffer, None
    compensation = add(compensation, update, fmt)
    new = add(weight, compensation, fmt)
    return new, buffer, sub(compensation, sub(new, weight, fmt), fmt)


def encode(x: NDArray[Any], fmt: LNSFormat) -> Codes:
    """The codes nearest to ``x`` (any float or integer dtype, computed from its float64 value) in logarithm.

    Raises:
        NonFiniteError: (a ValueError) ``x`` holds a NaN or an infinity.
    """
    value = np.asarray(x, np.float64)
    if not np.all(np.isfinite(value)):
        raise NonFiniteError("NaN or infinity to encode: LNS has no code for either; clean the input first")
    fraction, exponent = np.frexp(np.abs(value))
    significand = np.ldexp(fraction, MANTISSA_BITS + 1).astype(np.int64)
    # `side="left"` counts the thresholds strictly below the significand.
    rounded = np.searchsorted(encode_thresholds(fmt.fraction_bits), significand, side="left")
    log = (exponent.astype(np.int64) - 1 << fmt.fraction_bits) + rounded
    return pack(value < 0, np.where(value == 0, NO_LOG, log), fmt)


def decode(codes: Codes, fmt: LNSFormat, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """``sign x 2^(log/2^f)``: the significand ``2^(j/2^f)`` rounded to ``dtype``, times a power of two."""
    sign, log = unpack(codes, fmt)
    safe = np.where(log == NO_LOG, 0, log)
    significand = decode_significands(fmt.fraction_bits).astype(dtype)[safe & ((1 << fmt.fraction_bits) - 1)]
    magnitude = np.where(log == NO_LOG, dtype(0), np.ldexp(significand, (safe >> fmt.fraction_bits).astype(np.int32)))
    return np.where(sign, -magnitude, magnitude).astype(dtype)
