"""A residual network for small images, as a chain of blocks.

Layers with weights: a convolution of 3 x 3, three stages of n blocks, a linear layer, 6 n + 2 in
all. A block is ``y = relu(x' + norm(conv(relu(norm(conv(x))))))`` with convolutions of 3 x 3 and
``x' = x``; the first block of the second and third stage has stride 2 and twice the channels, and
there ``x' = norm(conv(x))`` with a convolution of 1 x 1. The paper pads ``x`` with zeros there
instead (its option A; this is its option B), so widths and results are near, not equal. Weights of
convolutions are drawn as He et al. 2015b propose: normal, with standard deviation
``sqrt(2 / (k k outputs))``.

Batch norm takes means and variances over the examples that a worker computes with at a time: a
micro-batch of a replica. So ``layout.dp`` and ``layout.micro_batches`` change the function that is
trained; cutting the chain into stages does not. Running statistics are updated once a micro-batch,
and averaged over the replicas at the end of an epoch.

Source: K. He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385),
section 4.2; K. He et al. 2015b, "Delving Deep into Rectifiers" (arXiv:1502.01852).
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from trainers.config.model import ResNetArguments
from trainers.models.init import normal_


class Block(nn.Module):
    """Two convolutions beside a shortcut, ``[B, inputs, H, W] -> [B, outputs, H/s, W/s]``.

    Args:
        inputs, outputs: channels.
        stride: s of the first convolution and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            convolution(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            convolution(outputs, outputs, 3),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.relu(self.shortcut(x) + self.branch(x))
        return y


def resnet(args: ResNetArguments, image: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return the chain of a first convolution, the blocks, and the linear layer of the classes.

    It maps images ``[B, C, H, W]``, or flat ones ``[B, C H W]``, to logits ``[B, classes]``.

    Args:
        args: depth and width.
        image: channels, height and width, (C, H, W).
        classes: number of classes.
    """
    blocks, inputs = (args.depth - 2) // 6, args.width
    layers: list[nn.Module] = [
        nn.Sequential(
            nn.Flatten(),
            nn.Unflatten(1, image),
            convolution(image[0], inputs, 3),
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
        )
    ]
    for stage in range(3):
        for block in range(blocks):
            outputs, stride = args.width << stage, 2 if stage and not block else 1
            layers.append(Block(inputs, outputs, stride))
            inputs = outputs
    head = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(*layers, head)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps height and width but for its stride, without bias, its weight
    drawn as He et al. 2015b propose."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    normal_(layer, weight=math.sqrt(2 / (size * size * outputs)))
    return layer
