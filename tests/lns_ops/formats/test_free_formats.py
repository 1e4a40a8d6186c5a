"""Floats of any widths, posits, takums, block floating point and lists of values: every code and
every boundary equals the definition in exact fractions."""

from __future__ import annotations

import itertools
import math
import os
import re
import tracemalloc
from collections.abc import Iterable
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import NonFiniteError
from lns_ops.formats import SizedFloat, Table, list_rounding, parse, random_bits
from lns_ops.formats.base import Encoded
from lns_ops.formats.tabulated import Listed
from tests.lns_ops.formats import definitions
from tests.lns_ops.formats.definitions import Rounding, binary, posit, takum, takum_exponent

LONG = {13, 14, 15}
"""Widths that take some seconds each, for the slow tests; 16 bits are always checked."""


def slow(bits: int, *more: int, always: bool = True) -> object:
    marks = [pytest.mark.slow] if bits in LONG or not always else []
    return pytest.param(bits, *more, marks=marks)


POSITS = [slow(bits, 2) for bits in range(2, 17)] + [
    (8, 0), (8, 1), (8, 3), (5, 4), slow(16, 1, always=False), slow(16, 0, always=False),
]  # fmt: skip
TAKUMS = [slow(bits) for bits in range(2, 17)]
FLOATS = [(4, 3, ""), (5, 2, ""), (2, 1, "finite"), (3, 2, "finite"), (2, 3, "finite"),
          (3, 4, "inf"), (5, 10, "inf"), (8, 7, ""), (6, 5, ""), (2, 9, "finite"), (7, 1, ""),
          (2, 1, "")]  # fmt: skip


def listed(name: str) -> Listed:
    fmt = parse(name)
    assert isinstance(fmt, Listed)
    return fmt


def values_of(fmt: Listed | SizedFloat, codes: list[int]) -> list[float]:
    found = fmt.decode(Encoded(torch.tensor(codes).to(fmt.storage)))
    return [float(x) for x in found]


def codes_of(fmt: Listed | SizedFloat, values: list[float]) -> list[int]:
    return [int(code) for code in fmt.encode(torch.tensor(values)).codes]


def around(boundary: Fraction) -> list[float]:
    """The float32 nearest to a boundary (often the boundary itself) and its neighbours."""
    near = np.float32(float(boundary))
    sides = (np.nextafter(near, np.float32(side)) for side in (-np.inf, np.inf))
    return [float(near), *map(float, sides)]


def check_every_boundary(fmt: Listed, rounding: Rounding, kept: list[int]) -> None:
    """Compare codes at and beside the boundaries above the values with the numbers ``kept``."""
    numbers, expected = [], []
    for at in kept[:-1]:
        values = rounding.values[at : at + 2]
        mean = sum(values, Fraction(0)) / 2
        for x in {*around(rounding.between[at]), *around(mean)}:
            if values[0] < Fraction(x) < values[1]:
                numbers.append(x)
                expected.append(rounding.of_two(at, Fraction(x)))
    assert codes_of(fmt, numbers) == expected


@pytest.mark.parametrize(("bits", "es"), POSITS)
def test_every_posit_is_the_standards(bits: int, es: int) -> None:
    fmt, rounding = listed(f"posit({bits},{es})"), Rounding(lambda c, n: posit(c, n, es), bits)
    values = values_of(fmt, rounding.codes)
    assert values == [float(v) for v in rounding.values]
    assert codes_of(fmt, values) == rounding.codes
    check_every_boundary(fmt, rounding, list(range(len(rounding.codes))))


@pytest.mark.parametrize("bits", TAKUMS)
def test_every_linear_takum_is_the_definitions(bits: int) -> None:
    fmt, rounding = listed(f"takum({bits})"), Rounding(takum, bits)
    smallest, largest = Fraction(2) ** -126, Fraction(2) ** 128
    kept = [at for at, v in enumerate(rounding.values) if v == 0 or smallest <= abs(v) < largest]
    values = [rounding.values[at] for at in kept]
    least = min(v for v in values if v > 0)
    expected = [  # float32 cannot represent the others
        Fraction(0) if v == 0 else math.copysign(min(max(abs(v), least), values[-1]), v)
        for v in rounding.values
    ]
    assert values_of(fmt, rounding.codes) == [float(v) for v in expected]
    assert codes_of(fmt, [float(v) for v in values]) == [rounding.codes[at] for at in kept]
    inner = Rounding(takum, bits)
    inner.codes = [rounding.codes[at] for at in kept]
    inner.values = values
    inner.between = [takum(2 * code + 1, bits + 1) or Fraction(0) for code in inner.codes[:-1]]
    check_every_boundary(fmt, inner, list(range(len(kept))))


