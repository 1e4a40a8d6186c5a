"""Gradients of gradients in simulated formats, and simulated networks in torch.func."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import quantize_updates_, simulate_
from lns_ops.formats import parse
from lns_ops.optim import SGD
from tests.lns_ops.nn.simulated.test_simulate import batch, gpu, network


def in_range(model: nn.Module) -> nn.Module:
    """Set a loss scale at which no gradient overflows, as some training steps would find it."""
    if hasattr(model, "loss_scale"):
        model.get_buffer("loss_scale").fill_(256)
    return model


def penalty(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a WGAN-GP penalty on the norm of the input's gradient."""
    x, _ = batch()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().sum()
    parameters = [p for p in model.parameters() if p.dim() > 1]
    return [slope, *torch.autograd.grad(loss, parameters)]


def test_gradients_of_gradients_in_float32_are_torchs_bits() -> None:
    found, expected = penalty(simulate_(network(), "float32")), penalty(network())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("tf32", 0.01),
        ("bfloat16", 0.1),
        ("float16", 0.01),
        ("lns(16,10)/channel", 0.02),
        ("posit(16)", 0.02),
        ("float(6,9)", 0.02),
    ],
)
def test_gradients_of_gradients_are_near_float32s(name: str, share: float) -> None:
    found, expected = penalty(in_range(simulate_(network(), name))), penalty(network())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < share * b.norm()


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float8_e4m3fn/tensor", "int8/channel", "posit(8)"]
)
def test_a_gradient_is_rounded_on_its_way_back_from_a_gradient(name: str) -> None:
    """y = w q(x): its second derivatives are sums of products of rounded values, by hand."""
    model, fmt = nn.Linear(1, 1, bias=False), parse(name)
    in_range(simulate_(model, name))
    w, x = model.weight, torch.tensor([[0.3]], requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square(), x, create_graph=True)
    with torch.no_grad():
        q = fmt.quantize
        y = q(w * q(x))
        incoming = q(2 * y)
        assert torch.equal(slope, q(incoming * w))
        outer = q(torch.ones(1, 1))
        # slope = q(q(2 y) w) with y = q(w q(x)): the derivative of each rounding is 1
        expected = outer * incoming + q(q(outer * w) * 2) * q(x)
    (found,) = torch.autograd.grad(slope.sum(), w)
    torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8/channel"])
def test_a_simulated_network_works_under_torch_func(name: str) -> None:
    model = in_range(simulate_(network(), name))
    x, y = batch()
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, values, (x[None],))
        return F.cross_entropy(out, y[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    for i in (0, 7):
        model.zero_grad()
        loss(parameters, x[i], y[i]).backward()
        for key, p in parameters.items():
            torch.testing.assert_close(each[key][i], p.grad)


def test_a_step_takes_gradients_that_have_a_graph() -> None:
    x, y = batch()
    weights = []
    for create_graph in (False, True):
        model = simulate_(network(), "bfloat16")
        optimizer = quantize_updates_(SGD(model.parameters(), lr=0.01), model, kahan_sum=True)
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g
        optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("gradient", [None, "float8_e5m2"])
def test_gradients_of_gradients_go_through_products_of_8_bits(gradient: str | None) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = simulate_(nn.Linear(32, 16), "float8_e4m3fn", gradient_format=gradient).to(device)
        x = torch.linspace(-1, 1, 64, device=device).view(2, 32).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grads = torch.autograd.grad(slope.square().sum(), [x, model.weight])
        found.append([g.cpu() for g in grads])
    for mine, theirs in zip(*found, strict=True):
        assert mine.norm() > 0
        assert (theirs - mine).norm() < 0.2 * mine.norm()  # roundings of 8 bits, as above
