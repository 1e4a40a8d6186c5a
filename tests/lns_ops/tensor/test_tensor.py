"""LNSTensor in torch: operations equal the reference, gradients agree with float64, and torch's
features work."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lns_ops import LNSFormat, LNSTensor, NonFiniteError, convert_, lns8, lns12, lns16, reference
from lns_ops.spec.format import logarithm
from lns_ops.spec.reference import NO_LOG, add_unpacked, pack, unpack
from tests.lns_ops.lns_formats import FORMATS, IDS, half_ulp


def random(shape: tuple[int, ...], fmt: LNSFormat, seed: int = 0) -> LNSTensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return LNSTensor.from_float(torch.where(values.abs() < 0.1, 0, values), fmt)


def equal(result: Tensor, codes: np.ndarray) -> None:
    assert isinstance(result, LNSTensor)
    assert result.shape == codes.shape
    np.testing.assert_array_equal(result.codes.numpy(), codes)


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
@pytest.mark.parametrize(
    "shapes", [((5, 7), (5, 7)), ((5, 7), (7,)), ((5, 1), (1, 7)), ((), (3,)), ((0, 3), (0, 3))]
)
def test_operators_equal_the_reference(
    fmt: LNSFormat, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    x, y = random(shapes[0], fmt, 1), random(shapes[1], fmt, 2)
    cx, cy = x.codes.numpy(), y.codes.numpy()
    equal(x + y, reference.add(cx, cy, fmt))
    equal(x - y, reference.sub(cx, cy, fmt))
    equal(x * y, reference.mul(cx, cy, fmt))
    one = torch.ones_like(y)
    equal(x / one, reference.div(cx, one.codes.numpy(), fmt))
    equal(-x, reference.neg(cx, fmt))
    equal(abs(x).sqrt(), reference.sqrt(reference.absolute(cx, fmt), fmt))
    equal(torch.relu(x), np.where(cx > 0, cx, 0))


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
def test_numbers_below_the_smallest_magnitude_lie_between_zero_and_it(name: str) -> None:
    """Such as the tolerance of a loop that ends once nothing changes, or of a check of sums."""
    values = torch.tensor([-1.0, -lns12.smallest, 0.0, lns12.smallest, 2.0])
    x = LNSTensor.from_float(values, lns12)
    for number in (1e-6, -1e-6, 1e-45):
        assert torch.equal(getattr(x, name)(number), getattr(values.double(), name)(number))
    assert (x == 1e-6).tolist() == [False, False, True, False, False]  # it is encoded first
    torch.distributions.OneHotCategorical(logits=random((8, 4), lns12))  # its sums are checked


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_python_numbers_are_encoded(fmt: LNSFormat) -> None:
    x = random((4, 3), fmt)
    half = reference.encode(np.array(0.5), fmt)
    equal(x * 0.5, reference.mul(x.codes.numpy(), half, fmt))
    equal(0.5 - x, reference.sub(half, x.codes.numpy(), fmt))
    equal(
        torch.add(x, x, alpha=0.5),
        reference.add(x.codes.numpy(), reference.mul(x.codes.numpy(), half, fmt), fmt),
    )


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_comparisons_and_arguments(fmt: LNSFormat) -> None:
    x, y = random((6, 9), fmt, 1), random((6, 9), fmt, 2)
    fx, fy = x.to_float(), y.to_float()
    for operator in (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne):
        assert torch.equal(operator(x, y), operator(fx, fy))
    assert torch.equal(x > 0, fx > 0)
    assert torch.equal(fx.gather(1, x.argmax(1, keepdim=True)), fx.amax(1, keepdim=True))
    equal(torch.where(x > y, x, y), reference.encode(torch.where(fx > fy, fx, fy).numpy(), fmt))


@pytest.mark.parametrize("dims", [0, 1, -1, (0, 2), (1, 0), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sum_over_dimensions(dims: int | tuple[int, ...], keepdim: bool) -> None:
    x = random((5, 70, 3), lns12)
    axes = sorted({d % 3 for d in ((dims,) if isinstance(dims, int) else dims)})
    flat = np.moveaxis(x.codes.numpy(), axes, range(len(axes)))
    expected = reference.sum(flat.reshape(-1, *flat.shape[len(axes) :]), 0, lns12)
    equal(
        x.sum(dims, keepdim=keepdim),
        expected.reshape(x.to_float().sum(dims, keepdim=keepdim).shape),
    )
    equal(x.sum(), reference.sum(x.codes.numpy().reshape(-1), 0, lns12))


@given(
    m=st.integers(1, 9),
    k=st.integers(1, 150),
    n=st.integers(1, 9),
    transpose=st.tuples(st.booleans(), st.booleans()),
)
def test_matmul_of_transposed_views(m: int, k: int, n: int, transpose: tuple[bool, bool]) -> None:
    x, y = (
        random((k, m) if transpose[0] else (m, k), lns12, 1),
        random((n, k) if transpose[1] else (k, n), lns12, 2),
    )
    x, y = x.t() if transpose[0] else x, y.t() if transpose[1] else y
    equal(x @ y, reference.matmul(x.codes.numpy(), y.codes.numpy(), lns12))


def test_batched_matmul_and_mean() -> None:
    x, y = random((3, 4, 70), lns12, 1), random((3, 70, 2), lns12, 2)
    equal(
        x @ y,
        np.stack(
            [
                reference.matmul(a, b, lns12)
                for a, b in zip(x.codes.numpy(), y.codes.numpy(), strict=True)
            ]
        ),
    )
    four = reference.encode(np.array(4.0), lns12)
    equal(x.mean(1), reference.div(reference.sum(x.codes.numpy(), 1, lns12), four, lns12))


@pytest.mark.parametrize("terms", [1, 64, 65, 1000])
@pytest.mark.parametrize("fmt", [lns8, lns12, lns16], ids=str)
def test_means_equal_the_reference_and_do_not_saturate(terms: int, fmt: LNSFormat) -> None:
    x = np.random.default_rng(terms).choice(fmt.codes(), (terms, 5))
    equal(LNSTensor(torch.from_numpy(x), fmt).mean(0), reference.mean(x, 0, fmt))
    large = LNSTensor(torch.full((terms,), fmt.field_mask, dtype=torch.int16), fmt)
    # lns8's sums stagnate at 23 equal terms; saturation would leave 1 / terms of the mean.
    assert large.mean().to_float().item() > fmt.largest * (0.05 if fmt == lns8 else 0.8)


@pytest.mark.parametrize("terms", [4097, 8192, 12_345])
def test_long_sums_are_sums_of_pieces(terms: int) -> None:
    x = np.random.default_rng(terms).choice(lns12.codes()[1000:3000], terms)
    equal(LNSTensor(torch.from_numpy(x), lns12).sum(), reference.long_sum(x, 0, lns12))
    ones = torch.full((terms,), lns12.bias, dtype=torch.int16)
    assert LNSTensor(ones, lns12).sum().to_float().item() == pytest.approx(terms, rel=0.1)
    assert LNSTensor(ones, lns12).mean().to_float().item() == pytest.approx(1, rel=0.1)


def test_structure_keeps_codes() -> None:
    x = random((4, 6), lns12)
    changes = (
        lambda t: t.t(), lambda t: t.reshape(3, 8), lambda t: t[1:3, ::2], lambda t: t[:, 2],
        lambda t: t.clone(), lambda t: torch.stack([t, t]),
        lambda t: t.unsqueeze(0).expand(2, 4, 6), lambda t: torch.cat([t, t], 1),
        lambda t: t[torch.tensor([3, 0])],
    )  # fmt: skip
    for change in changes:
        assert torch.equal(change(x).codes, change(x.codes))
        assert torch.equal(change(x).to_float(), change(x.to_float()))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)
    )


# A gradient has some ten roundings of up to half an ulp each, and sums of 64 terms: eight half-ulps
# are enough (five are observed).
GRADIENT_HALF_ULPS = 8


class Gate(nn.Module):
    """A ReLU that opens where another net's ReLU opened: a pre-activation that rounds across zero
    is not an error of the gradient."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        return x * self.masks.pop(0)


