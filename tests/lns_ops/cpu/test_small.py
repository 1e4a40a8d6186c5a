"""Kernels of small operands have the bits of the specification, whatever the layout."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lns_ops import cpu
from lns_ops import reference as ref
from lns_ops.cpu import small
from lns_ops.format import LNSFormat, lns12, lns16

FORMATS = (lns16, lns12, LNSFormat(8, 3), LNSFormat(14, 10))


def _codes(fmt: LNSFormat, *shape: int) -> NDArray[np.int16]:
    """Draw codes of the whole range, a tenth of them zeros."""
    rng = np.random.default_rng(sum(shape))
    drawn = rng.choice(fmt.codes(), shape).astype(np.int16)
    return np.where(rng.random(shape) < 0.1, np.int16(0), drawn)


def _lying(x: NDArray[Any], turned: bool) -> NDArray[Any]:
    """Return the values of ``x``, with columns side by side in memory if ``turned``."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) if turned else x


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 70, 5), (16, 16, 16), (2, 130, 40), (5, 7, 131)])
def test_products_of_any_layout(fmt: LNSFormat, sizes: tuple[int, int, int]) -> None:
    M, K, N = sizes
    x, y = _codes(fmt, 2, M, K), _codes(fmt, 2, K, N)
    assert small.are_products(x.size * N)
    expected = np.stack([ref.matmul(a, b, fmt) for a, b in zip(x, y, strict=True)])
    for of_x, of_y in product((False, True), repeat=2):
        a, b = _lying(x, of_x), _lying(y, of_y)
        np.testing.assert_array_equal(cpu.matmul_batched(a, b, fmt), expected)
        np.testing.assert_array_equal(cpu.matmul(a[0], b[0], fmt), expected[0])


def test_a_forced_kernel_takes_small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LNS_OPS_CPU_KERNEL", "gather")
    assert not small.are_products(8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(5,), (70, 3), (3, 70), (130, 2, 7), (2, 3, 150), (600,)])
def test_sums_along_any_axis(fmt: LNSFormat, shape: tuple[int, ...]) -> None:
    x = _codes(fmt, *shape)
    assert small.are_elements(x.size)
    for axis in range(len(shape)):
        terms = np.moveaxis(x, axis, 0)
        ones = np.full((1, len(terms)), fmt.bias, np.int16)
        expected = ref.matmul(ones, terms.reshape(len(terms), -1), fmt).reshape(terms.shape[1:])
        np.testing.assert_array_equal(cpu.sum(x, axis, fmt), expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 5), (5,)), ((4, 5), (4, 1)), ((), (3, 4)), ((2, 1, 3), (2, 4, 1)), ((7,), (1,)),
        ((1, 8, 1, 1), (4, 8, 3, 3)), ((2, 1, 3, 1), (1, 4, 1, 5)), ((0, 3), (3,)),
    ],
)  # fmt: skip
def test_arithmetic_broadcasts(fmt: LNSFormat, shapes: tuple[tuple[int, ...], ...]) -> None:
    given = [_codes(fmt, *shape) for shape in shapes]
    for name, (x, y) in product(("add", "sub", "mul"), (given, given[::-1])):
        whole = np.broadcast_arrays(x, y)
        alike = getattr(cpu, name)(*(np.array(a) for a in whole), fmt)
        np.testing.assert_array_equal(getattr(cpu, name)(x, y, fmt), alike)
