"""Matrix products on the CPU, summed in the contract's order.

A product uses 16-bit vectors with in-register tables (:mod:`lns_ops.cpu.simd.gemm`) or table
gathers (:mod:`lns_ops.cpu.kernels.gather_gemm`); :mod:`lns_ops.cpu.kernel_choice` decides. Small
products use one kernel, without inspecting the operands first (:mod:`lns_ops.cpu.small`).

Shape suffixes: M, K, N of a product; B a batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu import small
from lns_ops.cpu.arrays import GRAIN, Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernel_choice import Survey, kernel_info, survey
from lns_ops.cpu.kernels import gather_gemm
from lns_ops.cpu.kernels.gather_gemm import HIGHEST, LOWEST
from lns_ops.cpu.simd import avx512, gemm, piecewise_avx2, piecewise_avx512
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import BLOCK


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x @ y``: exact products, summed over k in the contract's order.

    Args:
        x_MK: int16 codes (M, K). Its zeros are skipped, so pass sparse activations here.
        y_KN: int16 codes (K, N). Either operand may be a transposed view.
        fmt: the format.

    Raises:
        ValueError: the operands are not matrices, or their inner sizes differ.
    """
    if x_MK.ndim != 2 or y_KN.ndim != 2 or x_MK.shape[1] != y_KN.shape[0]:
        raise ValueError(
            f"matmul of shapes {x_MK.shape} and {y_KN.shape}: needs (M, K) and (K, N) with the"
            " same K"
        )
    if small.are_products(x_MK.size * y_KN.shape[1]):
        return small.matmul(x_MK, y_KN, fmt)
    if not (x_MK.size and y_KN.size):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    x, y = survey(x_MK, fmt), survey(y_KN, fmt)
    if not (x.nonzero and y.nonzero):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    kernel = kernel_info()["kernel"]
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
        ValueError: the operands are not batches of equal length, or their inner sizes differ.
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
    if small.are_products(x_BMK.size * y_BKN.shape[2]):
        return small.matmul(x_BMK, y_BKN, fmt)
    if len(x_BMK) == 1:
        return matmul(x_BMK[0], y_BKN[0], fmt)[None]
    out = np.empty((x_BMK.shape[0], x_BMK.shape[1], y_BKN.shape[2]), np.int16)
    for b in range(len(out)):
        out[b] = matmul(x_BMK[b], y_BKN[b], fmt)
    return out


def _words(x: Codes, fmt: LNSFormat) -> NDArray[np.int32]:
    """Return contiguous words of ``x``.

    A transposed view is widened in memory order, then transposed.
    """
    flipped = x.flags.f_contiguous and not x.flags.c_contiguous
    source = flattened(x.T if flipped else x)
    words = np.empty(source.size, np.int32)
    run(gather_gemm.widen, source.size, GRAIN, source, words, fmt.bias, fmt.field_mask)
    return (
        np.ascontiguousarray(words.reshape(x.shape[::-1]).T) if flipped else words.reshape(x.shape)
    )


def _matmul_simd(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, plan: gemm.WordLayout) -> Codes:
    """Return the product, computed on vectors."""
    (M, K), N = x_MK.shape, y_KN.shape[1]
    x, y, mask = flattened(x_MK), flattened(y_KN), fmt.field_mask
    panels, blocks, out = -(-N // avx512.PANEL), -(-K // BLOCK), np.empty((M, N), np.int16)
    counts, steps, words = (
        np.empty(M * blocks, np.int32),
        np.empty(x.size, np.int32),
        np.empty(x.size, np.int32),
    )
    packed = np.empty(panels * K * 2 * avx512.PANEL, np.int16)
    # Packing is short and memory-bound, so only large operands are worth a second thread.
    run(
        gemm.pack_x, M, 1 + 8 * GRAIN // K, x, K, mask, plan.x_top, plan.unit_shift, BLOCK, counts,
        steps, words,
    )  # fmt: skip
    run(
        gemm.pack_y, panels, 1 + 8 * GRAIN // (K * avx512.PANEL), y, K, N, mask, plan.y_top,
        plan.unit_shift, packed,
    )  # fmt: skip
    # This many multiply-accumulates take a few times as long as starting a thread on them.
    grain = 1 + 4 * GRAIN // (avx512.ROWS_AT_ONCE * min(N, avx512.PANEL) * K)
    run(
        plan.kernel, panels * -(-M // avx512.ROWS_AT_ONCE), grain, counts, steps, words, packed,
        plan.constants, plan.extra, plan.mapped, out.reshape(-1), M, K, N, BLOCK, plan.zone,
        plan.top_field, plan.unit_shift, mask,
    )  # fmt: skip
    return out


def _work(rows: Survey, columns: int) -> int:
    """Return the time of a product whose scalar operand is ``rows``, in multiply-accumulates.

    It is the number of nonzero elements times the number of columns computed. A panel's right edge
    computes 256, 128 or 32 columns; the last keeps only one vector busy and counts for more.
    """
    full, edge = divmod(columns, avx512.PANEL)
    computed = full * avx512.PANEL + (
        avx512.PANEL if edge > 128 else 128 if edge > 32 else 80 if edge else 0
    )
    return rows.nonzero * computed


def _matmul_gather(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, clamp: bool) -> Codes:
    """Return the product, computed by table look-ups.

    ``clamp`` is needed if sums can reach the accumulator's limits.
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
