"""Functions from tables: every entry is the nearest code. The kernel reads the table and raises if
the function has no value."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from lns_ops import LNSFormat, LNSTensor, lns8, lns12, lns16, reference
from lns_ops import functional as lns
from lns_ops.functional import indexed
from lns_ops.spec import unary_functions
from tests.lns_ops.lns_formats import FORMATS, IDS

PARAMETERS = {
    "power_of": (2.0,),
    "softplus": (1.5, 2.0),
    "d_softplus": (1.5, 2.0),
    "elu": (0.7, 1.3, 0.9),
    "d_elu": (0.7, 1.3, 0.9),
    "d_elu_of_result": (0.7, 1.3, 0.9),
}

# Written differently than in lns_ops.spec.unary_functions, with 40 digits.
INDEPENDENT = {
    "exp": lambda x: mpmath.e**x,
    "expm1": lambda x: mpmath.e**x - 1,
    "power_of": lambda x: mpmath.mpf(2) ** x,
    "log": lambda x: mpmath.log(x) if x > 0 else None,
    "log2": lambda x: mpmath.log(x, 2) if x > 0 else None,
    "log10": lambda x: mpmath.log(x, 10) if x > 0 else None,
    "log1p": lambda x: mpmath.log(1 + x) if x > -1 else None,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "d_sigmoid": lambda x: 1 / (2 + mpmath.exp(-x) + mpmath.exp(x)),
    "tanh": lambda x: mpmath.sinh(x) / mpmath.cosh(x),
    "d_tanh": lambda x: 1 / mpmath.cosh(x) ** 2,
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.ncdf(x),
    "d_gelu": lambda x: mpmath.ncdf(x) + x * mpmath.npdf(x),
    "gelu_tanh": lambda x: (
        x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf(0.044715) * x**3))) / 2
    ),
    "softplus": lambda x: (
        x if 1.5 * x > 2 else mpmath.log(1 + mpmath.exp(mpmath.mpf(1.5) * x)) / mpmath.mpf(1.5)
    ),
    "log_sigmoid": lambda x: -mpmath.log(1 + mpmath.exp(-x)),
    "elu": lambda x: (
        mpmath.mpf(1.3) * x
        if x > 0
        else mpmath.mpf(1.3) * mpmath.mpf(0.7) * (mpmath.exp(mpmath.mpf(0.9) * x) - 1)
    ),
    "mish": lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))),
    "hardsigmoid": lambda x: min(max(x / 6 + mpmath.mpf(1) / 2, 0), 1),
    "hardswish": lambda x: x * min(max(x / 6 + mpmath.mpf(1) / 2, 0), 1),
}
DERIVATIVES = {"silu", "gelu_tanh", "mish", "log_sigmoid"}


def value_of(code: int, fmt: LNSFormat) -> mpmath.mpf:
    sign, log = (part.item() for part in reference.unpack(np.array(code, np.int16), fmt))
    return (
        (-1 if sign else 1) * mpmath.power(2, mpmath.mpf(log) / (1 << fmt.fraction_bits))
        if code
        else mpmath.mpf(0)
    )


def nearest(y: mpmath.mpf | None, fmt: LNSFormat) -> int:
    """The code by definition: the logarithm rounded to nearest, saturated, zero below the range."""
    if y is None:
        return unary_functions.undefined(fmt)
    if y == 0:
        return 0
    exact = mpmath.log(abs(y), 2) * (1 << fmt.fraction_bits)
    doubled = mpmath.nint(2 * exact)
    # a tie goes to even
    ulps = int(
        mpmath.nint(doubled / 2 if abs(2 * exact - doubled) < mpmath.mpf(10) ** -100 else exact)
    )
    return int(reference.pack(np.array(y < 0), np.array(ulps), fmt))


def some_codes(fmt: LNSFormat, count: int) -> list[int]:
    codes = fmt.codes()
    return codes[np.linspace(0, len(codes) - 1, min(count, len(codes))).astype(int)].tolist()


@pytest.mark.parametrize("name", sorted(INDEPENDENT))
@pytest.mark.parametrize("fmt", [lns8, lns12, LNSFormat(16, 10)], ids=str)
def test_entries_are_the_nearest_codes(name: str, fmt: LNSFormat) -> None:
    table = unary_functions.table(name, PARAMETERS.get(name, ()), fmt)
    with mpmath.workdps(400):  # 1 - tanh(40) and similar differences cancel without loss
        for code in some_codes(fmt, 90):
            assert table[code & (2 * fmt.field_mask + 1)] == nearest(
                INDEPENDENT[name](value_of(code, fmt)), fmt
            ), value_of(code, fmt)


@pytest.mark.parametrize("name", sorted(DERIVATIVES))
def test_derivatives_are_derivatives(name: str) -> None:
    fmt = LNSFormat(12, 6)
    table = unary_functions.table(f"d_{name}", (), fmt)
    with mpmath.workdps(50):
        for code in some_codes(fmt, 60):
            x = value_of(code, fmt)
            if abs(x) < 50:
                slope = mpmath.diff(lambda t: INDEPENDENT[name](t), x)
                assert abs(int(table[code & 0xFFF]) - nearest(slope, fmt)) <= (abs(slope) < 1e-6)


@pytest.mark.parametrize("name", sorted(unary_functions.FUNCTIONS))
def test_float64_is_trusted_no_further_than_it_goes(name: str) -> None:
    """The formulas in float64 compared with 60 digits: within the error that the tables allow."""
    function, parameters = unary_functions.FUNCTIONS[name], PARAMETERS.get(name, ())
    for code in some_codes(lns16, 120):
        with mpmath.workdps(60):
            x = value_of(code, lns16)
            (quick,), missing = unary_functions._values(function, [float(x)], parameters)
            if not missing and 1e-200 < abs(quick) < 1e200:
                exact = function(mpmath, mpmath.mpf(float(x)), *parameters)
                assert abs(mpmath.mpf(quick) / exact - 1) < unary_functions.TRUSTED / 4


def test_where_float64_could_err_more_digits_decide() -> None:
    """x + tiny is just beyond a threshold for one code; the table must not depend on float64's last
    bits."""
    fmt = lns12
    threshold = mpmath.power(2, mpmath.mpf(1) / 128)

    def close(m: object, x: object) -> object:
        return +threshold + (mpmath.mpf(2) ** -80 if m is mpmath else 0)

    unary_functions.FUNCTIONS["close"] = close
    try:
        with mpmath.workdps(60):
            threshold = mpmath.power(2, mpmath.mpf(1) / 128)
            assert set(unary_functions.table("close", (), fmt).tolist()) == {fmt.bias + 1}
    finally:
        del unary_functions.FUNCTIONS["close"]


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.5, -0.5, 1 / 3, 1.5, 1e9])
def test_powers_are_exact_in_the_logarithm(fmt: LNSFormat, exponent: float) -> None:
    table = unary_functions.table("power", (exponent,), fmt)
    for code in some_codes(fmt, 101):
        (sign,), (log,) = reference.unpack(np.array([code], np.int16), fmt)
        got = int(table[code & (2 * fmt.field_mask + 1)])
        if (code == 0 and exponent < 0) or (sign and exponent % 1):
            assert got == unary_functions.undefined(fmt)
        elif code == 0:
            assert got == (fmt.bias if exponent == 0 else 0)
        else:
            exact = mpmath.mpf(int(log)) * mpmath.mpf(exponent)
            rounded = int(mpmath.nint(exact))  # half to even
            assert got == int(
                reference.pack(np.array(sign and exponent % 2 == 1), np.array(rounded), fmt)
            )


def test_zero_to_a_small_power_is_zero() -> None:
    assert unary_functions.table("power", (1e-12,), lns16)[0] == 0


@pytest.mark.parametrize("exponent", [1 / 3, 0.1, 1.5, 2.5**-30, -1e-300, -1e300, 2.5 + 2**-50])
def test_powers_are_rounded_as_fractions_are(exponent: float) -> None:
    """For all logarithms: products of float64 decide, except near ties."""
    logs = np.arange(-lns16.max_log, lns16.max_log + 1)
    limit = 1 << 20
    exact = [min(max(round(Fraction(exponent) * x), -limit), limit) for x in logs.tolist()]
    got = unary_functions._rounded_products(Fraction(exponent), logs)
    np.testing.assert_array_equal(got, exact)


def test_the_root_is_the_power_of_one_half_and_division_that_of_minus_one() -> None:
    codes = torch.from_numpy(np.arange(1, lns12.field_mask + 1, dtype=np.int16))
    assert torch.equal(indexed.power(codes, 0.5, lns12), lns.sqrt(codes, lns12))
    one = torch.full_like(codes, lns12.bias)
    assert torch.equal(indexed.power(codes, -1.0, lns12), lns.div(one, codes, lns12))
    assert torch.equal(indexed.power(codes, 2.0, lns12), lns.mul(codes, codes, lns12))


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16], ids=str)
def test_the_kernel_reads_the_table(fmt: LNSFormat) -> None:
    codes = fmt.codes()
    for shape in ((codes.size,), (3, 5), (0,), ()):
        x = np.resize(codes, shape)
        expected = unary_functions.table("tanh", (), fmt)[
            x.astype(np.int64) & (2 * fmt.field_mask + 1)
        ]
        np.testing.assert_array_equal(
            indexed.lookup(torch.from_numpy(x), "tanh", fmt).numpy(), expected
        )
    strided = torch.from_numpy(codes)[::3]
    assert torch.equal(
        indexed.lookup(strided, "exp", fmt), indexed.lookup(strided.contiguous(), "exp", fmt)
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: x.log(), "log of a number for which it has no finite real value"),
        (lambda x: x**-1.0, r"power\(-1.0,\) of a number"),
        (lambda x: (x - 1) ** 0.5, r"power\(0.5,\) of a number"),
        (lambda x: (x - 2).log1p(), "log1p of a number"),
        (lambda x: (-2.0) ** x, "the base must be positive"),
        (lambda x: x ** float("nan"), "they must be finite"),
    ],
)
def test_arguments_without_a_value_are_errors(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(LNSTensor.from_float(torch.tensor([0.0, 1.0]), lns12))


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(ValueError, match="function 'cosh': must be power, plus or one of d_elu"):
        unary_functions.table("cosh", (), lns12)


@given(
    n=st.integers(0, 300),
    rows=st.integers(1, 7),
    width=st.integers(1, 3),
    fmt=st.sampled_from([lns8, lns12, lns16, LNSFormat(16, 10)]),
    seed=st.integers(0, 1000),
)
def test_sums_by_index_are_the_contracts(
    n: int, rows: int, width: int, fmt: LNSFormat, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # `rows` itself is left out
    x, index = rng.choice(fmt.codes(), (n, width)), rng.integers(0, rows + 1, n)
    got = indexed.index_sum(torch.from_numpy(x), torch.from_numpy(index), rows, fmt).numpy()
    np.testing.assert_array_equal(got, reference.sum_by_index(x, index, rows, fmt))
    if fmt != lns8:
        for row in range(rows):
            np.testing.assert_array_equal(got[row], reference.sum(x[index == row], 0, fmt))


@given(
    n=st.integers(0, 60),
    fmt=st.sampled_from([lns8, LNSFormat(6, 1), LNSFormat(12, 3), LNSFormat(13, 4)]),
    seed=st.integers(0, 1000),
)
def test_sums_by_index_in_coarse_formats(n: int, fmt: LNSFormat, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, index = rng.choice(fmt.codes(), (n, 2)), rng.integers(0, 3, n)
    terms, at = torch.from_numpy(x), torch.from_numpy(index)
    got = indexed.index_sum(terms, at, 3, fmt)
    np.testing.assert_array_equal(got.numpy(), reference.sum_by_index(x, index, 3, fmt))
    with FlopCounterMode(display=False):  # a dispatch mode gets the operations that a GPU uses
        assert torch.equal(indexed.index_sum(terms, at, 3, fmt), got)


@given(
    counts=st.lists(st.sampled_from([0, 1, 63, 4095, 4096, 4097, 8192, 9000]), max_size=5),
    unused=st.integers(0, 5000),
    fmt=st.sampled_from([lns12, lns16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_long_sums_by_index_are_cut_as_long_sums_are(
    counts: list[int], unused: int, fmt: LNSFormat, seed: int
) -> None:
    """The sum at a destination equals the sum of its terms alone bit for bit, for any number of
    terms."""
    rng = np.random.default_rng(seed)
    index = rng.permutation(np.repeat(np.arange(-1, len(counts)), [unused, *counts]))
    x = lns.encode(torch.from_numpy(rng.random(len(index), np.float32)), fmt)
    got = indexed.index_sum(x, torch.from_numpy(index), len(counts), fmt)
    for row in range(len(counts)):
        assert torch.equal(got[row], lns.sum(x[torch.from_numpy(index == row)], [0], fmt))


def test_a_sum_by_index_of_more_than_4096_pieces_is_cut_again() -> None:
    index = torch.zeros(4096 * 4096 + 4097, dtype=torch.int64)
    index[1] = 1
    x = lns.encode(torch.rand(len(index)) + 0.5, lns16)
    got = indexed.index_sum(x, index, 2, lns16)
    assert got[1] == x[1]
    assert torch.equal(got[0], lns.sum(x[index == 0], [0], lns16))


def test_sums_by_index_of_wide_rows_and_on_several_threads() -> None:
    from lns_ops import cpu

    rng = np.random.default_rng(0)
    x, index = rng.choice(lns16.codes(), (700, 300)), rng.integers(0, 40, 700)
    before = cpu.get_num_threads()
    try:
        for threads in (1, 3):
            cpu.set_num_threads(threads)
            got = indexed.index_sum(torch.from_numpy(x), torch.from_numpy(index), 40, lns16).numpy()
            for row in range(40):
                np.testing.assert_array_equal(got[row], reference.sum(x[index == row], 0, lns16))
    finally:
        cpu.set_num_threads(before)


def test_the_operators_pass_torchs_check() -> None:
    x = torch.from_numpy(lns12.codes()[1000:1012].reshape(3, 4).copy())
    index = torch.tensor([0, 2, 0])
    ordered, order = torch.sort(index, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(4))
    ops = torch.ops.lns_ops
    torch.library.opcheck(ops.lookup.default, (x, "silu", [], 12, 6))
    torch.library.opcheck(ops.segment_sum.default, (x, order, starts, 12, 6))
