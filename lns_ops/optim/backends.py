"""One interface for operations on a parameter, LNS codes or floats, for all optimizers.

An optimizer is written once, as a sequence of these operations. There are three implementations:

- :class:`~lns_ops.optim.backend_codes.Codes` uses the LNS operations of :mod:`lns_ops.functional`
  on int16 codes. Each is rounded once and gives the same bits on any device.
- :class:`~lns_ops.optim.backend_float.Floats` uses torch operations.
- :class:`~lns_ops.optim.backend_codes.Decoded` uses torch operations in float32, and codes for
  values that are kept between steps.

The composed optimizer *is* its own reference: the order of the operations is the contract.

An average that moves by less than half an ulp a step would freeze. So for a second moment an LNS
parameter keeps its *root* (half the range), with 16 bits below the ulp in a residue
(:mod:`lns_ops.optim.moments`), as in :class:`lns_ops.optim.Adam`. New state is zero everywhere,
because a CUDA graph is captured on zeroed state.

Scalars that depend on the step are float64 tensors on the parameter's device, encoded once, so a
captured graph continues to count steps. If a device's float64 power differs in its last of 53 bits,
such a scalar can be rounded to the neighbouring code, about once in 10^12 steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lns_ops.optim.base import zeros
from lns_ops.tensor import LNSTensor


class ParameterMath(ABC):
    """A parameter, its gradient and its state as plain tensors, with operations on them.

    Attributes:
        weight, grad: int16 codes or floats, of the parameter's shape.
        step: int64, 0-dim, on the parameter's device; 1 in the first step.
    """

    weight: Tensor
    grad: Tensor

    def __init__(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        self._parameter, self._state, self._group, self._key = parameter, state, group, key
        zeros(state, parameter, "step")
        self.step: Tensor = state["step"]

    @property
    def steps(self) -> Tensor:
        """The step as float64."""
        return self.step.double()

    def get(self, name: str) -> Tensor:
        """Return the state ``name``; initially zeros of the parameter's format and shape.

        Change it only with :meth:`put`.
        """
        zeros(self._state, self._parameter, name)
        value: Tensor = self._state[name]
        return value.codes if isinstance(value, LNSTensor) else value

    def put(self, name: str, value: Tensor) -> Tensor:
        """Store state and return it."""
        return self.get(name).copy_(value)

    def first(self, start: Tensor | float, value: Tensor) -> Tensor:
        """Return ``start`` in the first step and ``value`` later.

        A start on the host must be a Python number, so that a graph can capture it.
        """
        return torch.where(self.step == 1, start, value)

    @abstractmethod
    def number(self, value: float, name: str = "") -> Any:
        """Return a constant in the parameter's format; error messages call it ``name``."""

    def plain(self, value: float, name: str = "") -> Any:
        """Return :meth:`number` as a Python number.

        It can be used in selections even while a CUDA graph is captured.
        """
        made = self.number(value, name)
        return int(made) if isinstance(made, Tensor) else made

    @abstractmethod
    def scalar(self, value: Tensor) -> Tensor:
        """Round a float64 0-dim tensor to the parameter's format."""

    @abstractmethod
    def at_least_smallest(self, value: Tensor) -> Tensor:
        """Return :meth:`scalar` of a positive number, at least the format's smallest magnitude."""

    @abstractmethod
    def add(self, x: Any, y: Any) -> Tensor:
        """Return ``x + y``."""

    @abstractmethod
    def sub(self, x: Any, y: Any) -> Tensor:
        """Return ``x - y``."""

    @abstractmethod
    def mul(self, x: Any, y: Any) -> Tensor:
        """Return ``x y``."""

    @abstractmethod
    def div(self, x: Any, y: Any) -> Tensor:
        """Return ``x / y``."""

    @abstractmethod
    def sqrt(self, x: Tensor) -> Tensor:
        """Return the root of ``max(x, 0)``."""

    @abstractmethod
    def absolute(self, x: Tensor) -> Tensor:
        """Return ``|x|``."""

    @abstractmethod
    def sign(self, x: Tensor) -> Tensor:
        """Return -1, 0 or 1."""

    @abstractmethod
    def clamp(self, x: Tensor, low: Any, high: Any) -> Tensor:
        """Clamp ``x`` between two Python numbers."""

    def average(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Update ``state = beta state + (1 - beta) x`` and return it.

        In LNS beta is rounded to the format first, so that the gain of the average is 1.
        """
        return self.put(name, self.blend(self.get(name), x, beta))

    def gain(self, beta: float) -> Tensor:
        """Return the :meth:`average` of a constant 1 after this step, float64.

        It is ``1 - beta^t``; in LNS it is computed with the rounded factors.
        """
        return 1 - beta**self.steps

    @abstractmethod
    def blend(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return ``beta x + (1 - beta) y``, with the factors of :meth:`average`."""

    @abstractmethod
    def root_average(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Update ``state = beta state + (1 - beta) x^2`` and return its root."""

    @abstractmethod
    def root(self, name: str) -> Tensor:
        """Return the current root of :meth:`root_average`."""

    @abstractmethod
    def root_sum(self, name: str, x: Tensor, start: float = 0.0) -> Tensor:
        """Update ``state = state + x^2``, which starts from ``start``, and return its root."""

    @abstractmethod
    def largest(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Update ``state = max(beta state, |x|)`` and return it."""

    @abstractmethod
    def hypotenuse(self, x: Tensor, y: float) -> Tensor:
        """Return ``sqrt(x^2 + y^2)``, rounded once."""

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """Return the Euclidean norm of all elements, a float64 0-dim tensor."""

    @abstractmethod
    def follow(self, name: str, target: Tensor, factor: Tensor) -> None:
        """Update ``state += factor (target - state)`` with Kahan compensation.

        If the factor (float64) is 1, the state becomes ``target`` exactly.
        """

    @abstractmethod
    def descend(self, direction: Tensor, lr: float | Tensor) -> None:
        """Compute ``weight -= lr direction``, with the group's rounding options."""

    @abstractmethod
    def octaves(
        self, x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...]
    ) -> Tensor:
        """Return ``function(x)``, a float64 function, as a change of a logarithm in octaves.

        In LNS the result is int64 in 2^-16 ulps, from a table that is cached under ``of``.
        """

    @abstractmethod
    def multiply(self, octaves: Tensor, limit: Tensor | None) -> None:
        """Compute ``weight *= 2^octaves``, at most ``limit`` in magnitude.

        ``limit`` is in the parameter's format; zero weights stay zero.
        """

    def shrink(
        self,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        of: tuple[Any, ...],
        limit: Tensor | None,
    ) -> None:
        """Compute ``weight *= 2^(-sign(weight) function(x))``, by :meth:`octaves` and
        :meth:`multiply`.
        """
        self.multiply(torch.where(self.weight < 0, 1, -1) * self.octaves(x, function, of), limit)

    def decayed(self, decay: float) -> Tensor:
        """Return ``grad + decay weight``: L2 weight decay, in the gradient."""
        return (
            self.add(self.grad, self.mul(self.number(decay, "weight_decay"), self.weight))
            if decay
            else self.grad
        )

    def with_decay(self, direction: Tensor, decay: float) -> Tensor:
        """Return ``direction + decay weight``: decoupled weight decay."""
        return (
            self.add(direction, self.mul(self.number(decay, "weight_decay"), self.weight))
            if decay
            else direction
        )

    def root_mean_square(self) -> Tensor:
        """Return the root mean square of the weight's elements, float64."""
        return self.norm(self.weight) / math.sqrt(max(1, self.weight.numel()))
