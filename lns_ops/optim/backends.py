"""One parameter's numbers, LNS codes or floats, behind one interface for all optimizers.

An optimizer is so written once, as a sequence of operations.

The operations of :class:`~lns_ops.optim.backend_codes.Codes` are those of :mod:`lns_ops.functional`
on int16 codes, each an LNS operation of its own (rounded once), on any device with the same bits;
those of :class:`~lns_ops.optim.backend_float.Floats` are torch's;
:class:`~lns_ops.optim.backend_codes.Decoded` takes these in float32 and codes for what is kept from
step to step. An optimizer composed of them *is* its own reference: the order in which it calls them
is the contract.

Averages that move by less than half an ulp a step would freeze. So what an LNS parameter keeps of a
second moment is its *root* (half the range) with 16 bits below the ulp in a residue
(:mod:`lns_ops.optim.moments`), as in :class:`lns_ops.optim.Adam`. Fresh state is zero everywhere: a
CUDA graph is captured on zeroed state.

Scalars that depend on the step are float64 tensors on the parameter's device, encoded once; so a
captured graph goes on counting. A device whose float64 power differs in its last of 53 bits can
round such a scalar to the other code, about once in 10^12 steps.
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
    """A parameter, its gradient and its state as plain tensors, and the operations on them.

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
        """Return the state of that name, at first zeros of the parameter's format and shape.

        Only :meth:`put` may change it.
        """
        zeros(self._state, self._parameter, name)
        value: Tensor = self._state[name]
        return value.codes if isinstance(value, LNSTensor) else value

    def put(self, name: str, value: Tensor) -> Tensor:
        """Store state and return it."""
        return self.get(name).copy_(value)

    def first(self, start: Tensor | float, value: Tensor) -> Tensor:
        """Return ``start`` in the first step, later ``value``.

        A start on the host must be a Python number, which a graph can capture.
        """
        return torch.where(self.step == 1, start, value)

    @abstractmethod
    def number(self, value: float, name: str = "") -> Any:
        """Return a constant in the parameter's format; ``name`` is what an error calls it."""

    def plain(self, value: float, name: str = "") -> Any:
        """Return :meth:`number` as a Python number.

        Selections take it also while a CUDA graph is captured.
        """
        made = self.number(value, name)
        return int(made) if isinstance(made, Tensor) else made

    @abstractmethod
    def scalar(self, value: Tensor) -> Tensor:
        """Return a float64 0-dim tensor in the parameter's format."""

    @abstractmethod
    def at_least_smallest(self, value: Tensor) -> Tensor:
        """Return :meth:`scalar` of a positive number, the smallest magnitude if it underflows."""

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
        """Clamp ``x`` between two numbers of the host."""

    def average(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Move ``state = beta state + (1 - beta) x`` and return it.

        In LNS it takes the beta that the format has, so that its gain is 1.
        """
        return self.put(name, self.blend(self.get(name), x, beta))

    def gain(self, beta: float) -> Tensor:
        """Return what :meth:`average` of a constant 1 holds after this step, float64.

        It is ``1 - beta^t``; in LNS it takes the factors that the format has.
        """
        return 1 - beta**self.steps

    @abstractmethod
    def blend(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return ``beta x + (1 - beta) y``, with the factors of :meth:`average`."""

    @abstractmethod
    def root_average(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Move ``state = beta state + (1 - beta) x^2`` and return its root."""

    @abstractmethod
    def root(self, name: str) -> Tensor:
        """Return the root that :meth:`root_average` left."""

    @abstractmethod
    def root_sum(self, name: str, x: Tensor, start: float = 0.0) -> Tensor:
        """Move ``state = state + x^2``, which begins with ``start``, and return its root."""

    @abstractmethod
    def largest(self, name: str, x: Tensor, beta: float) -> Tensor:
        """Move ``state = max(beta state, |x|)`` and return it."""

    @abstractmethod
    def hypotenuse(self, x: Tensor, y: float) -> Tensor:
        """Return ``sqrt(x^2 + y^2)``, rounded once."""

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """Return the Euclidean norm of all elements, a float64 0-dim tensor."""

    @abstractmethod
    def follow(self, name: str, target: Tensor, factor: Tensor) -> None:
        """Move ``state += factor (target - state)``, the sum compensated.

        It becomes ``target`` itself where the factor (float64) is 1.
        """

    @abstractmethod
    def descend(self, direction: Tensor, lr: float | Tensor) -> None:
        """Compute ``weight -= lr direction``, rounded as the group says."""

    @abstractmethod
    def octaves(
        self, x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...]
    ) -> Tensor:
        """Return ``function(x)`` of float64 as a change of a logarithm.

        In LNS it is int64 in 2^-16 ulps, from a table (kept under ``of``).
        """

    @abstractmethod
    def multiply(self, octaves: Tensor, limit: Tensor | None) -> None:
        """Compute ``weight *= 2^octaves``, at most ``limit`` in magnitude.

        ``limit`` is a number of the format; a zero weight stays.
        """

    def shrink(
        self,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        of: tuple[Any, ...],
        limit: Tensor | None,
    ) -> None:
        """Compute ``weight *= 2^(-sign(weight) function(x))``.

        It is :meth:`octaves`, then :meth:`multiply`.
        """
        self.multiply(torch.where(self.weight < 0, 1, -1) * self.octaves(x, function, of), limit)

    def decayed(self, decay: float) -> Tensor:
        """Return ``grad + decay weight``: decay in the gradient (L2)."""
        return (
            self.add(self.grad, self.mul(self.number(decay, "weight_decay"), self.weight))
            if decay
            else self.grad
        )

    def with_decay(self, direction: Tensor, decay: float) -> Tensor:
        """Return ``direction + decay weight``: decoupled decay."""
        return (
            self.add(direction, self.mul(self.number(decay, "weight_decay"), self.weight))
            if decay
            else direction
        )

    def root_mean_square(self) -> Tensor:
        """Return the root mean square of the weight's elements, float64."""
        return self.norm(self.weight) / math.sqrt(max(1, self.weight.numel()))
