"""A very deep vanilla net: linear layers of one width with tanh between them, without shortcuts or
norms.

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
for Kaiming. Of a convolution their delta-orthogonal kernel is an orthogonal matrix in its centre;
here are linear layers, for which it is the matrix alone.
"""

from __future__ import annotations

import math

import numpy as np
from torch import nn

from trainers.config.model import VanillaArguments
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
        if args.init == "orthogonal":
            orthogonal_(layer, args.sigma_w)
            normal_(layer, bias=sigma_b)
        else:
            normal_(layer, weight=math.sqrt(2 / layer.in_features), bias=0)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(args.width, classes))
