"""Gradients of gradients (gradient penalties) are near float32; no gradient is lost silently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lns_ops
from lns_ops import LNSTensor


class Causal(nn.Module):
    """Attention to earlier positions."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Reshaped(nn.Module):
    """A layer for sequences or images, on rows of eight."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x.view(-1, *self.shape))
        out = out[0] if isinstance(out, tuple) else out
        return out.reshape(len(x), -1)[:, :8]


LAYERS = {
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "softsign": nn.Softsign(),
    "softmax": nn.Softmax(-1),
    "logsoftmax": nn.LogSoftmax(-1),
    "lstm": Reshaped(nn.LSTM(8, 8, batch_first=True), 4, 8),
    "conv": Reshaped(nn.Conv2d(1, 1, 3, padding=1), 1, 2, 4),
    "maxpool": Reshaped(nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)), 1, 2, 4),
    "attention": Reshaped(Causal(), 2, 4),
    "layernorm": nn.LayerNorm(8),
    "rmsnorm": nn.RMSNorm(8),
    "groupnorm": nn.GroupNorm(2, 8),
    "batchnorm": nn.BatchNorm1d(8),
}


def penalised(layer: nn.Module, fmt: str | None, floats: bool) -> list[Tensor | None]:
    """Return a net's gradients of the gradient penalty, with this layer in the net."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer)
    for part in layer.modules():  # new weights, independent of the collection
        if isinstance(part, nn.Conv2d | nn.LSTM):
            part.reset_parameters()
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(16, 4)
    if fmt:
        lns_ops.convert_(model, fmt, scope="everywhere")
        x = LNSTensor.from_float(x, "lns16")
    x.requires_grad_(True)
    out = model(x)
    loss = (
        functional.cross_entropy(out, torch.arange(16) % 3, reduction="sum")
        if floats
        else (out * out).sum() * 0.1
    )
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (slope * slope).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("floats", [True, False])  # whether the loss leaves LNS
@pytest.mark.parametrize("name", LAYERS)
def test_a_gradient_penalty_reaches_every_parameter(name: str, floats: bool) -> None:
    ours, theirs = (penalised(LAYERS[name], fmt, floats) for fmt in ("lns16", None))
    for mine, other in zip(ours, theirs, strict=True):
        if other is None or other.norm() < 1e-6:
            continue
        assert mine is not None
        assert (mine.to_float() - other).norm() < 0.1 * other.norm()


STEPS: dict[str, Any] = {
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (6,), w, b), (5, 6)),
    "plain_layer_norm": (lambda x, w, b: functional.layer_norm(x, (6,)) * w + b, (5, 6)),
    "rms_norm": (lambda x, w, b: functional.rms_norm(x, (6,), w) + b, (5, 6)),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), (4, 6, 3, 3)),
    "instance_norm": (lambda x, w, b: functional.instance_norm(x, None, None, w, b), (4, 6, 3, 3)),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, True), (4, 6, 3, 3)
    ),
    "attention": (
        lambda x, w, b: functional.scaled_dot_product_attention(x * w, x / 4, x + b), (2, 5, 6)
    ),
    "causal_attention": (
        lambda x, w, b: functional.scaled_dot_product_attention(
            x * w, x / 4, x + b, is_causal=True
        ),
        (2, 5, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_second_derivatives_are_near_float64(name: str) -> None:
    """First derivatives in a graph equal those without a graph, bit for bit."""
    torch.manual_seed(0)
    function, shape = STEPS[name]
    given = [torch.randn(shape), torch.rand(6) + 0.5, torch.randn(6), torch.randn(shape)]
    *operands, seed = (LNSTensor.from_float(x, "lns16") for x in given)
    exact = [x.to_float().double().requires_grad_() for x in operands]
    for x in operands:
        x.requires_grad_()
    plain = torch.autograd.grad(function(*operands), operands, seed)
    found = torch.autograd.grad(function(*operands), operands, seed, create_graph=True)
    wanted = torch.autograd.grad(
        function(*exact), exact, seed.to_float().double(), create_graph=True
    )
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one.codes, other.codes)
    cubes = [sum(((g - 1) ** 2 * g).sum() for g in first) for first in (found, wanted)]
    ours, theirs = (
        torch.autograd.grad(cube, leaves[:2])
        for cube, leaves in zip(cubes, (operands, exact), strict=True)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.to_float() - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize(
    ("function", "second", "third"),
    [
        (lambda x: x.abs() * x, lambda x: 2 * x.sign(), lambda x: 0 * x),
        (lambda x: x.abs() + x**3, lambda x: 6 * x, lambda x: 6 + 0 * x),
        (lambda x: x.sign() * x**3, lambda x: 6 * x.abs(), lambda x: 6 * x.sign()),
        (lambda x: x.norm(p=1) * x, lambda x: 2 * x.sign(), lambda x: 0 * x),
    ],
)
def test_derivatives_of_absolute_values_and_signs(
    function: Callable[[Tensor], Tensor],
    second: Callable[[Tensor], Tensor],
    third: Callable[[Tensor], Tensor],
) -> None:
    for value in (-1.5, -0.25, 0.75, 2.0):
        x = LNSTensor.from_float(torch.tensor([value]), "lns16").requires_grad_()
        found = function(x)
        for expected in (None, second, third):
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)
            if expected is not None:
                exact = expected(x.detach().to_float())
                assert torch.allclose(found.detach().to_float(), exact, rtol=0.02, atol=1e-6)
            found = found + 0 * x  # so that a constant has a gradient, too


def test_statistics_alone_have_a_gradient() -> None:
    """A penalty that does not depend on the output of a norm, only on its divisor."""
    x = LNSTensor.from_float(torch.randn(4, 6), "lns16").requires_grad_()
    seed = LNSTensor.from_float(torch.randn(4, 6), "lns16").requires_grad_()
    (slope,) = torch.autograd.grad(functional.layer_norm(x, (6,)), x, seed, create_graph=True)
    first = torch.autograd.grad((slope * slope).sum(), [x, seed], create_graph=True)
    assert all(g.to_float().norm() > 0.1 for g in first)
    (third,) = torch.autograd.grad((first[0] * first[0]).sum(), x)
    assert third.to_float().norm() > 0.1


def critic_step(critic: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of WGAN-GP (arXiv:1704.00028), the gap, and the norms of slopes."""
    share = torch.rand(len(real), 1)
    between = share * real + (1 - share) * fake
    between = (between.detach() if isinstance(between, LNSTensor) else between).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norms = slope.norm(2, dim=1)
    gap = critic(real).mean() - critic(fake).mean()
    return 10 * ((norms - 1) ** 2).mean() - gap, gap, norms


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_critic_learns_under_a_gradient_penalty(norm: type[nn.Module]) -> None:
    """For two clouds at a distance of 2, which is the gap of a critic of slope 1."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 16), norm(16), nn.Tanh(), nn.Linear(16, 1))
    lns_ops.convert_(critic, "lns16", scope="everywhere")
    optimizer = lns_ops.optim.Adam(critic.parameters(), lr=0.02)
    shift = torch.tensor([2.0, 0.0])
    gaps, steepness = [], []
    for _ in range(120):
        real, fake = torch.randn(32, 2) * 0.3 + shift, torch.randn(32, 2) * 0.3
        loss, gap, norms = critic_step(critic, real, fake)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gaps.append(gap.item())
        steepness.append(norms.mean().item())
    assert gaps[0] < 1
    assert 1.6 < sum(gaps[-10:]) / 10 < 2.6
    assert 0.8 < sum(steepness[-10:]) / 10 < 1.25
