"""Optimizers for LNS and float parameters, with Kahan compensation or stochastic rounding of LNS weights.

In low precision a small update vanishes in a large weight: at f = 6 the nearest neighbour of a weight is 1.1 % away, so any update
below half of that is lost, every time. Two ways to keep it:

- ``kahan_sum``: Kahan compensation (W. Kahan, "Further remarks on reducing truncation errors", 1965) keeps what was lost in a second number
  of the same format and offers it again at the next step. Deterministic; 2 bytes more a parameter.
- ``stochastic_rounding``: the sum of weight and update rounds up or down at random with the exact sum as its expected value (S. Gupta et
  al. 2015). No memory; the random bits come from (seed, parameter, step) alone, so a run repeats bit for bit on any device.

An LNSTensor parameter is updated by one fused kernel in which every operation is an LNS operation, or with ``arithmetic="float32"`` by one
that computes in float32 between loads and stores of codes; a float parameter by torch operations. Memory for an LNS parameter: 2 bytes,
+ 2 with Kahan, + 2 with momentum; Adam: 4 more (stochastic) or 6 (else).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.format import LNSFormat
from lns_ops.reference import adam_codes, check_adam
from lns_ops.tensor import LNSTensor

ARITHMETICS = ("lns", "float32")
"""What the operations of an LNS parameter's update are."""
_INTEGER_STATE = {"step": torch.int64, "root_residue": torch.int16}
"""State that is neither codes nor floats."""


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


def _gradient(parameter: LNSTensor) -> Tensor:
    grad, fmt = parameter.grad, parameter.fmt
    if not isinstance(grad, LNSTensor) or grad.fmt != fmt:
        raise ValueError(
            f"gradient of type {type(grad).__name__} for an {fmt} parameter: must be an LNSTensor of the same format"
        )
    return grad.codes


def _codes(state: dict[str, Tensor], name: str) -> Tensor | None:
    value = state.get(name)
    return value.codes if isinstance(value, LNSTensor) else value


