"""Sums and matrix products on the CPU, in the contract's order of additions.

A matrix product runs on 16-bit vectors with in-register tables (:mod:`lns_ops.cpu.simd.gemm`) or by
gathers from a table (:mod:`lns_ops.cpu.kernels.gather_gemm`); :mod:`lns_ops.cpu.kernel_choice` says
which.

Shape suffixes: M, K, N of a product; B a batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import GRAIN, Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernel_choice import Survey, kernel_info, lanes_plan, survey
from lns_ops.cpu.kernels import gather_gemm
from lns_ops.cpu.simd import avx512, gemm, piecewise_avx2, piecewise_avx512
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import ACC_MAX, ACC_MIN, BLOCK

LOWEST, HIGHEST = 4 * ACC_MIN, 4 * ACC_MAX


def sum(x: Codes, axis: int, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along ``axis`` in the contract's order: blocks of 64, then block totals.

    An empty sum is zero.

    Args:
        x: int16 codes with at least one axis.
        axis: which one; negative counts from the end. Axis 0 and the last axis need no copy.
        fmt: the format.
        shift: ulps added to the logarithm of a sum before it is stored in the format: a factor
            without saturation in between.

    Returns:
        Codes of ``x``'s shape without ``axis``.
    """
    axis = range(x.ndim)[axis]
    K, shape = x.shape[axis], x.shape[:axis] + x.shape[axis + 1 :]
    out = np.zeros(shape, np.int16)
    if not x.size:
        return out
    inner = int(np.prod(x.shape[axis + 1 :], dtype=np.int64))
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
    """Put the sum of each K codes that lie side by side into ``words``."""
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
    """Put the sum of each K codes that lie ``inner`` apart into ``words``."""
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


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x @ y``: exact products, summed over k in the contract's order.

    Args:
        x_MK: int16 codes (M, K). Its zeros are skipped, so sparse activations belong here.
        y_KN: int16 codes (K, N). Either operand may be a transposed view.
        fmt: the format.

    Raises:
        ValueError: not two matrices, or their inner sizes differ.
    """
    if x_MK.ndim != 2 or y_KN.ndim != 2 or x_MK.shape[1] != y_KN.shape[0]:
        raise ValueError(
            f"matmul of shapes {x_MK.shape} and {y_KN.shape}: needs (M, K) and (K, N) with the"
            " same K"
        )
    if not (x_MK.size and y_KN.size):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    x, y = survey(x_MK, fmt), survey(y_KN, fmt)
    if not (x.nonzero and y.nonzero):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    kernel = kernel_info()["matmul"]
    narrow = kernel == "simd avx2"
    if kernel != "gather" and (piecewise_avx2 if narrow else piecewise_avx512).supported(
        fmt.fraction_bits
    ):
        turn = _work(x, y_KN.shape[1]) > 1.2 * _work(y, x_MK.shape[0])
        left, right = (y, x) if turn else (x, y)
        plan = gemm.plan(left.span, right.span, x_MK.shape[1], fmt, narrow)
        if plan is not None:
            return (
                np.ascontiguousarray(_matmul_simd(y_KN.T, x_MK.T, fmt, plan).T)
                if turn
                else _matmul_simd(x_MK, y_KN, fmt, plan)
            )
    return _matmul_gather(
        x_MK, y_KN, fmt, clamp=not gemm.within_accumulator(x.span, y.span, x_MK.shape[1], fmt)
    )


def matmul_batched(x_BMK: Codes, y_BKN: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x[b] @ y[b]`` for every b; :func:`matmul` has the arguments.

    Raises:
        ValueError: not two batches of matrices of one length, or their inner sizes differ.
    """
    if (
        x_BMK.ndim != 3
        or y_BKN.ndim != 3
        or x_BMK.shape[0] != y_BKN.shape[0]
        or x_BMK.shape[2] != y_BKN.shape[1]
    ):
        raise ValueError(
            f"matmul_batched of shapes {x_BMK.shape} and {y_BKN.shape}: needs (B, M, K) and (B, K,"
            " N) with the same B and K"
        )
    out = np.empty((x_BMK.shape[0], x_BMK.shape[1], y_BKN.shape[2]), np.int16)
    for b in range(len(out)):
        out[b] = matmul(x_BMK[b], y_BKN[b], fmt)
    return out


