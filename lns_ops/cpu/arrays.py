"""The arrays that CPU kernels take: flat, contiguous and writable int16 codes, and how many are
worth a thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int16]

GRAIN = 1 << 15
"""Elements worth a thread of their own: some 50 microseconds of work."""


def checked_codes(x: Codes) -> Codes:
    """``x`` as a contiguous, writable array, which is the one array type that kernels are compiled
    for."""
    if not isinstance(x, np.ndarray) or x.dtype != np.int16:
        kind = getattr(x, "dtype", type(x).__name__)
        raise ValueError(
            f"operand of type {kind}: LNS operations take numpy int16 codes; encode(x, fmt) makes"
            " them"
        )
    if x.flags.c_contiguous and x.flags.writeable and x.flags.aligned:
        return x
    return np.array(x, np.int16, order="C", copy=True)


def flattened(x: Codes) -> Codes:
    """``x`` as :func:`checked_codes` makes it, in one dimension."""
    return checked_codes(x).reshape(-1)


def flat_pair(x: Codes, y: Codes) -> tuple[Codes, Codes, tuple[int, ...]]:
    """Flat operands of the common shape."""
    if x.shape == y.shape:
        return flattened(x), flattened(y), x.shape
    shape = np.broadcast_shapes(x.shape, y.shape)
    return flattened(np.broadcast_to(x, shape)), flattened(np.broadcast_to(y, shape)), shape
