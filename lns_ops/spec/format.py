"""Logarithmic number formats: the meaning of a code, and the rounding of encoding.

A value of ``LNSFormat(bits, fraction_bits)`` is ``sign x 2^(log / 2^f)`` with ``f = fraction_bits``
and an integer ``log``, a base-2 logarithm in fixed point. One unit of ``log`` (one *ulp*) is a
factor of ``2^(2^-f)``.

Code word (``bits`` wide, sign-extended to int16)::

    bit  bits-1          bits-2 ............ 0
         sign            log + 2^(bits-2)         the biased logarithm, 1 .. 2^(bits-1) - 1; 0 means
                                                  the value zero

So ``code < 0`` tests the sign in every format, the low ``bits`` bits are the word that a device
would store, and zero is code 0. The word with the sign bit set and a zero logarithm is never
produced and reads as zero.

Encoding rounds the *logarithm* to the nearest integer. No float is exactly between two logarithms
(``2^((k + 1/2) / 2^f)`` is irrational), so there are no ties, and rounding is a comparison with the
thresholds below. Every backend compares with the same integers, so all agree bit for bit.
Magnitudes above the largest saturate. Magnitudes whose rounded logarithm is below the smallest
become zero. NaN and infinities raise.

Limits: 2 <= bits <= 16; at least one integer bit in the logarithm (fraction_bits <= bits - 2); the
range must be within float32's (fraction_bits >= bits - 9), so that ``encode(decode(code)) == code``
for every code.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MANTISSA_BITS = 52
"""Number of fraction bits of the thresholds, as in float64.