@pytest.mark.parametrize("fmt", [lns16, LNSFormat(16, 10)], ids=str)
@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_gradients_agree_with_float64_within_the_formats_error(fmt: LNSFormat, scope: str) -> None:
    net, masks = convert_(small_net(), fmt, scope=scope), []
    exact = nn.Sequential(
        *[Gate(masks) if isinstance(m, nn.ReLU) else m for m in small_net().double()]
    )
    for module in net:
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(
                lambda module, inputs, output: masks.append((inputs[0] > 0).double())
            )
    x, y = torch.randn(64, 20), torch.randint(0, 5, (64,))
    for model, inputs in ((net, x), (exact, x.double())):
        F.cross_entropy(model(inputs), y, reduction="sum").backward()
    for parameter, truth in zip(net.parameters(), exact.parameters(), strict=True):
        gradient = (
            parameter.grad.to_float() if isinstance(parameter.grad, LNSTensor) else parameter.grad
        )
        assert (gradient - truth.grad).norm() / truth.grad.norm() < GRADIENT_HALF_ULPS * half_ulp(
            fmt
        )


def test_gradient_formulas_of_elementwise_operations() -> None:
    fmt = LNSFormat(16, 10)
    for function in (
        lambda t: t * t,
        lambda t: t / (t * t + 1),
        lambda t: (t.abs() + 1).sqrt(),
        lambda t: (t - 2) * 3,
        lambda t: (-t * t).mean(),
    ):
        values = torch.randn(50, generator=torch.Generator().manual_seed(3)) + 0.01
        x = LNSTensor.from_float(values, fmt).detach().requires_grad_()
        exact = values.double().requires_grad_()
        function(x).sum().backward()
        function(exact).sum().backward()
        assert (
            x.grad.to_float() - exact.grad
        ).norm() / exact.grad.norm() < GRADIENT_HALF_ULPS * half_ulp(fmt)


