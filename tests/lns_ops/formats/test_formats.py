"""All number formats keep one contract, and each equals an independent definition: torch's dtypes,
exact fractions, or LNS's own reference."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from lns_ops import NonFiniteError, cpu, formats, reference
from lns_ops.formats import FloatFormat, NumberFormat, parse, random_bits
from lns_ops.formats.scaling import BLOCK_SIZE

MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"]
LEVELS = Path(__file__).with_name("levels.npy")
"""Sixteen values from -4 to 4, unevenly spaced."""
NAMES = [
    "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "fixed(16,8)",
    "fixed(8,4)", "fixed(24,12)", "fixed(8,14)", "int8", "int8/channel", "int4/channel", "int12",
    "int2", "lns16", "lns12", "lns8", "lns8/tensor", "lns8/channel", "lns(5,1)/channel",
    "float8_e4m3fn/channel", "float8_e5m2/tensor", "float16/tensor", "fixed(8,7)/channel",
    "lns8/block", "float8_e4m3fn/block", *MX, "nvfp4",
    "float(4,3)", "float(2,1,finite)", "float(5,10,inf)", "float(6,9)", "float(8,3)",
    "float(3,4)/channel", "binary8p3", "binary8p4sf", "binary8p1", "binary6p3/channel",
    "posit(8)", "posit(16)", "posit(6,1)", "posit(8)/channel", "takum(8)",
    "takum(16)", "takum(8)/tensor", "takum_log(8)", "takum_log(14)", "takum_log(8)/block",
    "bfp(8,32)", "bfp(5,16)", f"table({LEVELS})", f"table({LEVELS})/channel",
]  # fmt: skip

BINARY = ["tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def sample(rows: int = 24, columns: int = 50, seed: int = 0) -> torch.Tensor:
    """Values over some twenty octaves, including zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(rows, columns, generator=generator)
        * torch.randn(rows, columns, generator=generator).mul(2).exp()
    )
    x[0] = 0
    x[1, :7] = 0
    return x


