"""A feed-forward net: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return the linear layers ``inputs - hidden[0] - ... - classes`` with ReLU between them.

    The input is ``[B, inputs]``, the output is logits ``[B, classes]``.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden, classes]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
