"""Encoding of floating-point arrays (to nearest or at random) and decoding on the CPU; rounding to
formats with a power-of-two scale for each group of values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import GRAIN, Codes, dense, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import elementwise, scaling
from lns_ops.spec import reference
from lns_ops.spec.format import (
    MANTISSA_BITS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    single_significands,
    stochastic_steps,
)


@lru_cache(maxsize=32)
def _encode_tables(
    fraction_bits: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Return the encoding tables by cell of ``2^-(f+1)``.

    They are the float32 shift, the float64 threshold in or above the cell, and the number of
    thresholds below it.
    """
    thresholds = encode_thresholds(fraction_bits) - (1 << MANTISSA_BITS)
    cells = np.arange(2 << fraction_bits, dtype=np.int64)
    width = 1 << (MANTISSA_BITS - 1 - fraction_bits)
    # A threshold equal to a cell's first fraction belongs to the cell, because only larger
    # fractions round up.
    base = np.searchsorted(thresholds, cells * width, side="left").astype(np.int64)
    inside = np.append(thresholds, 1 << MANTISSA_BITS)[base]
    step = 1 << (22 - fraction_bits)
    low = np.minimum(inside >> (MANTISSA_BITS - 23), (cells + 1) * step - 1) - cells * step
    shift = (base - cells) * step + (step - 1 - low)
    return shift.astype(np.int32), inside, base.astype(np.int32)