def test_gradients_accumulate_in_lns() -> None:
    x = random((3,), lns12).detach().requires_grad_()
    (x * 3).sum().backward()
    once = x.grad.codes.clone()
    (x * 3).sum().backward()
    equal(x.grad, reference.add(once.numpy(), once.numpy(), lns12))


def test_conversions_carry_gradients_across_the_border() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (LNSTensor.from_float(x, lns12) * 2).to_float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, torch.tensor([2.0, 2.0]))


def test_machinery_around_a_converted_module() -> None:
    net = convert_(small_net(), lns12, scope="everywhere")
    x = torch.randn(3, 20)
    expected = net(x).codes
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x).codes, expected)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    other = convert_(small_net(), lns12, scope="everywhere")
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x).codes, expected)
    checkpointed = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
    assert torch.equal(checkpointed.codes, expected)
    compiled = torch.compile(lambda a, b: torch.relu(a @ b), backend="aot_eager", fullgraph=True)
    a, b = random((4, 20), lns12), net[0].weight.detach().t()
    assert torch.equal(compiled(a, b).codes, torch.relu(a @ b).codes)


def test_repr_shows_values_and_format() -> None:
    assert (
        repr(LNSTensor.from_float(torch.tensor([1.0, 2.0]), lns12))
        == "LNSTensor([1., 2.], fmt=lns12)"
    )


