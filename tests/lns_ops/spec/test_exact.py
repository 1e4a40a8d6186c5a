"""Elementwise results are the correctly rounded ones: all pairs of a small format, a random million
of large ones.

Twice: against 40 digits (mpmath), and against xlns (https://github.com/xlnsresearch/xlns), an
independent implementation, in its correctly rounded mode.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray

from lns_ops import LNSFormat, cpu, lns8, lns12, lns16, reference

Codes = NDArray[np.int16]
OPERATIONS = ("add", "sub", "mul", "div")


def pairs(fmt: LNSFormat) -> tuple[Codes, Codes]:
    """All pairs of an 8-bit format; for other formats 10^6 random pairs, half of them close in
    magnitude, where additions are hardest."""
    codes = fmt.codes()
    if fmt.bits == 8:
        x, y = np.meshgrid(codes, codes)
        return x.reshape(-1), y.reshape(-1)
    rng = np.random.default_rng(fmt.fraction_bits)
    place = rng.integers(0, len(codes), 1_000_000)
    near = np.clip(place[::2] + rng.integers(-600, 601, 500_000), 0, len(codes) - 1)
    y = codes[rng.integers(0, len(codes), 1_000_000)]
    y[::2] = np.where(rng.random(500_000) < 0.5, codes[near], codes[::-1][near])
    return codes[place], y


@lru_cache(maxsize=100_000)
def gaussian_logarithm(distance: int, unlike: bool, fraction_bits: int) -> int:
    """``2^f log2(1 +- 2^(-distance / 2^f))``, rounded to nearest; it is irrational, so there are no
    ties."""
    with mpmath.workdps(40):
        ratio = mpmath.power(2, -mpmath.mpf(distance) / (1 << fraction_bits))
        return int(
            mpmath.nint(mpmath.log(1 - ratio if unlike else 1 + ratio, 2) * (1 << fraction_bits))
        )


def exact_sum(x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """``x + y`` by definition; mpmath computes every distance."""
    (sx, lx), (sy, ly) = reference.unpack(x, fmt), reference.unpack(y, fmt)
    zero = (lx == reference.NO_LOG) | (ly == reference.NO_LOG)
    distance, unlike = np.where(zero, 0, np.abs(lx - ly)), (sx != sy) & ~zero
    cancel = unlike & (distance == 0)
    kinds, where = np.unique(2 * distance + unlike, return_inverse=True)
    corrections = [
        0 if k == 1 else gaussian_logarithm(int(k) >> 1, bool(k & 1), fmt.fraction_bits)
        for k in kinds
    ]
    log = np.maximum(lx, ly) + np.where(zero, 0, np.array(corrections)[where.reshape(-1)])
    return reference.pack(np.where(lx >= ly, sx, sy), np.where(cancel, reference.NO_LOG, log), fmt)


@pytest.mark.parametrize(
    "fmt", [lns8, lns12, lns16, pytest.param(LNSFormat(16, 10), marks=pytest.mark.slow)], ids=str
)
def test_sums_of_forty_digits(fmt: LNSFormat) -> None:
    x, y = pairs(fmt)
    np.testing.assert_array_equal(cpu.add(x, y, fmt), exact_sum(x, y, fmt))
    np.testing.assert_array_equal(cpu.sub(x, y, fmt), exact_sum(x, reference.neg(y, fmt), fmt))


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16, LNSFormat(16, 10)], ids=str)
def test_products_are_exact(fmt: LNSFormat) -> None:
    """Convert to whole logarithms: zero below the range, the largest magnitude above it."""
    x, y = pairs(fmt)
    y = np.where(y == 0, fmt.bias, y).astype(np.int16)  # avoids division by zero
    (sx, lx), (sy, ly) = reference.unpack(x, fmt), reference.unpack(y, fmt)
    for got, log in (
        (cpu.mul(x, y, fmt), lx + ly),
        (cpu.div(x, y, fmt), np.where(x == 0, reference.NO_LOG, lx - ly)),
    ):
        sign, found = reference.unpack(got, fmt)
        expected = np.where(log < fmt.min_log, reference.NO_LOG, np.minimum(log, fmt.max_log))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(sign, (sx != sy) & (expected != reference.NO_LOG))


def by_xlns(xlns: Any, operation: str, x: Codes, y: Codes, fmt: LNSFormat) -> Codes:
    """The operation on xlns's arrays (``2 log + sign``, unbounded), clamped to the format."""
    numbers = []
    for codes in (x, y):
        sign, log = reference.unpack(codes, fmt)
        number = xlns.xlnsnp("")
        number.nd = np.where(log == reference.NO_LOG, np.iinfo(np.int64).min, 2 * log + sign)
        numbers.append(number)
    with np.errstate(divide="ignore", invalid="ignore"):
        symbol = {"add": "__add__", "sub": "__sub__", "mul": "__mul__", "div": "__truediv__"}[
            operation
        ]
        nd = getattr(numbers[0], symbol)(numbers[1]).nd
    log = np.where(nd < -(1 << 40), reference.NO_LOG, nd >> 1)
    return reference.pack((nd & 1).astype(bool), log, fmt)


@pytest.mark.parametrize("fmt", [lns8, lns16, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_xlns_agrees(operation: str, fmt: LNSFormat) -> None:
    xlns = pytest.importorskip("xlns", reason="compares with xlns: pip install xlns")
    x, y = pairs(fmt)
    if operation == "div":
        y = np.where(y == 0, fmt.bias, y).astype(np.int16)
    xlns.xlnssetF(fmt.fraction_bits)
    assert xlns.sbdb_ufunc is xlns.sbdb_ufunc_ideal
    # xlns 1.0.5 makes x - x the negative magnitude: its logarithm of 0 overflows ("need to deal
    # with z=0 s=1"). Ours is zero.
    cancels = (
        (operation in ("add", "sub"))
        & (x != 0)
        & (x == (reference.neg(y, fmt) if operation == "add" else y))
    )
    got = getattr(cpu, operation)(x, y, fmt)
    assert not got[cancels].any()
    np.testing.assert_array_equal(got[~cancels], by_xlns(xlns, operation, x, y, fmt)[~cancels])
