"""LossScale: a power of two changes no bit where nothing underflows, and saves what would."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lns_ops
from lns_ops import LossScale, cuda
from lns_ops.tensor import storage_of

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)


def net(fmt: str, scope: str = "everywhere") -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)
    )
    if fmt != "float32":
        lns_ops.convert_(made, fmt, scope=scope)
    return made


def trained(model: nn.Module, scale: LossScale, parts: int = 2) -> list[Tensor]:
    """Return the weights after three steps of gradients that are added up from so many parts."""
    optimizer = lns_ops.optim.SGD(model.parameters(), 0.01, 0.9, kahan_sum=True)
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(parts):
            x = torch.randn(4, 1, 6, 6, generator=draws)
            y = torch.randint(0, 5, (4,), generator=draws)
            backward(scale(F.cross_entropy(model(x), y, reduction="sum")))
        optimizer.step()
    return [storage_of(p.detach()) for p in model.parameters()]


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def scaled(model: nn.Module, factor: float) -> list[Tensor]:
    scale = LossScale(factor)
    return trained(scale.unscale_(model), scale)


@pytest.mark.parametrize(
    ("fmt", "scope"), [("float32", ""), ("lns16", "everywhere"), ("lns16", "matmul")]
)
@settings(max_examples=5, deadline=None)
@given(octaves=st.integers(0, 20))
def test_no_bit_changes_where_nothing_underflows(fmt: str, scope: str, octaves: int) -> None:
    plain = trained(net(fmt, scope), LossScale(1))
    found = scaled(net(fmt, scope), 2.0**octaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_what_would_underflow_is_kept() -> None:
    found = {}
    for factor in (1, 4096):
        scale, model = (
            LossScale(factor),
            lns_ops.convert_(nn.Linear(1, 1), "lns12", scope="everywhere"),
        )
        scale.unscale_(model)
        hidden = model(lns_ops.LNSTensor.from_float(torch.full((64, 1), 16.0), lns_ops.lns12))
        # an output's gradient of 2^-20 underflows, a weight's of 64 x 16 x 2^-20 = 2^-10 does not
        backward(scale(hidden.to_float().sum() * 2.0**-20))
        gradient = model.weight.grad
        assert isinstance(gradient, lns_ops.LNSTensor)
        found[factor] = float(gradient.to_float())
    assert found == {1: 0.0, 4096: 2.0**-10}


@pytest.mark.parametrize("factor", [0, -2, 3, 0.5, float("nan"), float("inf")])
def test_other_factors_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"must be a power of two, 1 or more.*for example 256"):
        LossScale(factor)


def test_a_factor_whose_inverse_underflows_is_refused() -> None:
    model = lns_ops.convert_(nn.Linear(2, 2), "lns12", scope="everywhere")
    with pytest.raises(ValueError, match=r"the parameter weight in lns12.*use at most 32768"):
        LossScale(65536).unscale_(model)
    assert LossScale(32768).unscale_(model) is model


def test_a_loss_without_gradient_stays() -> None:
    loss = torch.tensor(3.0)
    assert float(LossScale(256)(loss)) == 3
    assert not LossScale(256)(loss).requires_grad


def test_a_conversion_keeps_the_division() -> None:
    scale = LossScale(256)
    model = lns_ops.convert_(scale.unscale_(net("float32")), "lns16", scope="everywhere")
    found, expected = trained(model, scale), scaled(net("lns16"), 256)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_copies_are_made_without_a_warning_and_start_afresh() -> None:
    model = LossScale(256).unscale_(net("lns16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(model, io.BytesIO())
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = trained(net("lns16"), LossScale(1))
    for copied in copies:  # without hooks: a scale of its own may be put on it
        found = trained(copied, LossScale(1))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_is_scaled_too() -> None:
    def steps(factor: float, captured: bool) -> list[Tensor]:
        scale, model = LossScale(factor), net("lns16").cuda()
        scale.unscale_(model)
        optimizer = lns_ops.optim.SGD(model.parameters(), 0.01, 0.9, kahan_sum=True)
        draws = torch.Generator().manual_seed(1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = scale(F.cross_entropy(model(x), y, reduction="sum"))
            backward(loss)
            optimizer.step()
            return loss

        take: Callable[..., Tensor] = lns_ops.cuda_graph(step) if captured else step
        for _ in range(6):
            x = torch.randn(4, 1, 6, 6, generator=draws).cuda()
            take(x, torch.randint(0, 5, (4,), generator=draws).cuda())
        return [storage_of(p.detach()).cpu() for p in model.parameters()]

    expected = steps(1, captured=False)
    for found in (steps(256, captured=False), steps(256, captured=True)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
