"""Products that modules compute themselves: scope matmul leaves them, and says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lns_ops


class Adapter(nn.Module):
    """LoRA, whose base layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.a = nn.Parameter(torch.ones(2, 6))
        self.b = nn.Parameter(torch.ones(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight, self.base.bias) + x @ self.a.t() @ self.b.t()


class Wrapper(nn.Module):
    """A module without weights of its own that multiplies by those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight * 1.0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->bo", x, self.weights)


class Positions(nn.Module):
    """A module with a matrix that it adds, and attention by hand: nothing to name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 6))
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scores(x + self.table)
        return y


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.t(), -1) @ x


CASES = {"adapter": Adapter, "wrapper": Wrapper, "experts": Experts, "positions": Positions}
NAMED = {
    "adapter": {"0.base.weight": 1, "0.a": 1, "0.b": 1},
    "wrapper": {"0.layer.weight": 1},
    "experts": {"0.weights": 1},
    "positions": {},
}


def converted(name: str) -> nn.Module:
    torch.manual_seed(0)
    return lns_ops.convert_(nn.Sequential(CASES[name](), nn.Linear(6, 2)), "lns16")


@pytest.mark.parametrize("name", list(CASES))
def test_the_summary_names_modules_that_multiply_weights_themselves(name: str) -> None:
    text = lns_ops.summary(converted(name))
    assert ("0 computes products itself" in text) == (name != "positions")
    if name == "adapter":
        assert "(@, linear), and those with weights stay float32" in text


@pytest.mark.parametrize("name", list(CASES))
def test_float32_products_counts_those_with_weights(name: str) -> None:
    model, x = converted(name), torch.randn(4, 6)
    with lns_ops.float32_products(model) as found:
        model(x)
    assert dict(found) == NAMED[name]  # and not the LNS product of layer 1


def test_an_unconverted_layer_counts_too() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 3), nn.Linear(4, 2))
    lns_ops.convert_(model, "lns16", filter_fn=lambda layer, name: name == "1")
    with lns_ops.float32_products(model) as found:
        model(torch.randn(2, 1, 6))
    assert dict(found) == {"0.weight": 1}
