"""Products with rounded running sums: the reference equals exact fractions, the kernel equals the
reference; gradients, and networks."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lns_ops
from lns_ops import quantize_updates_, simulate_
from lns_ops.formats import Accumulation, parse
from lns_ops.nn.products.rounded_sums import RoundedSumsLinear, product, reference

FORMATS = ["float(8,13)", "float(4,3)", "float(5,10,inf)", "float(2,2,finite)", "bfloat16",
           "float16", "float8_e4m3fn", "tf32", "float32", "binary8p3"]  # fmt: skip
SUMS = st.builds(
    Accumulation,
    format=st.sampled_from(FORMATS),
    block=st.none() | st.integers(1, 9),
    promote=st.sampled_from(["float32", None]),
    order=st.sampled_from(["sequential", "tree"]),
)
HOPPER = Accumulation(format="float(8,13)", block=128)


def in_torch(x: torch.Tensor, y: torch.Tensor, sums: Accumulation) -> torch.Tensor:
    fmt = sums.number_format
    return reference(
        x, y, fmt.mantissa_bits, fmt.min_exponent, fmt.largest, fmt.saturates,
        sums.block or max(x.shape[1], 1), sums.promote is not None,
        sums.order == "tree",
    )  # fmt: skip


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all()) and x.shape == y.shape


def rounded(value: Fraction, sums: Accumulation) -> Fraction:
    """The definition: round to a multiple of the octave's step, ties to even; saturate."""
    fmt = sums.number_format
    exponent = fmt.min_exponent
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - fmt.mantissa_bits)
    near, largest = round(value / step) * step, Fraction(fmt.largest)
    return max(-largest, min(largest, near))


def in_pairs(terms: list[Fraction], sums: Accumulation) -> Fraction:
    """The definition of a tree: the size of its left half is the largest power of two below the
    number of terms."""
    if len(terms) == 1:
        return rounded(terms[0], sums)
    half = 1 << (len(terms) - 1).bit_length() - 1
    return rounded(in_pairs(terms[:half], sums) + in_pairs(terms[half:], sums), sums)


@given(
    st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=1, max_size=20),
    SUMS.filter(lambda sums: sums.number_format.saturates),
)
def test_the_reference_is_the_definition(pairs: list[tuple[int, int]], sums: Accumulation) -> None:
    block, total = sums.block or len(pairs), Fraction(0)
    for first in range(0, len(pairs), block):
        terms = [Fraction(a, 8) * Fraction(b, 8) for a, b in pairs[first : first + block]]
        running = in_pairs(terms, sums) if sums.order == "tree" else Fraction(0)
        for term in terms if sums.order == "sequential" else ():
            running = rounded(running + term, sums)
        total = total + running
        total = Fraction(float(total)) if sums.promote else rounded(total, sums)
    x, y = torch.tensor(pairs).float().div(8).unbind(1)
    assert in_torch(x[None], y[:, None], sums).item() == float(total)


BITS = st.integers(0, 2**32 - 1)


@given(st.lists(BITS, min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 70), SUMS)
def test_the_kernel_has_the_bits_of_the_reference(
    words: list[int], rows: int, columns: int, sums: Accumulation
) -> None:
    """Any float32, including NaNs, infinities and subnormal numbers."""
    terms = -(-len(words) // rows)
    left = np.resize(np.array(words, np.uint32), rows * terms).view(np.float32)
    right = np.resize(np.array(words[::-1], np.uint32), terms * columns).view(np.float32)
    x = torch.from_numpy(left.copy()).view(rows, terms)
    y = torch.from_numpy(right.copy()).view(terms, columns)
    assert same(product(x, y, sums), in_torch(x, y, sums))
    near = torch.frexp(x.nan_to_num())[0], torch.frexp(y.nan_to_num())[0]
    assert same(product(*near, sums), in_torch(*near, sums))


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_shares_its_work_among_threads(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(37, 200, generator=generator), torch.randn(200, 130, generator=generator)
    sums, threads = Accumulation(format=name, block=64), lns_ops.cpu.get_num_threads()
    try:
        lns_ops.cpu.set_num_threads(3)
        assert same(product(x, y, sums), in_torch(x, y, sums))
        assert same(product(y.t(), x.t(), sums), in_torch(y.t(), x.t(), sums))
    finally:
        lns_ops.cpu.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0), (1, 1, 1)])
