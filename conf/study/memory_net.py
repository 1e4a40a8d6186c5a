"""The net of ``memory``: layers of one width with tanh between them."""

from __future__ import annotations

from torch import nn


def make_net(inputs: int, classes: int, depth: int, width: int) -> nn.Sequential:
    """Return ``depth`` linear layers, each with tanh, and the linear layer of the classes."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(width, classes))
