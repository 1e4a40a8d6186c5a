"""Products that a checkpoint recomputes in the backward pass, in scope matmul."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import lns_ops
from tests.lns_ops.nn.test_own_products import Rows


class Anew(nn.Module):
    """A product, and a layer, that are recomputed in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.inner = nn.Sequential(nn.Linear(8, 8), Rows())
        self.function, self.options = True, {"use_reentrant": reentrant}

    def product(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, **self.options)
        if self.function:
            return checkpoint(self.product, x, **self.options)
        with torch.no_grad():
            shown = self.product(x)
        return self.product(x) + shown


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_that_is_computed_anew_outside_of_its_module_raises(reentrant: bool) -> None:
    """Its gradients would be the gradients of float32 products; a module's are correct."""
    net = lns_ops.convert_(Anew(reentrant), lns_ops.lns8, scope="matmul")
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises((RuntimeError, CheckpointError), match=r"[Cc]heckpoint"):
        net(x).sum().backward()
    net.function = False
    net(x).sum().backward()
    assert x.grad is not None
    again = x.detach().clone().requires_grad_()
    net.options = {"use_reentrant": not reentrant}
    net(again).sum().backward()
    assert torch.equal(again.grad, x.grad)
