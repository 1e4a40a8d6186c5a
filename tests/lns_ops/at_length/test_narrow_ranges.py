"""Operations in narrow formats: intermediate values must not leave the range if the result and the
gradient are within it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import LNSTensor, decode


def encoded(x: Tensor, fmt: str) -> LNSTensor:
    return LNSTensor.from_float(x, fmt)


def values(x: Tensor) -> Tensor:
    return decode(x.codes, x.fmt, torch.float64) if isinstance(x, LNSTensor) else x.double()


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors(
    function: Callable[..., Any], inputs: list[Tensor], grad: Tensor, fmt: str
) -> tuple[float, list[float]]:
    """Return the relative errors, in the norm, of a result and of the gradients; float64 is the
    reference."""
    leaves = [encoded(x, fmt).requires_grad_() for x in inputs]
    exact = [values(x.detach()).requires_grad_() for x in leaves]
    result, truth = function(*leaves), function(*exact)
    weight = encoded(grad.expand(truth.shape), fmt)
    result.backward(weight)
    truth.backward(values(weight))

    def far(got: Tensor, want: Tensor) -> float:
        return float((values(got.detach()) - want.detach()).norm() / want.detach().norm())

    gradients = []
    for x, y in zip(leaves, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        gradients.append(far(x.grad, y.grad))
    return far(result, truth), gradients


def in_place(*functions: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function that applies others in place, to a copy of its first argument."""

    def composed(x: Tensor, *others: Tensor) -> Tensor:
        y = x * 1
        for function in functions:
            assert function(y, *others) is y
        return y

    return composed


LARGE, GRADIENT = uniform(500, low=500, high=2500), uniform(500, low=100, high=1000, seed=1)