So float32 and float64 inputs are compared exactly.
"""


class NonFiniteError(ValueError):
    """The error of encoding a NaN or an infinity, for which LNS formats have no code.

    In training it usually means that the float part of the model has diverged.
    """


@dataclass(frozen=True)
class LNSFormat:
    """A logarithmic number format: a sign bit and a base-2 logarithm of ``bits - 1`` bits.

    >>> LNSFormat(bits=12, fraction_bits=6).largest
    64830.047072680376

    Args:
        bits: width of the code word including the sign, 2 to 16.
        fraction_bits: bits of the logarithm after the binary point, ``max(0, bits - 9)`` to
            ``bits - 2``.

    Raises:
        ValueError: ``bits`` or ``fraction_bits`` is out of range.
    """

    bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("fraction_bits", self.fraction_bits)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(
                    f"{name}={value!r}: must be an integer, for example LNSFormat(bits=12,"
                    " fraction_bits=6)"
                )
        if not 2 <= self.bits <= 16:
            raise ValueError(
                f"bits={self.bits}: an LNS code has 2 to 16 bits (sign included); lns12 is bits=12,"
                " fraction_bits=6"
            )
        lowest, highest = max(0, self.bits - 9), self.bits - 2
        if self.fraction_bits > highest or self.fraction_bits < 0:
            raise ValueError(
                f"fraction_bits={self.fraction_bits}: with bits={self.bits} at most {highest} (one"
                f" bit is the sign, one the integer part of the logarithm) and at least {lowest};"
                " lower fraction_bits or raise bits"
            )
        if self.fraction_bits < lowest:
            raise ValueError(
                f"fraction_bits={self.fraction_bits}: with bits={self.bits} the range would be"
                f" 2^+-{2.0 ** (highest - self.fraction_bits):g}, beyond float32's 2^+-128; use"
                f" fraction_bits >= {lowest}"
            )

    @property
    def bias(self) -> int:
        """The bias of the stored logarithm field, ``2^(bits-2)``: field = ``log`` + bias."""
        return 1 << (self.bits - 2)

    @property
    def max_log(self) -> int:
        """The largest logarithm, in ulps: ``2^(bits-2) - 1``."""
        return self.bias - 1

    @property
    def min_log(self) -> int:
        """The smallest logarithm of a nonzero value, in ulps: ``-max_log``."""
        return -self.max_log

    @property
    def field_mask(self) -> int:
        """The mask of the biased logarithm in a code: ``2^(bits-1) - 1``."""
        return (1 << (self.bits - 1)) - 1

    @property
    def sign_mask(self) -> int:
        """The mask that negates a nonzero code by XOR: ``-2^(bits-1)``, the sign and all above."""
        return -(1 << (self.bits - 1))

    @property
    def largest(self) -> float:
        """The largest magnitude: ``2^(max_log / 2^f)``."""
        return float(2.0 ** (self.max_log / 2**self.fraction_bits))

    @property
    def most_scale(self) -> float:
        """The largest power of two whose inverse is in the format."""
        return 2.0 ** (self.max_log >> self.fraction_bits)

    @property
    def smallest(self) -> float:
        """The smallest nonzero magnitude: ``2^(min_log / 2^f)``."""
        return float(2.0 ** (self.min_log / 2**self.fraction_bits))

    @property
    def of_squares(self) -> LNSFormat:
        """The format of the squares of its values, used for variances.

        It has one bit more and the same ulp, so the logarithm of a square is twice the logarithm of
        the value. If no such format exists (at 16 bits, or if its range would exceed float32's), it
        is the format itself.

        >>> lns12.of_squares.name, lns16.of_squares.name
        ('lns(13,6)', 'lns16')
        """
        return _of_squares(self.bits, self.fraction_bits)

    @property
    def epsilon(self) -> float:
        """The relative distance to the next value, ``2^(2^-f) - 1``.

        The relative rounding error is at most about half this value.
        """
        return float(2.0 ** (2.0**-self.fraction_bits) - 1)

    @property
    def name(self) -> str:
        """The name for :meth:`parse`: a preset (``lns12``) or ``lns(bits,fraction_bits)``."""
        for name, preset in PRESETS.items():
            if preset == self:
                return name
        return f"lns({self.bits},{self.fraction_bits})"

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> LNSFormat:
        """Return the format called ``name``.

        Names are the presets (``lns16``, ``lns12``, ``lns8``) and ``lns(bits,fraction_bits)``.

        Raises:
            ValueError: an invalid name, or numbers out of range.
        """
        if name in PRESETS:
            return PRESETS[name]
        match = re.fullmatch(r"lns\(\s*(-?\d+)\s*,\s*(-?\d+)\s*\)", name)
        if match is None:
            raise ValueError(
                f"format {name!r}: not one of {', '.join(PRESETS)} and not of the form"
                " lns(bits,fraction_bits)"
            )
        return LNSFormat(int(match[1]), int(match[2]))

    @staticmethod
    def of(fmt: LNSFormat | str) -> LNSFormat:
        """Return ``fmt`` itself, or the format with that name.

        Raises:
            ValueError: neither a format nor a format's name.
        """
        if isinstance(fmt, LNSFormat):
            return fmt
        if not isinstance(fmt, str):
            raise ValueError(
                f"format {fmt!r}: must be an LNSFormat such as lns_ops.lns12, or its name"
            )
        return LNSFormat.parse(fmt)

    def codes(self) -> NDArray[np.int16]:
        """Return all ``2^bits - 1`` codes of the format, int16, in ascending order of values."""
        magnitudes = np.arange(1, self.field_mask + 1)
        return np.concatenate([(magnitudes | self.sign_mask)[::-1], [0], magnitudes]).astype(
            np.int16
        )


@lru_cache
def _of_squares(bits: int, fraction_bits: int) -> LNSFormat:
    wider = bits + 1
    exists = wider <= 16 and fraction_bits >= wider - 9
    return LNSFormat(wider if exists else bits, fraction_bits)


LNSFormat.__module__ = "lns_ops.format"  # saved files refer to it by its public module

lns16 = LNSFormat(16, 7)
"""1 + 8 + 7 bits: bfloat16's range, the literature's 16-bit LNS."""
lns12 = LNSFormat(12, 6)
"""1 + 5 + 6 bits: the format of the MNIST table."""
lns8 = LNSFormat(8, 3)
"""1 + 4 + 3 bits: 2^-8 .. 2^8 in steps of 9 %; useful only with scaling."""

PRESETS: dict[str, LNSFormat] = {"lns16": lns16, "lns12": lns12, "lns8": lns8}


_UNIT_BITS = 160
"""Fraction bits of the powers of two from which tables are computed (to about 53 bits)."""


def _powers_of_two(bits: int) -> list[int]:
    """Return ``2^(j / 2^bits)`` for ``j`` in ``0 .. 2^bits - 1``, in units of ``2^-160``.

    Each result is below the exact value by less than ``2^(bits + 3)`` units: the root by two units,
    and each of up to ``2^bits`` products is truncated.
    """
    root = 2 << _UNIT_BITS
    for _ in range(bits):
        root = math.isqrt(root << _UNIT_BITS)
    powers = [1 << _UNIT_BITS]
    for _ in range((1 << bits) - 1):
        powers.append(powers[-1] * root >> _UNIT_BITS)
    return powers


@lru_cache(maxsize=32)
def encode_thresholds(fraction_bits: int) -> NDArray[np.int64]:
    """Return the thresholds at which the fraction of the logarithm rounds up.

    They are float64 significands: entry ``j`` is ``floor(2^((j + 1/2) / 2^f) * 2^52)``, int64,
    ``2^f`` entries. A significand ``m`` in ``[2^52, 2^53)`` has the rounded fractional logarithm
    ``#{j : m > threshold[j]}``, 0 to ``2^f`` (the last means the next power of two).
    """
    odd = _powers_of_two(fraction_bits + 1)[1::2]
    table = np.array([power >> _UNIT_BITS - MANTISSA_BITS for power in odd], dtype=np.int64)
    table.setflags(write=False)
    return table


def logarithm(value: float, fraction_bits: int) -> int:
    """Return ``round(2^f log2(value))`` for a positive number, in ulps.

    It is rounded as in encoding, but not limited to a format's range.
    """
    fraction, exponent = math.frexp(value)
    significand = int(math.ldexp(fraction, MANTISSA_BITS + 1))
    return (exponent - 1 << fraction_bits) + int(
        np.searchsorted(encode_thresholds(fraction_bits), significand, side="left")
    )


@lru_cache(maxsize=32)
def decode_significands(fraction_bits: int) -> NDArray[np.float64]:
    """Return ``2^(j / 2^f)`` for ``j`` in ``0 .. 2^f - 1``, correctly rounded to float64."""
    unit = 1 << _UNIT_BITS
    table = np.array([power / unit for power in _powers_of_two(fraction_bits)], dtype=np.float64)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=32)
def single_significands(fraction_bits: int) -> NDArray[np.float32]:
    """Return the float32 significands, normal and subnormal, by fraction of the logarithm.

    They are ``2^(j / 2^f)``, then ``2^(j / 2^f - 128)`` and ``2^(j / 2^f - 127)``, each rounded to
    float32 once; the latter two are subnormal.

    They are computed from integers, so a processor that flushes subnormals to zero gets the same
    table.
    """
    significands = decode_significands(fraction_bits)
    # in units of 2^-149
    subnormal = [
        np.rint(np.ldexp(significands, 149 - octaves)).astype(np.int32) for octaves in (128, 127)
    ]
    table = np.concatenate([significands.astype(np.float32).view(np.int32), *subnormal]).view(
        np.float32
    )
    table.setflags(write=False)
    return table


@lru_cache(maxsize=32)
def stochastic_steps(fraction_bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tables of stochastic encoding: a float32's neighbours, and their distances.

    Entry j of the first array is ``s_j = (2^(j / 2^f) - 1) 2^23``, with the power from
    :func:`decode_significands` rounded to float32; it has ``2^f + 1`` entries, the last is 2^23.
    Entry j of the second is ``floor(2^40 / (s_(j+1) - s_j))``, below 2^32. A mantissa m with ``s_j
    <= m < s_(j+1)`` is rounded up with probability ``((m - s_j) second[j] >> 24) / 2^16``.
    """
    single = decode_significands(fraction_bits).astype(np.float32).astype(np.float64)
    mantissas = np.append(((single - 1) * (1 << 23)).astype(np.int64), 1 << 23)
    reciprocals = (1 << 40) // np.diff(mantissas)
    for table in (mantissas, reciprocals):
        table.setflags(write=False)
    return mantissas, reciprocals
