"""A small convolutional net.

It has 3 x 3 convolutions, each with ReLU and pooling to half the size, then linear layers with ReLU
between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from trainers.models.mlp import mlp


def cnn(inputs: int, channels: Sequence[int], hidden: Sequence[int], classes: int) -> nn.Sequential:
    """Return convolutions of ``channels``, then linear layers ``features - hidden... - classes``.

    The input is ``[B, inputs]``, a square grey image a row; the output is logits ``[B, classes]``.

    Raises:
        ValueError: ``inputs`` is no square, or the image is too small to be halved so often.
    """
    side = math.isqrt(inputs)
    if side * side != inputs or side >> len(channels) == 0:
        raise ValueError(
            f"model.name=cnn with {inputs} inputs and {len(channels)} convolutions: needs square"
            " images that can be halved so often; use model.name=mlp, or fewer model.channels"
        )
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side, side))]
    for fan_in, fan_out in pairwise([1, *channels]):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    features = channels[-1] * (side >> len(channels)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), *mlp(features, hidden, classes))