def exact(exponent: Fraction) -> Decimal:
    """Return ``sqrt(e)^exponent`` to 40 digits."""
    return (Decimal(exponent.numerator) / Decimal(2 * exponent.denominator)).exp()


@pytest.mark.parametrize("bits", [2, 3, 5, 8, 11, 12, slow(16, always=False)])
def test_every_logarithmic_takum_is_the_definitions(bits: int) -> None:
    """Values are the nearest float32; boundaries are between the float32 values on both sides."""
    fmt = listed(f"takum_log({bits})")
    with localcontext() as context:
        context.prec = 40
        codes = [c for c in range(1, 1 << bits - 1) if 2.0**-126 <= carried(c, bits) < 2.0**128]
        for sign in (1, -1):
            values = values_of(fmt, [sign * code for code in codes])
            for code, value in zip(codes, values, strict=True):
                error = abs(Decimal(sign * value) - exact(logarithm(code, bits)))
                assert error <= Decimal(float(np.spacing(np.float32(value * sign)))) / 2
        assert codes_of(fmt, values) == [-code for code in codes]
        numbers, expected = [], []
        for code in codes[:-1]:
            boundary = exact(logarithm(2 * code + 1, bits + 1))
            for x in around(Fraction(boundary)):
                numbers.append(x)
                expected.append(code if Decimal(x) < boundary else code + 1)
        assert codes_of(fmt, numbers) == expected


def logarithm(code: int, bits: int) -> Fraction:
    found = takum_exponent(code, bits)
    assert found is not None
    return found


def carried(code: int, bits: int) -> float:
    return math.exp(logarithm(code, bits) / 2)


@pytest.mark.parametrize(("e", "m", "overflow"), FLOATS)
def test_every_float_is_ieees(e: int, m: int, overflow: str) -> None:
    fmt = parse(f"float({e},{m}{overflow and ','}{overflow})")
    assert isinstance(fmt, SizedFloat)
    codes = list(range(1 << e + m))  # the sign is a separate bit
    found = values_of(fmt, codes)
    exact_values = [binary(code, e, m, overflow == "finite") for code in codes]
    finite = [v for v in exact_values if v is not None]
    assert found[: len(finite)] == [float(v) for v in finite]
    if overflow != "finite":
        assert found[len(finite)] == math.inf
        assert all(map(math.isnan, found[len(finite) + 1 :]))
    negative = [code + (1 << e + m) for code in codes[: len(finite)]]
    assert values_of(fmt, negative) == [-v for v in found[: len(finite)]]
    width = 1 << fmt.storage.itemsize * 8
    for sign, own in ((1, codes), (-1, negative)):
        numbers, expected = [], []
        for code, (low, high) in enumerate(itertools.pairwise(finite)):
            mean = (low + high) / 2
            for x in around(mean):
                up = Fraction(x) > mean or (Fraction(x) == mean and code % 2)
                numbers.append(sign * x)
                expected.append(own[code + bool(up)])
        assert [code % width for code in codes_of(fmt, numbers)] == expected
        assert [fmt.quantize(torch.tensor(numbers)).tolist()] == [values_of(fmt, expected)]
    beyond = fmt.quantize(torch.tensor([3.4e38, -3.4e38, math.inf, -0.0]))
    end = math.inf if overflow == "inf" else found[len(finite) - 1]
    assert beyond.tolist()[:2] == [end, -end]
    assert float(beyond[2]) == end
    assert math.copysign(1, float(beyond[3])) == -1


