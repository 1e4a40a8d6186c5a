"""What networks written out by hand share: their list, their inputs, and a module of functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.network import Made, Network

NETWORKS: list[Network] = []
IMAGES, FEATURES, TOKENS = (4, 3, 16, 16), (6, 10), (3, 9)


def by_hand(make: Callable[[], Made]) -> Callable[[], Made]:
    name = make.__name__.strip("_").replace("_", "-")
    NETWORKS.append(Network(name=name, library="by hand", make=make))
    return make


def tokens(rows: int = TOKENS[0], length: int = TOKENS[1]) -> Tensor:
    return torch.randint(0, 30, (rows, length))


class Calls(nn.Module):
    """A module whose forward pass is a function of itself and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Loss(tuple[Tensor]):
    """A result that is a loss already."""

    def __new__(cls, loss: Tensor) -> Loss:
        return super().__new__(cls, (loss,))

    @property
    def loss(self) -> Tensor:
        return self[0]


def sinusoids(length: int, width: int) -> Tensor:
    at = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, width, 2) * (-math.log(1e4) / width)
    )
    return torch.stack([at.sin(), at.cos()], -1).flatten(1)