GRADIENTS: dict[str, tuple[Callable[..., Any], list[Tensor], Tensor]] = {
    "quotient": (torch.div, [uniform(500, high=10), LARGE], GRADIENT),
    "part of a sum": (lambda x: x / x.sum(), [torch.full((64,), 30.0)], torch.linspace(10, 50, 64)),
    "reciprocal": (torch.reciprocal, [LARGE], GRADIENT),
    "number over a tensor": (lambda x: 7 / x, [LARGE], GRADIENT),
    "rsqrt": (torch.rsqrt, [LARGE * 10], GRADIENT),
    "power": (lambda x: x**4, [uniform(500, low=0.1, high=0.2) / 20], GRADIENT * 20),
    "weight norm": (
        lambda v, g: torch._weight_norm(v, g, 0), [normal(8, 500) * 14.4, normal(8, 1, seed=1)],
        normal(8, 500, seed=2),
    ),
    "normalize": (lambda v: F.normalize(v, dim=-1), [normal(8, 500) * 360], normal(8, 500, seed=2)),
    "variance": (torch.var, [normal(100_000) / 100], torch.tensor(10_000.0)),
    "addcdiv": (
        lambda x, y, z: x.addcdiv(y, z, value=0.01), [uniform(500), uniform(500, high=100), LARGE],
        GRADIENT * 20,
    ),
    "power of each": (
        torch.pow, [uniform(500, low=0.05, high=0.2) / 20, uniform(500, low=3, high=4)],
        GRADIENT * 20,
    ),
    "power of each, summed": (
        torch.pow, [uniform(500, 1, low=0.1, high=3), uniform(3, low=0.5, high=2, seed=1)],
        uniform(500, 3),
    ),
    "number to the power": (
        lambda x: 0.1**x, [uniform(500, low=3.5, high=4.5)], GRADIENT * 20,
    ),
    "exp2": (torch.exp2, [uniform(500, low=-15, high=-12)], GRADIENT * 20),
    "log2": (torch.log2, [uniform(500, low=1.1, high=1.5) * 2**-16], uniform(500)),
    "log10": (torch.log10, [uniform(500, low=30_000, high=60_000)], GRADIENT * 20),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), [normal(4, 2000)], torch.tensor(1000.0)),
    "div_": (in_place(Tensor.div_), [uniform(500, high=10), LARGE], GRADIENT),
    "/=": (in_place(Tensor.__itruediv__), [uniform(500, high=10), LARGE], GRADIENT),
    "/= *= /=": (
        in_place(Tensor.div_, Tensor.mul_, Tensor.div_), [uniform(500, high=10), LARGE], GRADIENT,
    ),
    "reciprocal_": (in_place(Tensor.reciprocal_), [LARGE], GRADIENT),
    "rsqrt_": (in_place(Tensor.rsqrt_), [LARGE * 10], GRADIENT),
    "pow_": (
        in_place(lambda x: x.pow_(4)), [uniform(500, low=0.1, high=0.2) / 20], GRADIENT * 20,
    ),
    "addcdiv_": (
        in_place(lambda x, y, z: x.addcdiv_(y, z, value=0.01)),
        [uniform(500), uniform(500, high=100), LARGE], GRADIENT * 20,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_in_range(name: str) -> None:
    function, inputs, grad = GRADIENTS[name]
    _, gradients = errors(function, inputs, grad, "lns12")
    assert max(gradients) < 0.09, gradients


def test_a_quotients_gradient() -> None:
    a = encoded(torch.tensor([10.0]), "lns12").requires_grad_()
    b = encoded(torch.tensor([2000.0]), "lns12").requires_grad_()
    (a / b).backward(encoded(torch.tensor([1000.0]), "lns12"))
    assert b.grad is not None
    assert float(b.grad.to_float()) == pytest.approx(-0.0025, rel=0.02)


def test_softmax_of_many_classes() -> None:
    """For 999 classes p g is below the range and was lost, although the sum of p g is 0.01."""
    scores, grad = torch.zeros(4, 1000), torch.full((4, 1000), 0.02)
    scores[:, 0], grad[:, 0] = 7.0, 0.0
    kept = torch.ones(4, 1000, dtype=torch.bool)
    for function in (
        lambda x: F.softmax(x, -1),
        lambda x: F.scaled_dot_product_attention(
            x[:, None], torch.eye(1000) + 0 * x[:1], torch.eye(1000), kept[:, None], scale=1.0
        ),
    ):
        x = encoded(scores, "lns12").requires_grad_()
        exact = values(x.detach()).requires_grad_()
        function(x).backward(encoded(grad.reshape(function(x).shape), "lns12"))
        exact.softmax(-1).backward(grad.double())
        assert x.grad is not None
        assert exact.grad is not None
        error = values(x.grad)[:, 0] / exact.grad[:, 0] - 1
        assert error.abs().max() < 0.05


def test_exponents_that_are_whole_numbers_are_exact() -> None:
    x = encoded(torch.tensor([-2.0, 2.0, 0.0]), "lns16").requires_grad_()
    y = x ** torch.tensor([3, 2, 2])
    y.backward(encoded(torch.ones(3), "lns16"))
    assert x.grad is not None
    assert y.tolist() == [-8.0, 4.0, 0.0]
    torch.testing.assert_close(x.grad.to_float(), torch.tensor([12.0, 4.0, 0.0]), rtol=0.01, atol=0)


def test_gradients_of_powers_at_zero_are_torchs() -> None:
    exact = [torch.tensor([0.0, 0.0, 0.0, 2.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])]
    inputs = [encoded(x, "lns16").requires_grad_() for x in exact]
    torch.pow(*inputs).backward(encoded(torch.ones(4), "lns16"))
    exact = [x.requires_grad_() for x in exact]
    torch.pow(*exact).backward(torch.ones(4))
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.to_float(), y.grad, rtol=0.01, atol=0)
    root = encoded(torch.zeros(1), "lns16").requires_grad_()
    with pytest.raises(ValueError, match="zero to a negative"):
        (root ** encoded(torch.full((1,), 0.5), "lns16")).backward(encoded(torch.ones(1), "lns16"))


def test_second_derivatives_of_powers() -> None:
    def slopes(x: Tensor, y: Tensor) -> list[Tensor]:
        found = torch.autograd.grad((x**y + 2**x + x.log2()).sum(), [x, y], create_graph=True)
        return list(torch.autograd.grad((found[0] * 2 + found[1]).sum(), [x, y]))

    x, y = uniform(50, low=1, high=3), uniform(50, low=1, high=3, seed=1)
    got = slopes(*(encoded(t, "lns16").requires_grad_() for t in (x, y)))
    want = slopes(*(t.double().requires_grad_() for t in (x, y)))
    for a, b in zip(got, want, strict=True):
        assert float((values(a) - b).norm() / b.norm()) < 0.03


