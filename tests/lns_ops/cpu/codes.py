"""Formats and codes that the tests of the CPU kernels share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lns_ops import reference as ref
from lns_ops.format import LNSFormat, lns8, lns12, lns16

FORMATS = [
    lns16,
    lns12,
    lns8,
    LNSFormat(16, 14),
    LNSFormat(16, 9),
    LNSFormat(14, 5),
    LNSFormat(2, 0),
    LNSFormat(3, 1),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
Codes = NDArray[np.int16]


def random_codes(
    rng: np.random.Generator, fmt: LNSFormat, *shape: int, zeros: float = 0.1
) -> Codes:
    """Codes over the whole format, extremes included; a share of them is zero."""
    codes = rng.choice(fmt.codes(), shape)
    extremes = np.array(
        [fmt.field_mask, fmt.field_mask | fmt.sign_mask, 1, 1 | fmt.sign_mask], np.int16
    )
    codes = np.where(rng.random(shape) < 0.1, rng.choice(extremes, shape), codes)
    return np.where(rng.random(shape) < zeros, np.int16(0), codes).astype(np.int16)


def gaussian_codes(
    rng: np.random.Generator, fmt: LNSFormat, *shape: int, zeros: float = 0.1
) -> Codes:
    """Codes of normally distributed numbers, as weights and activations: they use the narrow
    kernel."""
    codes = ref.encode(rng.standard_normal(shape), fmt)
    return np.where(rng.random(shape) < zeros, np.int16(0), codes).astype(np.int16)


def cancelling_pair(rng: np.random.Generator, fmt: LNSFormat, *shape: int) -> tuple[Codes, Codes]:
    """Operands: a third cancel exactly, a third differ by a few ulps in magnitude."""
    x, y = random_codes(rng, fmt, *shape), random_codes(rng, fmt, *shape)
    kind = rng.integers(0, 3, shape)
    y = np.where(kind == 0, ref.neg(x, fmt), y)
    near = ref.pack(
        rng.random(shape) < 0.5, ref.unpack(x, fmt)[1] + rng.integers(-5, 6, shape), fmt
    )
    return x, np.where(kind == 1, near, y).astype(np.int16)


def assert_same(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    assert actual.dtype == expected.dtype
    assert actual.flags.c_contiguous
    np.testing.assert_array_equal(actual, expected, strict=True)
