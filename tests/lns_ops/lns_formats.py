"""The formats that the tests of lns_ops use, and the error that each may have."""

from __future__ import annotations

from lns_ops import LNSFormat, lns8, lns12, lns16

FORMATS = [
    lns16,
    lns12,
    lns8,
    LNSFormat(2, 0),
    LNSFormat(9, 0),
    LNSFormat(10, 7),
    LNSFormat(16, 10),
    LNSFormat(16, 14),
]
IDS = [str(f) for f in FORMATS]


def half_ulp(fmt: LNSFormat) -> float:
    """Return the largest relative error of a correctly rounded operation: half a step of the
    logarithm."""
    return float(2 ** (0.5 / 2**fmt.fraction_bits) - 1) * (1 + 1e-9)
