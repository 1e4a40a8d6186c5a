"""LossScale: a power of two changes no bit if nothing underflows, and prevents underflow
otherwise."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
    """Return the weights after three steps whose gradients are accumulated over the given number of
    parts."""
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


@pytest.mark.parametrize("factor", [0, -2, 3, 0.5, 1024 + 2**-42, float("nan"), float("inf")])
def test_other_factors_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"must be a power of two, 1 or more.*for example 256"):
        LossScale(factor)


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_a_factor_whose_inverse_underflows_is_refused(scope: str) -> None:
    model = lns_ops.convert_(nn.Sequential(nn.Linear(2, 2)), "lns12", scope=scope)
    with pytest.raises(ValueError, match=r"for 0 in lns12.*use at most 32768"):
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


def moved(model: nn.Module) -> nn.Module:
    return model._apply(lambda values: values.clone())  # as cuda() does


def reloaded(model: nn.Module) -> nn.Module:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def thawed(model: nn.Module) -> nn.Module:
    scale = LossScale(256)
    fresh = copy.deepcopy(model).requires_grad_(False)
    fresh._forward_pre_hooks.clear()
    return scale.unscale_(fresh).requires_grad_(True)


def pickled(model: nn.Module) -> nn.Module:
    made: nn.Module = pickle.loads(pickle.dumps(model))
    return made


@pytest.mark.parametrize("fmt", ["float32", "lns16"])
@pytest.mark.parametrize("change", [moved, reloaded, thawed, pickled, copy.deepcopy])
def test_parameters_that_come_later_are_divided_too(
    change: Callable[[nn.Module], nn.Module], fmt: str
) -> None:
    scale = LossScale(256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = change(scale.unscale_(net(fmt)))
        torch.save(model, io.BytesIO())
    found, expected = trained(model, scale), scaled(net(fmt), 256)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_twice_is_once_and_another_factor_is_refused() -> None:
    scale, model = LossScale(256), net("lns16")
    scale.unscale_(scale.unscale_(model))
    found, expected = trained(model, scale), scaled(net("lns16"), 256)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="are divided by 256 already: use one LossScale"):
        LossScale(8).unscale_(model)


def pair() -> tuple[nn.Module, LossScale, Callable[[], Tensor]]:
    """Return a network, the scale by which its parameters' gradients are divided, and its loss."""
    model, scale = net("lns16", "matmul"), LossScale(256)
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    scale.unscale_(model)
    return model, scale, lambda: F.cross_entropy(model(x), torch.arange(4), reduction="sum")


def test_what_autograd_grad_returns_is_the_gradient_with_the_scale_and_without() -> None:
    model, scale, loss = pair()
    backward(scale(loss()))
    expected = [p.grad for p in model.parameters()]
    for root in (loss(), scale(loss())):
        found = torch.autograd.grad(root, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_inner_step_moves_by_the_whole_gradient() -> None:
    """As in MAML: the outer gradient passes through a step made with the inner gradient."""
    found = {}
    for factor in (1, 256):
        model, scale = nn.Linear(3, 1, bias=False), LossScale(factor)
        with torch.no_grad():
            model.weight.fill_(1.0)
        scale.unscale_(model)
        x = torch.arange(6.0).view(2, 3)
        (inner,) = torch.autograd.grad(model(x).square().sum(), model.weight, create_graph=True)
        moved = model.weight - 2.0**-9 * inner
        backward(scale(F.linear(x, moved).square().sum()))
        found[factor] = model.weight.grad
    assert found[1] is not None
    assert found[256] is not None
    assert torch.equal(found[1], found[256])


def regression(scope: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(30, 4)
    if scope:
        lns_ops.convert_(model, "lns16", scope=scope)
    return model, torch.randn(64, 30)


def loss_of(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    out = torch.func.functional_call(model, weights, (x,))
    return lns_ops.LNSTensor.to_float(out).pow(2).sum() if is_lns(out) else out.pow(2).sum()


def is_lns(x: Tensor) -> bool:
    return isinstance(x, lns_ops.LNSTensor)


@pytest.mark.parametrize("scope", ["", "matmul", "everywhere"])
def test_gradients_through_swapped_in_weights_are_divided_once(scope: str) -> None:
    """``functional_call`` with weights computed from the parameters, as in MAML's outer step."""
    model, x = regression(scope)
    backward(loss_of(model, {n: p * 1.0 for n, p in model.named_parameters()}, x))
    expected = [storage_of(p.grad) for p in model.parameters() if p.grad is not None]
    model, x = regression(scope)
    scale = LossScale(64)
    scale.unscale_(model)
    backward(scale(loss_of(model, {n: p * 1.0 for n, p in model.named_parameters()}, x)))
    found = [storage_of(p.grad) for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def inner_steps(scope: str, factor: float) -> list[Tensor]:
    """Return the outer gradients of two inner steps, each by the gradient of a scaled loss."""
    model, x = regression(scope)
    scale = LossScale(factor)
    scale.unscale_(model)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(2):
        loss = scale(loss_of(model, weights, x))
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {n: w - 2.0**-9 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    backward(scale(loss_of(model, weights, x)))
    return [storage_of(p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("scope", ["", "matmul", "everywhere"])
def test_two_inner_steps_have_the_gradients_that_they_have_without_a_scale(scope: str) -> None:
    found, expected = inner_steps(scope, 64), inner_steps(scope, 1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_divided_once(reentrant: bool) -> None:
    model, scale, _ = pair()
    x = torch.randn(4, 1, 6, 6, requires_grad=True)
    gradients = []
    for checkpointed in (False, True):
        model.zero_grad()
        out = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        backward(scale(out.sum()))
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_gradient_taken_within_a_backward_pass_is_divided_once() -> None:
    """As in the adjoint method: a backward pass computes gradients itself and returns them."""
    layer, scale = nn.Linear(2, 2), LossScale(256)
    scale.unscale_(layer)

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            with torch.no_grad():
                result: Tensor = layer(x)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                y = layer(ctx.saved_tensors[0])
            return (grad, *torch.autograd.grad(y, list(layer.parameters()), grad))

    x = torch.randn(3, 2)
    backward(scale(layer(x).sum()))
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    backward(scale(Adjoint.apply(x, *layer.parameters()).sum()))  # type: ignore[no-untyped-call]
    assert all(torch.equal(p.grad, g) for p, g in zip(layer.parameters(), expected, strict=True))


def test_a_scale_goes_through_torch_func() -> None:
    scale, x = LossScale(8), torch.arange(3.0)
    found = torch.func.grad(lambda x: scale(x.square().sum()))(x)
    assert found.tolist() == [0, 16, 32]


def test_a_scaled_loss_may_be_changed_in_place() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = LossScale(8)(weight.sum())
    loss /= 2
    backward(loss)
    assert weight.grad is not None
    assert weight.grad.tolist() == [4, 4]


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_the_analysis_names_a_scale_that_is_taken(scope: str) -> None:
    model = nn.Linear(2, 2)
    x, y = torch.full((4, 2), 2.0**-6), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([20.0, 0.0]))  # confident in its class: gradients underflow
    analysis = lns_ops.analyze(model, (x, y), "lns12", scope=scope)
    assert 1 < analysis.loss_scale <= lns_ops.lns12.most_scale
    lns_ops.convert_(model, "lns12", scope=scope)
    LossScale(analysis.loss_scale).unscale_(model)


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