def _words(x: Codes, fmt: LNSFormat) -> NDArray[np.int32]:
    """Return contiguous words of ``x``.

    A transposed view is widened in memory order, then turned.
    """
    flipped = x.flags.f_contiguous and not x.flags.c_contiguous
    source = flattened(x.T if flipped else x)
    words = np.empty(source.size, np.int32)
    run(gather_gemm.widen, source.size, GRAIN, source, words, fmt.bias, fmt.field_mask)
    return (
        np.ascontiguousarray(words.reshape(x.shape[::-1]).T) if flipped else words.reshape(x.shape)
    )


def _matmul_simd(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, plan: gemm.WordLayout) -> Codes:
    """Return the product, computed on vector lanes."""
    (M, K), N = x_MK.shape, y_KN.shape[1]
    x, y, mask = flattened(x_MK), flattened(y_KN), fmt.field_mask
    panels, blocks, out = -(-N // avx512.PANEL), -(-K // BLOCK), np.empty((M, N), np.int16)
    counts, steps, words = (
        np.empty(M * blocks, np.int32),
        np.empty(x.size, np.int32),
        np.empty(x.size, np.int32),
    )
    packed = np.empty(panels * K * 2 * avx512.PANEL, np.int16)
    # Packing is short and bound by memory: only much of it is worth a second thread.
    run(
        gemm.pack_x, M, 1 + 8 * GRAIN // K, x, K, mask, plan.x_top, plan.unit_shift, BLOCK, counts,
        steps, words,
    )  # fmt: skip
    run(
        gemm.pack_y, panels, 1 + 8 * GRAIN // (K * avx512.PANEL), y, K, N, mask, plan.y_top,
        plan.unit_shift, packed,
    )  # fmt: skip
    # So many multiply-accumulates take a few times as long as to wake a thread.
    grain = 1 + 16 * GRAIN // (avx512.ROWS_AT_ONCE * min(N, avx512.PANEL) * K)
    run(
        plan.kernel, panels * -(-M // avx512.ROWS_AT_ONCE), grain, counts, steps, words, packed,
        plan.constants, plan.extra, plan.mapped, out.reshape(-1), M, K, N, BLOCK, plan.zone,
        plan.top_field, plan.unit_shift, mask,
    )  # fmt: skip
    return out


def _work(rows: Survey, columns: int) -> int:
    """Return the time of a product whose scalar operand is ``rows``, in multiply-accumulates.

    It is the number of nonzero elements times the columns computed.

    A panel's right edge computes 256, 128 or 32 columns; the last keeps one vector busy at a time
    and counts for more.
    """
    full, edge = divmod(columns, avx512.PANEL)
    computed = full * avx512.PANEL + (
        avx512.PANEL if edge > 128 else 128 if edge > 32 else 80 if edge else 0
    )
    return rows.nonzero * computed


def _matmul_gather(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, clamp: bool) -> Codes:
    """Return the product, computed by table look-ups.

    ``clamp`` is needed where the accumulator's limits are in reach.
    """
    (M, K), N = x_MK.shape, y_KN.shape[1]
    out = np.empty((M, N), np.int16)
    x, y, table = (
        _words(x_MK, fmt),
        _words(y_KN, fmt),
        gather_gemm.distance_table(fmt.fraction_bits),
    )
    units = M * -(-N // gather_gemm.STRIP)
    run(
        gather_gemm.matmul, units, max(1, 4 * GRAIN // (K * gather_gemm.STRIP)), x.reshape(-1),
        y.reshape(-1), out.reshape(-1), K, N, table, fmt.bias, fmt.field_mask, LOWEST, HIGHEST,
        clamp, BLOCK,
    )  # fmt: skip
    return out