def test_products_of_nothing(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    found = product(torch.ones(rows, terms), torch.ones(terms, columns), HOPPER)
    assert torch.equal(found, torch.full((rows, columns), float(terms)))


def test_a_narrow_sum_stagnates_and_blocks_help() -> None:
    """Adding 1 to 256 changes nothing with 8 significant bits."""
    x, y = torch.ones(1, 1024), torch.ones(1024, 1)
    for block, promote, expected in (
        (None, "float32", 256), (128, "float32", 1024), (128, None, 1024), (32, None, 1024),
        (512, "float32", 512), (1, None, 256),
    ):  # fmt: skip
        sums = Accumulation(format="bfloat16", block=block, promote=promote)
        assert product(x, y, sums).item() == expected


def test_a_tree_of_additions_does_not_stagnate() -> None:
    x, y = torch.ones(1, 1000), torch.ones(1000, 1)
    assert product(x, y, Accumulation(format="bfloat16", order="tree")).item() == 1000
    torch.manual_seed(0)
    a, b = torch.rand(1, 4096), torch.rand(4096, 1)
    exact = (a.double() @ b.double()).item()
    errors = {
        order: abs(product(a, b, Accumulation(format="bfloat16", order=order)).item() / exact - 1)
        for order in ("sequential", "tree")
    }
    assert errors["tree"] < 0.01
    assert errors["sequential"] > 0.5


@pytest.mark.parametrize(
    "sums",
    [
        HOPPER,
        Accumulation(format="float(4,3)", block=4),
        Accumulation(format="float(4,3)", order="tree"),
    ],
    ids=str,
)
def test_both_gradients_and_theirs_are_summed_alike(sums: Accumulation) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, g, v = (
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((6, 20), (20, 9), (6, 9), (6, 20))
    )
    out = product(x, y, sums)
    grad_x, grad_y = torch.autograd.grad(out, (x, y), g, create_graph=True)
    assert torch.equal(grad_x, in_torch(g, y.t(), sums))
    assert torch.equal(grad_y, in_torch(x.t(), g, sums))
    second_g, second_y = torch.autograd.grad(grad_x, (g, y), v)
    assert torch.equal(second_g, in_torch(v, y, sums))
    assert torch.equal(second_y, in_torch(g.t(), v, sums).t())


def test_transforms_and_compilers_see_one_operation() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 4, 30, generator=generator), torch.randn(30, 5, generator=generator)
    expected = torch.stack([product(part, y, HOPPER) for part in x])

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b, HOPPER)

    assert torch.equal(torch.vmap(multiply, (0, None))(x, y), expected)
    gradient = torch.func.grad(lambda a: multiply(a, y).sum())
    assert torch.equal(torch.vmap(gradient)(x), torch.stack([gradient(part) for part in x]))
    compiled = torch.compile(multiply, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[0], y), expected[0])
    graph = make_fx(multiply)(x[0], y)
    assert torch.equal(graph(x[1], y), expected[1])
    assert "rounded_product" in graph.code


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 10))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    return x, (x @ torch.randn(64, 10, generator=generator)).argmax(1)


def test_a_step_is_its_definition() -> None:
    """One linear layer by hand, with inputs of three dimensions."""
    torch.manual_seed(2)
    model, q = nn.Sequential(nn.Linear(50, 3)), parse("bfloat16").quantize
    sums = Accumulation(format="float(8,7)", block=16)
    w, b = (p.detach().clone() for p in model[0].parameters())
    x, g = torch.randn(2, 4, 50, requires_grad=True), torch.randn(2, 4, 3)
    simulate_(model, "bfloat16", accumulation=sums)
    out = model(x)
    flat = q(x).view(8, 50)
    assert torch.equal(out.view(8, 3), q(in_torch(flat, q(w).t(), sums) + q(b)))
    out.backward(g)
    grad = q(g).view(8, 3)
    assert torch.equal(model[0].weight.grad, in_torch(flat.t(), grad, sums).t())
    assert x.grad is not None
    assert torch.equal(x.grad.view(8, 50), q(in_torch(grad, q(w), sums)))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "posit(8)", "nvfp4", "lns8/channel"])
