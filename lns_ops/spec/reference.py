"""The specification of the arithmetic in plain integers, which every kernel equals bit for bit.

It is written for readability, not for speed.

A code is unpacked into a sign (bool) and a logarithm (int64, ulps); zero has the logarithm
``NO_LOG``. Elementwise operations compute in unbounded integers and clamp once, in :func:`pack`:
logarithms above the format's range saturate, logarithms below it become zero. Reductions
(:func:`sum`, :func:`matmul`) have a fixed order, the contract's order:

1. the reduced index is split into blocks of ``BLOCK = 64``, ascending;
2. inside a block, terms are added one after another, ascending, into an accumulator that starts at
   zero;
3. block totals are added, ascending, into a second accumulator that starts at zero.

Sequential addition over long rows would stick (4,096 ones sum to 370 at f = 7). With blocks the
error is as for 64 + K/64 terms. Both accumulators hold a sign and a 16-bit logarithm in ``ACC_MIN
.. ACC_MAX`` in every format: larger logarithms saturate at ``ACC_MAX``, smaller ones are zero, so
zero products and products below the range are skipped. The format's own range is applied once, when
the result is stored.

All functions take and return int16 numpy arrays of codes and broadcast like numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lns_ops.spec.format import (
    MANTISSA_BITS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    logarithm,
    stochastic_steps,
)
from lns_ops.spec.gaussian_log import (
    FINE_BITS,
    DecayTable,
    decay_table,
    gaussian_tables,
    stochastic_tables,
)

Codes = NDArray[np.int16]
Logs = NDArray[np.int64]
Signs = NDArray[np.bool_]

ACCUMULATIONS = ("contract", "float32")
"""How sums of matrix products can be computed: as specified here, or as in
:mod:`lns_ops.functional.accumulation`."""
BLOCK = 64
LONG_SUM = BLOCK * BLOCK
"""Maximum number of terms in a piece of :func:`long_sum`: as many blocks as a block has terms."""
COARSE_BITS = 4
"""In formats with at most this many fraction bits, a sum of 64 equal terms loses a large part: at 3
bits 0.35 of it is left, at 4 bits 0.7. There, sums by index of more than :data:`FEW_TERMS` terms
are exact (:func:`sum_by_index`)."""
FEW_TERMS = 16
SUM_BITS = 30
"""Fraction bits of the terms of an exact sum, in units of the largest term's power of two."""
NO_LOG = -(1 << 40)
"""The logarithm of zero: so far below every other that no comparison needs a special case."""
ACC_MIN, ACC_MAX = 1 - (1 << 14), (1 << 15) + (1 << 14) - 1
"""The accumulator's smallest and largest logarithm, in ulps.

The range has 16 bits. It starts at lns16's smallest logarithm and extends twice as far upwards.
"""
WEIGHT_SLOT, ROOT_SLOT = 0, 1
"""Slots of a step's random bits: one for rounding the weight, one for rounding the root."""


def unpack(codes: Codes, fmt: LNSFormat) -> tuple[Signs, Logs]:
    """Return sign (True: negative) and logarithm (ulps) of each code; zero is (False, NO_LOG)."""
    field = np.asarray(codes).astype(np.int64) & fmt.field_mask
    zero = field == 0
    return (np.asarray(codes) < 0) & ~zero, np.where(zero, NO_LOG, field - fmt.bias)


def pack(sign: Signs, log: Logs, fmt: LNSFormat) -> Codes:
    """Return the code of ``sign x 2^(log/2^f)``: saturated above the range, zero below it."""
    field = np.minimum(log, fmt.max_log) + fmt.bias
    return np.where(log < fmt.min_log, 0, np.where(sign, field | fmt.sign_mask, field)).astype(
        np.int16
    )