PEERS = {
    "float(4,3,inf)": ml_dtypes.float8_e4m3,
    "float(3,4,inf)": ml_dtypes.float8_e3m4,
    "float(5,2,inf)": ml_dtypes.float8_e5m2,
    "float(2,1,finite)": ml_dtypes.float4_e2m1fn,
    "float(2,3,finite)": ml_dtypes.float6_e2m3fn,
    "float(3,2,finite)": ml_dtypes.float6_e3m2fn,
    "float(8,7,inf)": ml_dtypes.bfloat16,
    "float(5,10,inf)": np.float16,
}


@pytest.mark.parametrize("name", PEERS)
def test_floats_are_ml_dtypes(name: str) -> None:
    """Every code, and a million bit patterns of float32."""
    fmt, peer = parse(name), np.dtype(PEERS[name])
    assert isinstance(fmt, SizedFloat)
    codes = np.arange(1 << int(fmt.bits))
    theirs = codes.astype(f"uint{8 * peer.itemsize}").view(peer).astype(np.float32)
    mine = fmt.decode(Encoded(torch.from_numpy(codes).to(fmt.storage))).numpy()
    np.testing.assert_array_equal(mine, theirs)
    words = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32)
    near = (words & 0x807FFFFF) | (words >> 8 & 15) + 119 << 23  # from 2^-8 to 2^7
    for x in (words.view(np.float32), near.view(np.float32)):
        used = x[np.isfinite(x)]
        with np.errstate(over="ignore"):
            expected = used.astype(peer).astype(np.float32)
        np.testing.assert_array_equal(fmt.quantize(torch.from_numpy(used)).numpy(), expected)


def test_float8_is_the_same_but_for_its_largest_octave() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 100
    bits = random_bits(x, 5, torch.tensor(1))
    for random in (None, bits):
        e5m2, e4m3 = parse("float8_e5m2"), parse("float8_e4m3fn")
        assert torch.equal(parse("float(5,2)").quantize(x, random), e5m2.quantize(x, random))
        low, wide = x.clamp(-224, 224), parse("float(4,3,finite)")
        assert torch.equal(parse("float(4,3)").quantize(low, random), e4m3.quantize(low, random))
        assert torch.equal(wide.quantize(2 * low, random), e4m3.quantize(2 * low, random))
    assert [parse(n).error.largest for n in ("float(4,3)", "float(4,3,finite)")] == [240, 480]


REALS = ["posit(8)", "posit(5,1)", "posit(2)", "takum(8)", "takum(12)", "takum_log(9)"]


@pytest.mark.parametrize("name", REALS)
def test_ends_and_what_is_no_real(name: str) -> None:
    fmt = listed(name)
    error = fmt.error
    x = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-44, -1e-44, 0.0, -0.0])
    q, codes = fmt.quantize(x), fmt.encode(x).codes
    assert bool(q[:3].isnan().all())
    assert codes[:3].tolist() == [-(2 ** (int(fmt.bits) - 1))] * 3
    expected = [error.largest, -error.largest, error.smallest, -error.smallest, 0, 0]
    if error.largest < 3e38:
        assert q[3:].tolist() == expected
    assert q[5:].tolist() == expected[2:]
    assert fmt.quantize(x[3:].double()).tolist() == q[3:].tolist()
    random = random_bits(torch.empty(4000), 1, torch.tensor(0))
    half = fmt.quantize(torch.full((4000,), error.smallest / 2), random)
    assert set(half.tolist()) == {0.0, error.smallest}
    assert float(half.mean() / error.smallest) == pytest.approx(0.5, abs=0.04)  # five deviations


_FILES = itertools.count()


def saved(values: Iterable[float], folder: Path, dtype: str = "float32") -> str:
    values, path = list(values), folder / f"levels{next(_FILES)}.npy"
    np.save(path, np.array(values, dtype))
    return f"table({path})"


@given(st.sets(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40), st.data())
def test_a_table_rounds_to_the_nearest_ties_to_even_indices(
    tmp_path_factory: pytest.TempPathFactory, levels: set[float], data: st.DataObject
) -> None:
    values = sorted({v + 0.0 for v in levels})
    if len(values) < 2:
        return
    fmt = parse(saved(values, tmp_path_factory.getbasetemp()))
    assert isinstance(fmt, Table)
    pairs = itertools.pairwise(values)
    numbers = [float(np.float32((a + b) / 2)) for a, b in pairs]
    numbers += data.draw(st.lists(st.floats(-2e6, 2e6, width=32)))
    for x, code in zip(numbers, codes_of(fmt, numbers), strict=True):
        distances = [abs(Fraction(x) - Fraction(v)) for v in values]
        nearest = [at for at, d in enumerate(distances) if d == min(distances)]
        assert code == min(nearest, key=lambda at: at % 2)


