"""A feed-forward net: linear layers with an activation function between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainers.config.model import FeedforwardArguments
from trainers.models.init import constant_

PLAIN = FeedforwardArguments()


class Swish(nn.Module):
    """The activation x sigmoid(beta x), which is silu(beta x) / beta.

    P. Ramachandran, B. Zoph, Q. V. Le 2017, "Searching for Activation Functions"
    (arXiv:1710.05941); with beta 1 also called SiLU. In LNS silu is one table, rounded once.

    Args:
        beta: positive constant; ReLU is the limit for large values.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of ``x``, elementwise."""
        if self.beta == 1.0:
            return nn.functional.silu(x)
        return nn.functional.silu(x * self.beta) / self.beta


class SwishBeta(nn.Module):
    """The activation x sigmoid(beta x) with a trained beta, one per layer.

    With ``s = sigmoid(beta x)`` and the output's gradient g, the gradient of beta is ``sum g x^2 s
    (1 - s)`` over all elements. Unlike the gradient of ``silu(beta x) / beta`` it has no
    subtraction of similar terms, so coarse formats represent it well. Source: see :class:`Swish`,
    section 5.1, where beta is initialised with 1.

    Args:
        beta: initial value.
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.empty(1))
        constant_(self, beta=beta)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of ``x``, elementwise."""
        return x * torch.sigmoid(self.beta * x)


def make_activation(arguments: FeedforwardArguments) -> nn.Module:
    """Return the activation function of a model's arguments as a module."""
    kinds = {"swish": Swish, "swish_beta": SwishBeta}
    return (
        nn.ReLU() if arguments.activation == "relu" else kinds[arguments.activation](arguments.beta)
    )


def mlp(
    inputs: int, hidden: Sequence[int], classes: int, arguments: FeedforwardArguments = PLAIN
) -> nn.Sequential:
    """Return the linear layers ``inputs - hidden[0] - ... - classes`` with activations between.

    The input is ``[B, inputs]``, the output is logits ``[B, classes]``.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *hidden, classes]):
        layers += [nn.Linear(fan_in, fan_out), make_activation(arguments)]
    return nn.Sequential(*layers[:-1])
