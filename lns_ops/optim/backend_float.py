"""ParameterMath for float parameters: torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import add_float


class Floats(ParameterMath):
    """Operations on a float parameter: torch operations that a CUDA graph can capture."""

    def __init__(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        super().__init__(parameter, state, group, key)
        assert parameter.grad is not None
        self.weight = parameter.detach()
        self.grad = -parameter.grad if group["maximize"] else parameter.grad

    def number(self, value: float, name: str = "") -> Any:
        return value

    def scalar(self, value: Tensor) -> Tensor:
        return value.to(self.weight.dtype)

    def at_least_smallest(self, value: Tensor) -> Tensor:
        return self.scalar(value)

    def add(self, x: Any, y: Any) -> Tensor:
        return torch.as_tensor(x + y)

    def sub(self, x: Any, y: Any) -> Tensor:
        return torch.as_tensor(x - y)

    def mul(self, x: Any, y: Any) -> Tensor:
        return torch.as_tensor(x * y)

    def div(self, x: Any, y: Any) -> Tensor:
        return torch.as_tensor(x / y)

    def sqrt(self, x: Tensor) -> Tensor:
        return x.clamp_min(0).sqrt()

    def absolute(self, x: Tensor) -> Tensor:
        return x.abs()

    def sign(self, x: Tensor) -> Tensor:
        return x.sign()

    def clamp(self, x: Tensor, low: Any, high: Any) -> Tensor:
        return x.clamp(float(low), float(high))

    def average(self, name: str, x: Tensor, beta: float) -> Tensor:
        return self.get(name).lerp_(x, 1 - beta)

    def blend(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        return x.lerp(y, 1 - beta)

    def root_average(self, name: str, x: Tensor, beta: float) -> Tensor:
        squares = self.get(name).mul_(beta).addcmul_(x, x, value=1 - beta)
        return squares.sqrt()

    def root(self, name: str) -> Tensor:
        return self.get(name).sqrt()

    def root_sum(self, name: str, x: Tensor, start: float = 0.0) -> Tensor:
        squares = self.put(name, self.first(start, self.get(name))).addcmul_(x, x)
        return squares.sqrt()

    def largest(self, name: str, x: Tensor, beta: float) -> Tensor:
        return self.put(name, torch.maximum(self.get(name) * beta, x.abs()))

    def hypotenuse(self, x: Tensor, y: float) -> Tensor:
        squares = x * x + y * y
        return squares.sqrt()

    def norm(self, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
        return length

    def follow(self, name: str, target: Tensor, factor: Tensor) -> None:
        state = self.get(name)
        self.put(
            name, torch.where(factor >= 1, target, state + self.scalar(factor) * (target - state))
        )

    def descend(self, direction: Tensor, lr: float | Tensor) -> None:
        add_float(self._parameter, direction, -lr, self._compensation())

    def octaves(
        self, x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...]
    ) -> Tensor:
        return function(x)

    def multiply(self, octaves: Tensor, limit: Tensor | None) -> None:
        add_float(
            self._parameter,
            self.weight * torch.expm1(octaves * math.log(2)),
            1.0,
            self._compensation(),
        )
        if limit is not None:
            self._parameter.clamp_(-limit, limit)

    def _compensation(self) -> Tensor | None:
        return self.get("compensation") if self._group["kahan_sum"] else None
