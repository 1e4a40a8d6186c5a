"""IEEE P3109's floats: every code and boundary equals the report's definition, and gfloat's."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from lns_ops.formats import P3109, parse, random_bits
from lns_ops.formats.base import Encoded
from tests.lns_ops.formats.definitions import p3109
from tests.lns_ops.formats.test_free_formats import around

needs_gfloat = pytest.mark.skipif(
    importlib.util.find_spec("gfloat") is None, reason="gfloat is not installed"
)
WIDTHS = [(k, p) for k in (3, 4, 6, 8, 10) for p in range(max(1, k - 7), k)]
NAMES = [(k, p, end) for k, p in WIDTHS for end in ("", "sf")]


def made(k: int, p: int, end: str) -> P3109:
    fmt = parse(f"binary{k}p{p}{end}")
    assert isinstance(fmt, P3109)
    return fmt


def decoded(fmt: P3109) -> list[float]:
    codes = torch.arange(1 << int(fmt.bits)).to(fmt.storage)
    return [float(v) for v in fmt.decode(Encoded(codes))]


@pytest.mark.parametrize(("k", "p", "end"), NAMES)
def test_every_code_and_boundary_is_the_definition(k: int, p: int, end: str) -> None:
    fmt = made(k, p, end)
    exact = [p3109(code, k, p, not end) for code in range(1 << k)]
    np.testing.assert_array_equal(decoded(fmt), np.array([float(v) for v in exact]))
    numbers = sorted((v, code) for code, v in enumerate(exact) if isinstance(v, Fraction))
    values, expected = [], []
    for (low, code), (high, above) in itertools.pairwise(numbers):
        mean = (low + high) / 2
        for x in {*around(mean), float(low)}:
            distances = {code: abs(Fraction(x) - low), above: abs(Fraction(x) - high)}
            values.append(x)
            expected.append(min(distances, key=lambda c: (distances[c], c % 2)))
    found = fmt.encode(torch.tensor(values)).codes.long() % (1 << k)
    assert found.tolist() == expected
    rounded = [float(Fraction(exact[code])) for code in expected]
    assert fmt.quantize(torch.tensor(values)).tolist() == rounded
    assert fmt.error.largest == float(numbers[-1][0])
    assert fmt.error.smallest == float(min(v for v, _ in numbers if v > 0))


@pytest.mark.parametrize(("k", "p", "end"), [(8, 3, ""), (8, 1, ""), (8, 3, "sf"), (6, 5, "")])
def test_there_is_one_zero_and_one_nan_and_what_is_beyond_saturates(
    k: int, p: int, end: str
) -> None:
    fmt = made(k, p, end)
    largest, negative = fmt.error.largest, 1 << k - 1
    x = torch.tensor([-0.0, -1e-30, 1e30, math.inf, -math.inf])
    expected = torch.tensor([0.0, 0.0, largest, largest, -largest])
    for found in (fmt.quantize(x), fmt.quantize(x[:3]), fmt.decode(fmt.encode(x))):
        assert torch.equal(found, expected[: len(found)])
        assert not bool(found[:2].signbit().any())
    codes = fmt.encode(torch.tensor([math.nan, -math.nan])).codes
    assert (codes.long() % (1 << k)).tolist() == [negative] * 2
    assert bool(fmt.quantize(torch.tensor([math.nan])).isnan())


def test_published_examples() -> None:
    """Values of binary8p3 from the report, and its names."""
    values = decoded(made(8, 3, ""))
    assert math.isnan(values[0x80])
    assert (values[0x7F], values[0xFF]) == (math.inf, -math.inf)
    assert (values[0x7E], values[0x40], values[1]) == (49152.0, 1.0, 2.0**-17)
    assert decoded(made(8, 3, "sf"))[0x7F] == 57344.0
    assert parse("binary8p3se") == parse("binary8p3")
    assert parse("binary8p3se").name == "binary8p3"


def test_with_eight_bits_it_is_half_of_an_ieee_float() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    for random in (None, random_bits(x, 5, torch.tensor(1))):
        half = parse("float(5,2)").quantize(2 * x, random) / 2
        assert torch.equal(parse("binary8p3").quantize(x, random), half)


@needs_gfloat
@pytest.mark.parametrize(("k", "p", "end"), NAMES)
def test_values_and_rounding_are_gfloats(k: int, p: int, end: str) -> None:
    from gfloat import Domain, decode_float, round_float
    from gfloat.formats import format_info_p3109

    fmt = made(k, p, end)
    theirs = format_info_p3109(k, p, domain=Domain.Finite if end else Domain.Extended)
    values = [decode_float(theirs, code).fval for code in range(1 << k)]
    np.testing.assert_array_equal(decoded(fmt), values)
    x = torch.randn(300, generator=torch.Generator().manual_seed(k)) * fmt.error.largest**0.5
    ties = [v for v in values if math.isfinite(v)]
    x = torch.cat([x, torch.tensor(ties) * 1.25, torch.tensor(ties) * 1.5])
    expected = [round_float(theirs, float(v), sat=True) for v in x]
    assert fmt.quantize(x).tolist() == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("binary8p8", "binary8p8: precision=8 must be from 1 to 7, which leaves a bit of exponent;"
         " use for example binary8p4"),
        ("binary8p0sf", "binary8p0sf: precision=0 must be from 1 to 7"),
        ("binary2p1", "binary2p1: width=2 must be from 3 to 16; use for example binary8p3"),
        ("binary16p3", "binary16p3: 13 bits of exponent must be at most 7, because float32 has no"
         " more; use for example binary16p9"),
        ("binary8p3ue", "binary8p3ue: an unsigned format has no negative numbers, which weights"),
        ("binary8", "format 'binary8': unknown; formats are"),
    ],
)  # fmt: skip
def test_bad_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(name)
