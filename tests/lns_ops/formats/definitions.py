"""Number formats as their sources define them, in exact fractions: what the fast ones must equal.

Bits are strings of 0 and 1, so that each line reads as the text of the source does. No speed, and
nothing shared with :mod:`lns_ops.formats`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction

Value = Fraction | None
"""A number; None for Not a Real, NaN and infinities."""


def number(bits: str) -> int:
    return int(bits, 2) if bits else 0


def string(code: int, bits: int) -> str:
    return format(code % (1 << bits), f"0{bits}b")


def power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def posit(code: int, bits: int, es: int = 2) -> Value:
    """Standard for Posit Arithmetic (2022), section 3: sign S, regime R of a run that the opposite
    bit or the end of the string ends, exponent E of ``es`` bits of which those beyond the end are
    0, fraction F of the rest: ``((1 - 3 S) + f) 2^((1 - 2 S) (2^es r + e + S))``."""
    text = string(code, bits)
    if number(text) == 0:
        return Fraction(0)
    if text == "1" + "0" * (bits - 1):
        return None
    sign, rest = number(text[0]), text[1:]
    run = len(rest) - len(rest.lstrip(rest[0]))
    regime = run - 1 if rest[0] == "1" else -run
    rest = rest[run + 1 :]
    exponent = number(rest[:es].ljust(es, "0"))
    fraction = rest[es:]
    f = Fraction(number(fraction), 1 << len(fraction))
    return (1 - 3 * sign + f) * power((1 - 2 * sign) * ((1 << es) * regime + exponent + sign))


def takum_fields(code: int, bits: int) -> tuple[int, int, Fraction] | Value:
    """Hunhold 2024, definition of takum encoding: S, D, R of three bits, C of r bits, M of the
    rest. Strings of fewer than 12 bits are continued with zeros."""
    text = string(code, bits).ljust(12, "0")
    if number(text) == 0:
        return Fraction(0)
    if number(text[1:]) == 0:
        return None
    sign, direction = number(text[0]), number(text[1])
    r = number(text[2:5]) if direction else 7 - number(text[2:5])
    c = (2**r - 1 if direction else -(2 ** (r + 1)) + 1) + number(text[5 : 5 + r])
    mantissa = text[5 + r :]
    return sign, c, Fraction(number(mantissa), 1 << len(mantissa))


def takum(code: int, bits: int) -> Value:
    """The linear takum: ``((1 - 3 S) + f) 2^e`` with ``e = (-1)^S (c + S)``."""
    fields = takum_fields(code, bits)
    if not isinstance(fields, tuple):
        return fields
    sign, c, f = fields
    return (1 - 3 * sign + f) * power((-1) ** sign * (c + sign))


def takum_exponent(code: int, bits: int) -> Value:
    """The value of a nonzero logarithmic takum is ``(-1)^S sqrt(e)^l`` with ``l = (-1)^S (c +
    m)``."""
    fields = takum_fields(code, bits)
    assert isinstance(fields, tuple)
    sign, c, m = fields
    return (-1) ** sign * (c + m)


def binary(code: int, e: int, m: int, finite: bool = False) -> Value:
    """IEEE Std 754-2019, section 3.4, for fields of ``e`` and ``m`` bits."""
    text = string(code, 1 + e + m)
    sign, exponent = (-1) ** number(text[0]), number(text[1 : 1 + e])
    fraction = Fraction(number(text[1 + e :]), 1 << m)
    if exponent == (1 << e) - 1 and not finite:
        return None
    bias = (1 << e - 1) - 1
    if exponent == 0:
        return sign * fraction * power(1 - bias)
    return sign * (1 + fraction) * power(exponent - bias)


class Rounding:
    """The rounding of exact numbers to codes of two's complement strings, in the bit string.

    "If x lies between two n-bit strings, with u the lower and w the upper value, and v the value
    of the n+1-bit string u1: to u if u < x < v, or x = v and u is even; else to w."
    """

    def __init__(self, decode: Callable[[int, int], Value], bits: int) -> None:
        self.codes = list(range(-(1 << bits - 1) + 1, 1 << bits - 1))
        self.values = [self._real(decode(code, bits)) for code in self.codes]
        self.between = [self._real(decode(2 * code + 1, bits + 1)) for code in self.codes[:-1]]

    @staticmethod
    def _real(value: Value) -> Fraction:
        assert value is not None
        return value

    def code(self, x: Fraction) -> int:
        if x == 0:
            return 0
        at = bisect_left(self.values, x)
        if at == len(self.codes) or self.values[at] == x:
            return self.codes[min(at, len(self.codes) - 1)]
        if at == 0:
            return self.codes[0]
        return self.of_two(at - 1, x)

    def of_two(self, at: int, x: Fraction) -> int:
        """The code of a number between the values with the numbers ``at`` and ``at + 1``."""
        lower, upper, v = self.codes[at], self.codes[at + 1], self.between[at]
        if lower == 0 or upper == 0:  # only zero rounds to zero
            return upper if lower == 0 else lower
        if x == v:
            return lower if lower % 2 == 0 else upper
        return lower if x < v else upper


def p3109(code: int, k: int, p: int, extended: bool) -> Fraction | float:
    """IEEE P3109 Interim Report 3.1: a code of K bits, of precision P, in a signed format.

    The code of the negative zero of IEEE 754 is NaN, and the largest code of either sign is an
    infinity if the format is extended. The bias is ``2^(K - P - 1)``.
    """
    text = string(code, k)
    magnitude = number(text[1:])
    if text == "1" + "0" * (k - 1):
        return math.nan
    sign = -1 if text[0] == "1" else 1
    if extended and magnitude == 2 ** (k - 1) - 1:
        return sign * math.inf
    exponent, fraction = (
        number(text[1 : 1 + k - p]),
        Fraction(number(text[1 + k - p :]), 1 << p - 1),
    )
    bias = 2 ** (k - p - 1)
    if exponent == 0:
        return sign * fraction * power(1 - bias)
    return sign * (1 + fraction) * power(exponent - bias)