def test_a_table_is_read_again_where_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "levels.npy"
    np.save(path, np.array([-1.0, 0, 1]))
    first = parse(f"table({path})")
    assert first == parse(f"table({path})")
    np.save(path, np.array([-1.0, 0, 0.5, 1]))
    second = parse(f"table({path})")
    assert second != first
    assert float(second.quantize(torch.tensor(0.6))) == 0.5
    infinite = torch.tensor([math.inf, -math.inf, math.nan])
    assert second.quantize(infinite).tolist()[:2] == [1.0, -1.0]
    with pytest.raises(NonFiniteError, match="NaN"):
        second.encode(infinite)


def test_a_table_may_have_65536_values(tmp_path: Path) -> None:
    name = saved(range(-(1 << 15), 1 << 15), tmp_path)
    x = torch.tensor([0.5, 1.5, -0.5, 32767.0, -4e4])
    assert parse(name).quantize(x).tolist() == [0, 2, 0, 32767, -32768]
    assert parse(name).encode(x).codes.tolist() == [32768, 32770, 32768, 65535, 0]
    assert parse(name).bits == 16


@pytest.mark.parametrize(("bits", "block"), [(8, 32), (4, 16), (3, 2), (12, 7)])
def test_block_floating_point_is_the_definition(bits: int, block: int) -> None:
    fmt = parse(f"bfp({bits},{block})")
    x = torch.randn(5, 45, generator=torch.Generator().manual_seed(bits))
    x *= torch.randn(5, 45, generator=torch.Generator().manual_seed(7)).mul(3).exp()
    largest_code = 2 ** (bits - 1) - 1
    for row, rounded in zip(x, fmt.quantize(x), strict=True):
        for values, found in zip(row.split(block), rounded.split(block), strict=True):
            exact_values = [Fraction(float(v)) for v in values]
            step = Fraction(2) ** -200
            while max(map(abs, exact_values)) > largest_code * step:
                step *= 2
            assert found.tolist() == [float(round(v / step) * step) for v in exact_values]
    encoded = fmt.encode(x)
    assert int(encoded.codes.abs().max()) <= largest_code
    assert fmt.bits == bits + 8 / block


SPREAD = [*REALS, "float(4,3)", "float(3,2,finite)", "float(6,9,inf)"]


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2),
    st.sampled_from(SPREAD),
)
def test_rounding_is_idempotent_monotone_symmetric_and_between_neighbours(
    values: list[float], name: str
) -> None:
    fmt, x = parse(name), torch.tensor(values).sort()[0]
    q = fmt.quantize(x)
    assert torch.equal(fmt.quantize(q), q)
    assert bool((q[1:] >= q[:-1]).all())
    assert torch.equal(fmt.quantize(-x), -q)
    inside = (x.abs() <= fmt.error.largest) & q.isfinite()
    error = (q.double() - x.double()).abs()
    assert bool((error <= fmt.error.bound(x))[inside].all())
    random = random_bits(x, 3, torch.tensor(1))
    assert torch.equal(fmt.quantize(q, random), q)


@pytest.mark.parametrize("name", [*REALS, "posit(16)", "takum(16)", "takum_log(16)"])
def test_the_table_of_leading_bits_is_the_binary_search(name: str) -> None:
    """A million bit patterns of float32, and all thresholds with their neighbours."""
    fmt = listed(name)
    assert fmt.grid.shift is not None
    words = np.random.default_rng(1).integers(0, 1 << 32, 1_000_000, np.uint32)
    ends = fmt.grid.thresholds
    for x in (words.view(np.float32), ends, np.nextafter(ends, np.float32(-np.inf))):
        finite = torch.from_numpy(x[np.isfinite(x)])
        thresholds = torch.from_numpy(ends)
        expected = torch.searchsorted(thresholds, finite, right=True)
        assert torch.equal(list_rounding.index(fmt, finite, None).long(), expected)


