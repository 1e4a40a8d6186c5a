"""The optimizer of a trial, made for gradients of a loss that is summed over a batch.

Low-precision gradients of a mean would lose their small entries to underflow (lns12 ends at 2^-16);
gradients of a sum do not. To get the step of the mean loss, the options are converted according to
the optimizer: sgd, asgd and mul get ``lr / batch``. The others divide by an average of the
gradient, so only terms that are added to the gradient (``eps``, weight decay) are multiplied by
``batch``. The conversion does not work for adadelta's ``eps``, which stays unchanged and is thus
smaller relative to the gradient, nor for hybridmul's thresholds, so hybridmul is not supported.
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
    """Return SGD with the step of the mean loss."""
    return optim.SGD(
        params, lr / batch, o.momentum, weight_decay=o.weight_decay * batch, nesterov=o.nesterov,
        **rounding
    )  # fmt: skip


def _adam(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Adam or AdamW with the step of the mean loss."""
    kind, decay = (
        (optim.AdamW, o.weight_decay) if o.name == "adamw" else (optim.Adam, o.weight_decay * batch)
    )
    return kind(
        params, lr, (o.betas[0], o.betas[1]), o.eps * batch, decay, amsgrad=o.amsgrad, **rounding
    )


def _with_betas(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Adamax, NAdam or RAdam with the step of the mean loss."""
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
    """Return Lion, whose step does not depend on the scale of the gradient."""
    return optim.Lion(params, lr, (o.betas[0], o.betas[1]), o.weight_decay, **rounding)


def _rmsprop(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return RMSprop with the step of the mean loss."""
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
    """Return Adagrad with the step of the mean loss."""
    return optim.Adagrad(
        params, lr, weight_decay=o.weight_decay * batch, eps=o.eps * batch, **rounding
    )


def _adadelta(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Adadelta; its ``eps`` is not multiplied by the batch."""
    return optim.Adadelta(params, lr, o.rho, o.eps, o.weight_decay * batch, **rounding)


def _rprop(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Rprop, whose step depends on the signs of the gradient alone."""
    return optim.Rprop(params, lr, **rounding)


def _asgd(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return ASGD with the step of the mean loss."""
    return optim.ASGD(
        params, lr / batch, lambd=1e-4 * batch, weight_decay=o.weight_decay * batch, **rounding
    )


def _lars(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return LARS with the step of the mean loss; vectors take the step of SGD."""
    groups, options = (
        _apart(params),
        (o.momentum, o.weight_decay * batch, o.trust_coefficient, o.nesterov),
    )
    for group in groups[1:]:  # without a trust ratio the step equals sgd's
        group["lr"] = lr / batch
    return optim.LARS(groups, lr, *options, **rounding)


def _lamb(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return LAMB with the step of the mean loss."""
    return optim.LAMB(
        _apart(params), lr, (o.betas[0], o.betas[1]), o.eps * batch, o.weight_decay, **rounding
    )


def _apart(params: Any) -> list[dict[str, Any]]:
    """Return a group of matrices and kernels and, where there are any, one of vectors.

    Vectors are updated without trust ratio and without decay.
    """
    matrices, vectors = ([p for p in params if (p.dim() > 1) == many] for many in (True, False))
    return [
        {"params": matrices},
        *([{"params": vectors, "adapt": False, "weight_decay": 0.0}] if vectors else []),
    ]


def _madam(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Madam with the step of the mean loss."""
    return optim.Madam(params, lr, o.beta, o.eps * batch, **rounding)


def _mul(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return Mul with the step of the mean loss."""
    return optim.Mul(params, lr / batch, **rounding)


def _signmul(
    params: Any, o: OptimizerConfig, lr: float, batch: int, rounding: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return SignMul, whose step depends on the signs of the gradient alone."""
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
    """Return the optimizer for a loss that is the *sum* over a batch, with the step of the mean.

    Args:
        model: the parameters, in the arithmetic of ``precision``.
        optimizer: name and options.
        precision: format, rounding and arithmetic of the update.
        batch_size: examples in the sum.
        seed: seed of stochastic rounding.
        scale: factor on ``optimizer.lr``.

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
