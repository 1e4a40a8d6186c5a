"""Rounding on a GPU by one kernel has the bits of rounding on a CPU, and thus of torch's operations
(test_formats.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lns_ops import NonFiniteError, cuda, reference
from lns_ops.formats import parse, random_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
    ),
]
BASES = ["lns8", "lns12", "lns(6,3)", "lns(2,0)", "float8_e4m3fn", "float8_e5m2", "float16"]
NAMES = [
    *(f"{base}/{granularity}" for base in BASES for granularity in ("tensor", "channel", "block")),
    *(f"int{bits}{granularity}" for bits in (2, 4, 8, 12) for granularity in ("", "/channel")),
    "float8_e4m3fn", "float8_e5m2",
    "posit(8)", "posit(16)", "posit(12,1)", "takum(8)", "takum_log(16)", "posit(8)/channel",
]  # fmt: skip
SHAPES = [
    (), (1,), (7,), (32,), (70_000,), (1, 1), (3, 33), (64, 128), (2, 3, 5, 7), (5, 1500),
    (3, 20_000), (9, 4, 26, 26), (700, 3), (1, 100_000), (0, 5), (5, 0),
]  # fmt: skip


def values(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """Any finite bits; values of some octaves, including zeros, at both ends and in the middle of
    float32's range; or few bits, so that many values are midway between two codes."""
    generator = np.random.default_rng(math.prod(shape))
    words = generator.integers(0, 0x7F800000, shape, np.int32)
    x = torch.from_numpy(np.asarray(words)).view(torch.float32).clone()
    if kind == "ties":  # sixteenths up to 127, the largest code of int8
        x = torch.from_numpy(np.asarray(words % 4065 - 2032)).float() / 16
        x.view(-1)[:1] = 127.0
        return x
    if kind != "any":
        shift = {"low": -146, "middle": 3, "high": 117}[kind]
        x = torch.ldexp(torch.frexp(x)[0], torch.from_numpy(np.asarray(words % 11)) + shift)
        x = torch.where(torch.from_numpy(np.asarray(words % 13 == 0)), 0.0, x)
    return torch.where(torch.from_numpy(np.asarray(words % 2 == 0)), x, -x)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_rounds_to_the_same_bits(name: str) -> None:
    fmt = parse(name)
    for shape in SHAPES:
        for kind in ("any", "low", "middle", "high", "ties"):
            x = values(shape, kind)
            assert same_bits(fmt.quantize(x.cuda()).cpu(), fmt.quantize(x)), (shape, kind)
    x = values((40, 50), "middle").t()
    assert same_bits(fmt.quantize(x.cuda()).cpu(), fmt.quantize(x).contiguous())


@pytest.mark.parametrize("name", ["lns8/channel", "float8_e4m3fn/block", "float8_e5m2", "int8"])
def test_transforms_take_torchs_operations(name: str) -> None:
    fmt, x = parse(name), values((4, 6, 50), "middle").cuda()
    expected = torch.stack([fmt.quantize(part) for part in x])
    assert same_bits(torch.vmap(fmt.quantize)(x), expected)
    assert same_bits(torch.func.functionalize(fmt.quantize)(x[0]), expected[0])
    assert same_bits(make_fx(lambda x: fmt.quantize(x))(x[0])(x[1]), expected[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(7,), (24, 50), (5, 1500), (3, 20_000)])
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("lns")])
def test_what_is_not_finite_is_rounded_as_on_a_cpu(
    name: str, shape: tuple[int, ...], value: float
) -> None:
    fmt, x = parse(name), values(shape, "middle")
    x.view(-1)[5] = value
    on_gpu, expected = fmt.quantize(x.cuda()).cpu(), fmt.quantize(x)
    assert torch.equal(on_gpu.isnan(), expected.isnan())
    assert torch.equal(on_gpu.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("shape", [(24, 50), (3, 20_000)])
def test_what_is_not_finite_is_counted_in_lns(shape: tuple[int, ...]) -> None:
    x = values(shape, "middle").cuda()
    x[1, :3] = math.inf
    x[2, 3] = math.nan
    cuda.check_faults()
    parse("lns8/channel").quantize(x)
    with pytest.raises(NonFiniteError, match="4 values"):
        cuda.check_faults()


def test_a_cuda_graph_rounds_what_it_is_given() -> None:
    names = ["lns8/channel", "float8_e4m3fn/tensor", "int8/channel"]
    x = values((4, 30_000), "middle").cuda()
    step = torch.tensor(3, device="cuda")
    for name in names:
        parse(name).quantize(x)
    random_bits(x, 1 << 63 | 5, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [parse(name).quantize(x) for name in names]
        random = random_bits(x, 1 << 63 | 5, step)
    other = values((4, 30_000), "high")
    x.copy_(other)
    step.fill_(7)
    graph.replay()
    for name, mine in zip(names, found, strict=True):
        assert same_bits(mine.cpu(), parse(name).quantize(other))
    assert torch.equal(random.cpu(), random_bits(other, 1 << 63 | 5, torch.tensor(7)))


@pytest.mark.parametrize("count", [0, 1, 8, 17, 5000])
@pytest.mark.parametrize("key", [5, (1 << 33) + 5, (1 << 64) - 1, -5 << 32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_bits_are_the_definitions(count: int, key: int, device: str) -> None:
    like, step = torch.empty(count, device="cuda"), 1 << 31
    found = random_bits(like, key, torch.tensor(step, device=device), 3)
    expected = reference.random_bits(count, key, step, 3)
    np.testing.assert_array_equal(found.cpu().numpy(), expected)
