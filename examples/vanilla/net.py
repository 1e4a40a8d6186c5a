"""A very deep vanilla net: linear layers of one width, or convolutions of as many channels, with
tanh between them, without shortcuts or norms.

With a wide layer's pre-activations of variance q, weights of variance ``sigma_w^2 / width`` and
biases of variance ``sigma_b^2``, the next layer's variance and the factor on a gradient's square
are::

    q'  = sigma_w^2 E[tanh(sqrt(q) z)^2] + sigma_b^2
    chi = sigma_w^2 E[tanh'(sqrt(q) z)^2],                        z standard normal

Signals and gradients neither vanish nor explode where chi is 1 at the fixed point of q, which for a
``sigma_w`` above 1 one ``sigma_b`` gives. With orthogonal weights all singular values of a layer
are alike, so that those of the whole net stay near 1 (dynamical isometry) and any depth trains.
Kaiming's normal weights have ``sigma_w^2 = 2``, made for ReLU: a deep tanh net is chaotic with
them.

Sources: S. Schoenholz et al. 2017, "Deep Information Propagation" (arXiv:1611.01232), for q and
chi; L. Xiao et al. 2018, "Dynamical Isometry and a Mean Field Theory of CNNs" (arXiv:1806.05393),
who train 10,000 convolutions so, with ``sigma_w^2 = 1.05``; K. He et al. 2015 (arXiv:1502.01852)
for Kaiming.

**Convolutions** (``kernel`` above 0) have Xiao et al.'s delta-orthogonal kernels, an orthogonal
matrix in the centre and zeros around it: at first a net of linear layers at every place, which
obeys the equations above, with ``inputs`` for the width where they differ. The first two
convolutions have stride 2, so that a deep net computes at a sixteenth of the places, and zeros
surround the images, where the paper's theory has periodic ones; neither changes the equations.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

INITIALS = ("orthogonal", "kaiming")
REDUCED = 2
"""The number of convolutions that have stride 2, the first ones."""
POINTS = 200
"""Number of points of the Gauss-Hermite quadrature."""


def critical_bias(sigma_w: float) -> tuple[float, float]:
    """Return ``sigma_b`` with which chi is 1, and the variance q of pre-activations there.

    Args:
        sigma_w: standard deviation of a weight times ``sqrt(width)``, above 1.
    """
    z, weight = np.polynomial.hermite_e.hermegauss(POINTS)
    weight = weight / weight.sum()
    low, high = 0.0, 16.0
    while high - low > 1e-12 * high:
        q = (low + high) / 2
        chi = sigma_w**2 * float(weight @ np.cosh(math.sqrt(q) * z) ** -4.0)
        low, high = (q, high) if chi > 1 else (low, q)
    variance = high - sigma_w**2 * float(weight @ np.tanh(math.sqrt(high) * z) ** 2)
    return math.sqrt(max(0.0, variance)), high


def make_net(
    inputs: int | tuple[int, ...],
    classes: int,
    depth: int = 10,
    width: int = 64,
    init: str = "orthogonal",
    sigma_w: float = 1.0247,
    kernel: int = 0,
) -> nn.Sequential:
    """Return ``depth`` layers, each with tanh, and the linear layer of the classes.

    The input is ``[B, ...]``, images ``[B, C, H, W]`` for convolutions, or laid flat; the output is
    logits ``[B, classes]``. The convolutions give ``[B, width, H/2, W/2]``, then ``[B, width, H/4,
    W/4]``, sides rounded up.

    Args:
        inputs: shape of an example, or the number of its values.
        classes: number of classes.
        depth: layers with tanh.
        width: units of each, or channels.
        init: ``orthogonal``, with the biases with which ``sigma_w`` is critical, or ``kaiming``.
        sigma_w: singular value of orthogonal weights.
        kernel: side of the kernels of convolutions, odd; 0 for linear layers.

    Raises:
        ValueError: an argument of which no network can be made.
    """
    check(init, sigma_w, kernel)
    if kernel:
        return convolutions(image_shape(inputs), classes, depth, width, kernel, init, sigma_w)
    sigma_b = critical_bias(sigma_w)[0]
    layers: list[nn.Module] = [nn.Flatten()]
    fan_in = inputs if isinstance(inputs, int) else math.prod(inputs)
    for _ in range(depth):
        layer = nn.Linear(fan_in, width)
        initialize_(layer, init, sigma_w, sigma_b)
        layers += [layer, nn.Tanh()]
        fan_in = width
    return nn.Sequential(*layers, nn.Linear(fan_in, classes))


def convolutions(
    image: tuple[int, int, int],
    classes: int,
    depth: int,
    width: int,
    kernel: int,
    init: str,
    sigma_w: float,
) -> nn.Sequential:
    """Return the net of convolutions; arguments as of :func:`make_net`."""
    sigma_b = critical_bias(sigma_w)[0]
    layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, image)]
    channels, height, side = image
    for index in range(depth):
        stride = 2 if index < REDUCED else 1
        layer = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2)
        initialize_(layer, init, sigma_w * math.sqrt(max(1.0, width / channels)), sigma_b)
        layers += [layer, nn.Tanh()]
        channels, height, side = width, -(-height // stride), -(-side // stride)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * side, classes))


def check(init: str, sigma_w: float, kernel: int) -> None:
    """Refuse arguments of which no network can be made.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    if init not in INITIALS:
        raise ValueError(f"init={init!r}: must be orthogonal or kaiming; use orthogonal")
    if kernel < 0 or (kernel and kernel % 2 == 0):
        raise ValueError(
            f"kernel={kernel}: must be odd, as an orthogonal matrix is put in the kernel's centre,"
            " or 0 for linear layers; use for example 3"
        )
    if not 1 < sigma_w <= 2:
        raise ValueError(
            f"sigma_w={sigma_w}: must be above 1, where a bias makes it critical, and at most 2;"
            " use for example 1.0247"
        )


@torch.no_grad()
def initialize_(layer: nn.Linear | nn.Conv2d, init: str, gain: float, sigma_b: float) -> None:
    """Draw weights and biases of a layer from torch's random numbers.

    Args:
        layer: linear layer, or convolution with kernels of odd sides.
        init: ``orthogonal`` or ``kaiming``.
        gain: factor on the orthogonal matrix. Of a convolution it is ``sigma_w`` times
            ``sqrt(outputs / inputs)`` where the matrix has more rows than columns, so that its
            elements have the variance ``sigma_w^2 / inputs`` of the equations.
        sigma_b: standard deviation of biases beside orthogonal weights.
    """
    weight = layer.weight
    if init == "kaiming":
        weight.normal_(0, math.sqrt(2 / weight[0].numel()))
        layer.bias.zero_()
        return
    layer.bias.normal_(0, sigma_b)
    if weight.dim() == 2:
        nn.init.orthogonal_(weight, gain)
        return
    matrix = nn.init.orthogonal_(weight.new_empty(weight.shape[:2]), gain)
    weight.zero_()
    weight.flatten(2)[:, :, weight[0, 0].numel() // 2] = matrix


def image_shape(inputs: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of an image; a number of pixels is a square grey one."""
    if isinstance(inputs, int):
        return 1, math.isqrt(inputs), math.isqrt(inputs)
    height, width = inputs[-2:]
    return inputs[0] if len(inputs) == 3 else 1, height, width
