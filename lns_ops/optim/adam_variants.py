"""Variants of Adam: Adamax, NAdam, RAdam, and Lion.

Equations are evaluated in the order written, as in :mod:`lns_ops.optim.adaptive`.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch

from lns_ops.optim.backend_codes import Codes
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import Rounding, check_range
from lns_ops.optim.composed import WithBetas


class Adamax(WithBetas):
    """Adam with the largest gradient instead of the root mean square, as torch.optim.Adamax.

    ::

        g = grad + weight_decay w
        exp_avg = beta1 exp_avg + (1 - beta1) g
        exp_inf = max(beta2 exp_inf, |g| + eps)               with 16 bits below the ulp
        w += -lr ((exp_avg / exp_inf) / (1 - beta1^t))

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        betas: decays, in [0, 1) and [10^-6, 1).
        eps: positive; in LNS at least the format's smallest magnitude.
        weight_decay: at least 0, added to the gradient.
        rounding: ``kahan_sum``, ``stochastic_rounding``, ``seed``, ``arithmetic``, ``maximize``:
            :class:`lns_ops.optim.base.Rounding`.

    State: ``step``, ``exp_avg``, ``exp_inf`` and, in LNS, its residue.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a
            parameter's format.

    Source: D. Kingma, J. Ba 2015 (arXiv:1412.6980), section 7.1.
    """

    def __init__(
        self, params: Any, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        super().__init__(
            params, betas, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, rounding
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        grad, (beta1, beta2) = x.decayed(group["weight_decay"]), group["betas"]
        average = x.average("exp_avg", grad, beta1)
        eps = x.at_least_smallest(torch.tensor(group["eps"], dtype=torch.float64))
        largest = x.largest("exp_inf", x.add(x.absolute(grad), eps), beta2)
        x.descend(x.mul(x.div(average, largest), x.scalar(1 / x.gain(beta1))), group["lr"])


class NAdam(WithBetas):
    """Adam with Nesterov momentum; the update is torch.optim.NAdam's.

    ::

        mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2),  p_t = mu_1 ... mu_t,  c = sqrt(1 - beta2^t)
        g = grad + weight_decay w                             (decoupled: see the last line)
        exp_avg = beta1 exp_avg + (1 - beta1) g
        root = root(beta2 v + (1 - beta2) g^2)
        d = (g (c (1 - mu_t) / (1 - p_t)) + exp_avg (c mu_(t+1) / (1 - p_(t+1)))) / (root + eps c)
        w += -lr d                                            (decoupled: d + weight_decay w)

    Args:
        params, lr, betas, eps, weight_decay, rounding: as for :class:`Adamax`.
        momentum_decay: at least 0.
        decoupled_weight_decay: use decoupled weight decay, as AdamW does.

    State: ``step``, ``mu_product`` (float64), ``exp_avg``; ``exp_avg_sq`` (float parameters) or its
    root and residue.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a
            parameter's format.

    Source: T. Dozat 2016 (openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).
    """

    def __init__(
        self, params: Any, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        check_range("momentum_decay", momentum_decay, 0, math.inf, "4e-3")
        options = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        super().__init__(
            params, betas, options | {"decoupled_weight_decay": decoupled_weight_decay}, rounding
        )

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        (beta1, beta2), decay, decoupled = (
            group["betas"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )
        now, after = (
            beta1 * (1 - 0.5 * 0.96 ** ((x.steps + k) * group["momentum_decay"])) for k in (0, 1)
        )
        product = x.put("mu_product", x.first(1.0, x.get("mu_product")) * now)
        unbiased = (1 - beta2**x.steps).sqrt()
        grad = x.decayed(0.0 if decoupled else decay)
        average, root = x.average("exp_avg", grad, beta1), x.root_average("exp_avg_sq", grad, beta2)
        share = (1 - beta1**x.steps) / x.gain(beta1)  # 1 if beta1 is exact in the format
        direction = x.add(
            x.mul(grad, x.scalar(unbiased * (1 - now) / (1 - product))),
            x.mul(average, x.scalar(unbiased * after / (1 - product * after) * share)),
        )
        direction = x.div(direction, x.add(root, x.at_least_smallest(group["eps"] * unbiased)))
        x.descend(x.with_decay(direction, decay if decoupled else 0.0), group["lr"])


class RAdam(WithBetas):
    """Adam whose first steps are SGD with momentum; torch.optim.RAdam's update.

    RAdam takes SGD steps until the variance of the root can be estimated.

    ::

        rho_inf = 2 / (1 - beta2) - 1,  rho_t = rho_inf - 2 t beta2^t / (1 - beta2^t)
        g = grad + weight_decay w                             (decoupled: see the last line)
        exp_avg = beta1 exp_avg + (1 - beta1) g
        root = root(beta2 v + (1 - beta2) g^2)
        rho_t > 5: d = (exp_avg / (root + eps)) (r_t sqrt(1 - beta2^t) / (1 - beta1^t))
        else:      d = exp_avg (1 / ((1 - beta1^t) grad_scale))
        w += -lr d                                            (decoupled: d + weight_decay w)

    with ``r_t^2 = (rho_t - 4) (rho_t - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho_t)``.

    Args:
        params, lr, betas, eps, weight_decay, rounding: as for :class:`Adamax`.
        decoupled_weight_decay: use decoupled weight decay, as AdamW does.
        grad_scale: factor by which the gradient is too large, for example the batch size if the
            loss is a sum. The first steps are proportional to the gradient, so they are divided by
            it. Later steps do not depend on it.

    State: ``step``, ``exp_avg``; ``exp_avg_sq`` (float parameters) or its root and residue.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a
            parameter's format.

    Source: L. Liu et al. 2020 (arXiv:1908.03265).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, decoupled_weight_decay: bool = False,
        grad_scale: float = 1.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        if not 0 < grad_scale < math.inf:
            raise ValueError(f"grad_scale={grad_scale}: must be positive and finite, for example 1")
        options = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, betas, options | {"grad_scale": grad_scale}, rounding)

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        (beta1, beta2), decay, decoupled = (
            group["betas"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
        )
        grad = x.decayed(0.0 if decoupled else decay)
        average, root = x.average("exp_avg", grad, beta1), x.root_average("exp_avg_sq", grad, beta2)
        first, second = x.gain(beta1), 1 - beta2**x.steps
        length, longest = (
            2 / (1 - beta2) - 1 - 2 * x.steps * (1 - second) / second,
            2 / (1 - beta2) - 1,
        )
        known = length > 5
        share = (
            (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        ).sqrt()
        eps = x.at_least_smallest(torch.tensor(group["eps"], dtype=torch.float64))
        rectified = x.mul(
            x.div(average, x.add(root, eps)),
            x.scalar(torch.where(known, share * second.sqrt() / first, 1.0)),
        )
        direction = torch.where(
            known, rectified, x.mul(average, x.scalar(1 / (first * group["grad_scale"])))
        )
        x.descend(x.with_decay(direction, decay if decoupled else 0.0), group["lr"])


class Lion(WithBetas):
    """Descent along the sign of an average of momentum and gradient.

    ::

        d = sign(beta1 exp_avg + (1 - beta1) grad) + weight_decay w
        exp_avg = beta2 exp_avg + (1 - beta2) grad
        w += -lr d

    Args:
        params, lr, rounding: as for :class:`Adamax`.
        betas: decays of the direction and of the average, both in [10^-6, 1).
        weight_decay: at least 0, decoupled.

    State: ``step``, ``exp_avg``.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta that rounds to 1, in a
            parameter's format.

    Source: X. Chen et al. 2023 (arXiv:2302.06675).

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Lion(model.parameters(), lr=1e-4, kahan_sum=True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """

    _decoupled = True

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, **rounding: Unpack[Rounding],
    ) -> None:  # fmt: skip
        super().__init__(params, betas, {"lr": lr, "weight_decay": weight_decay}, rounding)

    def _decays(self, group: dict[str, Any]) -> dict[str, float]:
        return {"beta1": group["betas"][0], "beta2": group["betas"][1]}

    def _step(self, x: ParameterMath, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        direction = x.sign(x.blend(x.get("exp_avg"), x.grad, beta1))
        x.average("exp_avg", x.grad, beta2)
        x.descend(x.with_decay(direction, group["weight_decay"]), group["lr"])

    def _fused(self, x: Codes, group: dict[str, Any]) -> bool:
        x.descend(x.lion("exp_avg", group["betas"], group["weight_decay"]), group["lr"])
        return True
