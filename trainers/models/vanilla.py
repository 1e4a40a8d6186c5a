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
from torch import nn

from trainers.config.model import REDUCED, VanillaArguments
from trainers.models.cnn import Images
from trainers.models.init import normal_, orthogonal_

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


def vanilla(args: VanillaArguments, inputs: int, classes: int) -> nn.Sequential:
    """Return ``args.depth`` linear layers, each with tanh, and the linear layer of the classes.

    The input is ``[B, inputs]``, the output is logits ``[B, classes]``.

    Args:
        args: depth, width and initial weights.
        inputs: values of an example.
        classes: number of classes.
    """
    sigma_b, _ = critical_bias(args.sigma_w)
    layers: list[nn.Module] = []
    for index in range(args.depth):
        layer = nn.Linear(args.width if index else inputs, args.width)
        _initial_(layer, args, layer.in_features, 1.0, sigma_b)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(args.width, classes))


def vanilla_convolutions(
    args: VanillaArguments, image: tuple[int, int, int], classes: int
) -> nn.Sequential:
    """Return ``args.depth`` convolutions, each with tanh, and the linear layer of the classes.

    The input is images ``[B, C, H, W]``, or laid flat; the output is logits ``[B, classes]``. The
    convolutions give ``[B, width, H/2, W/2]``, then ``[B, width, H/4, W/4]``, sides rounded up.

    Args:
        args: depth, width (channels), kernel and initial weights.
        image: channels, height and width, (C, H, W).
        classes: number of classes.
    """
    sigma_b, _ = critical_bias(args.sigma_w)
    inputs, height, width = image
    layers: list[nn.Module] = [Images(image)]
    for index in range(args.depth):
        stride = 2 if index < REDUCED else 1
        layer = nn.Conv2d(inputs, args.width, args.kernel, stride, padding=args.kernel // 2)
        gain = math.sqrt(max(1.0, args.width / inputs))
        _initial_(layer, args, args.kernel**2 * inputs, gain, sigma_b)
        layers += [layer, nn.Tanh()]
        inputs, height, width = args.width, -(-height // stride), -(-width // stride)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * height * width, classes))


def _initial_(
    layer: nn.Module, args: VanillaArguments, fan_in: int, gain: float, sigma_b: float
) -> None:
    """Let weights and biases of a layer be drawn as ``args.init`` says.

    Args:
        layer: linear layer or convolution.
        args: arguments of the model.
        fan_in: number of terms of an output.
        gain: factor on the orthogonal matrix besides ``sigma_w``: ``sqrt(outputs / inputs)`` where
            it has more rows than columns, so that its elements have the variance ``sigma_w^2 /
            inputs`` of the equations.
        sigma_b: standard deviation of biases beside orthogonal weights.
    """
    if args.init == "orthogonal":
        orthogonal_(layer, args.sigma_w * gain)
        normal_(layer, bias=sigma_b)
    else:
        normal_(layer, weight=math.sqrt(2 / fan_in), bias=0)