def test_errors_name_value_rule_and_remedy() -> None:
    x = random((3,), lns12)
    with pytest.raises(ValueError, match="add of lns12 and lns16: both operands need one format"):
        x + random((3,), lns16)
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2, 3\)"):
        random((2, 3), lns12) @ random((2, 3), lns12)
    with pytest.raises(NotImplementedError, match=r"aten.i0.default has no LNS kernel.*to_float"):
        torch.i0(x)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        LNSTensor.from_float(torch.tensor([float("nan")]), lns12)
    with pytest.raises(ValueError, match=r"division by zero.*in lns12 numbers below 1.5e-05"):
        x / 0
    with pytest.raises(ValueError, match=r"add of shapes \(3,\) and \(2,\): they do not broadcast"):
        x + random((2,), lns12)
    with pytest.raises(ValueError, match="LNS values are real"):
        LNSTensor.from_float(torch.ones(2, dtype=torch.complex64), lns12)
    with pytest.raises(ValueError, match="'lns13': not one of"):
        LNSTensor.from_float(torch.ones(2), "lns13")
    with pytest.raises(ValueError, match="format 12: must be an LNSFormat"):
        LNSTensor.from_float(torch.ones(2), 12)
    with pytest.raises(ValueError, match=r"lns12 to a torch\.float16 tensor"):
        convert_(torch.nn.Linear(2, 2), lns12, "everywhere").half()
    with pytest.raises(ValueError, match="codes are int16"):
        LNSTensor(torch.zeros(3), lns12)


@pytest.mark.parametrize("K", [4096, 4097, 9000])
def test_long_products_are_cut_as_sums_are(K: int) -> None:
    """Ones do not stagnate: at f = 6 a single sequence of 9,000 ones would end at a third; the same
    for bias and batches."""
    x, y = random((3, K), lns12, 1), random((K, 5), lns12, 2)
    expected = reference.long_matmul(x.codes.numpy(), y.codes.numpy(), lns12)
    equal(x @ y, expected)
    equal((x[None] @ y[None])[0], expected)
    bias = random((5,), lns12, 3)
    equal(
        F.linear(x, y.t(), bias),
        reference.add(expected, np.broadcast_to(bias.codes.numpy(), (3, 5)), lns12),
    )
    ones = LNSTensor.from_float(torch.ones(K), lns12)
    assert (ones @ ones).to_float().item() == pytest.approx(K, rel=0.05)
    x.requires_grad_()
    (x.t() @ random((3, 2), lns12, 4)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((5, 70, 3), 1), ((200,), 0), ((3, 9), -1), ((4200,), 0), ((), 0), ((0, 2), 0)],
)
def test_cumulative_sums_are_sums(shape: tuple[int, ...], dim: int) -> None:
    x = random(shape, lns12, 1).requires_grad_()
    got = x.cumsum(dim)
    assert got.shape == shape
    for k in {0, 1, 63, 64, 65, 199, 4095, 4096, 4199} if shape else set():
        if k < shape[dim] and x.numel():
            first = x.narrow(dim, 0, k + 1).sum(dim)
            assert torch.equal(got.select(dim, k).codes, first.codes)
    if x.numel() and shape:
        got.sum().backward()
        assert x.grad is not None
        # The first term is in every sum.
        assert x.grad.select(dim, 0).to_float().max().item() == pytest.approx(shape[dim], rel=0.05)