def add_unpacked(
    sx: Signs, lx: Logs, sy: Signs, ly: Logs, fraction_bits: int
) -> tuple[Signs, Logs]:
    """Add two LNS numbers with unbounded logarithms.

    The larger magnitude keeps its sign, and its logarithm takes the correction.
    """
    plus, minus = gaussian_tables(fraction_bits)
    larger, distance = np.maximum(lx, ly), np.minimum(np.abs(lx - ly), len(plus) - 1)
    correction = np.where(sx == sy, plus[distance], minus[distance])
    log = larger + np.where(np.minimum(lx, ly) == NO_LOG, 0, correction)
    cancelled = (sx != sy) & (lx == ly)
    return np.where(lx >= ly, sx, sy) & ~cancelled, np.where(cancelled, NO_LOG, log)


def _accumulator(sign: Signs, log: Logs) -> tuple[Signs, Logs]:
    """Clamp to the accumulator's range: saturate above it, underflow to zero below it."""
    lost = log < ACC_MIN
    return sign & ~lost, np.where(lost, NO_LOG, np.minimum(log, ACC_MAX))


def _accumulate(signs: Signs, logs: Logs, fraction_bits: int) -> tuple[Signs, Logs]:
    """Add up the terms along axis 0, ascending, in one accumulator that starts at zero."""
    sign, log = np.zeros(signs.shape[1:], np.bool_), np.full(signs.shape[1:], NO_LOG, np.int64)
    for term_sign, term_log in zip(signs, logs, strict=True):
        term = _accumulator(term_sign, term_log)
        sign, log = _accumulator(*add_unpacked(sign, log, *term, fraction_bits))
    return sign, log


