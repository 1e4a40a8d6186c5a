"""A small convolutional net.

It has 3 x 3 convolutions, each followed by an activation and pooling to half the size, then linear
layers with activations between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from trainers.config.model import FeedforwardArguments
from trainers.models.mlp import PLAIN, make_activation, mlp


class Images(nn.Unflatten):
    """Reshapes a batch to images, flattened or not.

    Args:
        image: channels, height and width, (C, H, W).
    """

    def __init__(self, image: tuple[int, int, int]) -> None:
        super().__init__(1, image)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, [B, C, H, W] or [B, C H W], as [B, C, H, W]."""
        return super().forward(x.flatten(1))


def cnn(
    image: tuple[int, int, int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    arguments: FeedforwardArguments = PLAIN,
) -> nn.Sequential:
    """Return convolutions of ``channels``, then linear layers ``features - hidden... - classes``.

    The input is images, ``[B, C, H, W]`` or laid flat; the output is logits ``[B, classes]``.

    Args:
        image: channels, height and width, (C, H, W).
        channels: number of channels of each convolution.
        hidden: widths of linear layers before the last one.
        classes: number of classes.
        arguments: arguments with the activation function.

    Raises:
        ValueError: the image is too small for this number of poolings.
    """
    inputs, height, width = image
    halved = (height >> len(channels)) * (width >> len(channels))
    if not halved:
        raise ValueError(
            f"model.name=cnn with images of {height} x {width} and {len(channels)} convolutions:"
            " needs images that can be halved so often; use model.name=mlp, or fewer model.channels"
        )
    layers: list[nn.Module] = [Images(image)]
    for fan_in, fan_out in pairwise([inputs, *channels]):
        activation = make_activation(arguments)
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), activation, nn.MaxPool2d(2)]
    end = mlp(channels[-1] * halved, hidden, classes, arguments)
    return nn.Sequential(*layers, nn.Flatten(), *end)
