"""Block formats as their sources define them, value by value in exact fractions. Shares no code
with :mod:`lns_ops.formats`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from tests.lns_ops.formats.definitions import binary


def numbers_of(e: int, m: int, left_out: int = 0) -> list[Fraction]:
    """The numbers of a float without infinities, from zero; the last ``left_out`` codes are
    NaNs."""
    codes = range((1 << e + m) - left_out)
    return [value for code in codes if (value := binary(code, e, m, finite=True)) is not None]


E2M1, E4M3 = numbers_of(2, 1), numbers_of(4, 3, left_out=1)
"""By code: 0 to 6, and 0 to 448."""
ELEMENTS = {
    "mxfp8_e4m3": E4M3, "mxfp8_e5m2": numbers_of(5, 2, left_out=4), "mxfp6_e3m2": numbers_of(3, 2),
    "mxfp6_e2m3": numbers_of(2, 3), "mxfp4_e2m1": E2M1,
    "mxint8": [Fraction(code, 64) for code in range(128)],
}  # fmt: skip
"""OCP MX v1.0, section 5.3: the non-negative elements, by code."""


def nearest(x: Fraction, numbers: list[Fraction]) -> Fraction:
    """The nearest number, with the sign of ``x``; of two, the one with the even code."""
    codes = range(len(numbers))
    code = min(codes, key=lambda code: (abs(numbers[code] - abs(x)), code % 2))
    return numbers[code] if x >= 0 else -numbers[code]


def quotient(x: Fraction, y: Fraction) -> Fraction:
    """Divide as float32 does."""
    return Fraction(float(np.float32(float(x)) / np.float32(float(y))))


def eighteen_bits(x: Fraction) -> Fraction:
    """The nearest number with 18 significant bits; of two, the larger."""
    step = Fraction(2) ** -200
    while x >= step * 2**18:
        step *= 2
    return (x / step + Fraction(1, 2)).__floor__() * step


def nvfp4(rows: list[list[float]]) -> list[list[float]]:
    """NVIDIA 2025 (arXiv:2509.25149): 16 values of e2m1, an e4m3 scale, a scale for the tensor."""
    exact = [[Fraction(x) for x in row] for row in rows]
    t = max(abs(x) for row in exact for x in row)
    s = max(eighteen_bits(quotient(t, Fraction(6 * 448))), Fraction(2) ** -100)
    found = []
    for row in exact:
        values: list[float] = []
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            wanted = quotient(max(map(abs, block)), 6 * s)
            d = nearest(max(wanted, Fraction(2) ** -6), E4M3)
            values += [float(nearest(quotient(x, d * s), E2M1) * d * s) for x in block]
        found.append(values)
    return found


def mx(row: list[float], name: str) -> list[float]:
    """OCP MX v1.0, section 6.3, with the smallest scale at which nothing saturates."""
    numbers, values = ELEMENTS[name], []
    for start in range(0, len(row), 32):
        block = [Fraction(x) for x in row[start : start + 32]]
        scale = Fraction(2) ** -126
        while max(map(abs, block)) > numbers[-1] * scale:
            scale *= 2
        values += [float(nearest(x / scale, numbers) * scale) for x in block]
    return values