def group_of(fmt: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of the values that share a scale. For blocks it is the row's, which
    also limits the scales of its blocks."""
    return (
        x.abs().amax()
        if fmt.name.endswith("/tensor") or fmt.name in ("int12", "int8", "int2")
        else x.abs().amax(1, keepdim=True)
    )


def has_code_of_nan(fmt: NumberFormat) -> bool:
    base = fmt.base if isinstance(fmt, formats.Scaled) else fmt
    if isinstance(base, formats.SizedFloat):
        return base.overflow != "finite"
    return isinstance(base, formats.Posit | formats.Takum | formats.LogarithmicTakum)


def in_range(fmt: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    return (
        torch.ones_like(x, dtype=torch.bool) if fmt.error.scaled else x.abs() <= fmt.error.largest
    )


@pytest.mark.parametrize("name", NAMES)
def test_rounding_keeps_to_the_contract(name: str) -> None:
    fmt, x = parse(name), sample()
    before, q = x.clone(), parse(name).quantize(x)
    assert torch.equal(x, before)
    assert q.dtype == torch.float32
    assert q.shape == x.shape
    assert torch.equal(fmt.quantize(q), q), "rounding a rounded tensor must change nothing"
    encoded = fmt.encode(x)
    assert encoded.codes.dtype == fmt.storage
    assert torch.equal(fmt.decode(encoded), q)
    assert torch.equal(fmt.quantize_(x), q)
    assert x is fmt.quantize_(x)
    error, bound = (
        (q.double() - before.double()).abs(),
        fmt.error.bound(before, group_of(fmt, before)),
    )
    inside = in_range(fmt, before)
    assert bool((error <= bound * (1 + 1e-7))[inside].all())
    assert torch.equal(
        q[~inside].abs().isfinite() & (q[~inside].abs() < fmt.error.largest),
        torch.zeros_like(q[~inside]).bool(),
    )


@pytest.mark.parametrize("name", NAMES)
def test_order_is_kept_within_a_group(name: str) -> None:
    x = sample(columns=16 if name == "nvfp4" else BLOCK_SIZE).sort(1)[0]
    assert bool((parse(name).quantize(x).diff(dim=1) >= 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_rounding_at_random_takes_the_neighbours_without_bias(name: str) -> None:
    fmt, x = parse(name), sample(8)
    draws = torch.stack(
        [fmt.quantize(x, random_bits(x, 7, torch.tensor(step))) for step in range(200)]
    ).double()
    assert torch.equal(fmt.quantize(draws[0].float()), draws[0].float()), "must lie on the grid"
    assert bool((draws.amax(0) >= draws.amin(0)).all())
    # A value on the grid stays. Any other goes to one of its two neighbours.
    q = fmt.quantize(x)
    assert torch.equal(fmt.quantize(q, random_bits(x, 7, torch.tensor(0))), q)
    inside = in_range(fmt, x) & (draws.amax(0) > draws.amin(0))
    # below the smallest magnitude LNS rounds by logarithms, and no mean exists between it and zero
    if "lns" in name:
        inside &= draws.amin(0) * draws.amax(0) > 0
    low, high = draws.amin(0)[inside], draws.amax(0)[inside]
    assert bool(((low <= x[inside]) & (x[inside] <= high)).all())
    assert bool(((draws == draws.amin(0)) | (draws == draws.amax(0)))[:, inside].all())
    # The mean of 200 two-valued draws: five standard deviations, three draws for small chances, and
    # the resolution of 16 random bits.
    chance = ((x[inside] - low) / (high - low)).double()
    deviation = (draws.mean(0)[inside] - x[inside]).abs() / (high - low)
    assert bool((deviation <= 5 * (chance * (1 - chance) / 200).sqrt() + 3 / 200 + 2.0**-15).all())


@pytest.mark.parametrize(
    "name",
    ["float32", "bfloat16", "fixed(16,8)", "int8/channel", "lns12", "lns8/channel", "mxfp8_e4m3",
     "mxfp4", "mxint8", "nvfp4", "float(3,2)", "posit(8)", "bfp(8,16)"],
)  # fmt: skip
def test_shapes_without_dimensions_or_elements(name: str) -> None:
    fmt = parse(name)
    for shape in ((), (1,), (0,), (3, 0), (2, 3, 4, 5), (33,)):
        x = torch.rand(shape)
        q = fmt.quantize(x)
        assert q.shape == x.shape
        assert torch.equal(fmt.decode(fmt.encode(x)), q)
    flipped = sample().t()
    assert torch.equal(fmt.quantize(flipped), fmt.quantize(flipped.contiguous()))
    assert torch.equal(fmt.quantize(sample().double()), fmt.quantize(sample()))


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_stays_one_and_has_a_code_only_in_floats(name: str) -> None:
    fmt, x = parse(name), torch.tensor([[1.0, math.nan, 2.0]])
    assert bool(fmt.quantize(x)[0, 1].isnan())
    if fmt.storage.is_floating_point or name in MX or has_code_of_nan(fmt):
        assert bool(fmt.decode(fmt.encode(x))[0, 1].isnan())
    else:
        with pytest.raises(NonFiniteError, match="NaN"):
            fmt.encode(x)


@given(st.floats(width=32, allow_nan=False), st.sampled_from(["bfloat16", "float16"]))
def test_wide_floats_are_torch_dtypes(value: float, name: str) -> None:
    x = torch.tensor([value])
    assert torch.equal(parse(name).quantize(x), x.to(getattr(torch, name)).float())


def nearest_binary(value: Fraction, mantissa_bits: int, min_exponent: int) -> Fraction:
    """The definition: round to a multiple of the octave's step, ties to even."""
    if value == 0:
        return value
    exponent = min_exponent
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa_bits)
    return round(value / step) * step  # Python rounds ties to even


@given(
    st.floats(-1e4, 1e4, width=32),
    st.sampled_from(["tf32", "float16", "float8_e4m3fn", "float8_e5m2"]),
)
def test_floats_are_the_definition(value: float, name: str) -> None:
    fmt = parse(name)
    assert isinstance(fmt, FloatFormat)
    expected = nearest_binary(Fraction(value), fmt.mantissa_bits, max(fmt.min_exponent, -40))
    expected = max(min(expected, Fraction(fmt.error.largest)), -Fraction(fmt.error.largest))
    if name == "tf32" and abs(value) < 2.0**-28:
        return  # the loop above starts at 2^-40
    assert float(fmt.quantize(torch.tensor([value]))) == float(expected)


