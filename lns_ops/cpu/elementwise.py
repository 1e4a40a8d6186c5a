"""Elementwise addition, multiplication, division and square root on the CPU, with broadcasting."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu import small
from lns_ops.cpu.arrays import GRAIN, Codes, flat_pair, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.kernel_choice import lanes_plan
from lns_ops.cpu.kernels import elementwise
from lns_ops.cpu.kernels import small as small_kernels
from lns_ops.cpu.simd import avx512
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import gaussian_tables


@lru_cache(maxsize=32)
def sum_table(fraction_bits: int) -> NDArray[np.int32]:
    """Return a table of G+ followed by G-, for elementwise additions."""
    return np.concatenate(gaussian_tables(fraction_bits)).astype(np.int32)


def _small_form(x: Codes, y: Codes) -> tuple[tuple[int, ...], int, NDArray[np.int64]] | None:
    """Return how a kernel for small operands broadcasts them, or None if no such kernel fits."""
    if x.shape == y.shape or not small.are_elements(max(x.size, y.size)):
        return None
    return small.broadcast_form(x.shape, y.shape)


def _add(x: Codes, y: Codes, fmt: LNSFormat, flip: int) -> Codes:
    if (found := _small_form(x, y)) is not None:
        shape, units, form = found
        out, table = np.empty(shape, np.int16), sum_table(fmt.fraction_bits)
        run(
            small_kernels.add, units, units, flattened(x), flattened(y), out.reshape(-1),
            table, form, table.size // 2 - 1, fmt.field_mask, flip,
        )  # fmt: skip
        return out
    a, b, shape = flat_pair(x, y)
    out = np.empty(shape, np.int16)
    chosen = lanes_plan((a, b), 2, fmt)
    if chosen is not None:
        kernels, plan = chosen
        run(
            kernels.add, -(-a.size // avx512.PANEL), GRAIN // 128, a, b, out.reshape(-1),
            plan.constants, plan.extra, plan.mapped, plan.zone, plan.top_field, plan.unit_shift,
            fmt.field_mask, flip & 1,
        )  # fmt: skip
        return out
    table = sum_table(fmt.fraction_bits)
    run(
        elementwise.add, a.size, GRAIN, a, b, out.reshape(-1), table, table.size // 2 - 1,
        fmt.field_mask, flip,
    )  # fmt: skip
    return out


def repeat(x: Codes, size: int, run_length: int) -> Codes:
    """Repeat each element of ``x`` ``run_length`` times, and the result until ``size`` codes."""
    out = np.empty(size, np.int16)
    run(
        elementwise.repeat,
        size // run_length,
        max(1, GRAIN // run_length),
        flattened(x),
        out,
        run_length,
    )
    return out


def add(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x + y``, broadcast, rounded correctly in the logarithm; ``x + (-x)`` is exactly 0.

    Args:
        x, y: int16 codes with shapes that broadcast.
        fmt: the format of operands and result.
    """
    return _add(x, y, fmt, 0)


def sub(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x - y``; :func:`add` has the arguments."""
    return _add(x, y, fmt, -1)


def mul(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x y``, broadcast: logarithms add; exact except for saturation and underflow."""
    if (found := _small_form(x, y)) is not None:
        shape, units, form = found
        out = np.empty(shape, np.int16)
        run(
            small_kernels.mul, units, units, flattened(x), flattened(y), out.reshape(-1),
            form, fmt.bias, fmt.field_mask,
        )  # fmt: skip
        return out
    a, b, shape = flat_pair(x, y)
    out = np.empty(shape, np.int16)
    run(elementwise.mul, a.size, GRAIN, a, b, out.reshape(-1), fmt.bias, fmt.field_mask)
    return out


def div(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """Return ``x / y``, broadcast: logarithms subtract; exact except for saturation and underflow.

    Raises:
        ValueError: some ``y`` is zero; LNS has no infinity.
    """
    a, b, shape = flat_pair(x, y)
    out = np.empty(shape, np.int16)
    if run(elementwise.div, a.size, GRAIN, a, b, out.reshape(-1), fmt.bias, fmt.field_mask):
        raise ValueError(
            f"division by zero: LNS has no infinity; mask zero divisors first (in {fmt} numbers"
            f" below {fmt.smallest:.2g} are zero, including one that is added to a divisor)"
        )
    return out


def sqrt(x: Codes, fmt: LNSFormat) -> Codes:
    """Return the square root: half the logarithm, rounded half to even.

    Raises:
        ValueError: some ``x`` is negative.
    """
    out = np.empty(x.shape, np.int16)
    if run(
        elementwise.sqrt, x.size, GRAIN, flattened(x), out.reshape(-1), fmt.bias, fmt.field_mask
    ):
        raise ValueError(
            "square root of a negative number: LNS has no NaN; take the absolute value or clamp"
            " first"
        )
    return out
