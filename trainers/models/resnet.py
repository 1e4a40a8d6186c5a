"""A residual network for small images, as a chain of blocks.

Layers with weights: a 3 x 3 convolution, three stages of n blocks, a linear layer, 6 n + 2 in
total. A block is ``y = relu(x' + norm(conv(relu(norm(conv(x))))))`` with 3 x 3 convolutions and
``x' = x``. The first block of the second and third stage has stride 2 and twice the channels, and
``x' = norm(conv(x))`` with a 1 x 1 convolution. The paper pads ``x`` with zeros there instead (its
option A; this is its option B), so sizes and results are similar but not equal. Weights of
convolutions are drawn as in He et al. 2015b: normal, with standard deviation
``sqrt(2 / (k k outputs))``.

Batch norm computes means and variances over a micro-batch of a replica. So ``layout.dp`` and
``layout.micro_batches`` change the function that is trained, but pipeline stages do not. Running
statistics are updated once per micro-batch, and averaged over the replicas at the end of an epoch.

Source: K. He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385),
section 4.2; K. He et al. 2015b, "Delving Deep into Rectifiers" (arXiv:1502.01852).
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from trainers.config.model import ResNetArguments
from trainers.models.init import normal_


class Block(nn.Module):
    """Two convolutions and a shortcut, ``[B, inputs, H, W] -> [B, outputs, H/s, W/s]``.

    Args:
        inputs, outputs: numbers of channels.
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
    """Return the chain of first convolution, blocks, and linear layer for the classes.

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
    """Return a convolution without bias, padded to keep height and width (divided by its stride);
    its weight is drawn as in He et al. 2015b."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    normal_(layer, weight=math.sqrt(2 / (size * size * outputs)))
    return layer