class _Optimizer(torch.optim.Optimizer):
    """What the optimizers here share: rounding options, the loop over parameters, integer state."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if defaults["arithmetic"] not in ARITHMETICS:
            raise ValueError(f"arithmetic={defaults['arithmetic']!r}: must be one of {', '.join(ARITHMETICS)}, for example 'lns'")
        if defaults["kahan_sum"] and defaults["stochastic_rounding"]:
            raise ValueError(
                "kahan_sum=True, stochastic_rounding=True: each keeps what the other has nothing left of; choose one of them"
            )
        if not 0 <= defaults["lr"] < float("inf"):
            raise ValueError(f"lr={defaults['lr']}: must be finite and at least 0")
        if not isinstance(defaults["seed"], int) or not 0 <= defaults["seed"] < 1 << 31:
            raise ValueError(f"seed={defaults['seed']!r}: must be a whole number from 0 to 2^31 - 1, for example 0")
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, LNSTensor):
                    self._check(group, parameter.fmt)
                elif group["stochastic_rounding"]:
                    raise ValueError(
                        f"stochastic_rounding=True for a {parameter.dtype} parameter: LNS parameters only; use kahan_sum=True, or "
                        "convert the module with scope='everywhere'"
                    )

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        """Refuse hyperparameters that cannot be used in ``fmt``."""
        raise NotImplementedError

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None) -> None:
        raise NotImplementedError

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
        index = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = group["seed"] << 32 | index if group["stochastic_rounding"] else None
                    self._update(parameter, self.state[parameter], group, key)
                index += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; integer state stays integer (torch would turn it into the parameter's dtype)."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in _INTEGER_STATE.keys() & state.keys():
                state[name] = torch.as_tensor(state[name]).to(parameter.device, _INTEGER_STATE[name], copy=True)


def _zeros(state: dict[str, Any], parameter: Tensor, *names: str) -> None:
    """Create the state of these names where it is missing."""
    for name in names:
        if name in state:
            continue
        if name in _INTEGER_STATE:
            shape = () if name == "step" else parameter.shape
            state[name] = torch.zeros(shape, dtype=_INTEGER_STATE[name], device=parameter.device)
        else:
            state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)


class SGD(_Optimizer):
    """Stochastic gradient descent with heavy-ball momentum, Kahan compensation or stochastic rounding.

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
        stochastic_rounding: round ``w + update`` at random, its expected value exact; LNS parameters only.
        seed: of the random rounding, 0 to 2^31 - 1.
        arithmetic: of an LNS parameter's update: ``lns`` (every operation an LNS operation) or ``float32`` (between load and store).

    State per parameter, in the parameter's own format: ``momentum_buffer``, ``compensation``; with stochastic rounding ``step`` (int64).

    Raises:
        ValueError: a value out of range, or one that underflows, or a momentum that rounds to 1, in a parameter's format.

    Source: W. Kahan 1965 (doi:10.1145/363707.363723); momentum as in Sutskever et al. 2013 with torch.optim's convention; stochastic
    rounding: S. Gupta et al. 2015 (arXiv:1502.02551).
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, kahan_sum: bool = False, stochastic_rounding: bool = False, seed: int = 0,
        arithmetic: str = "lns",
    ) -> None:  # fmt: skip
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must lie in [0, 1)")
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "kahan_sum": kahan_sum,
            "stochastic_rounding": stochastic_rounding,
        }
        options |= {"seed": seed, "arithmetic": arithmetic}
        super().__init__(params, options)

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        if group["arithmetic"] == "float32":
            return
        _scalar_code("lr", -group["lr"], fmt)
        if _scalar_code("momentum", group["momentum"], fmt) == fmt.bias:
            raise ValueError(
                f"momentum={group['momentum']}: rounds to 1 in {fmt}, so the buffer would grow without bound; use "
                f"momentum <= {1 / (1 + fmt.epsilon):.3g}"
            )

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None) -> None:
        wanted = {"momentum_buffer": group["momentum"] != 0, "compensation": group["kahan_sum"], "step": key is not None}
        _zeros(state, parameter, *(name for name, want in wanted.items() if want))
        if not isinstance(parameter, LNSTensor):
            _sgd_float(parameter, state, group)
            return
        fmt = parameter.fmt
        if key is not None:
            state["step"].add_(1)
        common: dict[str, Any] = {"step": state["step"] if key is not None else None, "key": key}
        common |= {"buffer": _codes(state, "momentum_buffer"), "compensation": _codes(state, "compensation")}
        if group["arithmetic"] == "float32":
            lns.sgd_update_float32_(
                parameter.codes, _gradient(parameter), fmt, lr=group["lr"], momentum=group["momentum"] or None, **common
            )
            return
        lns.sgd_update_(
            parameter.codes,
            _gradient(parameter),
            fmt,
            negative_lr=_scalar_code("lr", -group["lr"], fmt),
            momentum=_scalar_code("momentum", group["momentum"], fmt) if group["momentum"] else None,
            **common,
        )


