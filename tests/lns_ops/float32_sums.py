"""The check that a product with float32 sums keeps the bound that lns_ops.accumulation states.

The tests of every device use it.
"""

from __future__ import annotations

import numpy as np

from lns_ops import LNSFormat, reference


def order(codes: np.ndarray, fmt: LNSFormat) -> np.ndarray:
    """Return numbers that compare as the values of ``codes`` do."""
    return np.where(codes < 0, -(codes & fmt.field_mask).astype(np.int32), codes.astype(np.int32))


def outside(
    codes: np.ndarray, x: np.ndarray, y: np.ndarray, fmt: LNSFormat, e: float, u: float
) -> np.ndarray:
    """Tell, for each element, whether ``codes`` is outside the bound around ``x @ y``.

    e and u are those of lns_ops.accumulation. Encoding is monotonic, so the codes of the bound's
    two ends enclose those allowed. float64 errs by less than 1e-3 of the bound.
    """
    exact_x, exact_y = reference.decode(x, fmt, np.float64), reference.decode(y, fmt, np.float64)
    K = x.shape[-1]
    sums = 1 + K * u / (1 - K * u)
    large_x, large_y = (
        np.abs(v) * np.where(np.abs(v) < 2.0**-126, 2, 1 + e) for v in (exact_x, exact_y)
    )
    error = (large_x @ large_y * sums - np.abs(exact_x) @ np.abs(exact_y)) * 1.001 + K * 2.0**-124
    exact = exact_x @ exact_y
    low, high = (order(reference.encode(exact + side * error, fmt), fmt) for side in (-1, 1))
    return (order(codes, fmt) < low) | (order(codes, fmt) > high)