@given(st.floats(-300, 300, width=32), st.sampled_from([(16, 8), (8, 4), (12, 3), (9, 0), (8, 12)]))
def test_fixed_point_is_the_definition(value: float, widths: tuple[int, int]) -> None:
    bits, fraction_bits = widths
    steps = round(Fraction(value) * 2**fraction_bits)
    expected = max(min(steps, 2 ** (bits - 1) - 1), -(2 ** (bits - 1)))
    fmt = parse(f"fixed({bits},{fraction_bits})")
    assert int(fmt.encode(torch.tensor([value])).codes) == expected
    assert float(fmt.quantize(torch.tensor([value]))) == expected / 2**fraction_bits


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.integers(2, 12))
def test_integers_divide_by_their_largest(values: list[float], bits: int) -> None:
    x, fmt = torch.tensor(values), parse(f"int{bits}")
    encoded = fmt.encode(x)
    assert encoded.scale is not None
    largest = max(map(abs, values))
    if largest < 1e-30:
        return
    code, scale = 2 ** (bits - 1) - 1, float(encoded.scale)
    assert scale == pytest.approx(largest / code, rel=2.0 ** (bits - 24))
    assert int(encoded.codes.abs().max()) == code
    exact = [max(min(round(Fraction(float(v / encoded.scale))), code), -code) for v in x]
    assert encoded.codes.tolist() == exact


@pytest.mark.parametrize("name", ["lns8", "lns12", "lns16"])
def test_lns_is_lns(name: str) -> None:
    x, fmt = sample(), parse(name)
    assert isinstance(fmt, formats.Logarithmic)
    np.testing.assert_array_equal(fmt.encode(x).codes.numpy(), reference.encode(x.numpy(), fmt.lns))
    bits = random_bits(x, 3, torch.tensor(4))
    expected = reference.encode_stochastic(x.numpy(), fmt.lns, bits.numpy().astype(np.int64))
    # a CPU's, and what a GPU computes with
    for got in (fmt.encode(x, bits).codes, fmt._stochastic_anywhere(x, bits)):
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("name", ["lns8/channel", "float8_e4m3fn/tensor", "fixed(8,7)/channel"])
def test_a_scale_is_the_power_of_two_that_fills_the_range(name: str) -> None:
    fmt, x = parse(name), sample()
    assert isinstance(fmt, formats.Scaled)
    encoded = fmt.encode(x)
    assert encoded.scale is not None
    assert bool((torch.frexp(encoded.scale)[0] == 0.5).all())
    largest = (
        (x / encoded.scale).abs().amax(1)
        if name.endswith("channel")
        else (x / encoded.scale).abs().amax()[None]
    )
    used = largest[largest > 0]
    assert bool(((used <= fmt.base.error.largest) & (used > fmt.base.error.largest / 2)).all())
    huge = fmt.quantize(x * 2.0**20)
    assert torch.equal(huge, fmt.quantize(x) * 2.0**20), "a power of two must move the scale alone"


KERNELS = ["lns8", "lns12", "lns(6,3)", "lns(2,0)", "float8_e4m3fn", "float8_e5m2", "float16",
           "float(3,4)", "float(6,1,inf)"]  # fmt: skip
"""Formats whose rounding with a scale is a kernel on a CPU."""
PATTERNS = st.integers(0, 0x7F7FFFFF) | st.integers(0, 0x7F7FFF) | st.sampled_from([0, 1, 0x7FFFFF])


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


