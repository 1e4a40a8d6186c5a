"""Check that a product with float32 sums keeps the bound of lns_ops.accumulation. The tests of
every device use it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lns_ops import LNSFormat, reference


def order(codes: np.ndarray, fmt: LNSFormat) -> np.ndarray:
    """Return numbers in the same order as the values of ``codes``."""
    return np.where(codes < 0, -(codes & fmt.field_mask).astype(np.int32), codes.astype(np.int32))


def outside(
    codes: np.ndarray, x: np.ndarray, y: np.ndarray, fmt: LNSFormat, e: float, u: float
) -> np.ndarray:
    """Return, for each element, whether ``codes`` is outside the bound around ``x @ y``."""
    return outside_bound(codes, x, y, fmt, e, u, np.matmul, x.shape[-1])


def outside_bound(
    codes: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    fmt: LNSFormat,
    e: float,
    u: float,
    product: Callable[[np.ndarray, np.ndarray], np.ndarray],
    terms: int,
) -> np.ndarray:
    """Return, for each element, whether ``codes`` is outside the bound around ``product(x, y)``.

    A product is a sum of at most ``terms`` terms of x and y. e and u are defined in
    lns_ops.accumulation. Encoding is monotonic, so the codes of the bound's two ends enclose the
    allowed codes. float64's error is below 1e-3 of the bound.
    """
    exact_x, exact_y = reference.decode(x, fmt, np.float64), reference.decode(y, fmt, np.float64)
    sums = 1 + terms * u / (1 - terms * u)
    large_x, large_y = (
        np.abs(v) * np.where(np.abs(v) < 2.0**-126, 2, 1 + e) for v in (exact_x, exact_y)
    )
    magnitude = product(np.abs(exact_x), np.abs(exact_y))
    error = (product(large_x, large_y) * sums - magnitude) * 1.001 + terms * 2.0**-124
    exact = product(exact_x, exact_y)
    low, high = (order(reference.encode(exact + side * error, fmt), fmt) for side in (-1, 1))
    return (order(codes, fmt) < low) | (order(codes, fmt) > high)
