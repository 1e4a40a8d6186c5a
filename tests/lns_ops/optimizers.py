"""Every optimizer with options for its steps, and the tensors that the tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lns_ops.optim as optim
from lns_ops import LNSTensor

TORCHS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.05, "amsgrad": True},
    "RMSprop": {"lr": 0.02, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "Adadelta": {"lr": 1.0, "eps": 1e-3, "weight_decay": 0.1},
    "Rprop": {"lr": 0.02},
    "ASGD": {"lr": 0.05, "lambd": 0.01, "t0": 3},
    "Adamax": {"lr": 0.02, "weight_decay": 0.1},
    "NAdam": {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.99)},
}
OURS: dict[str, dict[str, Any]] = {
    "LARS": {"lr": 0.2, "trust_coefficient": 0.1, "weight_decay": 0.01},
    "LAMB": {"lr": 0.02, "weight_decay": 0.1},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "Madam": {"lr": 0.02},
    "Mul": {"lr": 0.05},
    "SignMul": {"lr": 0.02},
    "HybridMul": {"lr": 0.02},
}
ALL = TORCHS | OURS
ROUNDINGS: list[dict[str, Any]] = [
    {},
    {"kahan_sum": True},
    {"stochastic_rounding": True, "seed": 4},
]
FLOAT32: dict[str, Any] = {"arithmetic": "float32"}


def make(name: str, params: Any, **more: Any) -> torch.optim.Optimizer:
    kind: Any = getattr(optim, name)
    optimizer: torch.optim.Optimizer = kind(params, **(ALL[name] | more))
    return optimizer


def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, grads: list[Tensor]) -> None:
    for grad in grads:
        parameter.grad = (
            LNSTensor.from_float(grad, parameter.fmt)
            if isinstance(parameter, LNSTensor)
            else grad.to(parameter.dtype)
        )
        optimizer.step()


def gradients(steps: int, *shape: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) + 0.5 for _ in range(steps)]


def start_of(n: int) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(2))
    return torch.where(x.abs() < 0.05, 0.05, x)


def values(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: value.codes if isinstance(value, LNSTensor) else value
        for name, value in state.items()
    }


# -------------------------------------------------------------------------------------------------
