"""MX and NVFP4: every value against the definitions in exact fractions, and codes against
torchao's."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import NonFiniteError
from lns_ops.formats import Microscaling, parse, random_bits
from lns_ops.formats.blocks.nvfp4 import SMALLEST_TENSOR_SCALE
from tests.lns_ops.formats import block_definitions
from tests.lns_ops.formats.block_definitions import ELEMENTS, numbers_of

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
FINITE = st.floats(-(2.0**99), 2.0**99, width=32) | st.integers(-24, 24).map(lambda k: k / 4)


def spread_out(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values over some thirty octaves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.randn(rows, columns, generator=generator).mul(3).exp()


@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(1, 2))
def test_nvfp4_is_the_definition(values: list[float], rows: int) -> None:
    x = torch.tensor([values, [v * 2.0**-9 for v in values]][:rows])
    expected = torch.tensor(block_definitions.nvfp4(x.tolist()))
    assert torch.equal(parse("nvfp4").quantize(x), expected)


@given(st.lists(FINITE, min_size=1, max_size=70), st.sampled_from(list(ELEMENTS)))
def test_mx_is_the_definition(values: list[float], name: str) -> None:
    x = torch.tensor(values)
    assert parse(name).quantize(x).tolist() == block_definitions.mx(x.tolist(), name)


@given(st.lists(FINITE, min_size=1, max_size=40), st.integers(-130, 90), st.integers(0, 9))
def test_rounding_what_nvfp4_rounded_changes_nothing(
    values: list[float], shift: int, step: int
) -> None:
    """Values at both ends of float32's range, also rounded at random."""
    fmt = parse("nvfp4")
    x = torch.ldexp(torch.frexp(torch.tensor(values))[0], torch.tensor(shift))
    random = random_bits(x, 1, torch.tensor(step))
    for rounded in (fmt.quantize(x), fmt.quantize(x, random)):
        assert torch.equal(fmt.quantize(rounded), rounded)
        assert torch.equal(fmt.quantize(rounded, random), rounded)
        assert torch.equal(fmt.decode(fmt.encode(rounded)), rounded)


def test_nvfp4_has_two_scales() -> None:
    fmt, x = parse("nvfp4"), spread_out(3, 40)
    encoded = fmt.encode(x)
    assert encoded.scale is not None
    assert encoded.tensor_scale is not None
    assert encoded.codes.shape == x.shape
    assert int(encoded.codes.max()) < 16
    assert (encoded.scale.dtype, encoded.scale.shape) == (torch.float8_e4m3fn, (3, 3))
    assert (encoded.tensor_scale.dtype, encoded.tensor_scale.shape) == (torch.float32, ())
    assert float(encoded.tensor_scale) == pytest.approx(float(x.abs().max()) / 2688, rel=2.0**-18)
    assert fmt.bits == 4.5


def test_nvfp4_keeps_the_largest_of_a_block_when_it_rounds_at_random() -> None:
    """It is 6 block scales; the scale is computed from it again."""
    fmt, x = parse("nvfp4"), spread_out(20, 64)
    blocks = x.view(20, 4, 16)
    at = blocks.abs().argmax(-1, keepdim=True)
    nearest = fmt.quantize(x).view(20, 4, 16).gather(-1, at)
    for step in range(20):
        drawn = fmt.quantize(x, random_bits(x, 3, torch.tensor(step))).view(20, 4, 16)
        large = blocks.gather(-1, at).abs() > 2.0**-14 * x.abs().max()
        assert torch.equal(drawn.gather(-1, at)[large], nearest[large])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_within_its_place_in_nvfp4(value: float) -> None:
    fmt, x = parse("nvfp4"), torch.ones(2, 32)
    x[1, 3] = value
    found = fmt.quantize(x)
    assert bool(found[0].isfinite().all())
    assert found[1, 3].isnan() if math.isnan(value) else found[1, 3] == math.copysign(2688, value)