def test_networks_learn_with_rounded_sums(name: str) -> None:
    model = simulate_(network(), name, accumulation=HOPPER)
    assert [type(layer) for layer in (model[0], model[3])] == [RoundedSumsLinear] * 2
    optimizer = quantize_updates_(
        lns_ops.optim.SGD(model.parameters(), lr=0.003), model, kahan_sum=True
    )
    x, y = batch()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert "RoundedSumsLinear" in lns_ops.summary(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    lns_ops.revert_(model)
    assert [type(layer) for layer in (model[0], model[3])] == [nn.Linear] * 2


def test_a_wide_sum_is_near_float32s() -> None:
    x, _ = batch()
    plain = simulate_(network(), "bfloat16")(x)
    wide = simulate_(network(), "bfloat16", accumulation=Accumulation(format="float32"))(x)
    narrow = simulate_(network(), "bfloat16", accumulation=Accumulation(format="float(8,3)"))(x)
    torch.testing.assert_close(wide, plain, rtol=0.02, atol=0.02)
    assert float((narrow - plain).detach().norm()) > 5 * float((wide - plain).detach().norm())


class Owner(nn.Module):
    """A module that multiplies by its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


@pytest.mark.parametrize(
    "layer", [nn.ConvTranspose2d(1, 2, 3), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2), Owner()],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_other_layers_with_products_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer)
    said = f"accumulation with layer '1', a {type(layer).__name__}: only the sums of nn.Linear"
    with pytest.raises(ValueError, match=said):
        simulate_(model, "bfloat16", accumulation=HOPPER)
    assert not any(hasattr(part, "simulation") for part in model.modules())
    simulate_(
        model, "bfloat16", accumulation=HOPPER, filter_fn=lambda part, _: type(part) is nn.Linear
    )
    assert type(model[0]) is RoundedSumsLinear


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"format": "posit(8)"},
            r"accumulation: format='posit\(8\)' must be a binary float with a",
        ),
        ({"format": "binary8p1"}, "format='binary8p1' must be a binary float with a mantissa"),
        ({"format": "lns8"}, "format='lns8' must be a binary float"),
        ({"format": "float(9,1)"}, "exponent_bits=9 must be from 2 to 8"),
        ({"block": 0}, "accumulation: block=0 must be a whole number of at least 1; use for"),
        ({"block": 2.5}, "block=2.5 must be a whole number"),
        ({"order": "random"}, "order='random' must be one of sequential, tree; use for example"),
        ({"promote": "bfloat16"}, "promote='bfloat16' must be 'float32', or None to add"),
    ],
)
def test_bad_accumulations_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Accumulation(**{"format": "float(8,13)"} | values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5, 70, 9), (300, 33, 410), (2, 5000, 3), (1100, 20, 1300)])
def test_a_gpu_has_the_same_bits(name: str, shape: tuple[int, int, int]) -> None:
    """Small and large results, long sums, any float32 and operands of any strides."""
    rows, terms, columns = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, terms, generator=generator)
    y = torch.randn(terms, columns, generator=generator)
    words = torch.randint(-(2**31), 2**31, (terms,), generator=generator, dtype=torch.int64)
    x[0], x[1], y[3, 1] = words.int().view(torch.float32), x[1] * 1e-42, 3e38
    for sums in (
        Accumulation(format=name),
        Accumulation(format=name, block=16, promote=None),
        Accumulation(format=name, order="tree"),
        Accumulation(format=name, block=7, order="tree", promote=None),
    ):
        left = x.cuda().requires_grad_()
        found = product(left, y.cuda(), sums)
        assert same(found.detach().cpu(), product(x, y, sums))
        (gradient,) = torch.autograd.grad(found, left, torch.ones_like(found))
        assert same(gradient.cpu(), product(torch.ones(rows, columns), y.t(), sums))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_products_of_nothing_on_a_gpu(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    found = product(torch.ones(rows, terms).cuda(), torch.ones(terms, columns).cuda(), HOPPER)
    assert torch.equal(found.cpu(), torch.full((rows, columns), float(terms)))
