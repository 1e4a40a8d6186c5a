"""Optimizers for LNS and float parameters, with Kahan compensation.

In low precision a small update vanishes in a large weight: at f = 6 the nearest neighbour of a weight is 1.1 % away, so any update
below half of that is lost, every time. Kahan compensation (W. Kahan, "Further remarks on reducing truncation errors", 1965)
keeps what was lost in a second number of the same format and offers it again at the next step.

An LNSTensor parameter is updated by one fused kernel in which every operation is an LNS operation; a float parameter by torch
operations. Memory for an LNS parameter: 2 bytes, + 2 with Kahan, + 2 with momentum (float32: 4, + 4, + 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.format import LNSFormat
from lns_ops.tensor import LNSTensor


@lru_cache(maxsize=256)
def _scalar_code(name: str, value: float, fmt: LNSFormat) -> int:
    """The code of a hyperparameter, which must not vanish in the format."""
    code = int(lns.encode(torch.tensor(value, dtype=torch.float64), fmt))
    if code == 0 and value != 0:
        raise ValueError(
            f"{name}={abs(value):g}: underflows to zero in {fmt}, whose smallest magnitude is {fmt.smallest:.3g}; raise {name} "
            "(sum the loss over fewer examples, or average it) or use a format with more integer bits"
        )
    return code


class SGD(torch.optim.Optimizer):
    """Stochastic gradient descent with heavy-ball momentum and Kahan compensation.

    ``buffer = momentum * buffer + grad`` (``grad`` itself without momentum), ``update = -lr * buffer``, then ``w += update``; with
    ``kahan_sum``::

        compensation += update
        new = w + compensation
        compensation -= new - w
        w = new

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        momentum: in [0, 1).
        kahan_sum: keep a compensation for each parameter.

    State per parameter, in the parameter's own format: ``momentum_buffer``, ``compensation``.

    Raises:
        ValueError: a value out of range, or a learning rate that underflows in a parameter's format.

    Source: W. Kahan 1965 (doi:10.1145/363707.363723); momentum as in Sutskever et al. 2013 with torch.optim's convention.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, kahan_sum: bool = False) -> None:
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr={lr}: must be finite and at least 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must lie in [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum, "kahan_sum": kahan_sum})
        for group in self.param_groups:
            for fmt in {p.fmt for p in group["params"] if isinstance(p, LNSTensor)}:
                _scalar_code("lr", -group["lr"], fmt)
                _scalar_code("momentum", group["momentum"], fmt)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self._state(parameter, group)
                update = _update_lns if isinstance(parameter, LNSTensor) else _update_float
                update(parameter, state, group)
        return loss

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        wanted = {"momentum_buffer": group["momentum"] != 0, "compensation": group["kahan_sum"]}
        for name, want in wanted.items():
            if want and name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        return state


def _update_lns(parameter: LNSTensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    grad, fmt = parameter.grad, parameter.fmt
    if not isinstance(grad, LNSTensor) or grad.fmt != fmt:
        raise ValueError(
            f"gradient of type {type(grad).__name__} for an {fmt} parameter: must be an LNSTensor of the same format"
        )
    codes = {name: value.codes for name, value in state.items() if isinstance(value, LNSTensor)}
    lns.sgd_update_(
        parameter.codes,
        grad.codes,
        fmt,
        negative_lr=_scalar_code("lr", -group["lr"], fmt),
        momentum=_scalar_code("momentum", group["momentum"], fmt) if group["momentum"] else None,
        buffer=codes.get("momentum_buffer"),
        compensation=codes.get("compensation"),
    )


def _update_float(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    step = parameter.grad
    if "momentum_buffer" in state:
        step = state["momentum_buffer"].mul_(group["momentum"]).add_(step)
    if "compensation" not in state:
        parameter.add_(step, alpha=-group["lr"])
        return
    compensation = state["compensation"].add_(step, alpha=-group["lr"])
    new = parameter + compensation
    compensation.sub_(new - parameter)
    parameter.copy_(new)


def parameters_by_format(params: Iterable[Tensor]) -> dict[str, int]:
    """How many values are kept in each format: ``{"lns12": 407050}``; float dtypes under their torch names."""
    counts: dict[str, int] = {}
    for parameter in params:
        name = str(parameter.fmt) if isinstance(parameter, LNSTensor) else str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return counts
