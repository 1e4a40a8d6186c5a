"""The fused SGD step: one pass over weight, gradient, momentum buffer and Kahan compensation, in place.

Composed of the same two primitives as the elementwise kernels, on signs and fields that stay in registers from one operation
to the next; it reads and writes each array once (2 bytes a value). Every intermediate is clamped as the reference clamps it,
which :func:`~lns_ops._elementwise.add_fields` and ``mul_fields`` do. Signs of zeros are don't-cares: a zero field never
takes part in a sum and packs to code 0.
"""

from __future__ import annotations

import numpy as np
from numba import int32
from numpy.typing import NDArray

from lns_ops._elementwise import add_fields, code_of, mul_fields
from lns_ops._jit import kernel

_I16 = NDArray[np.int16]
_I32 = NDArray[np.int32]


@kernel
def plain(
    weight: _I16, grad: _I16, buffer: _I16, table: _I32, last: int, bias: int, mask: int,
    negative_lr: int, momentum: int, use_momentum: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """``buffer = momentum buffer + grad; weight += negative_lr buffer`` (``grad`` itself without momentum)."""
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    lr, mu = int32(negative_lr), int32(momentum)
    for i in range(start, stop):
        g = int32(grad[i])
        ss, fs = g >> 31, g & mask_
        if use_momentum:
            b = int32(buffer[i])
            ss, fs = add_fields((b ^ mu) >> 31, mul_fields(b & mask_, mu & mask_, bias_, mask_), ss, fs, table, last_, mask_)
            buffer[i] = code_of(ss, fs, mask_)
        w = int32(weight[i])
        fu = mul_fields(fs, lr & mask_, bias_, mask_)
        sn, fn = add_fields(w >> 31, w & mask_, ss ^ (lr >> 31), fu, table, last_, mask_)
        weight[i] = code_of(sn, fn, mask_)
    return 0


@kernel
def kahan(
    weight: _I16, grad: _I16, buffer: _I16, compensation: _I16, table: _I32, last: int, bias: int, mask: int,
    negative_lr: int, momentum: int, use_momentum: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """As :func:`plain`, with ``c += update; new = w + c; c -= new - w; w = new``."""
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    lr, mu = int32(negative_lr), int32(momentum)
    for i in range(start, stop):
        g = int32(grad[i])
        ss, fs = g >> 31, g & mask_
        if use_momentum:
            b = int32(buffer[i])
            ss, fs = add_fields((b ^ mu) >> 31, mul_fields(b & mask_, mu & mask_, bias_, mask_), ss, fs, table, last_, mask_)
            buffer[i] = code_of(ss, fs, mask_)
        c, w = int32(compensation[i]), int32(weight[i])
        sw, fw = w >> 31, w & mask_
        fu = mul_fields(fs, lr & mask_, bias_, mask_)
        sc, fc = add_fields(c >> 31, c & mask_, ss ^ (lr >> 31), fu, table, last_, mask_)
        sn, fn = add_fields(sw, fw, sc, fc, table, last_, mask_)
        sd, fd = add_fields(sn, fn, ~sw, fw, table, last_, mask_)
        sc, fc = add_fields(sc, fc, ~sd, fd, table, last_, mask_)
        weight[i] = code_of(sn, fn, mask_)
        compensation[i] = code_of(sc, fc, mask_)
    return 0