def in_torch(fmt: NumberFormat, x: torch.Tensor) -> torch.Tensor:
    """The operations with which :meth:`Scaled.quantize` rounds without a kernel."""
    assert isinstance(fmt, formats.Scaled)
    up, down = (fmt._spread(scale, x) for scale in fmt._scales(x))
    if isinstance(fmt.base, FloatFormat):
        return fmt.base.decode(fmt.base.encode(x * up)) * down
    return fmt.base.quantize(x * up) * down


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", KERNELS)
@given(
    st.lists(st.tuples(PATTERNS, st.booleans()), min_size=1, max_size=80),
    st.integers(1, 4),
    st.integers(-150, 100),
    st.booleans(),
)
def test_the_kernel_of_scaled_formats_is_torchs_operations(
    name: str, granularity: str, words: list[tuple[int, bool]], rows: int, shift: int, near: bool
) -> None:
    """Any finite bits, or neighbouring values anywhere in float32's range."""
    fmt = parse(f"{name}/{granularity}")
    width = -(-len(words) // rows)
    flat = np.resize(np.array([word for word, _ in words], np.int32), rows * width)
    x = torch.from_numpy(flat.view(np.float32)).clone()
    if near:
        x = torch.ldexp(torch.frexp(x)[0], torch.tensor(shift) + torch.from_numpy(flat) % 12)
    signs = torch.from_numpy(np.resize([sign for _, sign in words], rows * width))
    x = torch.where(signs, -x, x).view(rows, width)
    assert fmt._by_kernel(x) is not None
    assert same_bits(fmt.quantize(x), in_torch(fmt, x))


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float(7,8)", "float(2,1)", "float(7,21)"]
)
@given(st.lists(st.tuples(PATTERNS, st.booleans()), min_size=1, max_size=80))
def test_the_kernel_of_8_bit_floats_is_torchs_conversion(
    name: str, words: list[tuple[int, bool]]
) -> None:
    fmt = parse(name)
    x = torch.from_numpy(np.array([word for word, _ in words], np.int32).view(np.float32))
    x = torch.where(torch.tensor([sign for _, sign in words]), -x, x)
    for values in (x, torch.frexp(x)[0], 512 * torch.frexp(x)[0]):
        assert same_bits(fmt.quantize(values), fmt.decode(fmt.encode(values)))


@pytest.mark.parametrize("name", ["lns8/channel", "float8_e4m3fn/block", "float8_e4m3fn"])
def test_kernels_of_formats_share_their_work(name: str) -> None:
    fmt, x = parse(name), torch.randn(301, 1003, generator=torch.Generator().manual_seed(2))
    threads = cpu.get_num_threads()
    try:
        cpu.set_num_threads(3)
        assert same_bits(fmt.quantize(x), fmt.decode(fmt.encode(x)))
    finally:
        cpu.set_num_threads(threads)
    assert same_bits(fmt.quantize(x.t()), fmt.decode(fmt.encode(x.t().contiguous())))


@pytest.mark.parametrize("name", ["lns8/channel", "float8_e4m3fn/channel", "float16/block"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_rounded_without_the_kernel(name: str, value: float) -> None:
    fmt, x = parse(name), sample()
    x[3, 4] = value
    assert fmt._by_kernel(x) is None
    found, expected = fmt.quantize(x), in_torch(fmt, x)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    "name", ["lns8/channel", "float8_e4m3fn/channel", "float8_e5m2", "float(3,4)", "posit(7)",
             "takum(9)/channel", "bfp(6,8)", "mxfp4", "nvfp4", "binary8p3", "binary8p1"],
)  # fmt: skip
def test_formats_are_traced_in_torchs_operations(name: str) -> None:
    fmt, x = parse(name), sample().view(4, 6, 50)
    expected = [fmt.quantize(part) for part in x]
    traced = make_fx(lambda x: fmt.quantize(x))(x[0])
    assert torch.equal(traced(x[1]), expected[1]), "its operations, not the result of one call"
    compiled = torch.compile(fmt.quantize, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x[2]), expected[2])


@pytest.mark.parametrize(
    "name", ["lns8/channel", "float8_e4m3fn/block", "float8_e5m2", "int8", "float(8,3)",
             "posit(9)", "takum_log(9)/channel", "bfp(6,8)", "mxint8", "nvfp4",
             "binary8p3", "binary8p1"],
)  # fmt: skip
def test_formats_are_vectorized_by_vmap(name: str) -> None:
    fmt, x = parse(name), sample().view(4, 6, 50)
    expected = torch.stack([fmt.quantize(part) for part in x])
    assert same_bits(torch.vmap(fmt.quantize)(x), expected)
    assert same_bits(torch.func.functionalize(fmt.quantize)(x[0]), expected[0])
    negated = torch.conj(torch.randn(1, dtype=torch.complex64)).imag
    assert negated.is_neg()
    assert torch.equal(fmt.quantize(negated), fmt.quantize(negated.clone()))


