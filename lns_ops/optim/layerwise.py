"""Optimizers for large batches that scale each step by the norm of a layer's weights: LARS, LAMB.

A tensor's norm is a float64 number, computed from counts of magnitudes
(:func:`lns_ops.functional.reductions.norm`), so squares cannot leave the range of a narrow format.
Only the ratio of two norms is rounded to the format. Groups with ``adapt=False`` use the ratio 1;
as in both papers, these should be biases and the weights of normalization layers.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import Rounding, check_range
from lns_ops.optim.composed import ComposedOptimizer, WithBetas, adam_direction


def _scaled(x: ParameterMath, direction: Tensor, ratio: Tensor, defined: Tensor) -> Tensor:
    """Return ``ratio direction``, or ``direction`` if a zero norm makes the ratio undefined."""
    return x.mul(direction, x.at_least_smallest(torch.where(defined, ratio, 1.0)))


class LARS(ComposedOptimizer):
    """SGD with momentum whose step size is relative to the norm of each layer's weights.

    ::

        g = grad + weight_decay w
        ratio = trust_coefficient ||w|| / (||grad|| + weight_decay ||w||)
        buffer = momentum buffer + ratio g
        w += -lr buffer                                       (nesterov: ratio g + momentum buffer)

    The ratio is 1 where a norm is zero, or without ``adapt``.

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        momentum: in [0, 1).
        weight_decay: at least 0, added to the gradient.
        trust_coefficient: positive.
        nesterov: use Nesterov momentum.
        adapt: whether to use the ratio; can be set per group.
        rounding: ``kahan_sum``, ``stochastic_rounding``, ``seed``, ``arithmetic``, ``maximize``:
            :class:`lns_ops.optim.base.Rounding`.

    State: ``step``, ``momentum_buffer``.

    Raises:
        ValueError: a value is out of range or underflows, or the momentum rounds to 1, in a
            parameter's format.

    Source: Y. You, I. Gitman, B. Ginsburg 2017 (arXiv:1708.03888).

    >>> model = torch.nn.Linear(4, 2)
    >>> biases = {"params": [model.bias], "adapt": False, "weight_decay": 0.0}
    >>> optimizer = LARS([{"params": [model.weight]}, biases], lr=0.1, weight_decay=1e-4)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3, nesterov: bool = False, adapt: bool = True,
        **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("momentum", momentum, 0, 1, "0.9")
        if not 0 < trust_coefficient < math.inf:
            raise ValueError(
                f"trust_coefficient={trust_coefficient}: must be positive and finite, for example"
                " 0.001"
            )
        if nesterov and not momentum:
            raise ValueError(
                "nesterov=True with momentum=0: Nesterov momentum needs a momentum; use"
                " momentum=0.9"
            )
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, options | {"nesterov": nesterov, "adapt": adapt}, rounding)

    def _decays(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum": group["momentum"]}

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        direction, decay = x.decayed(group["weight_decay"]), group["weight_decay"]
        if group["adapt"]:
            weight, grad = x.norm(x.weight), x.norm(x.grad)
            ratio = group["trust_coefficient"] * weight / (grad + decay * weight)
            direction = _scaled(x, direction, ratio, (weight > 0) & (grad > 0))
        if group["momentum"]:
            momentum, step = x.number(group["momentum"], "momentum"), direction
            direction = x.put(
                "momentum_buffer", x.add(x.mul(momentum, x.get("momentum_buffer")), step)
            )
            if group["nesterov"]:
                direction = x.add(step, x.mul(momentum, direction))
        x.descend(direction, group["lr"])


class LAMB(WithBetas):
    """AdamW whose direction is rescaled to the norm of each layer's weights.

    ::

        d = correction exp_avg / (root + eps_hat) + weight_decay w
        w += -lr (d ||w|| / ||d||)

    The first term of d is the direction of :class:`lns_ops.optim.Adam`. The ratio of norms is 1 if
    one is zero, or without ``adapt``.

    Args:
        params, lr, rounding: as for :class:`LARS`.
        betas, eps: as for :class:`lns_ops.optim.Adam`.
        weight_decay: at least 0, decoupled.
        adapt: whether to use the ratio; can be set per group.

    State: ``step``, ``exp_avg``; ``exp_avg_sq`` (float parameters) or its root and residue.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a
            parameter's format.

    Source: Y. You et al. 2020 (arXiv:1904.00962).
    """

    _factors: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.0, adapt: bool = True,
        **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        super().__init__(
            params,
            betas,
            {"lr": lr, "eps": eps, "weight_decay": weight_decay, "adapt": adapt},
            rounding,
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        direction = x.with_decay(adam_direction(x, x.grad, group), group["weight_decay"])
        if group["adapt"]:
            weight, length = x.norm(x.weight), x.norm(direction)
            direction = _scaled(x, direction, weight / length, (weight > 0) & (length > 0))
        x.descend(direction, group["lr"])
