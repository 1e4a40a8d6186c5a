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

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lns_ops.format import (
    MANTISSA_BITS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    logarithm,
    stochastic_steps,
)
from lns_ops.gaussian import FINE_BITS, DecayTable, decay_table, gaussian_tables, stochastic_tables

Codes = NDArray[np.int16]
Logs = NDArray[np.int64]
Signs = NDArray[np.bool_]

BLOCK = 64
LONG_SUM = BLOCK * BLOCK
"""Terms that :func:`long_sum` adds up in one piece: as many blocks as a block has terms."""
NO_LOG = -(1 << 40)
"""Logarithm of zero: so far below every other that no comparison needs a special case."""
ACC_MIN, ACC_MAX = 1 - (1 << 14), (1 << 15) + (1 << 14) - 1
"""The accumulator's logarithms: 16 bits, starting at lns16's smallest and reaching twice as far up."""
WEIGHT_SLOT, ROOT_SLOT = 0, 1
"""What a step's random bits are for."""


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


def _reduce(signs: Signs, logs: Logs, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Reduce axis 0 in the contract's order and store the result, moved by ``shift`` ulps, in the format."""
    starts = range(0, signs.shape[0], BLOCK)
    totals = [_accumulate(signs[k : k + BLOCK], logs[k : k + BLOCK], fmt.fraction_bits) for k in starts]
    shape = (len(totals), *signs.shape[1:])
    total_signs = np.array([s for s, _ in totals], np.bool_).reshape(shape)
    total_logs = np.array([log for _, log in totals], np.int64).reshape(shape)
    sign, log = _accumulate(total_signs, total_logs, fmt.fraction_bits)
    return pack(sign, np.where(log == NO_LOG, NO_LOG, log + shift), fmt)


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


def sum(x: Codes, axis: int, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along ``axis`` in the contract's order, its logarithm moved by ``shift`` ulps before it is stored; an empty sum is zero."""
    sign, log = unpack(np.moveaxis(np.asarray(x), axis, 0), fmt)
    return _reduce(sign, log, fmt, shift)


def long_sum(x: Codes, axis: int, fmt: LNSFormat) -> Codes:
    """Sums of any length: more than ``LONG_SUM`` terms are cut into pieces of so many, whose sums are stored and summed in turn."""
    terms = np.moveaxis(np.asarray(x), axis, 0)
    while len(terms) > LONG_SUM:
        terms = np.stack([sum(terms[k : k + LONG_SUM], 0, fmt) for k in range(0, len(terms), LONG_SUM)])
    return sum(terms, 0, fmt)


def mean(x: Codes, axis: int, fmt: LNSFormat) -> Codes:
    """The sum divided by its number of terms, which is rounded as encoding rounds; no saturation in between."""
    return sum(x, axis, fmt, -logarithm(np.asarray(x).shape[axis], fmt.fraction_bits))


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """``x @ y`` for 2-d operands: exact products, summed over k in the contract's order."""
    (sx, lx), (sy, ly) = unpack(x_MK, fmt), unpack(y_KN, fmt)
    signs = sx.T[:, :, None] ^ sy[:, None, :]
    return _reduce(signs, lx.T[:, :, None] + ly[:, None, :], fmt)


def long_matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """:func:`matmul` of any K: more than ``LONG_SUM`` products are cut as :func:`long_sum` cuts terms."""
    cuts = range(0, x_MK.shape[1], LONG_SUM)
    if len(cuts) < 2:
        return matmul(x_MK, y_KN, fmt)
    return long_sum(np.stack([matmul(x_MK[:, k : k + LONG_SUM], y_KN[k : k + LONG_SUM], fmt) for k in cuts]), 0, fmt)


def random_bits(count: int, key: int, step: int, slot: int) -> NDArray[np.int64]:
    """Uniform integers in ``0 .. 2^16 - 1``, element i from (key, step, slot, i) alone, so the same on every backend and in any order.

    Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw 2011, doi:10.1145/2063384.2063405) with the 64-bit ``key`` and the counter
    ``(i // 8 low, i // 8 high, step mod 2^32, slot)``; element i takes the low (i even) or high half of word ``i % 8 // 2``.
    """
    block = np.arange(-(-count // 8), dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    words = [block & low, block >> np.uint64(32), *(np.full_like(block, value & 0xFFFFFFFF) for value in (step, slot))]
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
    """``x + y`` rounded up or down at random so that the expected value is the exact sum; see :func:`stochastic_tables`.

    Args:
        bits: uniform in ``0 .. 2^16 - 1``, of the result's shape.
    """
    (sx, lx), (sy, ly) = unpack(x, fmt), unpack(y, fmt)
    plus, minus = stochastic_tables(fmt.fraction_bits)
    distance = np.minimum(np.abs(lx - ly), len(plus) - 1)
    fine = np.where(sx == sy, plus[distance], minus[distance]).astype(np.int64)
    correction = np.where(np.minimum(lx, ly) == NO_LOG, 0, fine + bits >> FINE_BITS)
    return pack(np.where(lx >= ly, sx, sy), np.maximum(lx, ly) + correction, fmt)


def root_mean_square(
    root: Codes, x: Codes, fmt: LNSFormat, beta: float, *, residue: Codes | None = None, bits: NDArray[np.int64] | None = None
) -> tuple[Codes, Codes | None]:
    """``sqrt(beta root^2 + (1 - beta) x^2)`` of a nonnegative ``root``, one rounding; :class:`lns_ops.gaussian.DecayTable` is
    the definition.

    The logarithm has 16 bits behind the ulp. They round to nearest and stay in ``residue`` (int16, in 2^-16 ulps, -2^15 .. 2^15
    - 1), or round at random with ``bits``. Without one of the two an average with beta near 1 would never move.

    Returns:
        The new root, and the new residue where there was one; a root that is zero or saturates leaves none.
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
    """:func:`root_mean_square` of any table: sums of squares and maxima follow their input likewise."""
    _, root_log = unpack(root, fmt)
    _, x_log = unpack(x, fmt)
    index = np.clip(x_log - root_log, table.first, table.first + len(table.table) - 1) - table.first
    old = (root_log << FINE_BITS) + (0 if residue is None else residue.astype(np.int64))
    both = (root_log != NO_LOG) & (x_log != NO_LOG)
    fine = np.maximum(old + table.keep, (x_log << FINE_BITS) + table.take) + np.where(both, table.table[index], 0)
    log = fine + (1 << FINE_BITS - 1 if bits is None else bits) >> FINE_BITS
    new = pack(np.zeros(log.shape, np.bool_), log, fmt)
    if residue is None:
        return new, None
    return new, np.where((new == 0) | (log > fmt.max_log), 0, fine - (log << FINE_BITS)).astype(np.int16)


def _updated(
    weight: Codes, update: Codes, fmt: LNSFormat, compensation: Codes | None, bits: NDArray[np.int64] | None
) -> tuple[Codes, Codes | None]:
    """``weight + update``: with Kahan compensation, rounded at random, or to nearest."""
    if bits is not None:
        return add_stochastic(weight, update, fmt, bits), compensation
    if compensation is None:
        return add(weight, update, fmt), None
    compensation = add(compensation, update, fmt)
    new = add(weight, compensation, fmt)
    return new, sub(compensation, sub(new, weight, fmt), fmt)


def sgd_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    negative_lr: Codes,
    momentum: Codes | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
) -> tuple[Codes, Codes | None, Codes | None]:
    """One SGD step in which every operation is an LNS operation; returns weight, buffer, compensation.

    ``buffer = momentum * buffer + grad`` (where momentum is given), ``update = -lr * buffer``, then ``weight + update`` or, with
    Kahan compensation (W. Kahan 1965)::

        compensation = compensation + update
        new = weight + compensation
        compensation = compensation - (new - weight)

    or, with a ``key``, rounded at random by ``random_bits(weight.size, key, step, 0)``.

    ``negative_lr`` and ``momentum`` are codes of scalars.
    """
    direction = grad
    if momentum is not None and buffer is not None:
        direction = buffer = add(mul(momentum, buffer, fmt), grad, fmt)
    bits = None if key is None else random_bits(weight.size, key, step, WEIGHT_SLOT).reshape(weight.shape)
    new, compensation = _updated(weight, mul(negative_lr, direction, fmt), fmt, compensation, bits)
    return new, buffer, compensation


class AdamCodes(NamedTuple):
    """Adam's scalars in a format. Bias correction after t steps is entry ``min(t, len) - 1``; later ones would be the same.

    ``correction = sqrt(1 - beta2^t) / (1 - beta1^t)``, ``eps_hat = eps sqrt(1 - beta2^t)`` (D. Kingma, J. Ba 2015, the end of
    section 2), at least the format's smallest magnitude.
    """

    beta1: int
    one_minus_beta1: int
    correction: Codes
    eps_hat: Codes


def check_adam(beta1: float, beta2: float, eps: float) -> None:
    """Refuse what no format can use.

    Raises:
        ValueError: beta1 is not in [0, 1), beta2 not in [10^-6, 1), or eps not positive and finite.
    """
    if not 0 <= beta1 < 1:
        raise ValueError(f"beta1={beta1}: must lie in [0, 1), for example 0.9")
    if not 1e-6 <= beta2 < 1:
        raise ValueError(f"beta2={beta2}: must be at least 1e-6 and below 1, for example 0.999")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps={eps}: must be positive and finite, for example 1e-8")


@lru_cache(maxsize=64)
def adam_codes(beta1: float, beta2: float, eps: float, fmt: LNSFormat) -> AdamCodes:
    """The codes of Adam's scalars; ``1 - beta1`` is that of the beta1 that the format has, so that the average has gain 1.

    Raises:
        ValueError: as :func:`check_adam`, or beta1 rounds to 1, which would never forget.
    """
    check_adam(beta1, beta2, eps)
    first = encode(np.array(beta1), fmt)
    held = float(decode(first, fmt, np.float64))
    if held >= 1:
        raise ValueError(
            f"beta1={beta1}: rounds to 1 in {fmt}, so the average would never forget; use beta1 <= {1 / (1 + fmt.epsilon):.3g}"
        )
    # 1 - beta^t is 1 to within 2^-40 after so many steps.
    steps = np.arange(1, 2 + int(28 / -np.log(max(beta1, beta2))), dtype=np.float64)
    root = np.sqrt(1 - beta2**steps)
    correction = encode(root / (1 - beta1**steps), fmt)
    eps_hat = np.maximum(encode(eps * root, fmt), 1)
    length = 1 + int(np.flatnonzero((correction != correction[-1]) | (eps_hat != eps_hat[-1])).max(initial=-1)) + 1
    return AdamCodes(int(first), int(encode(np.array(1 - held), fmt)), correction[:length], eps_hat[:length].astype(np.int16))


def adam_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    step: int,
    exp_avg: Codes,
    root: Codes,
    residue: Codes | None = None,
    compensation: Codes | None = None,
    negative_lr: Codes,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: Codes | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> tuple[Codes, Codes, Codes, Codes | None, Codes | None]:
    """One Adam step (D. Kingma, J. Ba 2015) in which every operation is an LNS operation.

    ::

        grad = grad + weight_decay weight                      (where given and not decoupled)
        exp_avg = beta1 exp_avg + (1 - beta1) grad
        root = sqrt(beta2 root^2 + (1 - beta2) grad^2)         root_mean_square: one operation, nothing squared leaves the range
        direction = correction exp_avg / (root + eps_hat)
        direction = direction + weight_decay weight            (where given and decoupled: AdamW, I. Loshchilov, F. Hutter 2019)
        weight = weight + (-lr) direction                      to nearest, with Kahan compensation, or at random

    Args:
        step: 1 for the first one.
        root: the root of the second moment; ``residue`` holds its bits below the ulp unless a ``key`` rounds it at random.
        negative_lr, weight_decay: codes of scalars.
        key: of :func:`random_bits`, slot 0 for the weight and 1 for the root.

    Returns:
        weight, exp_avg, root, residue, compensation.
    """
    codes = adam_codes(beta1, beta2, eps, fmt)
    now = min(step, len(codes.correction)) - 1
    if weight_decay is not None and not decoupled:
        grad = add(grad, mul(weight_decay, weight, fmt), fmt)
    exp_avg = add(mul(np.int16(codes.beta1), exp_avg, fmt), mul(np.int16(codes.one_minus_beta1), grad, fmt), fmt)  # type: ignore[arg-type]
    bits = [
        None if key is None else random_bits(weight.size, key, step, s).reshape(weight.shape) for s in (WEIGHT_SLOT, ROOT_SLOT)
    ]
    root, residue = root_mean_square(root, grad, fmt, beta2, residue=None if key is not None else residue, bits=bits[1])
    direction = mul(codes.correction[now], div(exp_avg, add(root, codes.eps_hat[now], fmt), fmt), fmt)
    if weight_decay is not None and decoupled:
        direction = add(direction, mul(weight_decay, weight, fmt), fmt)
    weight, compensation = _updated(weight, mul(negative_lr, direction, fmt), fmt, compensation, bits[0])
    return weight, exp_avg, root, residue, compensation


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
    """``sign x 2^(log/2^f)``: the significand ``2^(j/2^f)`` times a power of two, rounded to ``dtype`` once."""
    sign, log = unpack(codes, fmt)
    safe = np.where(log == NO_LOG, 0, log)
    significand = decode_significands(fmt.fraction_bits)[safe & ((1 << fmt.fraction_bits) - 1)]
    magnitude = np.where(log == NO_LOG, 0.0, np.ldexp(significand, (safe >> fmt.fraction_bits).astype(np.int32)))
    return np.where(sign, -magnitude, magnitude).astype(dtype)


def encode_stochastic(x: NDArray[np.float32], fmt: LNSFormat, bits: NDArray[np.int64]) -> Codes:
    """The code below or above ``x`` in magnitude, at random, ``x`` being the expected value; :func:`stochastic_steps` is the definition.

    Args:
        x: float32, finite.
        bits: uniform in ``0 .. 2^16 - 1``, of ``x``'s shape.
    """
    mantissas, reciprocals = stochastic_steps(fmt.fraction_bits)
    fraction, exponent = np.frexp(np.abs(x).astype(np.float64))
    mantissa = np.where(x == 0, 0, np.ldexp(fraction, 24)).astype(np.int64) - (1 << 23) * (x != 0)
    j = np.searchsorted(mantissas, mantissa, side="right") - 1
    chance = (mantissa - mantissas[j]) * reciprocals[j] >> 24
    log = (exponent.astype(np.int64) - 1 << fmt.fraction_bits) + j + (chance + bits >> 16)
    return pack(x < 0, np.where(x == 0, NO_LOG, log), fmt)


# --------------------------------------------------------------------------------------------- updates in float32


class Codec(NamedTuple):
    """How updates in float32 load and store: ``decode(codes, fmt)``, ``encode(x, fmt)`` and ``encode_stochastic(x, fmt, bits)``."""

    decode: Callable[..., Any]
    encode: Callable[..., Any]
    encode_stochastic: Callable[..., Any]


_F32 = np.float32
_LARGEST = np.finfo(np.float32).max


def _inside(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """``x``, where it has left float32 the largest number, so that no NaN can come of it."""
    return np.clip(x, -_LARGEST, _LARGEST)


def _stored(x: NDArray[np.float32], fmt: LNSFormat, codec: Codec, bits: NDArray[np.int64] | None = None) -> Codes:
    """The codes of ``x``; what has left float32 saturates."""
    inside = _inside(x)
    codes: Codes = codec.encode(inside, fmt) if bits is None else codec.encode_stochastic(inside, fmt, bits)
    return codes


def _updated_float32(
    weight: NDArray[np.float32], update: NDArray[np.float32], fmt: LNSFormat, compensation: Codes | None,
    bits: NDArray[np.int64] | None, codec: Codec,
) -> tuple[Codes, Codes | None]:  # fmt: skip
    if bits is not None or compensation is None:
        return _stored(weight + update, fmt, codec, bits), compensation
    kept = _inside(codec.decode(compensation, fmt) + update)
    new = _stored(weight + kept, fmt, codec)
    return new, _stored(kept - (codec.decode(new, fmt) - weight), fmt, codec)


def sgd_update_float32(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    lr: float,
    momentum: float | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
    codec: Codec | None = None,
) -> tuple[Codes, Codes | None, Codes | None]:
    """:func:`sgd_update` with float32 in between: codes are decoded, every operation is one of float32 (rounded to nearest, none fused),
    and what is stored is encoded. Kahan's compensation is that of the stored weight.

    ``buffer = momentum buffer + grad``; ``update = -lr buffer`` from the buffer before it is rounded to the format.
    """
    codec = codec or REFERENCE_CODEC
    with np.errstate(over="ignore"):
        direction = codec.decode(grad, fmt)
        if momentum is not None and buffer is not None:
            direction = _inside(_F32(momentum) * codec.decode(buffer, fmt) + direction)
            buffer = _stored(direction, fmt, codec)
        bits = None if key is None else random_bits(weight.size, key, step, WEIGHT_SLOT).reshape(weight.shape)
        new, compensation = _updated_float32(codec.decode(weight, fmt), _F32(-lr) * direction, fmt, compensation, bits, codec)
    return new, buffer, compensation


@lru_cache(maxsize=64)
def adam_scalars(beta1: float, beta2: float, eps: float) -> NDArray[np.float32]:
    """``correction`` and ``eps_hat`` (:class:`AdamCodes`) of steps 1, 2, ..., float32 [steps, 2]; later ones are like the last.

    Raises:
        ValueError: as :func:`check_adam`.
    """
    check_adam(beta1, beta2, eps)
    steps = np.arange(1, 2 + int(28 / -np.log(max(beta1, beta2))), dtype=np.float64)
    root = np.sqrt(1 - beta2**steps)
    table = np.stack([root / (1 - beta1**steps), eps * root], axis=1).astype(np.float32)
    length = 1 + int(np.flatnonzero((table != table[-1]).any(axis=1)).max(initial=-1)) + 1
    return table[:length].copy()


def adam_update_float32(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    step: int,
    exp_avg: Codes,
    root: Codes,
    residue: Codes | None = None,
    compensation: Codes | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | None = None,
    decoupled: bool = False,
    key: int | None = None,
    codec: Codec | None = None,
) -> tuple[Codes, Codes, Codes, Codes | None, Codes | None]:
    """:func:`adam_update` with float32 in between, as :func:`sgd_update_float32`.

    ``residue`` holds codes here: what the stored root lacks of the exact one.
    """
    codec = codec or REFERENCE_CODEC
    scalars = adam_scalars(beta1, beta2, eps)
    correction, eps_hat = scalars[min(step, len(scalars)) - 1]
    with np.errstate(over="ignore", divide="ignore"):
        w, g = codec.decode(weight, fmt), codec.decode(grad, fmt)
        if weight_decay is not None and not decoupled:
            g = _inside(g + _F32(weight_decay) * w)
        average = _F32(beta1) * codec.decode(exp_avg, fmt) + _F32(1 - beta1) * g
        bits = [
            None if key is None else random_bits(weight.size, key, step, s).reshape(weight.shape)
            for s in (WEIGHT_SLOT, ROOT_SLOT)
        ]
        r = codec.decode(root, fmt)
        if key is None and residue is not None:
            r = r + codec.decode(residue, fmt)
        r = np.sqrt(_F32(beta2) * (r * r) + _F32(1 - beta2) * (g * g))
        root = _stored(r, fmt, codec, bits[1])
        if key is None and residue is not None:
            residue = _stored(r - codec.decode(root, fmt), fmt, codec)
        direction = _inside(correction * (average / (r + eps_hat)))
        if weight_decay is not None and decoupled:
            direction = direction + _F32(weight_decay) * w
        weight, compensation = _updated_float32(w, _F32(-lr) * direction, fmt, compensation, bits[0], codec)
    return weight, _stored(average, fmt, codec), root, residue, compensation


REFERENCE_CODEC = Codec(decode, encode, encode_stochastic)