def test_mx_has_one_scale_a_block() -> None:
    x = sample(4, 70)
    fmt = parse("mxfp8")
    encoded = fmt.encode(x)
    assert encoded.codes.shape == (4, 96)
    assert encoded.scale is not None
    assert encoded.scale.shape == (4, 3)
    assert fmt.bits == 8.25
    assert torch.equal(fmt.quantize(x), parse("float8_e4m3fn/block").quantize(x))


@pytest.mark.parametrize("shape", [(4, 70), (3, 2, 32), (5,), (2, 1)])
def test_a_block_is_32_values_along_the_last_dimension(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[..., : shape[-1] // 2] *= 2.0**12
    fmt = parse("lns8/block")
    pieces = [parse("lns8/tensor").quantize(row) for row in x.reshape(-1, shape[-1]).unbind()
              for row in row.split(32)]  # fmt: skip
    assert torch.equal(fmt.quantize(x).flatten(), torch.cat(pieces))
    encoded = fmt.encode(x)
    assert encoded.scale is not None
    assert encoded.scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    assert fmt.bits == 8.25


@pytest.mark.parametrize("name", NAMES)
def test_names_read_back(name: str) -> None:
    fmt = parse(name)
    assert parse(fmt.name) == fmt
    assert hash(parse(fmt.name)) == hash(fmt)
    assert str(fmt) == fmt.name == name
    assert 2 <= fmt.bits <= 32
    assert fmt.compensation.bits == fmt.bits


def test_published_limits() -> None:
    table = {
        "bfloat16": (16, 2.0**-8, 2.0**-133, 3.3895313892515355e38),
        "float16": (16, 2.0**-11, 2.0**-24, 65504.0),
        "tf32": (19, 2.0**-11, 2.0**-136, 3.4011621342146535e38),
        "float8_e4m3fn": (8, 2.0**-4, 2.0**-9, 448.0),
        "float8_e5m2": (8, 2.0**-3, 2.0**-16, 57344.0),
        "fixed(16,8)": (16, 0.0, 2.0**-8, 127.99609375),
    }
    for name, (bits, relative, smallest, largest) in table.items():
        fmt = parse(name)
        error = fmt.error
        assert (fmt.bits, error.relative, error.smallest, error.largest) == (
            bits,
            relative,
            smallest,
            largest,
        ), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("float64", "format 'float64': unknown; formats are float32"),
        ("lns13", "format 'lns13': not one of lns16"),
        ("int8/row", "the part after / must be one of tensor, channel, block; use for"),
        (
            "int8/block",
            "granularity='block': must be one of tensor, channel; use for example int8/",
        ),
        ("int16", "int16: scaled integers have 2 to 12 bits"),
        ("fixed(30,8)", "bits=30: fixed point has 2 to 24 bits"),
        ("fixed(8,200)", "fraction_bits=200"),
        ("fixed(8)", "unknown; formats are"),
        ("bfloat16/tensor", "has float32's range, so a scale would change nothing; use bfloat16"),
        ("mxfp8/tensor", "has a scale of its own"),
        ("mxint4", "unknown; formats are"),
        ("nvfp4/channel", "nvfp4 has a scale of its own; use nvfp4 as it is"),
        (7, "format 7: must be a name"),
    ],
)
def test_bad_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(name)


def test_integers_are_refused_as_values() -> None:
    with pytest.raises(
        ValueError, match=r"x has dtype int64: must be a float tensor; use x.float\(\)"
    ):
        parse("bfloat16").quantize(torch.arange(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_has_the_same_codes(name: str) -> None:
    fmt, x = parse(name), sample()
    random = random_bits(x, 9, torch.tensor(2))
    on_gpu = random_bits(x.cuda(), 9, torch.tensor(2))
    assert torch.equal(on_gpu.cpu(), random)
    for bits, gpu_bits in ((None, None), (random, on_gpu)):
        mine, theirs = fmt.encode(x, bits), fmt.encode(x.cuda(), gpu_bits)
        assert torch.equal(theirs.codes.cpu().view(torch.uint8), mine.codes.view(torch.uint8))
        assert (mine.scale is None) == (theirs.scale is None)
        if mine.scale is not None and theirs.scale is not None:
            assert torch.equal(
                theirs.scale.cpu().reshape(-1).view(torch.uint8),
                mine.scale.reshape(-1).view(torch.uint8),
            )
        assert torch.equal(fmt.decode(theirs).cpu(), fmt.decode(mine))
