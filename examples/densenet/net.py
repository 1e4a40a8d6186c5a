"""A densely connected network for small images, as a chain of layers.

Each layer gets the channels of all layers of its block before it, and adds k of its own::

    x_l = [x_(l-1), H(x_(l-1))]                      channels: k_0 + k (l - 1)  ->  k_0 + k l
    H   = conv3x3 . relu . norm                      DenseNet, "plain"
    H   = conv3x3 . relu . norm . conv1x1 . relu . norm      DenseNet-BC, "bc", 4 k channels between

Layers with weights: a convolution of 3 x 3 to 16 channels (2 k with ``bc``), three blocks of n
layers with a transition after the first and the second, a linear layer behind norm, ReLU and the
mean over all places. A transition is ``pool2x2 . conv1x1 . relu . norm``; it keeps the number of
channels, with ``bc`` it halves it. Weights of convolutions are normal with
standard deviation ``sqrt(2 / (k k outputs))`` (He et al. 2015b, arXiv:1502.01852), as in the paper.
Dropout, which the paper has on CIFAR without augmentation, is left out.

A layer takes all channels before it through a concatenation that is kept for its gradient, so
memory grows with the square of a block's layers; the paper's later report (G. Pleiss et al. 2017,
arXiv:1707.06990) computes them again instead. Batch norm takes means over what a worker computes
with at a time, so the number of replicas changes what is trained.

Source: G. Huang, Z. Liu, L. van der Maaten, K. Q. Weinberger 2017, "Densely Connected Convolutional
Networks" (arXiv:1608.06993), sections 3 and 4.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

VARIANTS = ("bc", "plain")
FIRST = 16
"""Channels of the first convolution of a plain DenseNet."""
BOTTLENECK = 4
"""Channels between the two convolutions of a layer of DenseNet-BC, over the growth."""


class DenseLayer(nn.Module):
    """A layer of a dense block, ``[B, inputs, H, W] -> [B, inputs + growth, H, W]``.

    Args:
        inputs: channels of all layers before it.
        growth: channels that it adds.
        bottleneck: whether a convolution of 1 x 1 comes first.
    """

    def __init__(self, inputs: int, growth: int, bottleneck: bool) -> None:
        super().__init__()
        first = normed(inputs, BOTTLENECK * growth, 1) if bottleneck else []
        last = normed(BOTTLENECK * growth if bottleneck else inputs, growth, 3)
        self.branch = nn.Sequential(*first, *last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels of ``x`` and the layer's own."""
        return torch.cat([x, self.branch(x)], 1)


def make_net(
    inputs: int | tuple[int, ...],
    classes: int,
    depth: int = 40,
    growth: int = 12,
    variant: str = "bc",
) -> nn.Sequential:
    """Return the chain of a first convolution, layers and transitions, and the linear layer.

    It maps images ``[B, C, H, W]``, or flat ones ``[B, C H W]``, to logits ``[B, classes]``.

    Args:
        inputs: shape of an image, (C, H, W) or (H, W), or the number of a square grey one's pixels.
        classes: number of classes.
        depth: layers with weights, L: with ``bc`` 6 n + 4, a first convolution, three blocks of n
            layers of two convolutions, two transitions and a linear layer; with ``plain`` 3 n + 4,
            where a layer has one convolution.
        growth: channels that a layer adds to those before it, k.
        variant: ``bc``, with convolutions of 1 x 1 to 4 k channels before those of 3 x 3, and
            transitions that halve the channels; or ``plain``, without either.

    Raises:
        ValueError: the depth does not fit the variant, or the image is too small to be halved
            twice.
    """
    image = image_shape(inputs)
    check(image, depth, growth, variant)
    bottleneck = variant == "bc"
    channels = 2 * growth if bottleneck else FIRST
    first = convolution(image[0], channels, 3)
    layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Unflatten(1, image), first)]
    for block in range(3):
        if block:
            outputs = channels // 2 if bottleneck else channels
            layers.append(nn.Sequential(*normed(channels, outputs, 1), nn.AvgPool2d(2)))
            channels = outputs
        for _ in range((depth - 4) // (6 if bottleneck else 3)):
            layers.append(DenseLayer(channels, growth, bottleneck))
            channels += growth
    head = (nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), *head))


def check(image: tuple[int, int, int], depth: int, growth: int, variant: str) -> None:
    """Refuse arguments of which no network can be made.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: must be bc or plain; use bc")
    layers = 6 if variant == "bc" else 3
    if depth <= 4 or (depth - 4) % layers:
        raise ValueError(
            f"depth={depth} with variant={variant}: must be {layers} n + 4; use for example 10, 22,"
            " 40 or 100"
        )
    if growth < 1:
        raise ValueError(f"growth={growth}: must be at least 1; use for example 12")
    if min(image[1:]) < 4:
        raise ValueError(
            f"images of {image[1]} x {image[2]}: two transitions halve them; use images of at least"
            " 4 x 4"
        )


def image_shape(inputs: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of an image; a number of pixels is a square grey one."""
    if isinstance(inputs, int):
        return 1, math.isqrt(inputs), math.isqrt(inputs)
    height, width = inputs[-2:]
    return inputs[0] if len(inputs) == 3 else 1, height, width


def convolution(inputs: int, outputs: int, size: int) -> nn.Conv2d:
    """Return a convolution that keeps height and width, without bias."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (size * size * outputs)))
    return layer


def normed(inputs: int, outputs: int, size: int) -> list[nn.Module]:
    """Return batch norm, ReLU and a convolution."""
    return [nn.BatchNorm2d(inputs), nn.ReLU(), convolution(inputs, outputs, size)]
