"""Random bits for rounding by Philox4x32-10, a counter-based generator.

The definition is :func:`lns_ops.reference.random_bits`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint16, uint32, uint64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import helper, put
from lns_ops.cpu.compiler.object_cache import kernel


@helper
def _round(a: Any, b: Any, c: Any, d: Any, low: Any, high: Any) -> Any:
    """Compute one round on four words with two key words."""
    first, second = uint64(uint64(a) * uint64(0xD2511F53)), uint64(uint64(c) * uint64(0xCD9E8D57))
    return (
        uint32(uint32(second >> uint64(32)) ^ uint32(b ^ low)),
        uint32(second & uint64(0xFFFFFFFF)),
        uint32(uint32(first >> uint64(32)) ^ uint32(d ^ high)),
        uint32(first & uint64(0xFFFFFFFF)),
    )


@kernel
def random_bits(
    out: NDArray[np.uint16],
    unused: NDArray[np.uint16],
    key: int,
    step: int,
    slot: int,
    start: int,
    stop: int,
) -> int:
    """Store blocks ``start .. stop`` of eight uniform 16-bit integers each."""
    for block in range(start, stop):
        index = uint64(block)
        a, b = uint32(index & uint64(0xFFFFFFFF)), uint32(index >> uint64(32))
        c, d = uint32(uint64(step) & uint64(0xFFFFFFFF)), uint32(slot)
        low, high = uint32(uint64(key) & uint64(0xFFFFFFFF)), uint32(uint64(key) >> uint64(32))
        for _ in range(10):
            a, b, c, d = _round(a, b, c, d, low, high)
            low, high = uint32(low + uint32(0x9E3779B9)), uint32(high + uint32(0xBB67AE85))
        at = block * 8
        put(out, at, uint16(a & uint32(0xFFFF)))
        put(out, at + 1, uint16(a >> uint32(16)))
        put(out, at + 2, uint16(b & uint32(0xFFFF)))
        put(out, at + 3, uint16(b >> uint32(16)))
        put(out, at + 4, uint16(c & uint32(0xFFFF)))
        put(out, at + 5, uint16(c >> uint32(16)))
        put(out, at + 6, uint16(d & uint32(0xFFFF)))
        put(out, at + 7, uint16(d >> uint32(16)))
    return 0
