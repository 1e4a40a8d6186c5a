"""The optimizer of a trial, for gradients of a loss that is summed over a batch.

Low-precision gradients of a mean would lose their small entries to underflow (lns12 ends at 2^-16);
those of a sum do not. What makes the step that of the mean depends on how an optimizer scales: sgd,
asgd and mul take ``lr / batch``; the others divide by an average of the gradient, so only what is
added to it (``eps``, decay in the gradient) is multiplied by ``batch``. adadelta's ``eps`` and
hybridmul's thresholds cannot be moved so: the first stays as it is, and is then smaller beside the
gradient; the second is not offered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lns_ops import optim, quantize_updates_
from trainers.config import PrecisionConfig
from trainers.config.optimizer import OptimizerConfig

_Make = Callable[[Any, OptimizerConfig, float, int, dict[str, Any]], torch.optim.Optimizer]


def _sgd(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.SGD(
        params, lr / batch, o.momentum, weight_decay=o.weight_decay * batch, nesterov=o.nesterov,
        **rounding
    )  # fmt: skip


def _adam(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    kind, decay = (
        (optim.AdamW, o.weight_decay) if o.name == "adamw" else (optim.Adam, o.weight_decay * batch)
    )
    return kind(
        params, lr, (o.betas[0], o.betas[1]), o.eps * batch, decay, amsgrad=o.amsgrad, **rounding
    )


def _with_betas(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    kinds: dict[str, Any] = {"adamax": optim.Adamax, "nadam": optim.NAdam, "radam": optim.RAdam}
    more = {"grad_scale": float(batch)} if o.name == "radam" else {}
    made: torch.optim.Optimizer = kinds[o.name](
        params,
        lr,
        (o.betas[0], o.betas[1]),
        o.eps * batch,
        o.weight_decay * batch,
        **more,
        **rounding,
    )
    return made


def _lion(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Lion(params, lr, (o.betas[0], o.betas[1]), o.weight_decay, **rounding)


def _rmsprop(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.RMSprop(
        params,
        lr,
        o.alpha,
        o.eps * batch,
        o.weight_decay * batch,
        o.momentum,
        o.centered,
        **rounding,
    )


def _adagrad(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Adagrad(
        params, lr, weight_decay=o.weight_decay * batch, eps=o.eps * batch, **rounding
    )


def _adadelta(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Adadelta(params, lr, o.rho, o.eps, o.weight_decay * batch, **rounding)


def _rprop(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Rprop(params, lr, **rounding)


def _asgd(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.ASGD(
        params, lr / batch, lambd=1e-4 * batch, weight_decay=o.weight_decay * batch, **rounding
    )


def _lars(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    groups, options = (
        _apart(params),
        (o.momentum, o.weight_decay * batch, o.trust_coefficient, o.nesterov),
    )
    for group in groups[1:]:  # without ratio the step is sgd's
        group["lr"] = lr / batch
    return optim.LARS(groups, lr, *options, **rounding)


def _lamb(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.LAMB(
        _apart(params), lr, (o.betas[0], o.betas[1]), o.eps * batch, o.weight_decay, **rounding
    )


def _apart(params: Any) -> list[dict[str, Any]]:
    """Matrices and kernels; vectors, without ratio and decay, where there are any."""
    matrices, vectors = ([p for p in params if (p.dim() > 1) == many] for many in (True, False))
    return [
        {"params": matrices},
        *([{"params": vectors, "adapt": False, "weight_decay": 0.0}] if vectors else []),
    ]


def _madam(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Madam(params, lr, o.beta, o.eps * batch, **rounding)


def _mul(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.Mul(params, lr / batch, **rounding)


def _signmul(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    return optim.SignMul(params, lr, **rounding)


_MAKE: dict[str, _Make] = {
    "sgd": _sgd, "adam": _adam, "adamw": _adam, "adamax": _with_betas, "nadam": _with_betas,
    "radam": _with_betas, "adagrad": _adagrad, "adadelta": _adadelta, "rmsprop": _rmsprop,
    "rprop": _rprop, "asgd": _asgd, "lars": _lars, "lamb": _lamb, "lion": _lion, "madam": _madam,
    "mul": _mul, "signmul": _signmul,
}  # fmt: skip


def make_optimizer(
    model: nn.Module,
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    batch_size: int,
    seed: int = 0,
    scale: float = 1.0,
) -> torch.optim.Optimizer:
    """The optimizer of a trial whose loss is the *sum* over a batch, making the step of the mean.

    Args:
        seed: of stochastic rounding.
        scale: of ``optimizer.lr``.

    Raises:
        ValueError: a value underflows, or a decay rounds to 1, in the format.
    """
    if precision.simulated:
        inner = make_optimizer(model, optimizer, PrecisionConfig(), batch_size, scale=scale)
        return quantize_updates_(
            inner, model, kahan_sum=precision.kahan_sum,
            stochastic_rounding=precision.stochastic_rounding, seed=seed % (1 << 31),
            master_format=precision.master_format,
        )  # fmt: skip
    rounding: dict[str, Any] = {
        "kahan_sum": precision.kahan_sum,
        "stochastic_rounding": precision.stochastic_rounding,
    }
    rounding["seed"] = seed % (1 << 31)
    if precision.update_arithmetic != "lns":
        rounding["arithmetic"] = precision.update_arithmetic
    return _MAKE[optimizer.name](
        list(model.parameters()), optimizer, optimizer.lr * scale, batch_size, rounding
    )
