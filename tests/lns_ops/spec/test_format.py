"""Formats: which exist, what their codes mean, how values are rounded to them."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import LNSFormat, NonFiniteError, cpu, lns8, lns12, lns16, reference
from lns_ops.spec.format import decode_significands, encode_thresholds
from tests.lns_ops.lns_formats import FORMATS, IDS, half_ulp


@pytest.mark.parametrize(
    ("bits", "fraction_bits", "said"),
    [
        (1, 0, "bits=1"),
        (17, 7, "bits=17"),
        (8, 8, "fraction_bits=8"),
        (8, 7, "at most 6"),
        (12, -1, "fraction_bits=-1"),
        (16, 6, "fraction_bits >= 7"),
        (12.0, 6, "must be an integer"),
        (True, 0, "must be an integer"),
    ],
)
def test_formats_that_cannot_exist(bits: int, fraction_bits: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LNSFormat(bits=bits, fraction_bits=fraction_bits)


def test_presets_are_what_the_docs_say() -> None:
    assert (lns16.bits, lns16.fraction_bits) == (16, 7)
    assert (lns12.bits, lns12.fraction_bits) == (12, 6)
    assert (lns8.bits, lns8.fraction_bits) == (8, 3)
    assert lns12.smallest == pytest.approx(2**-15.984375)
    assert lns12.epsilon == pytest.approx(0.0109, abs=1e-4)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_names_parse_back(fmt: LNSFormat) -> None:
    assert LNSFormat.parse(fmt.name) == fmt


def test_unknown_name_says_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"'lns13'.*lns16, lns12, lns8"):
        LNSFormat.parse("lns13")


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_codes_ascend_and_survive_decode_then_encode(
    fmt: LNSFormat, dtype: type[np.floating]
) -> None:
    codes = fmt.codes()
    values = reference.decode(codes, fmt, dtype)
    assert len(codes) == 2**fmt.bits - 1
    assert np.all(np.diff(values.astype(np.float64)) > 0)
    np.testing.assert_array_equal(reference.encode(values, fmt), codes)


@pytest.mark.parametrize(
    "fmt", [lns16, lns12, LNSFormat(9, 0), LNSFormat(10, 1), LNSFormat(15, 6)], ids=str
)
def test_decoding_rounds_once_to_float32_subnormals_too(fmt: LNSFormat) -> None:
    positive = np.arange(1, fmt.field_mask + 1)
    with localcontext() as digits:
        digits.prec = 60
        exact = [
            Decimal(2) ** (Decimal(int(field) - fmt.bias) / 2**fmt.fraction_bits)
            for field in positive
        ]
        steps = [
            Decimal(2) ** (max(-126, (int(field) - fmt.bias) >> fmt.fraction_bits) - 23)
            for field in positive
        ]
        nearest = [
            float((value / step).to_integral_value(ROUND_HALF_EVEN) * step)
            for value, step in zip(exact, steps, strict=True)
        ]
    codes = positive.astype(np.int16)
    for decode in (reference.decode, cpu.decode):
        np.testing.assert_array_equal(decode(codes, fmt, np.float32).astype(np.float64), nearest)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@given(exponent=st.floats(-1, 1), negative=st.booleans())
def test_encode_rounds_to_nearest(fmt: LNSFormat, exponent: float, negative: bool) -> None:
    value = 2.0 ** (exponent * fmt.max_log / 2**fmt.fraction_bits) * (-1 if negative else 1)
    decoded = float(reference.decode(reference.encode(np.float64(value), fmt), fmt, np.float64))
    assert abs(decoded - value) <= half_ulp(fmt) * abs(value)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_encode_saturates_and_underflows(fmt: LNSFormat) -> None:
    values = np.array([1e300, -1e300, 1e-300, -1e-300, 0.0, -0.0])
    largest = fmt.field_mask
    expected = np.array([largest, np.int16(largest | fmt.sign_mask), 0, 0, 0, 0], np.int16)
    np.testing.assert_array_equal(reference.encode(values, fmt), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_encode_refuses_what_lns_cannot_hold(value: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        reference.encode(np.array([1.0, value]), lns16)


@pytest.mark.parametrize("fraction_bits", range(15))
def test_tables_are_powers_of_two_rounded_once(fraction_bits: int) -> None:
    """Compared with 40-digit decimals, for 64 places in each table."""
    n = 1 << fraction_bits
    with localcontext() as context:
        context.prec = 40
        for j in np.unique(np.linspace(0, n - 1, 64).astype(int)).tolist():
            power, above = (Decimal(2) ** (Decimal(k) / (2 * n)) for k in (2 * j, 2 * j + 1))
            assert decode_significands(fraction_bits)[j] == float(power)
            assert encode_thresholds(fraction_bits)[j] == int(above * (1 << 52))
