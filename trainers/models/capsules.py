"""A capsule network with dynamic routing: convolution, primary capsules, class capsules.

A capsule's answer is a vector whose direction says what is seen and whose length, below 1, how
probable it is. With ``s_j`` the input of capsule j of the upper layer and ``u_i`` the answers of
the lower::

    u_ji = u_i W_ij       c_i = softmax_j(b_i)       s_j = sum_i c_ij u_ji
    v_j = |s_j|^2 / (1 + |s_j|^2) s_j / |s_j|        (squash)
    b_ij = b_ij + u_ji v_j,                          from zeros, r times

Routing with r = 1 weighs all alike. The network's answers are the lengths of the class capsules,
for the ``margin`` loss (:mod:`trainers.models.loss`). Gradients pass through the last iteration
alone: the agreements ``b`` before are taken as given, as is usual. Nothing is reconstructed, which
the paper adds as a regulariser.

Source: S. Sabour, N. Frosst, G. E. Hinton 2017, "Dynamic Routing Between Capsules"
(arXiv:1710.09829).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers.config.model import CapsuleArguments
from trainers.models.cnn import Images
from trainers.models.init import normal_

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
        self.weight = nn.Parameter(torch.empty(capsules, DIMENSIONS[0], classes * DIMENSIONS[1]))
        self.classes, self.iterations = classes, iterations
        normal_(self, weight=STD)

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


def capsules(args: CapsuleArguments, image: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return the network; the input is images, ``[B, C, H, W]`` or laid flat.

    Args:
        args: arguments of the model.
        image: channels, height and width, (C, H, W).
        classes: number of classes.

    Raises:
        ValueError: the image is too small for the two kernels.
    """
    height, width = (_places(_places(side, args.kernel, 1), args.kernel, 2) for side in image[1:])
    if height < 1 or width < 1:
        raise ValueError(
            f"model.name=capsules with images of {image[1]} x {image[2]} and"
            f" model.args.kernel={args.kernel}: two convolutions must fit into it; use a smaller"
            " kernel, for example 3"
        )
    return nn.Sequential(
        Images(image),
        nn.Conv2d(image[0], args.channels, args.kernel),
        nn.ReLU(),
        PrimaryCapsules(args.channels, args.types, args.kernel),
        ClassCapsules(height * width * args.types, classes, args.iterations),
    )


def _places(side: int, kernel: int, stride: int) -> int:
    """Return how many places a kernel has along a side."""
    return (side - kernel) // stride + 1
