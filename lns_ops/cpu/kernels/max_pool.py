"""Compiled maximum over windows of images.

The order key of a code and the index of the window's element share an int32, ``65536 key + 65535 -
tap``. So one maximum finds both the largest value and the first of equal ones. All columns of a row
are computed for any stride, and every stride-th is selected at the end. This keeps vectors
contiguous; at stride 2 half of the maxima are not used.
"""

from __future__ import annotations

import numpy as np
from numba import int16, int32, int64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, put, scratch
from lns_ops.cpu.compiler.object_cache import kernel

_I16 = NDArray[np.int16]

_BELOW = -(1 << 31) + (1 << 16)
"""A word below all keys; subtracting a tap from it does not overflow."""


@kernel
def max_pool(
    x: _I16, out: _I16, indices: NDArray[np.int64], H: int, W: int, OH: int, OW: int, KH: int,
    KW: int, SH: int, SW: int, PH: int, PW: int, DH: int, DW: int, mask: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Store the maxima (planes, OH, OW) of images (planes, H, W) and their places ``y W + x``.

    A unit is a plane; return 1 if a window is empty.
    """
    mask_ = int16(mask)
    columns = (OW - 1) * SW + 1
    reach = columns + (KW - 1) * DW
    line, best = scratch(reach, int32), scratch(columns, int32)
    for plane in range(start, stop):
        base = plane * H * W
        for oy in range(OH):
            for j in range(columns):
                put(best, j, int32(_BELOW))
            for ky in range(KH):
                iy = oy * SH - PH + ky * DH
                if iy < 0 or iy >= H:
                    continue
                for j in range(min(PW, reach)):
                    put(line, j, int32(_BELOW))
                for j in range(min(W, reach - PW)):
                    code = get(x, base + iy * W + j)
                    field = int32(code & mask_)
                    key = int32(-field) if code < 0 else field
                    put(line, PW + j, int32(int32(key * int32(65536)) + int32(65535)))
                for j in range(PW + W, reach):
                    put(line, j, int32(_BELOW))
                for kx in range(KW):
                    tap, shift = int32(ky * KW + kx), kx * DW
                    for j in range(columns):
                        put(best, j, max(get(best, j), int32(get(line, j + shift) - tap)))
            for ox in range(OW):
                found = get(best, ox * SW)
                if found <= _BELOW:  # a dilated window that contains only padding
                    return 1
                tap = 65535 - (int64(found) & 65535)
                ky = tap // KW
                place = (oy * SH - PH + ky * DH) * W + ox * SW - PW + (tap - ky * KW) * DW
                indices[(plane * OH + oy) * OW + ox] = place
                out[(plane * OH + oy) * OW + ox] = x[base + place]
    return 0