def wrong(kind: str, folder: Path) -> str:
    values: dict[str, Iterable[float]] = {
        "NaN": (0, 1, math.nan), "falls": (0, 2, 1), "twice": (0, 1, 1), "one": (1,),
        "long": range(65537), "huge": (0, 1e300),
    }  # fmt: skip
    return saved(values[kind], folder, "float64")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NaN", "value 2 is nan; must be finite in float32; leave it out"),
        ("huge", "value 1 is 1e+300; must be finite"),
        ("falls", "value 1 is 2.0 and value 2 is 1.0; must increase, in float32; save numpy.uniq"),
        ("twice", "value 1 is 1.0 and value 2 is 1.0; must increase"),
        ("one", "has 1 values; must have 2 to 65536"),
        ("long", "has 65537 values; must have 2 to 65536"),
    ],
)
def test_bad_tables_are_refused(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(wrong(kind, tmp_path))


@pytest.mark.timeout(60)
def test_a_table_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "levels.npy")
    with pytest.raises(ValueError, match="is not a regular file; give the path"):
        parse(f"table({tmp_path}/levels.npy)")


def test_a_table_of_a_strange_header_is_refused_and_takes_no_memory(tmp_path: Path) -> None:
    """20 GiB of zeros take no disk space, and a header may claim more than the file has."""
    long, lies, code = (tmp_path / f"{name}.npy" for name in ("long", "lies", "code"))
    for path, count in ((long, 20 * 2**28), (lies, 10**15)):
        with path.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
    os.truncate(long, long.stat().st_size + 20 * 2**30)
    np.save(code, np.array([Fraction(1), 2], dtype=object), allow_pickle=True)
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01\x00\x08\x00{'descr'")
    (tmp_path / "empty.npy").touch()
    tracemalloc.start()
    for name in ("long", "lies", "code", "torn", "empty"):
        with pytest.raises(ValueError, match=re.escape(f"table({tmp_path}/{name}.npy): ")):
            parse(f"table({tmp_path}/{name}.npy)")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("float(9,1)", "float(9,1): exponent_bits=9 must be from 2 to 8, because float32 has no"),
        ("float(4,0)", "mantissa_bits=0 must be from 1 to 23"),
        ("float(8,3,finite)", "float(8,3,finite): its largest octave must be within float32's"),
        ("float(4,3,fn)", "unknown; formats are float32"),
        ("float(4)", "unknown; formats are"),
        ("float(8,7)/tensor", "has float32's range, so a scale would change nothing"),
        ("posit(1)", "bits=1: posit has 2 to 16 bits"),
        ("posit(17)", "bits=17: posit has 2 to 16 bits"),
        ("posit(16,4)", "es=4: with bits=16 must be from 0 to 3, because of float32's range; use"),
        ("takum(1)", "bits=1: takum has 2 to 16 bits"),
        ("takum_log(40)", "bits=40: takum_log has 2 to 16 bits"),
        ("takum(8,2)", "unknown; formats are"),
        ("bfp(1,32)", "bfp(1,32): bits=1 must be from 2 to 24"),
        ("bfp(8,1)", "bfp(8,1): block=1 must be from 2 to 16384; use for example bfp(8,32)"),
        ("bfp(8,32)/channel", "has a scale of its own"),
        ("table(nowhere.npy)", "table(nowhere.npy): No such file or directory; give the path"),
        ("table(a.npy)/row", "table(a.npy)"),
        (f"table({__file__})", "write it with numpy.save"),
    ],
)
def test_bad_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(name)


def test_definitions_are_the_published_examples() -> None:
    """Figures printed in the sources, so that the definitions here do not rely on our reading
    alone."""
    assert posit(0b0_1111110, 8) == 2**20  # the standard: maxpos of 8 bits is 2^24
    assert posit(0b0_1111111, 8) == 2**24
    assert posit(1, 16) == Fraction(2) ** -56
    assert definitions.takum(0b0_1000000, 8) == 1
    assert takum_exponent(0x7FFF, 16) == Fraction(254_9375, 10_000)
