"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional.updates import advance
from lns_ops.optim.backend_codes import math_of
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import LNSOptimizer, add_float, gradient, scalar_code, state_codes, zeros
from lns_ops.optim.composed import adam_direction
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference_updates import adam_codes, check_adam
from lns_ops.tensor import LNSTensor


class Adam(LNSOptimizer):
    """Adam with Kahan compensation or stochastic rounding.

    ::

        grad = grad + weight_decay w                                     (AdamW: see there)
        exp_avg = beta1 exp_avg + (1 - beta1) grad
        root = sqrt(beta2 root^2 + (1 - beta2) grad^2)
        w += -lr correction exp_avg / (root + eps_hat)

    with ``correction = sqrt(1 - beta2^t) / (1 - beta1^t)`` and ``eps_hat = eps sqrt(1 - beta2^t)``
    after t steps, which is torch.optim.Adam's update. In LNS beta1 is rounded to the format, and
    ``1 - beta1^t`` is computed for the rounded beta1
    (:func:`lns_ops.spec.reference_updates.gain`).

    An LNS parameter stores the *root* of the second moment, because its logarithm needs half the
    range, and 16 more bits below the ulp. With beta2 = 0.999 the moment changes by a twentieth of
    an ulp a step at f = 6, so without these bits it would never change. With stochastic rounding
    the root is rounded at random instead, which makes it about one ulp too large at f = 6 and half
    an ulp at f = 7.

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        betas: decays of the two averages, in [0, 1) and [10^-6, 1).
        eps: added to the root; for an LNS parameter it is raised to the format's smallest magnitude
            if it is smaller.
        weight_decay: at least 0; L2, added to the gradient.
        kahan_sum, stochastic_rounding, seed, arithmetic, maximize: as for :class:`SGD`.
        amsgrad: divide by the largest root so far (S. Reddi et al. 2018, arXiv:1904.09237); the
            same operations in the same order, but not fused.

    State per LNS parameter: ``step`` (int64), ``exp_avg``, ``root_exp_avg_sq``, ``root_residue``
    (int16, in 2^-16 ulps; without stochastic rounding), ``compensation``; per float parameter
    ``step``, ``exp_avg``, ``exp_avg_sq``, ``compensation``.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a
            parameter's format.

    Source: D. Kingma, J. Ba, "Adam", 2015 (arXiv:1412.6980).

    >>> import torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Adam(model.parameters(), lr=1e-2, kahan_sum=True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        kahan_sum: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        arithmetic: str = "lns",
        *,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        if not 0 <= weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay={weight_decay}: must be finite and at least 0, for example 1e-4"
            )
        check_adam(*betas, eps)
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "kahan_sum": kahan_sum,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "arithmetic": arithmetic,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, options)

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        if group["arithmetic"] == "float32":
            return
        scalar_code("lr", -float(group["lr"]), fmt)
        scalar_code("weight_decay", group["weight_decay"], fmt)
        adam_codes(*group["betas"], group["eps"], fmt)

    def _may_wait(self, group: dict[str, Any]) -> bool:
        return group["arithmetic"] == "lns" and not group["amsgrad"]

    def _update(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        if group["amsgrad"]:
            self._amsgrad(math_of(parameter, state, group, key), group)
            return
        is_lns = isinstance(parameter, LNSTensor)
        names = ["step", "exp_avg", "root_exp_avg_sq" if is_lns else "exp_avg_sq"]
        names += ["root_residue"] if is_lns and key is None else []
        names += ["compensation"] if group["kahan_sum"] else []
        zeros(state, parameter, *names)
        if not isinstance(parameter, LNSTensor):
            state["step"].add_(1)
            _adam_float(parameter, state, group, self._decoupled)
            return
        advance(state["step"])
        fmt, (beta1, beta2) = parameter.fmt, group["betas"]
        grad = lns.neg(gradient(parameter), fmt) if group["maximize"] else gradient(parameter)
        common: dict[str, Any] = {
            "step": state["step"],
            "exp_avg": state["exp_avg"].codes,
            "root": state["root_exp_avg_sq"].codes,
            "residue": state.get("root_residue") if key is None else None,
            "compensation": state_codes(state, "compensation"),
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "decoupled": self._decoupled,
            "key": key,
        }
        if group["arithmetic"] == "float32":
            decay = group["weight_decay"] or None
            lns.adam_update_float32_(
                parameter.codes, grad, fmt, lr=group["lr"], weight_decay=decay, **common
            )
            return
        lns.adam_update_(
            parameter.codes,
            grad,
            fmt,
            negative_lr=self._negated_rate(group, fmt),
            weight_decay=scalar_code("weight_decay", group["weight_decay"], fmt)
            if group["weight_decay"]
            else None,
            **common,
        )

    def _amsgrad(self, x: ParameterMath, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        x.step.add_(1)
        direction = adam_direction(x, x.decayed(0.0 if self._decoupled else decay), group)
        x.descend(x.with_decay(direction, decay if self._decoupled else 0.0), group["lr"])


class AdamW(Adam):
    """Adam with decoupled weight decay.

    ``w += -lr (correction exp_avg / (root + eps_hat) + weight_decay w)``.

    Arguments, state and errors are the same as for :class:`Adam`; ``weight_decay`` defaults to
    0.01.

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", 2019
    (arXiv:1711.05101).
    """

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        kahan_sum: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        arithmetic: str = "lns",
        *,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        more: dict[str, bool] = {"amsgrad": amsgrad, "maximize": maximize}
        super().__init__(
            params, lr, betas, eps, weight_decay, kahan_sum, stochastic_rounding, seed, arithmetic,
            **more,
        )  # fmt: skip


def _adam_float(
    parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], decoupled: bool
) -> None:
    """Update by torch.optim.Adam's equations, with operations that a CUDA graph can capture and
    optional Kahan compensation.
    """
    assert parameter.grad is not None
    grad, (beta1, beta2), decay = parameter.grad, group["betas"], group["weight_decay"]
    if group["maximize"]:
        grad = -grad
    if decay and not decoupled:
        grad = grad.add(parameter, alpha=decay)
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = state["step"].double()
    root = (
        state["exp_avg_sq"]
        .sqrt()
        .div_((1 - beta2**steps).sqrt_().to(parameter.dtype))
        .add_(group["eps"])
    )
    direction = state["exp_avg"].div(root).div_((1 - beta1**steps).to(parameter.dtype))
    if decay and decoupled:
        direction.add_(parameter, alpha=decay)
    add_float(
        parameter, direction, -group["lr"], state["compensation"] if group["kahan_sum"] else None
    )
