"""LNS arithmetic on the CPU: every function equals :mod:`lns_ops.reference` bit for bit, at speed.

Arrays are numpy int16 codes of an :class:`~lns_ops.format.LNSFormat`; results are C-contiguous. Operands may be strided,
transposed or broadcast views. Work runs on ``get_num_threads()`` threads (OMP_NUM_THREADS, else the CPUs of the process),
outside the GIL; torch's thread count is never touched.

Kernels are compiled by numba on first use and kept on disk (:mod:`lns_ops._native` says where); nothing needs a C compiler.
Matrix products have three kernels: 16-bit vectors with in-register tables (:mod:`lns_ops._simd`) where the processor has AVX-512
or AVX2, else gathers from a table (:mod:`lns_ops._gather`); :func:`kernel_info` says which and why, and the environment variable
``LNS_OPS_CPU_KERNEL`` (``gather``, ``simd`` for the better of the other two, or ``avx2``) forces one.

Shape suffixes: M, K, N of a product; B a batch.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import config as numba_config
from numpy.typing import NDArray

from lns_ops import _elementwise, _gather, _lanes, _pieces, _random, _segments, _simd, _vector, reference
from lns_ops._pool import get_num_threads, run, set_num_threads
from lns_ops.format import (
    MANTISSA_BITS,
    LNSFormat,
    NonFiniteError,
    decode_significands,
    encode_thresholds,
    single_significands,
    stochastic_steps,
)
from lns_ops.gaussian import decay_table, gaussian_tables, stochastic_tables
from lns_ops.reference import ACC_MAX, ACC_MIN, BLOCK, ROOT_SLOT, WEIGHT_SLOT, adam_codes

__all__ = [
    "adam_update", "adam_update_float32", "add", "decode", "div", "encode", "encode_stochastic", "get_num_threads", "kernel_info",
    "matmul", "matmul_batched", "mul", "repeat", "set_num_threads", "sgd_update", "sgd_update_float32", "sqrt", "sub", "sum",
]  # fmt: skip

Codes = NDArray[np.int16]

_GRAIN = 1 << 15
"""Elements worth a thread of their own: some 50 microseconds of work."""


def _codes(x: Codes) -> Codes:
    """``x`` as a contiguous, writable array, which is the one array type that kernels are compiled for."""
    if not isinstance(x, np.ndarray) or x.dtype != np.int16:
        kind = getattr(x, "dtype", type(x).__name__)
        raise ValueError(f"operand of type {kind}: LNS operations take numpy int16 codes; encode(x, fmt) makes them")
    if x.flags.c_contiguous and x.flags.writeable and x.flags.aligned:
        return x
    return np.array(x, np.int16, order="C", copy=True)


def _flat(x: Codes) -> Codes:
    return _codes(x).reshape(-1)


def _pair(x: Codes, y: Codes) -> tuple[Codes, Codes, tuple[int, ...]]:
    """Flat operands of the common shape."""
    if x.shape == y.shape:
        return _flat(x), _flat(y), x.shape
    shape = np.broadcast_shapes(x.shape, y.shape)
    return _flat(np.broadcast_to(x, shape)), _flat(np.broadcast_to(y, shape)), shape


@lru_cache(maxsize=32)
def _sum_table(fraction_bits: int) -> NDArray[np.int32]:
    """G+ and then G-, one table for elementwise additions."""
    return np.concatenate(gaussian_tables(fraction_bits)).astype(np.int32)


# --------------------------------------------------------------------------------------------------- elementwise


def _add(x: Codes, y: Codes, fmt: LNSFormat, flip: int) -> Codes:
    a, b, shape = _pair(x, y)
    out = np.empty(shape, np.int16)
    chosen = _lanes_plan((a, b), 2, fmt)
    if chosen is not None:
        kernels, plan = chosen
        run(kernels.add, -(-a.size // _vector.PANEL), _GRAIN // 128, a, b, out.reshape(-1), plan.constants, plan.extra, plan.mapped,
            plan.zone, plan.top_field, plan.unit_shift, fmt.field_mask, flip & 1)  # fmt: skip
        return out
    table = _sum_table(fmt.fraction_bits)
    run(_elementwise.add, a.size, _GRAIN, a, b, out.reshape(-1), table, table.size // 2 - 1, fmt.field_mask, flip)
    return out


def _lanes_plan(operands: tuple[Codes, ...], K: int, fmt: LNSFormat) -> tuple[Any, _simd.Plan] | None:
    """How to add flat ``operands``, K at a time, on vector lanes; None where gathers must do, or will do."""
    if operands[0].size < _lanes.WORTH:
        return None
    kernel = kernel_info()["matmul"]
    return None if kernel == "gather" else _lanes.plan([_survey(x, fmt).span for x in operands], K, fmt, kernel)


def repeat(x: Codes, size: int, run_length: int) -> Codes:
    """``size`` codes, flat: each of ``x`` ``run_length`` times, then all of that over again."""
    out = np.empty(size, np.int16)
    run(_elementwise.repeat, size // run_length, max(1, _GRAIN // run_length), _flat(x), out, run_length)
    return out


def add(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x + y``, correctly rounded in the logarithm, broadcasting; ``x + (-x)`` is exact zero.

    Args:
        x, y: int16 codes of shapes that broadcast together.
        fmt: their format, and the result's.
    """
    return _add(x, y, fmt, 0)


