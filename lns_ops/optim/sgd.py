"""SGD with heavy-ball or Nesterov momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import directions
from lns_ops.functional.updates import advance
from lns_ops.optim.backend_codes import math_of
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import LNSOptimizer, add_float, gradient, scalar_code, state_codes, zeros
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor


class SGD(LNSOptimizer):
    """SGD with heavy-ball or Nesterov momentum, and Kahan compensation or stochastic rounding.

    ::

        g = grad + weight_decay * w
        buffer = momentum * buffer + g                        (g itself without momentum)
        direction = buffer                                    (nesterov: g + momentum * buffer)
        w += -lr * direction

    evaluated in this order. With ``kahan_sum`` the last line is::

        compensation += update
        new = w + compensation
        compensation -= new - w
        w = new

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        momentum: in [0, 1).
        kahan_sum: keep a compensation for each parameter; updates below ``(2^(2^-f / 2) - 1)^2
            |w|`` are still lost (:mod:`lns_ops.optim`).
        stochastic_rounding: round ``w + update`` at random so that its expected value is exact; LNS
            parameters only.
        seed: seed of the random rounding, 0 to 2^31 - 1.
        arithmetic: how an LNS parameter is updated: ``lns`` (every operation an LNS operation) or
            ``float32`` (codes are decoded when read and rounded when stored).
        weight_decay: at least 0, added to the gradient.
        nesterov: use Nesterov momentum; needs ``momentum > 0``.
        maximize: maximize the objective instead of minimizing it.

    State per parameter, in the parameter's own format: ``momentum_buffer``, ``compensation``;
    ``step`` (int64) with stochastic rounding, or if float32 arithmetic is combined with weight
    decay or nesterov.

    Raises:
        ValueError: a value is out of range or underflows, or the momentum rounds to 1, in a
            parameter's format.

    Source: W. Kahan 1965 (doi:10.1145/363707.363723); momentum as in Sutskever et al. 2013 with
    torch.optim's convention; stochastic rounding: S. Gupta et al. 2015 (arXiv:1502.02551).

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, kahan_sum=True)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, kahan_sum: bool = False,
        stochastic_rounding: bool = False, seed: int = 0, arithmetic: str = "lns", *,
        weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
    ) -> None:  # fmt: skip
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must be in [0, 1), for example 0.9")
        if not 0 <= weight_decay < float("inf"):
            raise ValueError(
                f"weight_decay={weight_decay}: must be finite and at least 0, for example 1e-4"
            )
        if nesterov and not momentum:
            raise ValueError(
                "nesterov=True with momentum=0: Nesterov momentum needs a momentum; use"
                " momentum=0.9"
            )
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "kahan_sum": kahan_sum,
            "stochastic_rounding": stochastic_rounding,
        }
        options |= {
            "seed": seed,
            "arithmetic": arithmetic,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, options)

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        if group["arithmetic"] == "float32":
            return
        scalar_code("lr", -float(group["lr"]), fmt)
        scalar_code("weight_decay", group["weight_decay"], fmt)
        if scalar_code("momentum", group["momentum"], fmt) == fmt.bias:
            raise ValueError(
                f"momentum={group['momentum']}: rounds to 1 in {fmt}, so the buffer would grow"
                f" without bound; use momentum <= {1 / (1 + fmt.epsilon):.3g}"
            )

    def _may_wait(self, group: dict[str, Any]) -> bool:
        return bool(group["arithmetic"] == "lns")

    def _update(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        in_float32 = isinstance(parameter, LNSTensor) and group["arithmetic"] == "float32"
        if in_float32 and (group["nesterov"] or group["weight_decay"]):
            _composed(math_of(parameter, state, group, key), group)
            return
        wanted = {
            "momentum_buffer": group["momentum"] != 0,
            "compensation": group["kahan_sum"],
            "step": key is not None,
        }
        zeros(state, parameter, *(name for name, want in wanted.items() if want))
        if not isinstance(parameter, LNSTensor):
            _sgd_float(parameter, state, group)
            return
        fmt = parameter.fmt
        if key is not None:
            advance(state["step"])
        common: dict[str, Any] = {"step": state["step"] if key is not None else None, "key": key}
        common |= {"compensation": state_codes(state, "compensation")}
        buffer, grad = state_codes(state, "momentum_buffer"), gradient(parameter)
        if group["maximize"]:
            grad = lns.neg(grad, fmt)
        if group["arithmetic"] == "float32":
            momentum = group["momentum"] or None
            lns.sgd_update_float32_(
                parameter.codes,
                grad,
                fmt,
                lr=group["lr"],
                momentum=momentum,
                buffer=buffer,
                **common,
            )
            return
        if group["nesterov"]:
            assert buffer is not None
            grad, buffer = _look_ahead(parameter.codes, grad, buffer, group, fmt), None
        elif group["weight_decay"]:
            grad = lns.add(
                grad, lns.mul(_number("weight_decay", group, fmt), parameter.codes, fmt), fmt
            )
        common |= {
            "momentum": None if buffer is None else scalar_code("momentum", group["momentum"], fmt),
            "buffer": buffer,
        }
        lns.sgd_update_(
            parameter.codes, grad, fmt, negative_lr=self._negated_rate(group, fmt), **common
        )


def _composed(x: ParameterMath, group: dict[str, Any]) -> None:
    x.step.add_(1)
    direction = grad = x.decayed(group["weight_decay"])
    if group["momentum"]:
        momentum = x.number(group["momentum"], "momentum")
        direction = x.put("momentum_buffer", x.add(x.mul(momentum, x.get("momentum_buffer")), grad))
        direction = x.add(grad, x.mul(momentum, direction)) if group["nesterov"] else direction
    x.descend(direction, group["lr"])


def _look_ahead(
    weight: Tensor, grad: Tensor, buffer: Tensor, group: dict[str, Any], fmt: LNSFormat
) -> Tensor:
    """Update the buffer and return ``g + momentum buffer`` with ``g = grad + weight_decay w``."""
    if grad.device.type == "cpu":
        momentum, decay = (
            scalar_code(name, group[name], fmt) for name in ("momentum", "weight_decay")
        )
        return directions.nesterov(weight, grad, buffer, momentum, decay, fmt)
    if group["weight_decay"]:
        grad = lns.add(grad, lns.mul(_number("weight_decay", group, fmt), weight, fmt), fmt)
    factor = _number("momentum", group, fmt)
    buffer.copy_(lns.add(lns.mul(factor, buffer, fmt), grad, fmt))
    return lns.add(grad, lns.mul(factor, buffer, fmt), fmt)


def _number(name: str, group: dict[str, Any], fmt: LNSFormat) -> Tensor:
    return torch.tensor(scalar_code(name, group[name], fmt), dtype=torch.int16)


def _sgd_float(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    grad = -parameter.grad if group["maximize"] else parameter.grad
    if group["weight_decay"]:
        grad = grad.add(parameter, alpha=group["weight_decay"])
    step = grad
    if "momentum_buffer" in state:
        step = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        step = grad.add(step, alpha=group["momentum"]) if group["nesterov"] else step
    add_float(parameter, step, -group["lr"], state["compensation"] if group["kahan_sum"] else None)
