"""ParameterMath for LNS parameters: LNS operations, or float32 operations on decoded codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.formats import random_bits
from lns_ops.formats.logarithmic import Logarithmic
from lns_ops.functional import directions, reductions
from lns_ops.optim import moments
from lns_ops.optim.backend_float import Floats
from lns_ops.optim.backends import ParameterMath
from lns_ops.optim.base import gradient, negated_rate, rate_code, scalar_code
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import DecayTable
from lns_ops.spec.reference import WEIGHT_SLOT
from lns_ops.spec.reference_updates import gain
from lns_ops.tensor import LNSTensor

_FLOAT32 = torch.finfo(torch.float32)


@lru_cache(maxsize=256)
def decay_codes(beta: float, name: str, fmt: LNSFormat) -> tuple[int, int]:
    """Return the code of a decay and the code of 1 minus the rounded decay.

    Raises:
        ValueError: the decay underflows, or it rounds to 1, so that an average would never forget.
    """
    code = scalar_code(name, beta, fmt)
    held = float(lns.decode(torch.tensor(code, dtype=torch.int16), fmt, torch.float64))
    if held >= 1:
        raise ValueError(
            f"{name}={beta}: rounds to 1 in {fmt}, so the average would never forget; use {name} <="
            f" {1 / (1 + fmt.epsilon):.3g}"
        )
    return code, int(lns.encode_number(1 - held, fmt))


class Codes(ParameterMath):
    """Operations on an LNS parameter: each is one LNS operation on codes.

    Attributes:
        fmt: the parameter's format.
    """

    def __init__(
        self, parameter: LNSTensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        super().__init__(parameter, state, group, key)
        self.fmt = parameter.fmt
        self.weight = parameter.codes
        grad = gradient(parameter).contiguous()
        self.grad = lns.neg(grad, self.fmt) if group["maximize"] else grad

    def number(self, value: float, name: str = "") -> Any:
        code = rate_code(value, self.fmt) if name == "lr" else scalar_code(name, value, self.fmt)
        return torch.tensor(code, dtype=torch.int16)

    def scalar(self, value: Tensor) -> Tensor:
        return lns.encode(value, self.fmt)

    def at_least_smallest(self, value: Tensor) -> Tensor:
        return lns.encode(value, self.fmt).clamp_min(1)

    def add(self, x: Any, y: Any) -> Tensor:
        return lns.add(x, y, self.fmt)

    def sub(self, x: Any, y: Any) -> Tensor:
        return lns.sub(x, y, self.fmt)

    def mul(self, x: Any, y: Any) -> Tensor:
        return lns.mul(x, y, self.fmt)

    def div(self, x: Any, y: Any) -> Tensor:
        return lns.div(x, y, self.fmt)

    def sqrt(self, x: Tensor) -> Tensor:
        return lns.sqrt(lns.relu(x), self.fmt)

    def absolute(self, x: Tensor) -> Tensor:
        return lns.absolute(x, self.fmt)

    def sign(self, x: Tensor) -> Tensor:
        return lns.sign(x, self.fmt)

    def clamp(self, x: Tensor, low: Any, high: Any) -> Tensor:
        least, most = (int(lns.order_key(code, self.fmt)) for code in (low, high))
        return lns.from_key(lns.order_key(x, self.fmt).clamp(least, most), self.fmt)

    def gain(self, beta: float) -> Tensor:
        codes = torch.tensor(decay_codes(beta, "beta", self.fmt), dtype=torch.int16)
        keep, rest = lns.decode(codes, self.fmt, torch.float64).tolist()
        result: Tensor = gain(keep, rest, self.steps)
        return result

    def blend(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        keep, rest = (
            torch.tensor(code, dtype=torch.int16) for code in decay_codes(beta, "beta", self.fmt)
        )
        return self.add(self.mul(keep, x), self.mul(rest, y))

    def root_average(self, name: str, x: Tensor, beta: float) -> Tensor:
        return self._root(name, x, moments.mean_square(beta, self.fmt.fraction_bits))

    def root(self, name: str) -> Tensor:
        return self.get(f"root_{name}").clone()

    def root_sum(self, name: str, x: Tensor, start: float = 0.0) -> Tensor:
        if start:
            root = self.get(f"root_{name}")
            self.put(
                f"root_{name}",
                self.first(self.plain(math.sqrt(start), "initial_accumulator_value"), root),
            )
        return self._root(name, x, moments.sum_square(self.fmt.fraction_bits))

    def largest(self, name: str, x: Tensor, beta: float) -> Tensor:
        table, residue = moments.maximum(beta, self.fmt.fraction_bits), self.get(f"{name}_residue")
        return moments.follow_(self.get(name), residue, x, table, self.fmt)

    def hypotenuse(self, x: Tensor, y: float) -> Tensor:
        root, residue = x.clone(), torch.zeros_like(x)
        other = torch.full_like(x, max(1, int(lns.encode_number(y, self.fmt))))
        return moments.follow_(
            root, residue, other, moments.sum_square(self.fmt.fraction_bits), self.fmt
        )

    def norm(self, x: Tensor) -> Tensor:
        return reductions.norm(x, self.fmt)

    def follow(self, name: str, target: Tensor, factor: Tensor) -> None:
        state, lost, whole = self.get(name), self.get(f"{name}_compensation"), factor >= 1
        difference = self.mul(self.scalar(factor), self.sub(target, state))
        lns.sgd_update_(state, difference, self.fmt, negative_lr=self.fmt.bias, compensation=lost)
        state.copy_(torch.where(whole, target, state))
        lost.copy_(torch.where(whole, 0, lost))

    def descend(self, direction: Tensor, lr: float | Tensor, momentum: float = 0.0) -> None:
        """Descend as the base class does, with momentum in the same kernel.

        The direction is then ``buffer = momentum buffer + direction``.
        """
        kahan, key = self._group["kahan_sum"], self._key
        lns.sgd_update_(
            self.weight, direction, self.fmt, negative_lr=negated_rate(lr, self.fmt), key=key,
            momentum=self.plain(momentum, "momentum") if momentum else None,
            buffer=self.get("momentum_buffer") if momentum else None,
            compensation=self.get("compensation") if kahan else None,
            step=None if key is None else self.step,
        )  # fmt: skip

    def octaves(
        self, x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...]
    ) -> Tensor:
        return moments.fine_logarithms(x, function, of, self.fmt)

    def multiply(self, octaves: Tensor, limit: Tensor | None) -> None:
        residue = self.get("weight_residue") if self._group["kahan_sum"] else None
        moments.multiply_(
            self.weight, octaves, residue, limit, self.fmt, key=self._key, step=self.step
        )

    def shrink(
        self,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        of: tuple[Any, ...],
        limit: Tensor | None,
    ) -> None:
        if not self.fused:
            super().shrink(x, function, of, limit)
            return
        table = moments.fine_table(function, of, self.fmt, self.weight.device)
        residue = self.get("weight_residue") if self._group["kahan_sum"] else None
        highest = None if limit is None else int(limit)
        directions.multiply(
            self.weight, x, table, residue, highest, self.fmt, key=self._key, step=int(self.step)
        )

    @property
    def fused(self) -> bool:
        """Whether :mod:`lns_ops.functional.directions` has kernels for this device."""
        return self.weight.device.type == "cpu" and self.weight.is_contiguous()

    def lion(self, name: str, betas: tuple[float, float], decay: float) -> Tensor:
        """Return ``sign(blend(state, grad, beta1)) + decay weight``.

        Then update the average in the state with beta2.
        """
        forward, kept = (decay_codes(beta, "beta", self.fmt) for beta in betas)
        code = self.plain(decay, "weight_decay")
        return directions.lion(
            self.weight, self.grad, self.get(name), forward, kept, code, self.fmt
        )

    def normed(
        self,
        name: str,
        table: DecayTable,
        eps: Tensor,
        decay: float = 0.0,
        factor: Tensor | None = None,
        bound: float | None = None,
    ) -> Tensor:
        """Update the root with ``g = decayed(decay)`` and return ``(g / (root + eps)) factor``,
        at most ``bound``.
        """
        root, residue = self.get(f"root_{name}"), self.get(f"root_{name}_residue")
        return directions.normed(
            self.weight, self.grad, root, residue, table, self.plain(decay, "weight_decay"),
            int(self.at_least_smallest(eps)), self.fmt,
            factor=None if factor is None else int(self.scalar(factor)),
            bound=None if bound is None else self.plain(bound, "g_bound"),
        )  # fmt: skip

    def _root(self, name: str, x: Tensor, table: DecayTable) -> Tensor:
        return moments.follow_(
            self.get(f"root_{name}"), self.get(f"root_{name}_residue"), x, table, self.fmt
        )


class Decoded(Floats):
    """Operations on an LNS parameter in float32: codes are decoded when read, rounded when stored.

    They follow :func:`lns_ops.reference.sgd_update_float32` and
    :func:`~lns_ops.reference.adam_update_float32`: every operation is a float32 operation. A stored
    value is rounded to the format, and the step continues with the rounded value. Values beyond
    float32's range are clamped to its largest number. The state has the same names as for
    :class:`Codes`; a residue holds the code of the rounding error of the stored value.
    """

    def __init__(
        self, parameter: LNSTensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        ParameterMath.__init__(self, parameter, state, group, key)
        self._codes, self._fmt = parameter.codes, parameter.fmt
        self.weight, grad = (
            lns.decode(codes, self._fmt) for codes in (parameter.codes, gradient(parameter))
        )
        self.grad = -grad if group["maximize"] else grad

    def get(self, name: str) -> Tensor:
        value = super().get(name)
        return lns.decode(value, self._fmt) if value.dtype == torch.int16 else value

    def put(self, name: str, value: Tensor) -> Tensor:
        stored = super().get(name)
        stored.copy_(self._encoded(value) if stored.dtype == torch.int16 else value)
        return value

    def at_least_smallest(self, value: Tensor) -> Tensor:
        return self.scalar(value).clamp_min(_FLOAT32.tiny)

    average = ParameterMath.average

    def blend(self, x: Tensor, y: Tensor, beta: float) -> Tensor:
        return x * beta + y * (1 - beta)

    def root_average(self, name: str, x: Tensor, beta: float) -> Tensor:
        root = self.root(name)
        return self._put_whole(f"root_{name}", self.sqrt(root * root * beta + x * x * (1 - beta)))

    def root(self, name: str) -> Tensor:
        return self._whole(f"root_{name}")

    def root_sum(self, name: str, x: Tensor, start: float = 0.0) -> Tensor:
        root = self.first(math.sqrt(start), self.root(name))
        return self._put_whole(f"root_{name}", self.sqrt(root * root + x * x))

    def largest(self, name: str, x: Tensor, beta: float) -> Tensor:
        return self._put_whole(name, torch.maximum(self._whole(name) * beta, x.abs()))

    def follow(self, name: str, target: Tensor, factor: Tensor) -> None:
        lost = f"{name}_compensation"
        state = self._whole(name, lost)
        self._put_whole(
            name,
            torch.where(factor >= 1, target, state + self.scalar(factor) * (target - state)),
            lost,
        )

    def descend(self, direction: Tensor, lr: float | Tensor) -> None:
        update = direction * -lr
        if self._key is not None:
            bits = random_bits(self.weight, self._key, self.step, WEIGHT_SLOT)
            self._codes.copy_(self._encoded(self.weight + update, bits))
        elif self._group["kahan_sum"]:
            kept = _inside(self.get("compensation") + update)
            self._codes.copy_(self._encoded(self.weight + kept))
            self.put("compensation", kept - (lns.decode(self._codes, self._fmt) - self.weight))
        else:
            self._codes.copy_(self._encoded(self.weight + update))
        self.weight = lns.decode(self._codes, self._fmt)

    def octaves(
        self, x: Tensor, function: Callable[[Tensor], Tensor], of: tuple[Any, ...]
    ) -> Tensor:
        return moments.fine(function(x), self._fmt)

    def multiply(self, octaves: Tensor, limit: Tensor | None) -> None:
        residue = super().get("weight_residue") if self._group["kahan_sum"] else None
        code = None if limit is None else self._encoded(limit).clamp_min(1)
        moments.multiply_(
            self._codes, octaves, residue, code, self._fmt, key=self._key, step=self.step
        )

    def _encoded(self, x: Tensor, bits: Tensor | None = None) -> Tensor:
        return Logarithmic(self._fmt).encode(_inside(x), bits).codes

    def _whole(self, name: str, residue: str = "") -> Tensor:
        """Return the state plus its residue, the rounding error of the stored value."""
        return self.get(name) + self.get(residue or f"{name}_residue")

    def _put_whole(self, name: str, value: Tensor, residue: str = "") -> Tensor:
        value = self.put(name, _inside(value))
        self.put(residue or f"{name}_residue", value - self.get(name))
        return value


def _inside(x: Tensor) -> Tensor:
    """Return ``x`` clamped to float32's largest number, so that an overflow causes no NaN later."""
    return x.clamp(_FLOAT32.min, _FLOAT32.max)


def math_of(
    parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
) -> ParameterMath:
    """Return the operations for a parameter that has a gradient."""
    if not isinstance(parameter, LNSTensor):
        return Floats(parameter, state, group, key)
    return (Decoded if group["arithmetic"] == "float32" else Codes)(parameter, state, group, key)
