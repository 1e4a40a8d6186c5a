"""Gradients of gradients (gradient penalties): near float32, or refused; none is lost silently."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lns_ops


class Reshaped(nn.Module):
    """A layer of sequences or images, on rows of eight."""

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
    "softmax": nn.Softmax(-1),
    "logsoftmax": nn.LogSoftmax(-1),
    "lstm": Reshaped(nn.LSTM(8, 8, batch_first=True), 4, 8),
    "conv": Reshaped(nn.Conv2d(1, 1, 3, padding=1), 1, 2, 4),
    "maxpool": Reshaped(nn.Sequential(nn.MaxPool2d(2), nn.Upsample(scale_factor=2)), 1, 2, 4),
}
ONCE = {
    "layernorm": nn.LayerNorm(8),
    "rmsnorm": nn.RMSNorm(8),
    "groupnorm": nn.GroupNorm(2, 8),
    "batchnorm": nn.BatchNorm1d(8),
}


def penalised(layer: nn.Module, fmt: str | None, floats: bool) -> list[Tensor | None]:
    """Return the gradients of a penalty of the gradient of a net with this layer."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer)
    for part in layer.modules():  # not as drawn when the tests were collected
        if isinstance(part, nn.Conv2d | nn.LSTM):
            part.reset_parameters()
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(16, 4)
    if fmt:
        lns_ops.convert_(model, fmt, scope="everywhere")
        x = lns_ops.LNSTensor.from_float(x, lns_ops.lns16)
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


@pytest.mark.parametrize("name", ONCE)
def test_normalizations_refuse_a_second_derivative(name: str) -> None:
    with pytest.raises(RuntimeError, match="differentiate twice"):
        penalised(ONCE[name], "lns16", floats=False)


def test_causal_attention_refuses_a_second_derivative() -> None:
    q = lns_ops.LNSTensor.from_float(torch.randn(2, 4, 8), lns_ops.lns16).requires_grad_(True)
    out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    (slope,) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (slope * slope).sum().backward()
