"""The arrays that CPU kernels take (flat, contiguous, writable int16 codes), and thread grain."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int16]
_INT16 = np.dtype(np.int16)  # numpy has a single object for it

GRAIN = 1 << 15
"""Minimum number of elements per thread: about 50 microseconds of work."""


@lru_cache(maxsize=4096)
def broadcast_shape(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape of two shapes; torch's own function takes 28 microseconds.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    return np.broadcast_shapes(x, y)


def dense(x: NDArray[Any]) -> NDArray[Any]:
    """Return ``x`` as a contiguous, writable, aligned array; ``x`` itself if it already is one."""
    if x.flags.c_contiguous and x.flags.carray:
        return x
    return np.array(x, order="C", copy=True)


def checked_codes(x: Codes) -> Codes:
    """Return ``x`` as a contiguous, writable array, the only array type that kernels accept."""
    if type(x) is np.ndarray and x.dtype is _INT16:
        return dense(x)
    if not isinstance(x, np.ndarray) or x.dtype != np.int16:
        kind = getattr(x, "dtype", type(x).__name__)
        raise ValueError(
            f"operand of type {kind}: LNS operations take numpy int16 codes; create them with"
            " encode(x, fmt)"
        )
    return dense(x)


def flattened(x: Codes) -> Codes:
    """Return ``x`` as a one-dimensional array, checked as in :func:`checked_codes`."""
    x = checked_codes(x)
    return x if x.ndim == 1 else x.reshape(-1)


def flat_pair(x: Codes, y: Codes) -> tuple[Codes, Codes, tuple[int, ...]]:
    """Return both operands flat, broadcast to their common shape, and that shape."""
    if x.shape == y.shape:
        return flattened(x), flattened(y), x.shape
    shape = broadcast_shape(x.shape, y.shape)
    return flattened(np.broadcast_to(x, shape)), flattened(np.broadcast_to(y, shape)), shape
