"""Operations on small operands, one kernel call each (:mod:`lns_ops.cpu.kernels.small`).

Products of at most :data:`PRODUCTS` multiplications are small, and sums and elementwise operations
of at most :data:`ELEMENTS` elements. The bits are the same as with the kernels for large operands.
``LNS_OPS_CPU_KERNEL`` forces the latter for products.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import Codes, broadcast_shape, checked_codes
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernels import small
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST, STRIP, distance_table
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import BLOCK

PRODUCTS = 1 << 15
ELEMENTS = 1 << 12


def are_products(count: int) -> bool:
    """Return whether matrix products with ``count`` multiplications in total are small."""
    return 0 < count <= PRODUCTS and "LNS_OPS_CPU_KERNEL" not in os.environ


def are_elements(count: int) -> bool:
    """Return whether sums and elementwise operations on ``count`` elements are small."""
    return 0 < count <= ELEMENTS


def _in_memory(x: Codes) -> tuple[Codes, int, int]:
    """Return matrices or batches flat in memory order, and the strides within a matrix."""
    rows, columns = x.shape[-2:]
    if x.flags.c_contiguous:
        return checked_codes(x).reshape(-1), columns, 1
    turned = x.swapaxes(-1, -2)
    if turned.flags.c_contiguous:
        return checked_codes(turned).reshape(-1), 1, rows
    return checked_codes(x).reshape(-1), columns, 1


def matmul(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x @ y`` of small matrices, or of batches of small matrices."""
    (M, K), N = x.shape[-2:], y.shape[-1]
    flat_x, x_row, x_column = _in_memory(x)
    flat_y, y_row, y_column = _in_memory(y)
    out = np.empty((*x.shape[:-1], N), np.int16)
    batch = len(out) if out.ndim == 3 else 1
    run(
        small.matmul, batch, batch, flat_x, flat_y, out.reshape(-1),
        distance_table(fmt.fraction_bits), M, K, N, x_row, x_column, y_row, y_column, fmt.bias,
        fmt.field_mask, LOWEST, HIGHEST, BLOCK,
    )  # fmt: skip
    return out


def sum(x: Codes, K: int, shape: tuple[int, ...], inner: int, fmt: LNSFormat, shift: int) -> Codes:
    """Return the sums of K codes each of a small ``x``, at distance ``inner``, with ``shape``."""
    out = np.empty(shape, np.int16)
    units = -(-out.size // STRIP) if inner == 1 else -(-inner // STRIP) * (out.size // inner)
    run(
        small.sum_codes, units, units, checked_codes(x).reshape(-1), out.reshape(-1),
        distance_table(fmt.fraction_bits), K, inner, shift, fmt.bias, fmt.field_mask, LOWEST,
        HIGHEST, BLOCK,
    )  # fmt: skip
    return out


@lru_cache(maxsize=4096)
def broadcast_form(
    x: tuple[int, ...], y: tuple[int, ...]
) -> tuple[tuple[int, ...], int, NDArray[np.int64]] | None:
    """Return the shape to which two shapes broadcast, and how a small kernel iterates over it.

    These are the number of units, and the sizes and both strides in three dimensions. Returns None
    if more dimensions are needed, or if the result is not small.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    shape = broadcast_shape(x, y)
    if not 0 < math.prod(shape) <= ELEMENTS:
        return None
    groups: list[tuple[int, bool, bool]] = []  # size, and which operands are broadcast along it
    padded = ((1,) * (len(shape) - len(s)) + tuple(s) for s in (x, y))
    for size, of_x, of_y in zip(shape, *padded, strict=True):
        repeated = (of_x == 1, of_y == 1)
        if size == 1:
            continue
        if groups and groups[-1][1:] == repeated:
            size *= groups.pop()[0]
        groups.append((size, *repeated))
    if len(groups) > 3:
        return None
    form = np.zeros((3, 3), np.int64)
    form[0] = 1
    steps = [1, 1]
    for place, (size, *along) in enumerate(reversed(groups)):
        form[0, 2 - place] = size
        for operand in range(2):
            if not along[operand]:
                form[1 + operand, 2 - place] = steps[operand]
                steps[operand] *= size
    return shape, int(form[0, 0] * form[0, 1]), form.reshape(-1)
