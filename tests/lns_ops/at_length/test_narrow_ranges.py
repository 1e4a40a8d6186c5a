"""Operations in narrow formats: what is stored on the way must not leave the range where the result
and the gradient do not."""

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
    """Return the relative errors in the norm of a result and of the gradients, beside float64."""
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
    assert weight.grad[0].to_float().sum() > 0.5  # 1.8, but for what sticks at 3 fraction bits
