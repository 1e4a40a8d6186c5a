"""Compiled kernels of products of powers, which add logarithms beyond a format's range.

A product has three factors, flat arrays of codes, each raised to its own power; unused factors have
the power 0. Logarithms are multiplied and added in float64, which is exact, except that a
fractional power rounds half to even. The definition is ``unclamped.product`` in
:mod:`lns_ops.functional`, in torch operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, int16, int32
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, put
from lns_ops.cpu.compiler.object_cache import kernel
from lns_ops.cpu.kernels.elementwise import code_of

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]
_F64 = NDArray[np.float64]


@helper
def raised(code: Any, power: Any, furthest: Any, bias: Any, mask: Any) -> Any:
    """Return the logarithm of a power, a whole number, and 1 if the power is nonzero, else 0."""
    field = code & mask
    exact = float64(int32(field - bias)) * power
    nearest = float64(exact + 6755399441055744.0) - 6755399441055744.0  # 1.5 x 2^52
    log = min(max(nearest, -furthest), furthest)
    return log, int32(field > 0) | int32(power == 0.0)


@helper
def product(
    a: Any, b: Any, c: Any, p: Any, q: Any, r: Any, odd_p: Any, odd_q: Any, odd_r: Any, shift: Any,
    flip: Any, furthest: Any, bias: Any, mask: Any,
) -> Any:  # fmt: skip
    """Return the logarithm of a product, its sign (0 or -1), and whether it is nonzero."""
    x, alive_x = raised(a, p, furthest, bias, mask)
    y, alive_y = raised(b, q, furthest, bias, mask)
    z, alive_z = raised(c, r, furthest, bias, mask)
    sign = ((a & odd_p) ^ (b & odd_q) ^ (c & odd_r)) >> 31
    return int32(x + y + z + shift), sign ^ flip, alive_x & alive_y & alive_z


@kernel
def codes(
    a: _I16, b: _I16, c: _I16, out: _I16, powers: _F64, odd: _I32, shift: int, flip: int,
    furthest: int, bias: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store the codes of products: clamped to the range, zero below it."""
    bias_, mask_, flip_, furthest_ = int32(bias), int32(mask), int32(flip), float64(furthest)
    p, q, r, shift_ = get(powers, 0), get(powers, 1), get(powers, 2), float64(shift)
    odd_p, odd_q, odd_r = get(odd, 0), get(odd, 1), get(odd, 2)
    for i in range(start, stop):
        log, sign, alive = product(
            int32(get(a, i)), int32(get(b, i)), int32(get(c, i)), p, q, r, odd_p, odd_q, odd_r,
            shift_, flip_, furthest_, bias_, mask_,
        )  # fmt: skip
        field = max(min(int32(log + bias_), mask_), int32(0)) & int32(-alive)
        put(out, i, code_of(sign, field, mask_))
    return 0


@kernel
def parts(
    a: _I16, b: _I16, c: _I16, logs: _I32, signs: _I16, alive: _I16, powers: _F64, odd: _I32,
    shift: int, flip: int, furthest: int, bias: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store logarithms of products, signs (0 or -1), and -1 for nonzero products, else 0."""
    bias_, mask_, flip_, furthest_ = int32(bias), int32(mask), int32(flip), float64(furthest)
    p, q, r, shift_ = get(powers, 0), get(powers, 1), get(powers, 2), float64(shift)
    odd_p, odd_q, odd_r = get(odd, 0), get(odd, 1), get(odd, 2)
    for i in range(start, stop):
        log, sign, kept = product(
            int32(get(a, i)), int32(get(b, i)), int32(get(c, i)), p, q, r, odd_p, odd_q, odd_r,
            shift_, flip_, furthest_, bias_, mask_,
        )  # fmt: skip
        put(logs, i, log)
        put(signs, i, int16(sign))
        put(alive, i, int16(-kept))
    return 0
