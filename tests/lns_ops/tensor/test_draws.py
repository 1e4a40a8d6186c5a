"""Random draws of LNSTensors keep the bounds that torch guarantees: above 0, below 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, distributions

from lns_ops import LNSFormat, LNSTensor
from lns_ops.tensor import draws


def zeros(fmt: str, *shape: int) -> LNSTensor:
    return LNSTensor.from_float(torch.zeros(shape), fmt)


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "gumbel_softmax": lambda t: F.gumbel_softmax(t, tau=1.0),
    "exponential": lambda t: torch.empty_like(t).exponential_().log(),
    "rand_like": lambda t: torch.rand_like(t).log(),
    "log of 1 - rand_like": lambda t: (1 - torch.rand_like(t)).log(),
    "uniform": lambda t: torch.log1p(-torch.empty_like(t).uniform_()),
    "Gumbel": lambda t: distributions.Gumbel(t, 1.0).rsample(),
    "Laplace": lambda t: distributions.Laplace(t, 1.0).rsample(),
    "Dirichlet": lambda t: distributions.Dirichlet(t.exp() * 0.3).rsample().log(),
}


@pytest.mark.parametrize("fmt", ["lns16", "lns12"])
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_logarithms_of_draws_are_finite(draw: Callable[[Tensor], Tensor], fmt: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        found = draw(zeros(fmt, 256, 200))
        assert isinstance(found, LNSTensor)


@pytest.mark.parametrize("fmt", ["lns16", "lns12"])
def test_gumbel_draws_have_the_mean_and_spread_of_the_distribution(fmt: str) -> None:
    torch.manual_seed(0)
    drawn: Any = distributions.Gumbel(zeros(fmt, 100_000), 1.0).sample()
    found = drawn.to_float()
    assert abs(found.mean() - 0.5772) < 0.06
    assert abs(found.std() - 1.2825) < 0.12


BOUNDS = [
    (0.0, 1.0),
    (-1.0, 1.0),
    (-1.0, 0.0),
    (-3.0, -1.0),
    (0.5, 5.0),
    (torch.finfo().eps - 1, 1),
]


@pytest.mark.parametrize("fmt", ["lns16", "lns12", "lns8"])
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_uniform_draws_stay_within_their_bounds(low: float, high: float, fmt: str) -> None:
    torch.manual_seed(0)
    found = zeros(fmt, 20_000).uniform_(low, high).to_float().double()  # type: ignore[attr-defined]
    assert found.min() >= low
    assert found.max() < high
    torch.manual_seed(0)
    exact = torch.empty(20_000).uniform_(low, high).double()
    epsilon, smallest = LNSFormat.of(fmt).epsilon, LNSFormat.of(fmt).smallest
    assert ((found - exact).abs() <= exact.abs() * epsilon + 1.01 * smallest).all()


def test_bounds_without_a_code_between_them_take_the_nearest() -> None:
    found = zeros("lns12", 10).uniform_(1.001, 1.002).to_float()  # type: ignore[attr-defined]
    assert torch.equal(found, torch.ones(10))


def test_a_draw_of_zero_stays_zero() -> None:
    fmt = LNSFormat.of("lns12")
    codes = draws.within(torch.tensor([0.0, 1e-30, -1e-30]), -1.0, 1.0, fmt)
    values = LNSTensor(codes, fmt).to_float().tolist()
    assert values == pytest.approx([0.0, fmt.smallest, -fmt.smallest])


def test_limits_of_float32_are_those_of_the_format() -> None:
    finfo, fmt = torch.finfo(torch.float32), LNSFormat.of("lns12")
    x = zeros("lns12", 1)
    assert float(torch.full_like(x, finfo.tiny)) == pytest.approx(fmt.smallest)
    assert 0.97 < float(torch.full_like(x, 1 - finfo.eps)) < 1
    assert float(torch.full_like(x, 1e-12)) == 0