def sub(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x - y``; see :func:`add`."""
    return _add(x, y, fmt, -1)


def mul(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x y``, broadcasting: logarithms add; exact but for saturation and underflow."""
    a, b, shape = _pair(x, y)
    out = np.empty(shape, np.int16)
    run(_elementwise.mul, a.size, _GRAIN, a, b, out.reshape(-1), fmt.bias, fmt.field_mask)
    return out


def div(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x / y``, broadcasting: logarithms subtract; exact but for saturation and underflow.

    Raises:
        ValueError: some ``y`` is zero; LNS has no infinity.
    """
    a, b, shape = _pair(x, y)
    out = np.empty(shape, np.int16)
    if run(_elementwise.div, a.size, _GRAIN, a, b, out.reshape(-1), fmt.bias, fmt.field_mask):
        raise ValueError("division by zero: LNS has no infinity; mask zero divisors first")
    return out


def sqrt(x: Codes, fmt: LNSFormat) -> Codes:
    """Square root: half the logarithm, rounded half to even.

    Raises:
        ValueError: some ``x`` is negative.
    """
    out = np.empty(x.shape, np.int16)
    if run(_elementwise.sqrt, x.size, _GRAIN, _flat(x), out.reshape(-1), fmt.bias, fmt.field_mask):
        raise ValueError("square root of a negative number: LNS has no NaN; take the absolute value or clamp first")
    return out


# ----------------------------------------------------------------------------------------------- encode, decode


@lru_cache(maxsize=32)
def _encode_tables(fraction_bits: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """For cells of ``2^-(f+1)``: the float32 shift, the float64 threshold in the cell (or beyond it), thresholds below it."""
    thresholds = encode_thresholds(fraction_bits) - (1 << MANTISSA_BITS)
    cells = np.arange(2 << fraction_bits, dtype=np.int64)
    width = 1 << (MANTISSA_BITS - 1 - fraction_bits)
    # A threshold equal to a cell's first fraction belongs to the cell: only larger fractions round up.
    base = np.searchsorted(thresholds, cells * width, side="left").astype(np.int64)
    inside = np.append(thresholds, 1 << MANTISSA_BITS)[base]
    step = 1 << (22 - fraction_bits)
    low = np.minimum(inside >> (MANTISSA_BITS - 23), (cells + 1) * step - 1) - cells * step
    shift = (base - cells) * step + (step - 1 - low)
    return shift.astype(np.int32), inside, base.astype(np.int32)


def encode(x: NDArray[Any], fmt: LNSFormat) -> Codes:
    """The codes nearest to ``x`` in logarithm: ``sign x round(2^f log2|x|)``; saturates above the range, zero below it.

    Args:
        x: any shape; float32 and float64 are read as they are, other real dtypes are converted to float64 first.
        fmt: the format.

    Raises:
        NonFiniteError: (a ValueError) ``x`` holds a NaN or an infinity.
    """
    x = np.asarray(x)
    if x.dtype not in (np.float32, np.float64):
        x = x.astype(np.float64)
    if not (x.flags.c_contiguous and x.flags.writeable and x.flags.aligned):
        x = np.array(x, order="C", copy=True)
    out, f = np.empty(x.shape, np.int16), fmt.fraction_bits
    shift, threshold, base = _encode_tables(f)
    if x.dtype == np.float32:
        bad = run(_elementwise.encode32, x.size, _GRAIN, x.reshape(-1).view(np.int32), out.reshape(-1), shift, f, fmt.bias,
                  fmt.field_mask)  # fmt: skip
    else:
        bad = run(_elementwise.encode64, x.size, _GRAIN, x.reshape(-1).view(np.int64), out.reshape(-1), threshold, base, f,
                  fmt.bias, fmt.field_mask)  # fmt: skip
    if bad:
        raise NonFiniteError("NaN or infinity to encode: LNS has no code for either; clean the input first")
    return out


@lru_cache(maxsize=32)
def _stochastic_tables(fraction_bits: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """For cells of ``2^-(f+1)``: the last significand at or below the start; and both arrays of :func:`stochastic_steps`."""
    mantissas, reciprocals = stochastic_steps(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (22 - fraction_bits)
    base = np.searchsorted(mantissas, starts, side="right") - 1
    return base.astype(np.int32), mantissas.astype(np.int32), reciprocals.copy()


def encode_stochastic(x: NDArray[np.float32], fmt: LNSFormat, bits: NDArray[np.uint16]) -> Codes:
    """The code below or above each finite ``x`` in magnitude, at random, ``x`` being the expected value.

    Args:
        x: float32, any shape.
        bits: uniform uint16, at least as many as ``x`` has elements.
    """
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty(x.shape, np.int16)
    base, mantissas, reciprocals = _stochastic_tables(fmt.fraction_bits)
    run(_elementwise.encode32_stochastic, x.size, _GRAIN, x.reshape(-1).view(np.int32), bits.reshape(-1), out.reshape(-1), base,
        mantissas, reciprocals, fmt.fraction_bits, fmt.bias, fmt.field_mask)  # fmt: skip
    return out


@lru_cache(maxsize=32)
def _decode_tables(fraction_bits: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Significand bit patterns: float32's with the results of exponents -128 and -127 after them, and float64's."""
    single = single_significands(fraction_bits).view(np.int32).copy()
    single[: 1 << fraction_bits] -= 127 << 23
    return single, decode_significands(fraction_bits).view(np.int64).copy()


def decode(codes: Codes, fmt: LNSFormat, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """``sign x 2^(log/2^f)``, rounded to ``dtype`` once.

    Args:
        codes: int16, any shape.
        fmt: their format.
        dtype: np.float32 (exact inverse of :func:`encode`) or np.float64; others go through the reference, slowly.
    """
    f, single = fmt.fraction_bits, np.dtype(dtype) == np.float32
    if not single and np.dtype(dtype) != np.float64:
        return np.asarray(reference.decode(codes, fmt, dtype))
    out = np.empty(codes.shape, dtype)
    table32, table64 = _decode_tables(f)
    flat = out.reshape(-1).view(np.int32 if single else np.int64)
    if single:
        run(_elementwise.decode32, codes.size, _GRAIN, _flat(codes), flat, table32, f, fmt.bias, fmt.field_mask)
    else:
        run(_elementwise.decode64, codes.size, _GRAIN, _flat(codes), flat, table64, f, fmt.bias, fmt.field_mask)
    return out


# ---------------------------------------------------------------------------------------------------- reductions

_LOWEST, _HIGHEST = 4 * ACC_MIN, 4 * ACC_MAX


def sum(x: Codes, axis: int, fmt: LNSFormat, shift: int = 0) -> Codes:
    """Sum along ``axis`` in the contract's order (blocks of 64, then block totals); an empty sum is zero.

    Args:
        x: int16 codes with at least one axis.
        axis: which one; negative counts from the end. Axis 0 and the last axis need no copy.
        fmt: the format.
        shift: ulps added to the logarithm of a sum before it is stored in the format: a factor without saturation in between.

    Returns:
        Codes of ``x``'s shape without ``axis``.
    """
    axis = range(x.ndim)[axis]
    K, shape = x.shape[axis], x.shape[:axis] + x.shape[axis + 1 :]
    out = np.zeros(shape, np.int16)
    if not x.size:
        return out
    inner = int(np.prod(x.shape[axis + 1 :], dtype=np.int64))
    words, table = np.empty(out.size, np.int32), _gather.distance_table(fmt.fraction_bits)
    limits = (_LOWEST, _HIGHEST)
    chosen = _lanes_plan((_flat(x),), K, fmt) if inner == 1 or inner >= _vector.PANEL // 2 else None
    if inner == 1:
        blocks = -(-K // BLOCK)
        parts = np.empty(blocks * out.size, np.int32)
        if chosen is not None:
            kernels, plan = chosen
            run(kernels.sum_rows, -(-parts.size // _vector.PANEL), 8, _flat(x), parts, K, plan.constants, plan.extra, plan.mapped,
                plan.zone, plan.top_field, plan.unit_shift, fmt.bias, fmt.field_mask, BLOCK)  # fmt: skip
        else:
            strips = -(-parts.size // _gather.STRIP)
            run(_gather.sum_rows, strips, 8, _flat(x), parts, K, table, fmt.bias, fmt.field_mask, *limits, BLOCK)
        run(_gather.sum_totals, out.size, _GRAIN // blocks, parts, words, out.size, table, *limits)
    elif chosen is not None:
        kernels, plan = chosen
        units = -(-inner // _vector.PANEL) * (out.size // inner)
        run(kernels.sum_columns, units, max(1, _GRAIN // (K * _vector.PANEL)), _flat(x), words, K, inner, plan.constants, plan.extra,
            plan.mapped, plan.zone, plan.top_field, plan.unit_shift, fmt.bias, fmt.field_mask, BLOCK)  # fmt: skip
    else:
        units = -(-inner // _gather.STRIP) * (out.size // inner)
        run(_gather.sum_columns, units, max(1, _GRAIN // (K * _gather.STRIP)), _flat(x), words, K, inner, table, fmt.bias,
            fmt.field_mask, *limits, BLOCK)  # fmt: skip
    if shift:
        words += 4 * shift
    run(_gather.narrow, out.size, _GRAIN, words, out.reshape(-1), fmt.bias, fmt.field_mask)
    return out


def matmul(x_MK: Codes, y_KN: Codes, fmt: LNSFormat) -> Codes:
    """``x @ y``: exact products, summed over k in the contract's order.

    Args:
        x_MK: int16 codes (M, K). Its zeros are skipped, so sparse activations belong here.
        y_KN: int16 codes (K, N). Either operand may be a transposed view.
        fmt: the format.

    Raises:
        ValueError: not two matrices, or their inner sizes differ.
    """
    if x_MK.ndim != 2 or y_KN.ndim != 2 or x_MK.shape[1] != y_KN.shape[0]:
        raise ValueError(f"matmul of shapes {x_MK.shape} and {y_KN.shape}: needs (M, K) and (K, N) with the same K")
    if not (x_MK.size and y_KN.size):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    x, y = _survey(x_MK, fmt), _survey(y_KN, fmt)
    if not (x.nonzero and y.nonzero):
        return np.zeros((x_MK.shape[0], y_KN.shape[1]), np.int16)
    kernel = kernel_info()["matmul"]
    avx2 = kernel == "simd avx2"
    if kernel != "gather" and (_pieces if avx2 else _segments).supported(fmt.fraction_bits):
        turn = _work(x, y_KN.shape[1]) > 1.2 * _work(y, x_MK.shape[0])
        left, right = (y, x) if turn else (x, y)
        plan = _simd.plan(left.span, right.span, x_MK.shape[1], fmt, avx2)
        if plan is not None:
            return (
                np.ascontiguousarray(_matmul_simd(y_KN.T, x_MK.T, fmt, plan).T) if turn else _matmul_simd(x_MK, y_KN, fmt, plan)
            )
    return _matmul_gather(x_MK, y_KN, fmt, clamp=not _simd.within_accumulator(x.span, y.span, x_MK.shape[1], fmt))


def matmul_batched(x_BMK: Codes, y_BKN: Codes, fmt: LNSFormat) -> Codes:
    """``x[b] @ y[b]`` for every b; see :func:`matmul`.

    Raises:
        ValueError: not two batches of matrices of one length, or their inner sizes differ.
    """
    if x_BMK.ndim != 3 or y_BKN.ndim != 3 or x_BMK.shape[0] != y_BKN.shape[0] or x_BMK.shape[2] != y_BKN.shape[1]:
        raise ValueError(
            f"matmul_batched of shapes {x_BMK.shape} and {y_BKN.shape}: needs (B, M, K) and (B, K, N) with the same B and K"
        )
    out = np.empty((x_BMK.shape[0], x_BMK.shape[1], y_BKN.shape[2]), np.int16)
    for b in range(len(out)):
        out[b] = matmul(x_BMK[b], y_BKN[b], fmt)
    return out


def _words(x: Codes, fmt: LNSFormat) -> NDArray[np.int32]:
    """Contiguous words of ``x``; a transposed view is widened in memory order and then turned."""
    flipped = x.flags.f_contiguous and not x.flags.c_contiguous
    source = _flat(x.T if flipped else x)
    words = np.empty(source.size, np.int32)
    run(_gather.widen, source.size, _GRAIN, source, words, fmt.bias, fmt.field_mask)
    return np.ascontiguousarray(words.reshape(x.shape[::-1]).T) if flipped else words.reshape(x.shape)


class _Survey(NamedTuple):
    """What the choice of a kernel needs to know of an operand: smallest and largest field of its nonzero codes, their number."""

    span: tuple[int, int]
    nonzero: int


def _survey(x: Codes, fmt: LNSFormat) -> _Survey:
    flat = _flat(x.T if x.flags.f_contiguous else x)
    found = np.empty(3, np.int64)
    run(_gather.survey, flat.size, flat.size, flat, found, fmt.field_mask)
    low, high, nonzero = found.tolist()
    return _Survey((low, high), nonzero)


def _matmul_simd(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, plan: _simd.Plan) -> Codes:
    """The product on vector lanes."""
    (M, K), N = x_MK.shape, y_KN.shape[1]
    x, y, mask = _flat(x_MK), _flat(y_KN), fmt.field_mask
    panels, blocks, out = -(-N // _vector.PANEL), -(-K // BLOCK), np.empty((M, N), np.int16)
    counts, steps, words = np.empty(M * blocks, np.int32), np.empty(x.size, np.int32), np.empty(x.size, np.int32)
    packed = np.empty(panels * K * 2 * _vector.PANEL, np.int16)
    # Packing is short and bound by memory: only much of it is worth a second thread.
    run(_simd.pack_x, M, 1 + 8 * _GRAIN // K, x, K, mask, plan.x_top, plan.unit_shift, BLOCK, counts, steps, words)
    run(_simd.pack_y, panels, 1 + 8 * _GRAIN // (K * _vector.PANEL), y, K, N, mask, plan.y_top, plan.unit_shift, packed)
    run(plan.kernel, panels * -(-M // _vector.ROWS_AT_ONCE), 1, counts, steps, words, packed, plan.constants, plan.extra,
        plan.mapped, out.reshape(-1), M, K, N, BLOCK, plan.zone, plan.top_field, plan.unit_shift, mask)  # fmt: skip
    return out


def _work(rows: _Survey, columns: int) -> int:
    """Time of a product whose scalar operand is ``rows``, in multiply-accumulates: its nonzero elements times columns computed.

    A panel's right edge computes 256, 128 or 32 columns; the last keeps one vector busy at a time and counts for more.
    """
    full, edge = divmod(columns, _vector.PANEL)
    computed = full * _vector.PANEL + (_vector.PANEL if edge > 128 else 128 if edge > 32 else 80 if edge else 0)
    return rows.nonzero * computed


def _matmul_gather(x_MK: Codes, y_KN: Codes, fmt: LNSFormat, clamp: bool) -> Codes:
    """The product by table look-ups; ``clamp`` where the accumulator's limits are in reach."""
    (M, K), N = x_MK.shape, y_KN.shape[1]
    out = np.empty((M, N), np.int16)
    x, y, table = _words(x_MK, fmt), _words(y_KN, fmt), _gather.distance_table(fmt.fraction_bits)
    units = M * -(-N // _gather.STRIP)
    run(_gather.matmul, units, max(1, 4 * _GRAIN // (K * _gather.STRIP)), x.reshape(-1), y.reshape(-1), out.reshape(-1), K, N,
        table, fmt.bias, fmt.field_mask, _LOWEST, _HIGHEST, clamp, BLOCK)  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------- optimizer


def _in_place(name: str, x: Codes, shape: tuple[int, ...]) -> Codes:
    """``x`` flat, without a copy."""
    if x.dtype != np.int16 or x.shape != shape or not (x.flags.c_contiguous and x.flags.writeable):
        raise ValueError(
            f"{name} of dtype {x.dtype}, shape {x.shape}: an array updated in place must be writable, contiguous int16 codes "
            f"of the weight's shape {shape}; pass the array itself, not a strided view"
        )
    return x.reshape(-1)


@lru_cache(maxsize=32)
def _fine_table(fraction_bits: int) -> NDArray[np.int32]:
    """Both tables of additions that round at random, one after the other."""
    return np.concatenate(stochastic_tables(fraction_bits))


def random_bits(count: int, key: int, step: int, slot: int) -> NDArray[np.uint16]:
    """As :func:`lns_ops.reference.random_bits`, up to seven more than ``count``."""
    blocks = -(-count // 8)
    out = np.empty(8 * blocks, np.uint16)
    run(_random.random_bits, blocks, _GRAIN // 16, out, out, key, step, slot)
    return out


def _absent(x: Codes | None, w: Codes) -> Codes:
    """An array for a kernel that will not touch it: one of its own, because overlapping arguments would keep the loop from vectorizing."""
    return np.empty(w.size, np.int16) if x is None else x


def sgd_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    negative_lr: int,
    momentum: int | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
) -> None:
    """One SGD step in LNS operations, fused, in place on ``weight``, ``buffer`` and ``compensation``.

    ``buffer = momentum buffer + grad`` (where momentum and a buffer are given), ``update = -lr buffer``, then
    ``weight += update`` or, with Kahan compensation (W. Kahan 1965)::

        compensation = compensation + update
        new = weight + compensation
        compensation = compensation - (new - weight)

    Args:
        weight: int16 codes, contiguous, updated.
        grad: int16 codes of the same shape; read only.
        fmt: the format.
        negative_lr: the code of ``-lr`` (an integer, or an array of one element).
        momentum: the code of the momentum factor.
        buffer: momentum buffer, like ``weight``, updated.
        compensation: Kahan's running error, like ``weight``, updated.
        key, step: round ``weight + update`` at random by the bits of (key, step); compensation is not used then.

    Raises:
        ValueError: an array to be updated is not writable contiguous int16 of the weight's shape, or ``grad``'s shape differs.
    """
    w, g = _in_place("weight", weight, weight.shape), _gradient(grad, weight)
    use_momentum = momentum is not None and buffer is not None
    b = _absent(_in_place("buffer", buffer, weight.shape) if use_momentum and buffer is not None else None, w)
    table = _sum_table(fmt.fraction_bits)
    last = table.size // 2 - 1
    scalars = (fmt.bias, fmt.field_mask, _scalar(negative_lr), _scalar(momentum), use_momentum)
    if key is not None:
        bits, fine = random_bits(w.size, key, step, WEIGHT_SLOT), _fine_table(fmt.fraction_bits)
        run(_elementwise.sgd_stochastic, w.size, _GRAIN // 4, w, g, b, bits, table, fine, last, fine.size // 2 - 1, *scalars)
    elif compensation is None:
        run(_elementwise.sgd_plain, w.size, _GRAIN // 2, w, g, b, table, last, *scalars)
    else:
        c = _in_place("compensation", compensation, weight.shape)
        run(_elementwise.sgd_kahan, w.size, _GRAIN // 4, w, g, b, c, table, last, *scalars)


def _gradient(grad: Codes, weight: Codes) -> Codes:
    if grad.shape != weight.shape:
        raise ValueError(f"grad of shape {grad.shape}: must have the weight's shape {weight.shape}")
    return _flat(grad)


def adam_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    step: int,
    exp_avg: Codes,
    root: Codes,
    residue: Codes | None = None,
    compensation: Codes | None = None,
    negative_lr: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: int | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> None:
    """One Adam or AdamW step in LNS operations, fused, in place; :func:`lns_ops.reference.adam_update` has the equations.

    Args:
        weight, exp_avg, root, compensation: int16 codes, contiguous, of one shape, updated.
        grad: int16 codes of that shape; read only.
        residue: the root's bits below the ulp, int16, updated; must be given unless ``key`` is.
        step: 1 for the first one.
        negative_lr, weight_decay: codes of scalars.
        key: round weight and root at random by the bits of (key, step); residue and compensation are not used then.

    Raises:
        ValueError: an array to be updated is not writable contiguous int16 of the weight's shape, ``grad``'s shape differs, a
            residue is needed, or a scalar is out of range.
    """
    codes, decay = adam_codes(beta1, beta2, eps, fmt), decay_table(beta2, fmt.fraction_bits)
    w, g = _in_place("weight", weight, weight.shape), _gradient(grad, weight)
    m, r = _in_place("exp_avg", exp_avg, weight.shape), _in_place("root", root, weight.shape)
    now, table = min(step, len(codes.correction)) - 1, _sum_table(fmt.fraction_bits)
    last = table.size // 2 - 1
    scalars = (
        fmt.bias, fmt.field_mask, _scalar(negative_lr), codes.beta1, codes.one_minus_beta1, int(codes.correction[now]),
        int(codes.eps_hat[now]), _scalar(weight_decay), weight_decay is not None and not decoupled, weight_decay is not None and decoupled,
        decay.first, decay.keep, decay.take,
    )  # fmt: skip
    if key is not None:
        bits, root_bits = (random_bits(w.size, key, step, slot) for slot in (WEIGHT_SLOT, ROOT_SLOT))
        fine = _fine_table(fmt.fraction_bits)
        run(_elementwise.adam_stochastic, w.size, _GRAIN // 8, w, g, m, r, bits, root_bits, table, decay.table, fine, last,
            fine.size // 2 - 1, *scalars)  # fmt: skip
        return
    if residue is None:
        raise ValueError(
            "residue=None: without it or a key the second moment would never move; pass int16 zeros of the weight's shape"
        )
    e = _in_place("residue", residue, weight.shape)
    if compensation is None:
        run(_elementwise.adam_plain, w.size, _GRAIN // 8, w, g, m, r, e, table, decay.table, last, *scalars)
    else:
        c = _in_place("compensation", compensation, weight.shape)
        run(_elementwise.adam_kahan, w.size, _GRAIN // 8, w, g, m, r, e, c, table, decay.table, last, *scalars)


_CODEC = reference.Codec(decode, encode, lambda x, fmt, bits: encode_stochastic(x, fmt, bits.astype(np.uint16)))


def sgd_update_float32(weight: Codes, grad: Codes, fmt: LNSFormat, *, buffer: Codes | None = None, compensation: Codes | None = None,
                       **options: Any) -> None:  # fmt: skip
    """:func:`lns_ops.reference.sgd_update_float32` in place on ``weight``, ``buffer`` and ``compensation``; not fused on a CPU."""
    updated = reference.sgd_update_float32(weight, grad, fmt, buffer=buffer, compensation=compensation, codec=_CODEC, **options)
    _store((weight, buffer, compensation), updated)


def adam_update_float32(
    weight: Codes, grad: Codes, fmt: LNSFormat, *, exp_avg: Codes, root: Codes, residue: Codes | None = None,
    compensation: Codes | None = None, **options: Any,
) -> None:  # fmt: skip
    """:func:`lns_ops.reference.adam_update_float32` in place on all arrays but ``grad``; not fused on a CPU."""
    state: dict[str, Any] = {"exp_avg": exp_avg, "root": root, "residue": residue, "compensation": compensation}
    updated = reference.adam_update_float32(weight, grad, fmt, codec=_CODEC, **state, **options)
    _store((weight, *state.values()), updated)


def _store(arrays: tuple[Codes | None, ...], values: tuple[Codes | None, ...]) -> None:
    for array, value in zip(arrays, values, strict=True):
        if array is not None and value is not None and value is not array:
            array[...] = value


def _scalar(code: Any) -> int:
    return 0 if code is None else int(np.asarray(code).reshape(()))


def kernel_info() -> dict[str, str]:
    """Which matrix-product kernel is in use and why: keys ``matmul`` (``simd avx512bw+vbmi``, ``simd avx2`` or ``gather``) and ``reason``.

    The vector kernels serve 3 to 7 fraction bits and operands whose products span less than some 90 octaves; other calls use
    gathers whatever this says.

    Raises:
        ValueError: LNS_OPS_CPU_KERNEL names no kernel, or one that this processor cannot run.
    """
    forced, no_avx512, no_avx2 = os.environ.get("LNS_OPS_CPU_KERNEL", ""), _missing("avx512bw", "avx512vbmi"), _missing("avx2")
    if forced not in ("", "gather", "simd", "avx2"):
        raise ValueError(f"LNS_OPS_CPU_KERNEL={forced!r}: must be 'gather', 'simd', 'avx2' or unset")
    if forced in ("simd", "avx2") and no_avx2:
        raise ValueError(f"LNS_OPS_CPU_KERNEL={forced!r}: needs AVX2, and {no_avx2}; unset it or set it to 'gather'")
    if forced == "gather" or no_avx2:
        return {"matmul": "gather", "reason": no_avx2 or "LNS_OPS_CPU_KERNEL=gather"}
    if forced == "avx2" or no_avx512:
        return {"matmul": "simd avx2", "reason": no_avx512 or "LNS_OPS_CPU_KERNEL=avx2"}
    return {"matmul": "simd avx512bw+vbmi", "reason": "the processor has AVX-512 BW and VBMI"}


@lru_cache(maxsize=8)
def _missing(*features: str) -> str:
    """Why a kernel that needs these features cannot run here; empty if it can."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES:
        return "NUMBA_CPU_NAME or NUMBA_CPU_FEATURES overrides the processor's own features"
    found = get_host_cpu_features()
    lacking = [name for name in features if not found.get(name)]
    return f"this processor lacks {' and '.join(lacking)}" if lacking else ""
