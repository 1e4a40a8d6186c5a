"""Padding by reflection and replication, and interpolation.

Padding gathers along one dimension after the other; its gradient sums the values that were gathered
from one place, in the contract's order. Nearest-neighbour interpolation is a gather as well; linear
interpolation is a product with encoded weights along each dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops.functional.indexed import index_sum
from lns_ops.tensor.lns_tensor import LNSTensor
from lns_ops.tensor.ops.pooling import adaptive_average
from lns_ops.tensor.registry import aten, handles, replaces


def _reflected(at: Tensor, length: int) -> Tensor:
    at = at.abs()
    return torch.where(at >= length, 2 * (length - 1) - at, at)


def _replicated(at: Tensor, length: int) -> Tensor:
    return at.clamp(0, length - 1)


def _places(
    x: Tensor, padding: Sequence[int], rule: Callable[[Tensor, int], Tensor]
) -> list[tuple[int, Tensor]]:
    """Return the input position of each output position, per padded dimension, the last first.

    Raises:
        ValueError: reflection padding is not shorter than the dimension.
    """
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    each = [(-1 - i, x.shape[-1 - i], before, after) for i, (before, after) in enumerate(pairs)]
    for d, length, before, after in each:
        if rule is _reflected and max(before, after) >= length:
            raise ValueError(
                f"padding {(before, after)} by reflection of dimension {d} with {length} values:"
                " must be fewer than these; pad less, or use mode='replicate'"
            )
    return [
        (d, rule(torch.arange(-before, length + after, device=x.device), length))
        for d, length, before, after in each
    ]


_RULES: dict[Any, Callable[[Tensor, int], Tensor]] = {}
_BACKWARD: dict[Any, Callable[[Tensor, int], Tensor]] = {}
for _kind, _rule in (("reflection", _reflected), ("replication", _replicated)):
    for _dims in (1, 2, 3):
        _RULES[getattr(aten, f"{_kind}_pad{_dims}d").default] = _rule
        _BACKWARD[getattr(aten, f"{_kind}_pad{_dims}d_backward").default] = _rule


@handles(*_RULES)
def _padded(func: Any, x: LNSTensor, padding: list[int]) -> LNSTensor:
    codes = x.codes
    for dim, at in _places(codes, padding, _RULES[func]):
        codes = codes.index_select(dim, at)
    return LNSTensor(codes, x.fmt)


@handles(*_BACKWARD)
def _padded_backward(func: Any, grad: LNSTensor, x: LNSTensor, padding: list[int]) -> LNSTensor:
    codes = grad.codes
    for dim, at in _places(x.codes, padding, _BACKWARD[func]):
        codes = index_sum(codes.movedim(dim, 0).contiguous(), at, x.shape[dim], grad.fmt).movedim(
            0, dim
        )
    return LNSTensor(codes.contiguous(), grad.fmt)


def _sizes(x: Tensor, size: Any, scale_factor: Any) -> list[int]:
    dims = x.dim() - 2
    if size is not None:
        return [size] * dims if isinstance(size, int) else list(size)
    factors = (
        [scale_factor] * dims if isinstance(scale_factor, (int, float)) else list(scale_factor)
    )
    return [int(length * factor) for length, factor in zip(x.shape[2:], factors, strict=True)]


def _linear(
    x: LNSTensor, sizes: list[int], align_corners: bool | None, scales: list[float | None]
) -> Tensor:
    result: Tensor = x
    for d, (wanted, scale) in enumerate(zip(sizes, scales, strict=True), start=2):
        unit = torch.eye(x.shape[d])[None]  # on the CPU, so that all devices get the same weights
        how: Any = {"size": wanted} if scale is None else {"scale_factor": scale}
        weights = F.interpolate(unit, mode="linear", align_corners=align_corners, **how)[0]
        result = (
            result.movedim(d, -1) @ LNSTensor.from_float(weights, x.fmt).to(x.device)
        ).movedim(-1, d)
    return result


@replaces(F.interpolate)
def interpolate(
    input: LNSTensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:  # fmt: skip
    """Interpolate as torch does, by gathers (nearest) or products (linear, area).

    ``bicubic`` and antialiasing are decoded, computed in float32 and encoded once.
    """
    sizes = _sizes(input, size, scale_factor)
    if mode == "area" and not antialias:
        return adaptive_average(input, sizes, len(sizes))
    if mode in ("linear", "bilinear", "trilinear") and not antialias:
        factors = (
            [None] * len(sizes) if size is not None or recompute_scale_factor else scale_factor
        )
        each = [factors] * len(sizes) if isinstance(factors, (int, float)) else list(factors)
        return _linear(input, sizes, align_corners, each)
    if mode not in ("nearest", "nearest-exact") or antialias:
        decoded = F.interpolate(
            input.to_float(), size, scale_factor, mode, align_corners, recompute_scale_factor,
            antialias,
        )  # fmt: skip
        return LNSTensor.from_float(decoded, input.fmt)
    result: Tensor = input
    factors = None if size is not None or recompute_scale_factor else scale_factor
    for d, wanted in enumerate(sizes, start=2):
        positions = torch.arange(input.shape[d], dtype=torch.float64, device=input.device)[
            None, None
        ]
        how: Any = {"size": wanted}
        if factors is not None:
            how = {"scale_factor": factors if isinstance(factors, (int, float)) else factors[d - 2]}
        result = result.index_select(
            d, F.interpolate(positions, mode=mode, **how)[0, 0].to(torch.int64)
        )
    return result