def test_nvfp4_of_nothing_and_of_tiny_values_is_zero() -> None:
    fmt = parse("nvfp4")
    assert fmt.quantize(torch.zeros(2, 20)).tolist() == [[0.0] * 20] * 2
    tiny = SMALLEST_TENSOR_SCALE * 2.0**-8
    assert fmt.quantize(torch.full((3,), tiny)).tolist() == [0.0] * 3
    with pytest.raises(NonFiniteError, match="NaN to encode in nvfp4"):
        fmt.encode(torch.tensor([math.nan]))


def test_mxint8_has_the_values_of_block_floating_point() -> None:
    x = spread_out(50, 100)
    assert torch.equal(parse("mxint8").quantize(x), parse("bfp(8,32)").quantize(x))
    encoded = parse("mxint8").encode(x)
    assert encoded.scale is not None
    assert encoded.codes.dtype == torch.int8
    assert int(encoded.codes.abs().max()) == 127
    assert encoded.scale.dtype == torch.float8_e8m0fnu
    value = encoded.codes[3, 40].double() / 64 * encoded.scale[3, 1].float()
    assert float(value) == float(parse("mxint8").quantize(x)[3, 40])


@pytest.mark.parametrize("name", list(ELEMENTS))
def test_every_code_of_mx_is_its_value(name: str) -> None:
    fmt = parse(name)
    assert isinstance(fmt, Microscaling)
    numbers = [float(v) for v in ELEMENTS[name]]
    x = torch.tensor([[v, -v] for v in numbers]).flatten()
    block = torch.full((len(x), 32), numbers[-1])
    block[:, 0] = x
    encoded = fmt.encode(block)
    assert encoded.scale is not None
    assert bool((encoded.scale.float() == 1).all())
    assert torch.equal(fmt.decode(encoded)[:, 0], x)
    first = encoded.codes.view(torch.uint8)[:, 0].long() & (15 if fmt.packed else 255)
    assert first[::2].tolist() == list(range(len(numbers)))
    assert len(set(first.tolist())) == len(x) - (name == "mxint8")  # which has one zero


def test_a_nan_is_one_of_its_whole_block_in_mx_codes() -> None:
    fmt, x = parse("mxint8"), torch.ones(2, 64)
    x[0, 40] = math.nan
    decoded = fmt.decode(fmt.encode(x))
    assert bool(decoded[0, 32:].isnan().all())
    assert bool((decoded[0, :32] == 1).all())
    assert bool((decoded[1] == 1).all())
    assert int(fmt.quantize(x).isnan().sum()) == 1


@needs_torchao
@pytest.mark.parametrize("name", [name for name in ELEMENTS if name != "mxint8"])
def test_mx_codes_are_torchaos(name: str) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    x, fmt = spread_out(300, 640), parse(name)
    dtype = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2,
             "mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3",
             "mxfp4_e2m1": torch.float4_e2m1fn_x2}[name]  # fmt: skip
    scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
    mine = fmt.encode(x)
    assert mine.scale is not None
    assert codes.dtype == mine.codes.dtype
    assert torch.equal(codes.view(torch.uint8), mine.codes.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), mine.scale.view(torch.uint8))
    assert torch.equal(to_dtype(codes, scale, dtype, 32, torch.float32), fmt.decode(mine))


@needs_torchao
def test_nvfp4_codes_are_torchaos() -> None:
    """With a given tensor scale, because torchao does not round it to 18 bits."""
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    x = spread_out(300, 640)
    mine = parse("nvfp4").encode(x)
    assert mine.scale is not None
    scale, codes = nvfp4_quantize(x, 16, mine.tensor_scale)
    assert torch.equal(scale.float().view(300, -1), mine.scale.float())
    assert torch.equal(unpack_uint4(codes), mine.codes)


def test_elements_are_the_published_ones() -> None:
    assert [float(v) for v in numbers_of(2, 1)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [float(v[-1]) for v in ELEMENTS.values()] == [448, 57344, 28, 7.5, 6, 127 / 64]
