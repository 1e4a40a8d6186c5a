"""A densely connected network for small images, as a chain of layers.

Each layer gets the channels of all layers of its block before it, and adds k of its own::

    x_l = [x_(l-1), H(x_(l-1))]                      channels: k_0 + k (l - 1)  ->  k_0 + k l
    H   = conv3x3 . relu . norm                      DenseNet, "plain"
    H   = conv3x3 . relu . norm . conv1x1 . relu . norm      DenseNet-BC, "bc", 4 k channels between

Layers with weights: a convolution of 3 x 3 to 16 channels (2 k with ``bc``), three blocks of n
layers with a transition after the first and the second, a linear layer behind norm, ReLU and the
mean over all places. A transition is ``pool2x2 . conv1x1 . relu . norm``; it keeps the number of
channels, with ``bc`` it halves it. Weights of convolutions are drawn as in
:mod:`trainers.models.resnet`, as the paper does after He et al. 2015b. Dropout, which the paper has
on CIFAR without augmentation, is left out.

A layer takes all channels before it through a concatenation that is kept for its gradient, so
memory grows with the square of a block's layers; the paper's later report (G. Pleiss et al. 2017,
arXiv:1707.06990) computes them again instead. Each layer of the chain hands on the concatenation,
so stages of a pipeline may be cut anywhere. What :mod:`trainers.models.resnet` says of batch norm
holds here too.

Source: G. Huang, Z. Liu, L. van der Maaten, K. Q. Weinberger 2017, "Densely Connected Convolutional
Networks" (arXiv:1608.06993), sections 3 and 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers.config.model import DenseNetArguments
from trainers.models.cnn import Images
from trainers.models.resnet import convolution

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
        first = _normed(inputs, BOTTLENECK * growth, 1) if bottleneck else []
        last = _normed(BOTTLENECK * growth if bottleneck else inputs, growth, 3)
        self.branch = nn.Sequential(*first, *last)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels of ``x`` and the layer's own."""
        return torch.cat([x, self.branch(x)], 1)


def densenet(args: DenseNetArguments, image: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return the chain of a first convolution, layers and transitions, and the linear layer.

    It maps images ``[B, C, H, W]``, or flat ones ``[B, C H W]``, to logits ``[B, classes]``.

    Args:
        args: depth, growth and variant.
        image: channels, height and width, (C, H, W).
        classes: number of classes.

    Raises:
        ValueError: the image is too small to be halved twice.
    """
    if min(image[1:]) < 4:
        raise ValueError(
            f"model.name=densenet with images of {image[1]} x {image[2]}: two transitions halve"
            " them; use images of at least 4 x 4, or model.name=mlp"
        )
    bottleneck = args.variant == "bc"
    channels = 2 * args.growth if bottleneck else FIRST
    layers: list[nn.Module] = [nn.Sequential(Images(image), convolution(image[0], channels, 3))]
    for block in range(3):
        if block:
            outputs = channels // 2 if bottleneck else channels
            layers.append(nn.Sequential(*_normed(channels, outputs, 1), nn.AvgPool2d(2)))
            channels = outputs
        for _ in range(args.block):
            layers.append(DenseLayer(channels, args.growth, bottleneck))
            channels += args.growth
    head = (nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), *head))


def _normed(inputs: int, outputs: int, size: int) -> list[nn.Module]:
    """Return batch norm, ReLU and a convolution without bias that keeps height and width."""
    return [nn.BatchNorm2d(inputs), nn.ReLU(), convolution(inputs, outputs, size)]