def test_powers_of_tensors() -> None:
    x = LNSTensor.from_float(torch.tensor([2.0, 4.0, -2.0, -2.0, 0.0, 0.0, 1.0, 2.0]), lns16)
    y = LNSTensor.from_float(torch.tensor([0.5, -1.0, 2.0, -1.0, 2.0, 0.0, 0.3, 1000.0]), lns16)
    got = (x**y).to_float()
    exact = torch.tensor([2**0.5, 0.25, 4.0, -0.5, 0.0, 1.0, 1.0, lns16.largest])
    assert ((got - exact).abs() <= half_ulp(lns16) * exact.abs()).all()
    for base, exponent in ((-2.0, 0.5), (0.0, -1.0)):
        with pytest.raises(ValueError, match="pow of a negative number to a fractional power"):
            LNSTensor.from_float(torch.tensor([base]), lns16) ** LNSTensor.from_float(
                torch.tensor([exponent]), lns16
            )
    x, y = (
        LNSTensor.from_float(torch.tensor(v), lns16).requires_grad_()
        for v in ([1.5, 3.0], [2.0, -0.5])
    )
    (x**y).sum().backward()
    a, b = (v.detach().to_float().requires_grad_() for v in (x, y))
    (a**b).sum().backward()
    for got_grad, wanted in ((x.grad, a.grad), (y.grad, b.grad)):
        assert got_grad is not None
        assert wanted is not None
        torch.testing.assert_close(got_grad.to_float(), wanted, rtol=0.02, atol=0)


@pytest.mark.parametrize("fmt", [lns8, lns12, lns16], ids=str)
def test_saturated_values_are_finite_and_found(fmt: LNSFormat) -> None:
    x = LNSTensor.from_float(torch.tensor([1.0, -1e39, 1e39, 0.0], dtype=torch.float64), fmt)
    assert torch.isfinite(x).all()
    for infinite in (torch.isinf, torch.isnan, torch.isposinf, torch.isneginf):
        assert not infinite(x).any()
    assert (x.abs() == x.fmt.largest).tolist() == [False, True, True, False]


@pytest.mark.parametrize("fmt", [lns16, lns12, lns8, LNSFormat(2, 0), LNSFormat(8, 6)], ids=str)
def test_numbers_above_the_range_count_in_full(fmt: LNSFormat) -> None:
    x = LNSTensor(torch.from_numpy(fmt.codes()), fmt)
    (sign, log), nonzero = unpack(x.codes.numpy(), fmt), x.codes.numpy() != 0
    divisor = LNSTensor(x.codes[x.codes != 0], fmt)
    for number in (3.0, fmt.largest * 1.3, -fmt.largest * 1.3, 600_000, 1e12, -1e30):
        ulps, negative = logarithm(abs(number), fmt.fraction_bits), number < 0
        up, down = (np.where(log == NO_LOG, log, log + shift) for shift in (ulps, -ulps))
        product = pack(sign ^ negative, up, fmt)
        for found in (x * number, number * x, x.clone().mul_(number)):
            equal(found, product)
        equal(x / number, pack(sign ^ negative, down, fmt))
        equal(number / divisor, pack((sign ^ negative)[nonzero], ulps - log[nonzero], fmt))
        other, f = (np.array(negative), np.array(ulps)), fmt.fraction_bits
        total = pack(*add_unpacked(sign, log, *other, f), fmt)
        for found in (x + number, number + x, x.clone().add_(number), x - -number):
            equal(found, total)
        equal(number - x, pack(*add_unpacked(~sign & nonzero, log, *other, f), fmt))


def test_a_compiled_sum_with_a_number_above_the_range_leaves_eager_ones_alone() -> None:
    x = LNSTensor.from_float(torch.tensor([1.0, -6e4]), lns12)
    for add in (lambda v: v + 1e6, lambda v: 7e4 - v):
        torch._dynamo.reset()
        compiled = torch.compile(add, backend="aot_eager", fullgraph=True)
        for codes in (x, torch.cat([x, x]), torch.cat([x, x, x])):
            assert torch.equal(compiled(codes).codes, add(codes).codes)


def test_a_number_above_the_range_less_a_multiple_counts_in_full() -> None:
    x = LNSTensor.from_float(torch.tensor([40_000.0]), lns12)
    assert torch.rsub(x, 1e5, alpha=2).item() == pytest.approx(20_357, rel=0.1)
    assert torch.rsub(x, 8e4, alpha=0.5).item() == pytest.approx(6e4, rel=0.03)
    assert torch.rsub(x / 1e9, 1e-4, alpha=10).item() == pytest.approx(-3e-4, rel=0.05)