def encode(x: NDArray[Any], fmt: LNSFormat) -> Codes:
    """Return the codes nearest to ``x`` in logarithm: ``sign x round(2^f log2|x|)``.

    Magnitudes above the range saturate, those below it underflow to zero.

    Args:
        x: any shape; float32 and float64 are read directly, other real dtypes are converted to
            float64 first.
        fmt: the format.

    Raises:
        NonFiniteError: (a ValueError) ``x`` contains a NaN or an infinity.
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        x = x.astype(np.float64)
    x = dense(x)
    out, f = np.empty(x.shape, np.int16), fmt.fraction_bits
    shift, threshold, base = _encode_tables(f)
    if x.dtype == np.float32:
        bad = run(
            elementwise.encode32, x.size, GRAIN, x.reshape(-1).view(np.int32), out.reshape(-1),
            shift, f, fmt.bias, fmt.field_mask,
        )  # fmt: skip
    else:
        bad = run(
            elementwise.encode64, x.size, GRAIN, x.reshape(-1).view(np.int64), out.reshape(-1),
            threshold, base, f, fmt.bias, fmt.field_mask,
        )  # fmt: skip
    if bad:
        places = np.argwhere(~np.isfinite(x))
        first = tuple(places[0].tolist())
        raise NonFiniteError(
            f"NaN or infinity to encode: {x[first]} at index {first} of shape {x.shape},"
            f" {len(places):,} of {x.size:,} values in all; LNS has no code for either: clean the"
            " input first"
        )
    return out


@lru_cache(maxsize=32)
def _stochastic_tables(
    fraction_bits: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return the tables of stochastic encoding by cell of ``2^-(f+1)``.

    They are the last significand at or below the cell's start, and both arrays of
    :func:`stochastic_steps`.
    """
    mantissas, reciprocals = stochastic_steps(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (22 - fraction_bits)
    base = np.searchsorted(mantissas, starts, side="right") - 1
    return base.astype(np.int32), mantissas.astype(np.int32), reciprocals.copy()


def encode_stochastic(x: NDArray[np.float32], fmt: LNSFormat, bits: NDArray[np.uint16]) -> Codes:
    """Return the code below or above each finite ``x`` in magnitude, at random.

    The expected value is ``x``.

    Args:
        x: float32, any shape.
        bits: uniform uint16, at least as many as ``x`` has elements.
    """
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty(x.shape, np.int16)
    base, mantissas, reciprocals = _stochastic_tables(fmt.fraction_bits)
    run(
        elementwise.encode32_stochastic, x.size, GRAIN, x.reshape(-1).view(np.int32),
        bits.reshape(-1), out.reshape(-1), base, mantissas, reciprocals, fmt.fraction_bits,
        fmt.bias, fmt.field_mask,
    )  # fmt: skip
    return out


@lru_cache(maxsize=32)
def _decode_tables(fraction_bits: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the bit patterns of significands, for float32 and for float64.

    Float32's are followed by the results of the exponents -128 and -127.
    """
    single = single_significands(fraction_bits).view(np.int32).copy()
    single[: 1 << fraction_bits] -= 127 << 23
    return single, decode_significands(fraction_bits).view(np.int64).copy()


def decode(
    codes: Codes, fmt: LNSFormat, dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """Return ``sign x 2^(log/2^f)``, rounded to ``dtype`` once.

    Args:
        codes: int16, any shape.
        fmt: their format.
        dtype: np.float32 (encodes back to the same codes) or np.float64; others use the slow
            reference.
    """
    f, single = fmt.fraction_bits, np.dtype(dtype) == np.float32
    if not single and np.dtype(dtype) != np.float64:
        return np.asarray(reference.decode(codes, fmt, dtype))
    out = np.empty(codes.shape, dtype)
    table32, table64 = _decode_tables(f)
    flat = out.reshape(-1).view(np.int32 if single else np.int64)
    if single:
        run(
            elementwise.decode32, codes.size, GRAIN, flattened(codes), flat, table32, f, fmt.bias,
            fmt.field_mask,
        )  # fmt: skip
    else:
        run(
            elementwise.decode64, codes.size, GRAIN, flattened(codes), flat, table64, f, fmt.bias,
            fmt.field_mask,
        )  # fmt: skip
    return out


def quantize_float(
    x: NDArray[np.float32], mantissa_bits: int, min_exponent: int, largest: float
) -> NDArray[np.float32] | None:
    """Return ``x`` rounded to saturating binary floats, or None if a value is not finite.

    Args:
        x: float32, any shape.
        mantissa_bits: width of the mantissa.
        min_exponent: exponent of the smallest normal number.
        largest: largest magnitude.
    """
    flat, out, result = _rounded(x)
    bad = run(
        scaling.quantize_floats, flat.size, GRAIN, flat, result, _pattern(largest), mantissa_bits,
        min_exponent + 127,
    )  # fmt: skip
    return None if bad else out


def quantize_scaled(
    x: NDArray[np.float32],
    width: int,
    length: int,
    fmt: LNSFormat | tuple[int, int],
    largest: float,
) -> NDArray[np.float32] | None:
    """Return ``x`` rounded to a format times a power of two for each group, the smallest that
    avoids saturation; None if a value is not finite.

    Args:
        x: float32, any shape.
        width: number of values of a row.
        length: number of values of a group; a row's last group may have fewer.
        fmt: an LNS format, or for binary floats the number of mantissa bits and the exponent of the
            smallest normal number.
        largest: largest magnitude of the format.
    """
    flat, out, result = _rounded(x)
    rows, grain = flat.size // max(width, 1), max(1, GRAIN // max(width, 1))
    if isinstance(fmt, LNSFormat):
        f = fmt.fraction_bits
        bad = run(
            scaling.quantize_scaled_logarithms, rows, grain, flat, result, _encode_tables(f)[0],
            _decode_tables(f)[0], width, length, _pattern(largest), f, fmt.bias, fmt.field_mask,
        )  # fmt: skip
    else:
        bad = run(
            scaling.quantize_scaled_floats, rows, grain, flat, result, width, length,
            _pattern(largest), fmt[0], fmt[1] + 127,
        )  # fmt: skip
    return None if bad else out


def _rounded(
    x: NDArray[np.float32],
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
    """Return the bits of ``x``, an array for the rounded values, and their bits."""
    out = np.empty(x.shape, np.float32)
    return dense(x).reshape(-1).view(np.int32), out, out.reshape(-1).view(np.int32)


def _pattern(value: float) -> int:
    return int(np.float32(value).view(np.int32))
