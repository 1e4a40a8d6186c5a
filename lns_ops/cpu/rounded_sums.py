"""Matrix products whose running sums are rounded to a binary float, on the CPU."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import dense
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import rounded_sums

_WORK = 1 << 14
"""Minimum number of additions for a thread."""


def rounded_product(
    x_MK: NDArray[np.float32],
    y_KN: NDArray[np.float32],
    *,
    mantissa_bits: int,
    min_exponent: int,
    largest: float,
    saturates: bool,
    block: int,
    promote: bool,
    tree: bool,
) -> NDArray[np.float32]:
    """Return ``x @ y``, float32, with running sums that are rounded after every addition.

    Args:
        x_MK: float32.
        y_KN: float32.
        mantissa_bits: width of the sum's mantissa.
        min_exponent: exponent of the sum's smallest normal number.
        largest: largest magnitude of a sum.
        saturates: whether a larger sum becomes ``largest`` instead of infinity.
        block: number of terms of a block.
        promote: whether block sums are added in float32 instead of the format of sums.
        tree: whether the terms of a block are added in pairs instead of one after the other.
    """
    (rows, inner), columns = x_MK.shape, y_KN.shape[1]
    out = np.empty((rows, columns), np.float32)
    strips = -(-columns // rounded_sums.STRIP)
    grain = max(1, _WORK // max(1, inner * min(columns, rounded_sums.STRIP)))
    run(
        rounded_sums.matmul, rows * strips, grain, dense(x_MK).reshape(-1),
        dense(y_KN).reshape(-1), out.reshape(-1), rows, inner, columns, 52 - mantissa_bits,
        min_exponent + 1023, _pattern(largest), _pattern(largest if saturates else math.inf),
        block, int(promote), int(tree),
    )  # fmt: skip
    return out


def _pattern(value: float) -> int:
    return int(np.float64(value).view(np.int64))
