"""Sums on the CPU, in the contract's order of additions.

They use 16-bit vectors with in-register tables (:mod:`lns_ops.cpu.simd.reduce`) or table gathers
(:mod:`lns_ops.cpu.kernels.gather_gemm`); :mod:`lns_ops.cpu.kernel_choice` decides. Small sums use
one kernel (:mod:`lns_ops.cpu.small`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu import small
from lns_ops.cpu.arrays import GRAIN, Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernel_choice import lanes_plan
from lns_ops.cpu.kernels import gather_gemm
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST
from lns_ops.cpu.simd import avx512
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import BLOCK


def sum(x: Codes, axis: int, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along ``axis`` in the contract's order: blocks of 64, then block totals.

    An empty sum is zero.

    Args:
        x: int16 codes with at least one axis.
        axis: the axis to sum over; negative counts from the end. Axis 0 and the last need no copy.
        fmt: the format.
        shift: ulps added to the logarithm of a sum before it is stored: a factor without
            intermediate saturation.

    Returns:
        Codes with ``x``'s shape without ``axis``.
    """
    axis = range(x.ndim)[axis]
    K, shape = x.shape[axis], x.shape[:axis] + x.shape[axis + 1 :]
    inner = math.prod(x.shape[axis + 1 :])
    if small.are_elements(x.size):
        return small.sum(x, K, shape, inner, fmt, shift)
    out = np.zeros(shape, np.int16)
    if not x.size:
        return out
    words = np.empty(out.size, np.int32)
    if inner == 1:
        _sum_rows(flattened(x), words, K, fmt)
    else:
        _sum_columns(flattened(x), words, K, inner, fmt)
    if shift:
        words += 4 * shift
    run(gather_gemm.narrow, out.size, GRAIN, words, out.reshape(-1), fmt.bias, fmt.field_mask)
    return out


def _sum_rows(x: Codes, words: NDArray[np.int32], K: int, fmt: LNSFormat) -> None:
    """Write the sums of each K adjacent codes to ``words``."""
    blocks = -(-K // BLOCK)
    parts = np.empty(blocks * words.size, np.int32)
    table, limits = gather_gemm.distance_table(fmt.fraction_bits), (LOWEST, HIGHEST)
    chosen = lanes_plan((x,), K, fmt)
    if chosen is not None:
        kernels, plan = chosen
        run(
            kernels.sum_rows, -(-parts.size // avx512.PANEL), 8, x, parts, K, plan.constants,
            plan.extra, plan.mapped, plan.zone, plan.top_field, plan.unit_shift, fmt.bias,
            fmt.field_mask, BLOCK,
        )  # fmt: skip
    else:
        run(
            gather_gemm.sum_rows, -(-parts.size // gather_gemm.STRIP), 8, x, parts, K, table,
            fmt.bias, fmt.field_mask, *limits, BLOCK,
        )  # fmt: skip
    grain = GRAIN // blocks
    run(gather_gemm.sum_totals, words.size, grain, parts, words, words.size, table, *limits)


def _sum_columns(x: Codes, words: NDArray[np.int32], K: int, inner: int, fmt: LNSFormat) -> None:
    """Write the sums of each K codes at distance ``inner`` to ``words``."""
    chosen = lanes_plan((x,), K, fmt) if inner >= avx512.PANEL // 2 else None
    width = gather_gemm.STRIP if chosen is None else avx512.PANEL
    units, grain = -(-inner // width) * (words.size // inner), max(1, GRAIN // (K * width))
    if chosen is not None:
        kernels, plan = chosen
        run(
            kernels.sum_columns, units, grain, x, words, K, inner, plan.constants, plan.extra,
            plan.mapped, plan.zone, plan.top_field, plan.unit_shift, fmt.bias, fmt.field_mask,
            BLOCK,
        )  # fmt: skip
    else:
        table = gather_gemm.distance_table(fmt.fraction_bits)
        run(
            gather_gemm.sum_columns, units, grain, x, words, K, inner, table, fmt.bias,
            fmt.field_mask, LOWEST, HIGHEST, BLOCK,
        )  # fmt: skip
