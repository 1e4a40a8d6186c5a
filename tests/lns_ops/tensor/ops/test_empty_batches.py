"""Batches without examples, as a mixture gives an expert that gets no token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lns_ops import LNSTensor, convert_
from lns_ops.tensor import in_float32
from tests.lns_ops.tensor.twins import FMT

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear of rows": (lambda: nn.Linear(4, 3), (0, 4)),
    "Linear of no sequences": (lambda: nn.Linear(4, 3), (0, 5, 4)),
    "Linear of empty sequences": (lambda: nn.Linear(4, 3, bias=False), (2, 0, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (0, 5, 4)),
    "LayerNorm without a weight": (lambda: nn.LayerNorm(4, elementwise_affine=False), (0, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (0, 5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (0, 4, 7)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), (0, 3, 6, 6)),
    "Transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (0, 5, 4)),
}


@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_nothing_and_its_parameters_gradients_of_zero(name: str, scope: str) -> None:
    make, shape = LAYERS[name]
    exact, x = make(), torch.empty(shape, requires_grad=True)
    layer = convert_(make(), FMT, scope=scope)
    y = layer(x)
    y.sum().backward()
    assert y.shape == exact(torch.empty(shape)).shape
    assert x.grad is not None
    assert x.grad.shape == shape
    for p in layer.parameters():
        assert p.grad is not None
        assert p.grad.shape == p.shape
        assert not in_float32(p.grad).any()


def test_second_derivatives_of_no_rows() -> None:
    layer = convert_(nn.Linear(4, 3), FMT, scope="everywhere")
    x = LNSTensor.from_float(torch.empty(2, 0, 4), FMT).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (dw,) = torch.autograd.grad(dx.square().sum(), layer.weight)
    assert dw.shape == (3, 4)
    assert not dw.codes.any()


def test_a_product_over_no_columns_is_zero() -> None:
    x = LNSTensor.from_float(torch.empty(2, 3, 0), FMT)
    w = LNSTensor.from_float(torch.empty(4, 0), FMT)
    y = torch.nn.functional.linear(x, w)
    assert y.shape == (2, 3, 4)
    assert not y.codes.any()


@pytest.mark.parametrize(
    "pick",
    [
        lambda w, places: w[places],
        lambda w, places: torch.nn.functional.embedding(places, w),
        lambda w, places: w.index_select(0, places.flatten()),
    ],
)
def test_rows_picked_by_an_empty_index_have_a_gradient_of_zero(
    pick: Callable[[Tensor, Tensor], Tensor],
) -> None:
    w = LNSTensor.from_float(torch.randn(5, 4), FMT).requires_grad_()
    picked = pick(w, torch.empty(0, 3, dtype=torch.int64))
    assert picked.shape[-1] == 4
    assert not picked.numel()
    picked.sum().backward()
    assert w.grad is not None
    assert w.grad.shape == (5, 4)
    assert not w.grad.codes.any()


@pytest.mark.parametrize("shape", [(0, 4, 7), (3, 4, 0)])
def test_normalizing_nothing_gives_nothing_as_in_torch(shape: tuple[int, ...]) -> None:
    for make in (lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4)):
        assert make()(torch.empty(shape)).shape == shape
        layer = convert_(make(), FMT, scope="everywhere")
        assert layer(LNSTensor.from_float(torch.empty(shape), FMT)).shape == shape