def test_compiled_in_place_and_powers_have_the_same_bits() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        z /= y
        z.pow_(2)
        return (z**y) * 0.5**y

    def results(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [uniform(50, low=1, high=3, seed=seed) for seed in (0, 1)]
        x, y = (encoded(values, "lns12").requires_grad_() for values in inputs)
        result = function(x, y)
        return [result, *torch.autograd.grad(result.sum(), [x, y])]

    expected = results(function)
    for a, b in zip(results(torch.compile(function, backend="aot_eager")), expected, strict=True):
        assert torch.equal(a.codes, b.codes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("fmt", ["lns16", "lns12", "lns(16,10)"])
@pytest.mark.parametrize("power", [-1, 1])
def test_in_range_gradients_are_torchs_formulas(fmt: str, power: int) -> None:
    x = encoded(normal(6, 70), fmt).requires_grad_()
    y = encoded(uniform(70, low=0.5, high=2), fmt).requires_grad_()
    grad = encoded(normal(6, 70, seed=1), fmt)
    (x / y if power == -1 else x * y).backward(grad)
    z, w = x.detach(), y.detach()
    each = grad * z if power == 1 else -grad * ((z / w) / w)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad.codes, (grad * w if power == 1 else grad / w).codes)
    assert torch.equal(y.grad.codes, each.sum(0).codes)


def test_second_derivatives_of_quotients() -> None:
    def slopes(x: Tensor, y: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(
            (x / y + y**3 + y.rsqrt() + 2 / y).sum(), y, create_graph=True
        )
        return list(torch.autograd.grad(first.sum(), [x, y]))

    x, y = uniform(50, low=1, high=3), uniform(50, low=1, high=3, seed=1)
    got = slopes(*(encoded(t, "lns16").requires_grad_() for t in (x, y)))
    want = slopes(*(t.double().requires_grad_() for t in (x, y)))
    for a, b in zip(got, want, strict=True):
        assert float((values(a) - b).norm() / b.norm()) < 0.02


def around_500(*shape: int) -> Tensor:
    return uniform(*shape, low=450, high=550)


MEANS: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 16), [around_500(1, 1, 32, 32)], "lns12"),
    "avg_pool2d.padded": (
        lambda x: F.avg_pool2d(x, 16, 8, 4, count_include_pad=False), [around_500(1, 1, 32, 32)],
        "lns12",
    ),
    "avg_pool2d.override": (
        lambda x: F.avg_pool2d(x, 16, divisor_override=200), [around_500(1, 1, 32, 32)], "lns12",
    ),
    "adaptive": (lambda x: F.adaptive_avg_pool1d(x, 7), [uniform(1, 2, 2700)], "lns(14,9)"),
    "embedding_bag": (
        lambda x: F.embedding_bag(torch.arange(len(x))[None], x, mode="mean"),
        [around_500(256, 3)], "lns12",
    ),
    "embedding_bag.many": (
        lambda x: F.embedding_bag((torch.arange(1000) % 7)[None], x, mode="mean"),
        [uniform(7, 2, low=0.2, high=0.4)], "lns(14,9)",
    ),
    "segment_reduce": (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([510, 2])),
        [around_500(512)], "lns12",
    ),
    "segment_reduce.initial": (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([510, 2]), initial=3.0),
        [around_500(512, 2)], "lns12",
    ),
    "scatter_reduce": (
        lambda x, y: x.scatter_reduce(0, (torch.arange(200) % 2).tile(5), y, "mean"),
        [uniform(3), uniform(1000)], "lns(16,10)",
    ),
    "local_response_norm": (
        lambda x: F.local_response_norm(x, 3), [around_500(1, 4, 100)], "lns12",
    ),
    "lp_pool1d": (lambda x: F.lp_pool1d(x, 2, 10), [around_500(1, 4, 100)], "lns12"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_sums_beyond_the_range(name: str) -> None:
    function, inputs, fmt = MEANS[name]
    result, gradients = errors(function, inputs, torch.tensor(100.0), fmt)
    assert result < 0.03, result
    assert max(gradients) < 0.03, gradients


def test_counts_beyond_the_range() -> None:
    places = torch.arange(1000) % 2
    x = encoded(torch.zeros(2), "lns(14,9)").requires_grad_()
    x.scatter_reduce(0, places, encoded(uniform(1000), "lns(14,9)"), "mean").backward(
        encoded(torch.full((2,), 100.0), "lns(14,9)")
    )
    assert x.grad is not None
    torch.testing.assert_close(x.grad.to_float(), torch.full((2,), 100 / 501), rtol=0.002, atol=0)
    weight = encoded(uniform(2, 3), "lns8").requires_grad_()
    rows = F.embedding(torch.zeros(1000, dtype=torch.long), weight, scale_grad_by_freq=True)
    rows.backward(encoded(torch.full((1000, 3), 0.6), "lns8"))
    assert weight.grad is not None
    assert weight.grad[0].to_float().sum() > 0.5  # 1.8 without stagnation at 3 fraction bits
