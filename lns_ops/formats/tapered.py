"""Tapered formats: posits and takums, most precise around 1 and less precise towards both ends.

In both formats a few leading bits determine how many bits the exponent has, and the mantissa has
the remaining bits. Codes are two's complement integers in the order of their values; -2^(n-1) is
Not a Real (NaR), the code of NaN and infinities. There is one zero.

*Rounding* is done in the bit string, as both definitions say. The boundary between two neighbours
is the value of the string of n + 1 bits between them (the lower one's string and a 1); a number at
the boundary goes to the even code. If the last bits belong to the mantissa, the boundary is the
mean of the neighbours; if they belong to the exponent, it is nearer to their geometric mean. Only
zero rounds to zero, and no number rounds to NaR: both ends saturate. In contrast, stochastic
rounding (:mod:`lns_ops.formats.tabulated`) has the exact number as its expected value, also between
zero and the smallest magnitude.

*Scales.* A scale maps the largest magnitude of a group to a range in which the format is as precise
as at 1, instead of to the format's largest magnitude, which has hardly any mantissa.

Sources: Posit Working Group, "Standard for Posit Arithmetic (2022)", with es = 2; earlier posits
had other values of es. L. Hunhold, "Beating Posits at Their Own Game: Takum Arithmetic", CoNGA 2024
(arXiv:2404.18603), and, for linear takums, "Design and Implementation of a Takum Arithmetic
Hardware Codec in VHDL", 2024 (arXiv:2408.10594).

Limits: takums range from 2^-255 to 2^255 (logarithmic takums to e^127). Values outside float32's
normal range are left out: here a takum format saturates at its outermost values from 2^-126 to
2^128. Logarithmic takums are usually not float32 numbers and are rounded to the nearest float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from lns_ops.formats.fixed_point import integer_dtype
from lns_ops.formats.tabulated import Grid, Listed, thresholds_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Floats = NDArray[np.float64]

BITS = (2, 16)
_SMALLEST, _LARGEST = 2.0**-126, float(np.finfo(np.float32).max)
_SHORTEST_TAKUM = 12
"""Takum strings up to this width are extended with zeros: sign, direction, regime, and up to 7 bits
of characteristic."""


def _length(x: Integers) -> Integers:
    """Return the number of binary digits of integers below 2^53; 0 for 0."""
    return np.frexp(x.astype(np.float64))[1].astype(np.int64)


def posit_values(codes: Integers, bits: int, es: int) -> Floats:
    """Return the values of positive posits: ``2^(k 2^es + e) (1 + f)``.

    The regime is a run of k + 1 ones or -k zeros that ends with the opposite bit. Then follow
    ``es`` bits of an exponent e (missing bits are zeros) and a fraction f.
    """
    body = bits - 1
    ones = codes >> body - 1 & 1 == 1
    run = body - _length(np.where(ones, ~codes & (1 << body) - 1, codes))
    regime = np.where(ones, run - 1, -run)
    left = np.maximum(body - run - 1, 0)
    tail = (codes & (1 << left) - 1) << es  # room for missing exponent bits
    exponent, fraction = tail >> left, tail & (1 << left) - 1
    values: Floats = np.ldexp(1 + fraction / (1 << left), regime * (1 << es) + exponent)
    return values


def takum_logarithms(codes: Integers, bits: int) -> tuple[Integers, Floats]:
    """Return the characteristics c and mantissas m of positive takums.

    A direction bit D and three bits R give the number r of bits of the characteristic C, R if D = 1
    and 7 - R if D = 0; ``c = 2^r - 1 + C`` or ``c = -2^(r+1) + 1 + C``. The remaining bits are m, a
    fraction in [0, 1).
    """
    codes = codes << max(_SHORTEST_TAKUM - bits, 0)
    bits = max(_SHORTEST_TAKUM, bits)
    above, regime = codes >> bits - 2 & 1 == 1, codes >> bits - 5 & 7
    r = np.where(above, regime, 7 - regime)
    p = bits - 5 - r
    c = np.where(above, (1 << r) - 1, 1 - (1 << r + 1)) + (codes >> p & (1 << r) - 1)
    return c, (codes & (1 << p) - 1) / (1 << p)


@dataclass(frozen=True)
class _Tapered(Listed):
    """Formats whose codes are two's complement strings of ``width`` bits."""

    width: int

    @property
    def bits(self) -> float:
        """The width."""
        return self.width

    @property
    def storage(self) -> torch.dtype:
        """The dtype int8 or int16."""
        return integer_dtype(self.width)

    @property
    @abstractmethod
    def precise_below(self) -> float:
        """The magnitude up to which, starting from 1, the format is as precise as at 1."""

    @abstractmethod
    def positive(self, codes: Integers, bits: int) -> Floats:
        """Return the values of positive codes of ``bits`` bits."""

    @property
    def grid(self) -> Grid:
        """The values of all codes that float32 can represent."""
        return _grid(self)

    def _check_width(self, name: str) -> None:
        low, high = BITS
        if not low <= self.width <= high:
            raise ValueError(
                f"bits={self.width}: {name} has {low} to {high} bits, so that its values fit in a"
                f" table; use for example {name}(8)"
            )


