"""Warnings for decays that a format cannot hold: moving averages, replaced buffers, factors near
1."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSTensor, cuda
from lns_ops.cuda import later
from lns_ops.tensor.limits import decays

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
    with warnings.catch_warnings():  # once per conversion
        warnings.simplefilter("error")
        slow.exp()


def test_the_warning_names_what_can_stay() -> None:
    """exp(log_sigma) of a small log_sigma is not a decay, but the call of exp cannot show this."""
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    log_sigma = lns(-0.002, -0.001).requires_grad_()
    with pytest.warns(UserWarning, match=r"state again and again.*float32.*log_sigma.*can stay"):
        sigma = log_sigma.exp()
    exact = torch.tensor([-0.002, -0.001]).exp()
    assert isinstance(sigma, LNSTensor)
    assert ((sigma.detach() / exact).to_float() - 1).abs().max() < lns_ops.lns16.epsilon / 2


def test_counts_that_are_not_there_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a GPU's value, which the host reads when it arrives."""
    there = False
    monkeypatch.setattr(
        decays.later, "read", lambda values, action: later.wait(lambda: there, values, action)
    )
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    slow = lns(-0.002, -0.0005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow.exp()
        slow.exp()
    there = True
    with pytest.warns(UserWarning, match=r"exp in lns16: 2 of 2 results below 1") as caught:
        cuda.raise_seen(-1)
    assert len(caught) == 1
    assert not later._waiting


def test_counts_of_an_earlier_conversion_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    there = False
    monkeypatch.setattr(
        decays.later, "read", lambda values, action: later.wait(lambda: there, values, action)
    )
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    lns(-0.002).exp()
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    there = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lns(-0.2).exp()


def test_nothing_to_look_at() -> None:
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    assert lns().exp().shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}")
def test_a_gpu_is_not_waited_for() -> None:
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    x = LNSTensor.from_float(torch.full((64,), -0.002, device="cuda"), "lns16")
    x.exp()  # compiles kernels
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later.look()
    lns_ops.convert_(nn.Linear(1, 1), "lns16", scope="everywhere")
    torch.cuda._sleep(200_000_000)  # the values arrive later
    torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = [x.exp() for _ in range(40)][-1]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.warns(UserWarning, match=r"exp in lns16: 64 of 64 results below 1"):
        y.sum().item()
