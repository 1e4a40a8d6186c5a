"""How far a signal gets through an untrained net, beside what theory says: the loop of
``signal_propagation``, which trains nothing.

Two inputs of correlation 1/2 go through tanh layers of one width n, drawn as those of ``net.py``
are. With weights of variance ``sigma_w^2 / n`` and biases of variance ``sigma_b^2``, their
pre-activations have a correlation c that a layer of infinite width takes to::

    q c' = sigma_w^2 E[tanh(u) tanh(v)] + sigma_b^2,   u, v normal, variance q, correlation c

at the fixed point q (S. Schoenholz et al. 2017, arXiv:1611.01232). At the critical point ``1 - c``
falls with a power of the depth, so that inputs stay apart; with Kaiming's weights c itself falls by
a factor a layer, so that similar inputs become unlike.

In f bits of fraction the signal differs from that of the same weights in float64 by a share e: a
rounding errs by ``delta = 2^-f ln 2 / sqrt(12)``, the sum of n terms adds ``n / 2`` such errors and
tanh one more, and orthogonal layers keep those of all layers before them::

    e^2 = L (n / 2 + 1) delta^2                      after L layers, while it is small

Every trial reports what it measured over what theory says, at depth 1, 2, 4 and so on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from net import critical_bias, initialize_
from torch import Tensor, nn

import lns_ops
from trainers import LoopContext

PAIRS = 32
"""Pairs of inputs."""
LAYERS = 1 << 20
"""Distance between the seeds of two trials' layers."""
POINTS = 64
"""Points of the quadrature, of each of two variables."""


def train(config: dict[str, Any], context: LoopContext) -> dict[str, float]:
    """Send the inputs through the layers and report measured over theory at each octave of depth.

    ``config``: ``weights`` (critical, kaiming), ``sigma_w`` of critical ones, ``width``, and
    ``bits`` of fraction, or none for float32.

    Raises:
        ValueError: there are no such weights.
    """
    weights, bits, width = config["weights"], config["bits"], config["width"]
    if weights not in ("critical", "kaiming"):
        raise ValueError(f"weights={weights!r}: must be critical or kaiming; use critical")
    torch.manual_seed(context.seed)
    sigma_w = config["sigma_w"] if weights == "critical" else math.sqrt(2)
    sigma_b, q = critical_bias(sigma_w) if weights == "critical" else (0.0, fixed_point(sigma_w))
    z = torch.randn(2, PAIRS, width)
    first = math.sqrt(q) * torch.stack([z[0], 0.5 * z[0] + math.sqrt(0.75) * z[1]])
    signal = first if bits is None else rounded(first, bits)
    exact, theory, ratio = signal.double(), 0.5, math.nan
    for depth in range(1, 2 ** (context.trial.epochs - 1) + 1):
        torch.manual_seed(LAYERS * context.seed + depth)
        layer = nn.Linear(width, width)
        initialize_(layer, "orthogonal" if weights == "critical" else "kaiming", sigma_w, sigma_b)
        signal, exact = step(layer, signal, exact, bits)
        theory = correlation(theory, q, sigma_w, sigma_b)
        if depth & (depth - 1):
            continue
        if bits is not None:
            delta = 2.0**-bits * math.log(2) / math.sqrt(12)
            error = float((signal.double() - exact).norm() / exact.norm())
            ratio = error / (delta * math.sqrt(depth * (width / 2 + 1)))
        else:
            a, b = signal.double()
            c = float((a * b).sum() / (a.norm() * b.norm()))
            ratio = (
                (1 - c) / (1 - theory)
                if weights == "critical"
                else math.log(max(c, 1e-9)) / math.log(theory)
            )
        context.report({"validation/ratio": ratio})
    return {"test/ratio": ratio}


def step(
    layer: nn.Linear, signal: Tensor, exact: Tensor, bits: int | None
) -> tuple[Tensor, Tensor]:
    """Return pre-activations after a layer, as computed and in float64 with the same weights."""
    with torch.no_grad():
        if bits is None:
            return layer(signal.tanh()), exact
        net = nn.Sequential(nn.Tanh(), layer)
        lns_ops.convert_(net, form(bits), scope="everywhere")
        weight, bias = (floats(each).double() for each in (layer.weight, layer.bias))
        return floats(net(signal)), exact.tanh() @ weight.T + bias


def form(bits: int) -> str:
    """Return the format of ``bits`` of fraction, with a sign and five bits before the point."""
    return f"lns({bits + 6},{bits})"


def rounded(x: Tensor, bits: int) -> Tensor:
    """Return values as the format has them."""
    return floats(lns_ops.LNSTensor.from_float(x, form(bits)))


def floats(x: Tensor) -> Tensor:
    """Return an LNS tensor, or any, as float32."""
    return x.to_float() if isinstance(x, lns_ops.LNSTensor) else x


def correlation(c: float, q: float, sigma_w: float, sigma_b: float) -> float:
    """Return the correlation after a layer of infinite width, by Gauss-Hermite quadrature."""
    z, weight = np.polynomial.hermite_e.hermegauss(POINTS)
    weight = weight / weight.sum()
    u = np.tanh(math.sqrt(q) * z)
    v = np.tanh(math.sqrt(q) * (c * z[:, None] + math.sqrt(max(0.0, 1 - c * c)) * z))
    return (sigma_w**2 * float(np.einsum("i,j,i,ij", weight, weight, u, v)) + sigma_b**2) / q


def fixed_point(sigma_w: float) -> float:
    """Return the variance q of pre-activations that layers without biases keep."""
    z, weight = np.polynomial.hermite_e.hermegauss(POINTS)
    weight, q = weight / weight.sum(), 1.0
    for _ in range(1000):
        q = sigma_w**2 * float(weight @ np.tanh(math.sqrt(q) * z) ** 2)
    return q
