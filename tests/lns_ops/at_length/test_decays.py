"""Decays that a format cannot hold warn: moving averages, replaced buffers, factors near 1."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSTensor

AVERAGES: dict[str, Callable[[LNSTensor, LNSTensor, float], object]] = {
    "number": lambda a, x, d: d * a + (1 - d) * x,
    "in place": lambda a, x, d: a.mul_(d).add_(x, alpha=1 - d),
    "lerp_": lambda a, x, d: a.lerp_(x, 1 - d),
    "_foreach_lerp_": lambda a, x, d: torch._foreach_lerp_([a], [x], 1 - d),
}


def lns(*values: float, fmt: str = "lns16") -> LNSTensor:
    return LNSTensor.from_float(torch.tensor(values), fmt)


@pytest.mark.parametrize("decay", [0.99, 0.995, 0.996, 0.9973])
@pytest.mark.parametrize("kind", list(AVERAGES))
def test_a_moving_average_that_stops_short_warns(kind: str, decay: float) -> None:
    with pytest.warns(UserWarning, match=r"lns16: .*moving average .*in float32"):
        AVERAGES[kind](lns(1.0), lns(2.0), decay)


@pytest.mark.parametrize("kind", list(AVERAGES))
def test_a_moving_average_that_gets_near_does_not_warn(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AVERAGES[kind](lns(1.0), lns(2.0), 0.9)


def test_the_warning_says_how_far_it_gets() -> None:
    a, x = lns(1.0), lns(2.0)
    with pytest.warns(UserWarning, match="stops within 54 % of new values"):
        a.lerp_(x, 0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3_000):
            a.lerp_(x, 0.005)
    assert 1.2 < float(a.to_float()) < 1.4  # 2 / 1.54 = 1.30


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * (x * self.weight).detach()
        return x * self.weight


def test_a_buffer_that_is_replaced_stays_float32_and_warns() -> None:
    model = lns_ops.convert_(Average(), "lns16", scope="everywhere")
    with pytest.warns(UserWarning, match=r"buffer 'mean' of a Average .*in place .*lerp_"):
        model(torch.full((1,), 2.0))
    assert type(model.mean) is Tensor
    assert model.mean.dtype == torch.float32


def test_decays_of_exp_that_round_to_one_warn() -> None:
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    slow, mixed = lns(-0.002, -0.0005, -0.001), lns(-0.002, -0.5, -0.7, -0.9, 0.0, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed.exp()
        lns(-0.1, -0.2).exp()
    with pytest.warns(UserWarning, match=r"exp in lns16: 3 of 3 results below 1.*float32"):
        slow.exp()
    with warnings.catch_warnings():  # once a conversion
        warnings.simplefilter("error")
        slow.exp()