def _reduce(signs: Signs, logs: Logs, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along axis 0 in the contract's order, add ``shift`` ulps, and store in the format."""
    starts = range(0, signs.shape[0], BLOCK)
    totals = [
        _accumulate(signs[k : k + BLOCK], logs[k : k + BLOCK], fmt.fraction_bits) for k in starts
    ]
    shape = (len(totals), *signs.shape[1:])
    total_signs = np.array([s for s, _ in totals], np.bool_).reshape(shape)
    total_logs = np.array([log for _, log in totals], np.int64).reshape(shape)
    sign, log = _accumulate(total_signs, total_logs, fmt.fraction_bits)
    return pack(sign, np.where(log == NO_LOG, NO_LOG, log + shift), fmt)


def add(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x + y``, correctly rounded in the logarithm.

    The correction is G+ if the signs agree and G- if they differ; ``x + (-x)`` is exactly zero.
    """
    return pack(*add_unpacked(*unpack(x, fmt), *unpack(y, fmt), fmt.fraction_bits), fmt)


def neg(x: Codes, fmt: LNSFormat) -> Codes:
    """Return ``-x``, exact."""
    sign, log = unpack(x, fmt)
    return pack(~sign, log, fmt)


def absolute(x: Codes, fmt: LNSFormat) -> Codes:
    """Return ``|x|``, exact."""
    sign, log = unpack(x, fmt)
    return pack(np.zeros_like(sign), log, fmt)


def sub(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x - y``, computed as ``x + (-y)``."""
    return add(x, neg(y, fmt), fmt)


def mul(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x y``: logarithms add; exact except for saturation and underflow."""
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    return pack(sx ^ sy, lx + ly, fmt)


def square(x: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x^2`` in codes of ``fmt.of_squares``: twice the logarithm, exact in that format."""
    sign, log = unpack(x, fmt)
    return pack(np.zeros_like(sign), 2 * log, fmt.of_squares)


def div(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x / y``: logarithms subtract; exact except for saturation and underflow.

    Raises:
        ValueError: some ``y`` is zero; LNS has no infinity.
    """
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    if np.any(ly == NO_LOG):
        raise ValueError(
            f"division by zero: LNS has no infinity; mask zero divisors first (in {fmt} numbers"
            f" below {fmt.smallest:.2g} are zero, including one that is added to a divisor)"
        )
    return pack(sx ^ sy, np.where(lx == NO_LOG, NO_LOG, lx - ly), fmt)


def sqrt(x: Codes, fmt: LNSFormat) -> Codes:
    """Return the square root: half the logarithm, rounded half to even.

    Raises:
        ValueError: some ``x`` is negative.
    """
    sign, log = unpack(x, fmt)
    if np.any(sign):
        raise ValueError(
            "square root of a negative number: LNS has no NaN; take the absolute value or clamp"
            " first"
        )
    half = log >> 1
    return pack(sign, np.where(log == NO_LOG, NO_LOG, half + (log & 1) * (half & 1)), fmt)


def order_key(x: Codes, fmt: LNSFormat) -> Logs:
    """Return integers in the order of the values: ``key(x) < key(y)`` if and only if ``x < y``."""
    sign, log = unpack(x, fmt)
    field = np.where(log == NO_LOG, 0, log + fmt.bias)
    return np.where(sign, -field, field)


def sum(x: Codes, axis: int, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along ``axis`` in the contract's order; an empty sum is zero.

    ``shift`` ulps are added to the sum's logarithm before it is stored.
    """
    sign, log = unpack(np.moveaxis(np.asarray(x), axis, 0), fmt)
    return _reduce(sign, log, fmt, shift)


def long_sum(x: Codes, axis: int, fmt: LNSFormat) -> Codes:
    """Sum any number of terms along ``axis``.

    More than ``LONG_SUM`` terms are split into pieces of that many, whose sums are stored and
    summed in the same way.
    """
    terms = np.moveaxis(np.asarray(x), axis, 0)
    while len(terms) > LONG_SUM:
        terms = np.stack(
            [sum(terms[k : k + LONG_SUM], 0, fmt) for k in range(0, len(terms), LONG_SUM)]
        )
    return sum(terms, 0, fmt)


def sum_by_index(x: Codes, index: NDArray[np.int64], rows: int, fmt: LNSFormat) -> Codes:
    """Return ``out[r] = sum of x[i] over the i with index[i] = r``, ``[rows, ...]``.

    It is :func:`long_sum` in ascending order of i. In formats with up to :data:`COARSE_BITS`
    fraction bits, sums of more than :data:`FEW_TERMS` terms are :func:`exact_sum`.
    """
    parts = [np.asarray(x)[index == r] for r in range(rows)]
    coarse = fmt.fraction_bits <= COARSE_BITS
    return np.stack(
        [
            exact_sum(part, fmt) if coarse and len(part) > FEW_TERMS else long_sum(part, 0, fmt)
            for part in parts
        ]
    )


def exact_sum(x: Codes, fmt: LNSFormat) -> Codes:
    """Sum along axis 0 with integer additions, in any order; the logarithm is rounded once.

    A term is truncated to a multiple of 2^-30 times the power of two at or below the largest term.
    """
    octave = 1 << fmt.fraction_bits
    units = [int(v) for v in np.rint(decode_significands(fmt.fraction_bits) * 2.0**SUM_BITS)]
    codes = np.asarray(x)
    out = np.zeros(codes.shape[1:], np.int16)
    for place in np.ndindex(*codes.shape[1:]):
        signs, logs = unpack(codes[(slice(None), *place)], fmt)
        highest, total = int(logs.max()) // octave, 0
        for negative, log in zip(signs, logs, strict=True):
            if log != NO_LOG:
                power, fraction = divmod(int(log), octave)
                term = units[fraction] >> (highest - power)
                total += -term if negative else term
        if total:
            found = logarithm(float(abs(total)), fmt.fraction_bits) + (highest - SUM_BITS) * octave
            out[place] = pack(np.array(total < 0), np.array(found), fmt)
    return out


def mean(x: Codes, axis: int, fmt: LNSFormat) -> Codes:
    """Return the sum divided by its number of terms, without intermediate saturation.

    The number of terms is rounded as in encoding.
    """
    return sum(x, axis, fmt, -logarithm(np.asarray(x).shape[axis], fmt.fraction_bits))


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x @ y`` of 2-d operands: exact products, summed over k in the contract's order."""
    (sx, lx), (sy, ly) = unpack(x_MK, fmt), unpack(y_KN, fmt)
    signs = sx.T[:, :, None] ^ sy[:, None, :]
    return _reduce(signs, lx.T[:, :, None] + ly[:, None, :], fmt)


def long_matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x @ y`` of 2-d operands of any K.

    More than ``LONG_SUM`` products are split as in :func:`long_sum`.
    """
    cuts = range(0, x_MK.shape[1], LONG_SUM)
    if len(cuts) < 2:
        return matmul(x_MK, y_KN, fmt)
    return long_sum(
        np.stack([matmul(x_MK[:, k : k + LONG_SUM], y_KN[k : k + LONG_SUM], fmt) for k in cuts]),
        0,
        fmt,
    )


def random_bits(count: int, key: int, step: int, slot: int) -> NDArray[np.int64]:
    """Return uniform integers in ``0 .. 2^16 - 1`` by Philox4x32-10.

    Element i depends only on (key, step, slot, i), so it is the same on every backend and in any
    order.

    The generator (J. Salmon, M. Moraes, R. Dror, D. Shaw 2011, doi:10.1145/2063384.2063405) runs
    with the 64-bit ``key`` and the counter ``(i // 8 low, i // 8 high, step mod 2^32, slot)``.
    Element i is the low (i even) or high half of word ``i % 8 // 2``.
    """
    block = np.arange(-(-count // 8), dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    words = [
        block & low,
        block >> np.uint64(32),
        *(np.full_like(block, value & 0xFFFFFFFF) for value in (step, slot)),
    ]
    keys = [key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            second >> np.uint64(32) ^ words[1] ^ np.uint64(keys[0]),
            second & low,
            first >> np.uint64(32) ^ words[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [keys[0] + 0x9E3779B9 & 0xFFFFFFFF, keys[1] + 0xBB67AE85 & 0xFFFFFFFF]
    halves = [half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, axis=-1).astype(np.int64).reshape(-1)[:count]


def add_stochastic(x: Codes, y: Codes, fmt: LNSFormat, bits: NDArray[np.int64]) -> Codes:
    """Return ``x + y`` rounded up or down at random; the expected value is the exact sum.

    :func:`stochastic_tables` defines the probabilities.

    Args:
        bits: uniform in ``0 .. 2^16 - 1``, with the result's shape.
    """
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    plus, minus = stochastic_tables(fmt.fraction_bits)
    distance = np.minimum(np.abs(lx - ly), len(plus) - 1)
    fine = np.where(sx == sy, plus[distance], minus[distance]).astype(np.int64)
    correction = np.where(np.minimum(lx, ly) == NO_LOG, 0, fine + bits >> FINE_BITS)
    return pack(np.where(lx >= ly, sx, sy), np.maximum(lx, ly) + correction, fmt)


def root_mean_square(
    root: Codes,
    x: Codes,
    fmt: LNSFormat,
    beta: float,
    *,
    residue: Codes | None = None,
    bits: NDArray[np.int64] | None = None,
) -> tuple[Codes, Codes | None]:
    """Return ``sqrt(beta root^2 + (1 - beta) x^2)`` of a nonnegative ``root``, rounded once.

    :class:`lns_ops.spec.gaussian_log.DecayTable` is the definition.

    The logarithm is computed with 16 more bits below the ulp. It is rounded to nearest with the
    difference kept in ``residue`` (int16, in 2^-16 ulps, -2^15 .. 2^15 - 1), or rounded at random
    with ``bits``. Without one of the two an average with beta near 1 would never change.

    Returns:
        The new root, and the new residue if one was given; it is zero if the root is zero or
            saturates.
    """
    return followed(root, x, fmt, decay_table(beta, fmt.fraction_bits), residue=residue, bits=bits)


def followed(
    root: Codes,
    x: Codes,
    fmt: LNSFormat,
    table: DecayTable,
    *,
    residue: Codes | None = None,
    bits: NDArray[np.int64] | None = None,
) -> tuple[Codes, Codes | None]:
    """Return the root and residue after one step of any decay table.

    Sums of squares and maxima are such steps as well; :func:`root_mean_square` is the average.
    """
    _, root_log = unpack(root, fmt)
    _, x_log = unpack(x, fmt)
    index = np.clip(x_log - root_log, table.first, table.first + len(table.table) - 1) - table.first
    old = (root_log << FINE_BITS) + (0 if residue is None else residue.astype(np.int64))
    both = (root_log != NO_LOG) & (x_log != NO_LOG)
    fine = np.maximum(old + table.keep, (x_log << FINE_BITS) + table.take) + np.where(
        both, table.table[index], 0
    )
    log = fine + (1 << FINE_BITS - 1 if bits is None else bits) >> FINE_BITS
    new = pack(np.zeros(log.shape, np.bool_), log, fmt)
    if residue is None:
        return new, None
    return new, np.where((new == 0) | (log > fmt.max_log), 0, fine - (log << FINE_BITS)).astype(
        np.int16
    )


def encode(x: NDArray[Any], fmt: LNSFormat) -> Codes:
    """Return the codes nearest to ``x`` in logarithm.

    ``x`` has any float or integer dtype; it is converted to float64 and encoded.

    Raises:
        NonFiniteError: (a ValueError) ``x`` contains a NaN or an infinity.
    """
    value = np.asarray(x, np.float64)
    if not np.all(np.isfinite(value)):
        raise NonFiniteError(
            "NaN or infinity to encode: LNS has no code for either; clean the input first"
        )
    fraction, exponent = np.frexp(np.abs(value))
    significand = np.ldexp(fraction, MANTISSA_BITS + 1).astype(np.int64)
    # `side="left"` counts the thresholds strictly below the significand.
    rounded = np.searchsorted(encode_thresholds(fmt.fraction_bits), significand, side="left")
    log = (exponent.astype(np.int64) - 1 << fmt.fraction_bits) + rounded
    return pack(value < 0, np.where(value == 0, NO_LOG, log), fmt)


def decode(
    codes: Codes, fmt: LNSFormat, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return ``sign x 2^(log/2^f)``, rounded to ``dtype`` once.

    The value is the significand ``2^(j/2^f)`` times a power of two.
    """
    sign, log = unpack(codes, fmt)
    safe = np.where(log == NO_LOG, 0, log)
    significand = decode_significands(fmt.fraction_bits)[safe & ((1 << fmt.fraction_bits) - 1)]
    magnitude = np.where(
        log == NO_LOG, 0.0, np.ldexp(significand, (safe >> fmt.fraction_bits).astype(np.int32))
    )
    return np.where(sign, -magnitude, magnitude).astype(dtype)


def encode_stochastic(x: NDArray[np.float32], fmt: LNSFormat, bits: NDArray[np.int64]) -> Codes:
    """Return the code below or above ``x`` in magnitude, at random; the expected value is ``x``.

    :func:`stochastic_steps` has the definition.

    Args:
        x: float32, finite.
        bits: uniform in ``0 .. 2^16 - 1``, with ``x``'s shape.
    """
    mantissas, reciprocals = stochastic_steps(fmt.fraction_bits)
    fraction, exponent = np.frexp(np.abs(x).astype(np.float64))
    mantissa = np.where(x == 0, 0, np.ldexp(fraction, 24)).astype(np.int64) - (1 << 23) * (x != 0)
    j = np.searchsorted(mantissas, mantissa, side="right") - 1
    chance = (mantissa - mantissas[j]) * reciprocals[j] >> 24
    log = (exponent.astype(np.int64) - 1 << fmt.fraction_bits) + j + (chance + bits >> 16)
    return pack(x < 0, np.where(x == 0, NO_LOG, log), fmt)