@lru_cache(maxsize=32)
def _grid(fmt: _Tapered) -> Grid:
    bits, codes = fmt.width, np.arange(1, 1 << fmt.width - 1)
    values = fmt.positive(codes, bits)
    kept = np.flatnonzero((values >= _SMALLEST) & (values <= _LARGEST))
    first, last = int(kept[0]), int(kept[-1])
    values, lower = values[kept], codes[first:last]
    between = fmt.positive(2 * lower + 1, bits + 1)
    positive, zero = values.astype(np.float32), np.zeros(1, np.float32)
    # A tie goes to the even code. For negative values the upper one has the smaller magnitude.
    above = thresholds_of(between, lower % 2 == 1)
    below = thresholds_of(-between, lower % 2 == 0)
    ends = np.pad(positive, (first, len(codes) - 1 - last), mode="edge")
    return Grid(
        levels=np.concatenate([-positive[::-1], zero, positive]),
        boundaries=np.concatenate([-between[::-1], [0.0, 0.0], between]),
        thresholds=np.concatenate([below[::-1], zero, np.nextafter(zero, np.float32(1)), above]),
        codes=np.concatenate([-codes[kept][::-1], [0], codes[kept]]),
        decoded=np.concatenate([zero + np.float32(np.nan), -ends[::-1], zero, ends]),
        unit=_unit(values, between, fmt.precise_below),
        full_scale=float(positive[values < fmt.precise_below][-1]),
    )


def _unit(values: Floats, between: Floats, end: float) -> float:
    """Return the unit roundoff from 1 to ``end``, 0 without a step."""
    inside = np.flatnonzero((values[:-1] >= 1) & (values[:-1] < end))
    low, high = (between / values[:-1])[inside] - 1, (values[1:] / between)[inside] - 1
    return float(np.maximum(low, high).max(initial=0.0))


@dataclass(frozen=True)
class Posit(_Tapered):
    """A posit of ``width`` bits, of which ``es`` are for the exponent: ``posit(n)``.

    >>> import torch
    >>> Posit(8).quantize(torch.tensor([0.3, 3.3, 1e9, 1e-9, 0.0]))
    tensor([3.1250e-01, 3.2500e+00, 1.6777e+07, 5.9605e-08, 0.0000e+00])

    Args:
        width: bits, 2 to 16.
        es: exponent bits, 2 in the standard; limited so that the largest magnitude,
            ``2^(2^es (width - 2))``, is below 2^127.

    Raises:
        ValueError: ``width`` or ``es`` is out of range.
    """

    es: int = 2

    def __post_init__(self) -> None:
        self._check_width("posit")
        if not 0 <= self.es <= 6 or (self.width - 2) << self.es > 126:
            most = 6 if self.width == 2 else int(math.log2(126 / (self.width - 2)))
            raise ValueError(
                f"es={self.es}: with bits={self.width} must be from 0 to {most}, because of"
                f" float32's range; use for example posit({self.width},{min(most, 2)})"
            )

    @property
    def name(self) -> str:
        """The name: ``posit(n)`` with the standard's es = 2, otherwise ``posit(n,es)``."""
        return f"posit({self.width})" if self.es == 2 else f"posit({self.width},{self.es})"

    @property
    def precise_below(self) -> float:
        """The base of the regime, ``2^(2^es)``."""
        return 2.0 ** (1 << self.es)

    def positive(self, codes: Integers, bits: int) -> Floats:
        """Return the values of positive codes."""
        return posit_values(codes, bits, self.es)


@dataclass(frozen=True)
class Takum(_Tapered):
    """A linear takum of ``width`` bits, ``(1 + m) 2^c`` for positive ones: ``takum(n)``.

    >>> import torch
    >>> Takum(8).quantize(torch.tensor([0.3, 3.3, 1e9, 0.0]))
    tensor([3.1250e-01, 3.5000e+00, 5.3687e+08, 0.0000e+00])

    Args:
        width: bits, 2 to 16.

    Raises:
        ValueError: ``width`` is out of range.
    """

    def __post_init__(self) -> None:
        self._check_width("takum")

    @property
    def name(self) -> str:
        """The name: ``takum(n)``."""
        return f"takum({self.width})"

    @property
    def precise_below(self) -> float:
        """The base of the characteristic, 2: from there the characteristic takes one bit more."""
        return 2.0

    def positive(self, codes: Integers, bits: int) -> Floats:
        """Return the values of positive codes."""
        c, m = takum_logarithms(codes, bits)
        return np.ldexp(1 + m, c)


@dataclass(frozen=True)
class LogarithmicTakum(_Tapered):
    """A (logarithmic) takum of ``width`` bits, ``e^((c + m) / 2)`` for positive ones:
    ``takum_log(n)``.

    >>> import torch
    >>> LogarithmicTakum(8).quantize(torch.tensor([0.3, 3.3, 1e9, 0.0]))
    tensor([2.8650e-01, 3.4903e+00, 2.1744e+09, 0.0000e+00])

    Args:
        width: bits, 2 to 16.

    Raises:
        ValueError: ``width`` is out of range.
    """

    def __post_init__(self) -> None:
        self._check_width("takum_log")

    @property
    def name(self) -> str:
        """The name: ``takum_log(n)``."""
        return f"takum_log({self.width})"

    @property
    def precise_below(self) -> float:
        """The base of the characteristic, the square root of e."""
        return math.sqrt(math.e)

    def positive(self, codes: Integers, bits: int) -> Floats:
        """Return the values of positive codes, accurate to float64's last bits."""
        c, m = takum_logarithms(codes, bits)
        return np.exp((c + m) / 2)
