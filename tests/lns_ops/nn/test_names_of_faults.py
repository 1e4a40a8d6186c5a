"""Faults on a GPU name the converted module whose forward pass launched them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from lns_ops import convert_, revert_
from lns_ops.cuda import faults


class Asks(nn.Module):
    """A layer with a forward of its own that records the name a fault in it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.said = nn.Linear(2, 2), [""]
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(faults._named("encode"))
        if x.shape[-1] != 2:
            raise RuntimeError("a wrong shape")
        return self.scale * functional.linear(x, self.layer.weight)


@pytest.mark.parametrize("scope", ["matmul", "everywhere"])
def test_faults_on_a_gpu_have_the_name_of_the_module(scope: str) -> None:
    model = convert_(nn.Sequential(nn.Linear(2, 2), Asks()), "lns12", scope=scope)
    asks: Any = model[1]
    model(torch.randn(3, 2))
    assert asks.said[-1] == "encode of module '1'"
    assert faults._named("encode") == "encode"
    with pytest.raises(RuntimeError, match="a wrong shape"):
        asks(torch.randn(3, 1))
    assert faults._named("encode") == "encode"
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.randn(3, 2))
        assert copied[1].said[-1] == "encode of module '1'"
    revert_(model)(torch.randn(3, 2))
    assert asks.said[-1] == "encode"
