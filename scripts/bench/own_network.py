"""A small network as a user writes one, for ``own_network.yaml``."""

from __future__ import annotations

from torch import nn


def net() -> nn.Module:
    """Return a network of 64 inputs, 16 hidden units and ten classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
