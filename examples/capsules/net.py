"""A capsule network with dynamic routing: convolution, primary capsules, class capsules.

A capsule's answer is a vector whose direction says what is seen and whose length, below 1, how
probable it is. With ``s_j`` the input of capsule j of the upper layer and ``u_i`` the answers of
the lower::

    u_ji = u_i W_ij       c_i = softmax_j(b_i)       s_j = sum_i c_ij u_ji
    v_j = |s_j|^2 / (1 + |s_j|^2) s_j / |s_j|        (squash)
    b_ij = b_ij + u_ji v_j,                          from zeros, r times

Routing with r = 1 weighs all alike. The network's answers are the lengths of the class capsules,
for the loss ``margin``. Gradients pass through the last iteration
alone: the agreements ``b`` before are taken as given, as is usual. Nothing is reconstructed, which
the paper adds as a regulariser.

Source: S. Sabour, N. Frosst, G. E. Hinton 2017, "Dynamic Routing Between Capsules"
(arXiv:1710.09829).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

DIMENSIONS = 8, 16
"""Numbers of a primary capsule and of a class capsule, as in the paper."""
SMALLEST = 2.0**-12
"""The number that is added to squares before their root, so that its gradient at 0 is finite; also
in 12-bit LNS, whose numbers end at 2^-16."""
STD = 0.1
"""Standard deviation of the initial weights between capsules."""


def squash(s: Tensor) -> Tensor:
    """Return ``|s|^2 / (1 + |s|^2) s / |s|`` along the last dimension."""
    square = (s * s).sum(-1, keepdim=True)
    return s * (square / (1 + square) / torch.sqrt(square + SMALLEST))


class PrimaryCapsules(nn.Module):
    """A convolution whose channels are capsules, ``[B, C, H, W] -> [B, N, 8]``, squashed.

    Args:
        channels: number of channels of the images.
        types: capsules at each place of the convolution's result.
        kernel: side of its kernel; its stride is 2.
    """

    def __init__(self, channels: int, types: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, types * DIMENSIONS[0], kernel, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the capsules of all types and places."""
        y = self.convolution(x)
        return squash(y.unflatten(1, (-1, DIMENSIONS[0])).movedim(2, -1).flatten(1, 3))


class ClassCapsules(nn.Module):
    """The lengths of the capsules of the classes, ``[B, N, 8] -> [B, classes]``.

    Args:
        capsules: N, of the layer below.
        classes: number of capsules.
        iterations: r, of the routing.
    """

    def __init__(self, capsules: int, classes: int, iterations: int) -> None:
        super().__init__()
        shape = capsules, DIMENSIONS[0], classes * DIMENSIONS[1]
        self.weight = nn.Parameter(STD * torch.randn(shape))
        self.classes, self.iterations = classes, iterations

    def forward(self, u: Tensor) -> Tensor:
        """Return ``|v_j|``."""
        votes_NBK = torch.bmm(u.transpose(0, 1), self.weight)
        votes = votes_NBK.transpose(0, 1).unflatten(2, (self.classes, DIMENSIONS[1]))
        v = self.route(votes)
        return torch.sqrt((v * v).sum(-1) + SMALLEST)

    def route(self, votes: Tensor) -> Tensor:
        """Return the capsules ``v`` [B, classes, 16] on which ``votes`` [B, N, classes, 16]
        agree."""
        given = votes.detach()
        agreement = given.new_zeros(given.shape[:-1])
        for _ in range(self.iterations - 1):
            v = squash((agreement.softmax(-1).unsqueeze(-1) * given).sum(1))
            agreement = agreement + (given * v.unsqueeze(1)).sum(-1)
        return squash((agreement.softmax(-1).unsqueeze(-1) * votes).sum(1))


def make_net(
    inputs: int | tuple[int, ...],
    classes: int,
    channels: int = 256,
    types: int = 32,
    kernel: int = 9,
    iterations: int = 3,
) -> nn.Sequential:
    """Return the network; it takes images ``[B, C, H, W]``, or square grey ones laid flat.

    Args:
        inputs: shape of an image, (C, H, W) or (H, W), or the number of its pixels.
        classes: number of classes.
        channels: number of channels of the first convolution.
        types: primary capsules at each place.
        kernel: side of both convolutions' kernels.
        iterations: number of iterations of the routing.

    Raises:
        ValueError: the image is too small for the two kernels.
    """
    image = image_shape(inputs)
    height, width = (places(places(side, kernel, 1), kernel, 2) for side in image[1:])
    if height < 1 or width < 1:
        raise ValueError(
            f"kernel={kernel} with images of {image[1]} x {image[2]}: two convolutions must fit"
            " into it; use a smaller kernel, for example 3"
        )
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, image),
        nn.Conv2d(image[0], channels, kernel),
        nn.ReLU(),
        PrimaryCapsules(channels, types, kernel),
        ClassCapsules(height * width * types, classes, iterations),
    )


def image_shape(inputs: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of an image; a number of pixels is a square grey one."""
    if isinstance(inputs, int):
        return 1, math.isqrt(inputs), math.isqrt(inputs)
    height, width = inputs[-2:]
    return inputs[0] if len(inputs) == 3 else 1, height, width


def places(side: int, kernel: int, stride: int) -> int:
    """Return how many places a kernel has along a side."""
    return (side - kernel) // stride + 1
