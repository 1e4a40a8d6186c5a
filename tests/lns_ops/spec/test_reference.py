"""The reference compared with real arithmetic: the promises of the contract, checked independently
of its code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import LNSFormat, lns12, lns16, reference
from tests.lns_ops.lns_formats import FORMATS, IDS, half_ulp

SMALL = [f for f in FORMATS if f.bits <= 10]


def every_pair(fmt: LNSFormat) -> tuple[np.ndarray, np.ndarray]:
    codes = fmt.codes()
    return codes[:, None], codes[None, :]


def check_correctly_rounded(codes: np.ndarray, exact: np.ndarray, fmt: LNSFormat) -> None:
    """Correctly rounded, saturated, or underflowed. One table rounding leaves slightly more than
    0.5 ulp if two logarithms nearly tie."""
    np.testing.assert_array_equal(codes, reference.encode(exact, fmt))


@pytest.mark.parametrize("fmt", SMALL, ids=[str(f) for f in SMALL])
def test_addition_is_correctly_rounded_for_every_pair(fmt: LNSFormat) -> None:
    x, y = every_pair(fmt)
    exact = reference.decode(x, fmt, np.float64) + reference.decode(y, fmt, np.float64)
    cancels = reference.order_key(x, fmt) == -reference.order_key(y, fmt)
    check_correctly_rounded(reference.add(x, y, fmt), np.where(cancels, 0, exact), fmt)


@pytest.mark.parametrize("fmt", SMALL, ids=[str(f) for f in SMALL])
def test_multiplication_and_division_are_exact(fmt: LNSFormat) -> None:
    x, y = every_pair(fmt)
    fx, fy = reference.decode(x, fmt, np.float64), reference.decode(y, fmt, np.float64)
    check_correctly_rounded(reference.mul(x, y, fmt), fx * fy, fmt)
    nonzero = fy[0] != 0
    check_correctly_rounded(reference.div(x, y[:, nonzero], fmt), fx / fy[:, nonzero], fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_negation_absolute_value_and_order(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    values = reference.decode(codes, fmt, np.float64)
    np.testing.assert_array_equal(
        reference.decode(reference.neg(codes, fmt), fmt, np.float64), -values
    )
    np.testing.assert_array_equal(
        reference.decode(reference.absolute(codes, fmt), fmt, np.float64), abs(values)
    )
    assert np.all(np.diff(reference.order_key(codes, fmt)) == 1)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_difference_of_equals_is_zero(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    assert not reference.sub(codes, codes, fmt).any()


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_square_root_rounds_half_to_even(fmt: LNSFormat) -> None:
    codes = fmt.codes()[fmt.codes() >= 0]
    _, log = reference.unpack(codes, fmt)
    _, root = reference.unpack(reference.sqrt(codes, fmt), fmt)
    expected = np.where(
        log == reference.NO_LOG, reference.NO_LOG, np.rint(log / 2).astype(np.int64)
    )
    np.testing.assert_array_equal(root, expected)


def test_errors_of_sqrt_and_division() -> None:
    minus_one = reference.encode(np.array([-1.0]), lns12)
    with pytest.raises(ValueError, match="square root of a negative"):
        reference.sqrt(minus_one, lns12)
    with pytest.raises(ValueError, match="division by zero"):
        reference.div(minus_one, np.zeros(1, np.int16), lns12)


def test_blocks_keep_long_sums_from_sticking() -> None:
    """Added one after another, 4,096 ones stagnate at 370 for f = 7; in blocks of 64 the sum is
    right."""
    ones = reference.encode(np.ones(4096), lns16)
    assert float(reference.decode(reference.sum(ones, 0, lns16), lns16)) == pytest.approx(
        4096, rel=0.015
    )
    stuck = np.zeros((), np.int16)
    for one in ones:
        stuck = reference.add(stuck, one, lns16)
    assert float(reference.decode(stuck, lns16)) == pytest.approx(370, rel=0.01)


@given(seed=st.integers(0, 2**32 - 1), k=st.integers(0, 200))
def test_matmul_is_products_summed_in_order(seed: int, k: int) -> None:
    """matmul equals the sum of elementwise products if products neither saturate nor underflow."""
    rng = np.random.default_rng(seed)
    x, y = (
        reference.encode(rng.uniform(0.5, 2, s) * rng.choice([-1, 1], s), lns12)
        for s in ((3, k), (k, 2))
    )
    products = reference.mul(x[:, :, None], y[None, :, :], lns12)
    np.testing.assert_array_equal(reference.matmul(x, y, lns12), reference.sum(products, 1, lns12))


def test_matmul_error_is_what_the_design_measured() -> None:
    """f = 7, K = 784: the measured RMS error is 1.06 % compared with float64 on the same operands;
    allow a fifth more."""
    rng = np.random.default_rng(0)
    x, y = (reference.encode(rng.standard_normal(s), lns16) for s in ((16, 784), (784, 16)))
    exact = reference.decode(x, lns16, np.float64) @ reference.decode(y, lns16, np.float64)
    error = reference.decode(reference.matmul(x, y, lns16), lns16, np.float64) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.0127


def test_kahan_wins_back_small_updates() -> None:
    """1,000 updates of 1e-3 on a weight of 1: plain LNS never moves (half an ulp is 5.4e-3), Kahan
    reaches 2."""
    one, step = reference.encode(np.array([1.0]), lns12), reference.encode(np.array([1.0]), lns12)
    rate = reference.encode(np.array(1e-3), lns12)
    plain, weight, compensation = one, one, np.zeros(1, np.int16)
    for _ in range(1000):
        plain, _, _ = reference.sgd_update(plain, step, lns12, negative_lr=rate)
        weight, _, compensation = reference.sgd_update(
            weight, step, lns12, negative_lr=rate, compensation=compensation
        )
    assert float(reference.decode(plain, lns12)[0]) == 1.0
    assert float(reference.decode(weight, lns12)[0]) == pytest.approx(2.0, rel=0.03)


def test_half_ulp_is_half_an_ulp() -> None:
    assert half_ulp(lns12) == pytest.approx(0.00543, abs=1e-5)