def _sgd_float(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    assert parameter.grad is not None
    step = parameter.grad
    if "momentum_buffer" in state:
        step = state["momentum_buffer"].mul_(group["momentum"]).add_(step)
    _add_float(parameter, step, -group["lr"], state.get("compensation"))


def _add_float(parameter: Tensor, direction: Tensor, alpha: float, compensation: Tensor | None) -> None:
    """``parameter += alpha direction``, with Kahan compensation where there is one."""
    if compensation is None:
        parameter.add_(direction, alpha=alpha)
        return
    compensation.add_(direction, alpha=alpha)
    new = parameter + compensation
    compensation.sub_(new - parameter)
    parameter.copy_(new)


class Adam(_Optimizer):
    """Adam with Kahan compensation or stochastic rounding.

    ::

        grad = grad + weight_decay w                                     (AdamW: see there)
        exp_avg = beta1 exp_avg + (1 - beta1) grad
        root = sqrt(beta2 root^2 + (1 - beta2) grad^2)
        w += -lr correction exp_avg / (root + eps_hat)

    with ``correction = sqrt(1 - beta2^t) / (1 - beta1^t)`` and ``eps_hat = eps sqrt(1 - beta2^t)`` after t steps, which is
    torch.optim.Adam's update. An LNS parameter keeps the *root* of the second moment, whose logarithm needs half the range, and
    16 bits below its ulp: with beta2 = 0.999 the moment moves by a twentieth of an ulp a step at f = 6 and would otherwise
    never move. With stochastic rounding those bits round at random instead (which makes the root about one ulp too large at f =
    6, half of it at f = 7).

    Args:
        params: LNSTensor or float parameters, or groups of them as in torch.optim.
        lr: step size, at least 0.
        betas: decays of the two averages, in [0, 1) and [10^-6, 1).
        eps: added to the root; for an LNS parameter at least its format's smallest magnitude, which it takes instead.
        weight_decay: at least 0; L2, added to the gradient.
        kahan_sum, stochastic_rounding, seed: as for :class:`SGD`.

    State per LNS parameter: ``step`` (int64), ``exp_avg``, ``root_exp_avg_sq``, ``root_residue`` (int16, in 2^-16 ulps; without
    stochastic rounding), ``compensation``; per float parameter ``step``, ``exp_avg``, ``exp_avg_sq``, ``compensation``.

    Raises:
        ValueError: a value out of range, one that underflows, or a beta1 that rounds to 1, in a parameter's format.

    Source: D. Kingma, J. Ba, "Adam", 2015 (arXiv:1412.6980).
    """

    _decoupled = False

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
    ) -> None:
        if not 0 <= weight_decay < float("inf"):
            raise ValueError(f"weight_decay={weight_decay}: must be finite and at least 0")
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
        }
        super().__init__(params, options)

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        if group["arithmetic"] == "float32":
            return
        _scalar_code("lr", -group["lr"], fmt)
        _scalar_code("weight_decay", group["weight_decay"], fmt)
        adam_codes(*group["betas"], group["eps"], fmt)

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None) -> None:
        is_lns = isinstance(parameter, LNSTensor)
        moments = ["root_exp_avg_sq", *([] if key is not None else ["root_residue"])] if is_lns else ["exp_avg_sq"]
        _zeros(state, parameter, "step", "exp_avg", *moments, *(["compensation"] if group["kahan_sum"] else []))
        state["step"].add_(1)
        if not isinstance(parameter, LNSTensor):
            _adam_float(parameter, state, group, self._decoupled)
            return
        fmt, (beta1, beta2) = parameter.fmt, group["betas"]
        common: dict[str, Any] = {
            "step": state["step"],
            "exp_avg": state["exp_avg"].codes,
            "root": state["root_exp_avg_sq"].codes,
            "residue": state.get("root_residue") if key is None else None,
            "compensation": _codes(state, "compensation"),
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "decoupled": self._decoupled,
            "key": key,
        }
        if group["arithmetic"] == "float32":
            decay = group["weight_decay"] or None
            lns.adam_update_float32_(parameter.codes, _gradient(parameter), fmt, lr=group["lr"], weight_decay=decay, **common)
            return
        lns.adam_update_(
            parameter.codes,
            _gradient(parameter),
            fmt,
            negative_lr=_scalar_code("lr", -group["lr"], fmt),
            weight_decay=_scalar_code("weight_decay", group["weight_decay"], fmt) if group["weight_decay"] else None,
            **common,
        )


class AdamW(Adam):
    """Adam with decoupled weight decay: ``w += -lr (correction exp_avg / (root + eps_hat) + weight_decay w)``.

    Arguments, state and errors are those of :class:`Adam`; ``weight_decay`` is 0.01 unless given.

    Source: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization", 2019 (arXiv:1711.05101).
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
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, kahan_sum, stochastic_rounding, seed, arithmetic)


def _adam_float(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], decoupled: bool) -> None:
    """torch.optim.Adam's equations in tensor operations that a CUDA graph can capture, the sum with Kahan compensation if asked for."""
    assert parameter.grad is not None
    grad, (beta1, beta2), decay = parameter.grad, group["betas"], group["weight_decay"]
    if decay and not decoupled:
        grad = grad.add(parameter, alpha=decay)
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    steps = state["step"].double()
    root = state["exp_avg_sq"].sqrt().div_((1 - beta2**steps).sqrt_().to(parameter.dtype)).add_(group["eps"])
    direction = state["exp_avg"].div(root).div_((1 - beta1**steps).to(parameter.dtype))
    if decay and decoupled:
        direction.add_(parameter, alpha=decay)
    _add_float(parameter, direction, -group["lr"], state.get("compensation"))


def parameters_by_format(params: Iterable[Tensor]) -> dict[str, int]:
    """How many values are kept in each format: ``{"lns12": 407050}``; float dtypes under their torch names."""
    counts: dict[str, int] = {}
    for parameter in params:
        name = str(parameter.fmt) if isinstance(parameter, LNSTensor) else str(parameter.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + parameter.numel()
    return counts
