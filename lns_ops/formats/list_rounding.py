"""Rounding to a list of values (:mod:`lns_ops.formats.tabulated`) in torch's operations.

A list is kept on each device that it was used on: a CUDA graph cannot copy it there while it is
captured, and for torch.compile it is a constant.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lns_ops.formats.bit_views import bit_view


class Listed(Protocol):
    """What is needed of a format."""

    def __hash__(self) -> int:
        """Return the key by which its arrays are kept."""
        raise NotImplementedError

    @property
    def grid(self) -> Any:
        """The arrays, a :class:`~lns_ops.formats.tabulated.Grid`."""

    @property
    def storage(self) -> torch.dtype:
        """The dtype of codes."""


@lru_cache(maxsize=256)
def _kept(fmt: Listed, name: str, device: torch.device) -> Tensor:
    array = torch.from_numpy(getattr(fmt.grid, name))
    return array.to(device, fmt.storage if name == "codes" else array.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(fmt: Listed, name: str, device: torch.device) -> Tensor:
    return _kept(fmt, name, device)


def kept(fmt: Listed, name: str, device: torch.device) -> Tensor:
    """Return the array of a format's grid with this name, on a device."""
    found: Tensor = _constant(fmt, name, device)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _shift(fmt: Listed) -> int | None:
    shift: int | None = fmt.grid.shift
    return shift


def _nearest(fmt: Listed, x: Tensor) -> Tensor:
    shift = _shift(fmt)
    if shift is None:
        thresholds = kept(fmt, "thresholds", x.device)
        return torch.searchsorted(thresholds, x.contiguous(), right=True)
    cell = bit_view(x, torch.int32) >> shift & (1 << 32 - shift) - 1
    place = kept(fmt, "cells", x.device)[cell]
    return place + (x >= kept(fmt, "ends", x.device)[place])


def index(fmt: Listed, x: Tensor, random: Tensor | None) -> Tensor:
    """Return the places in the list of float32 values rounded to nearest, or at random."""
    if random is None:
        return _nearest(fmt, x)
    levels = kept(fmt, "levels", x.device)
    place = _nearest(fmt, x)
    below = (place - (x < levels[place]).to(place.dtype)).clamp(0, len(levels) - 2)
    # In float64 the difference of two neighbours is exact enough and cannot overflow.
    low, high = levels[below].double(), levels[below + 1].double()
    chance = ((x.double() - low) / (high - low)).clamp(0, 1)
    return below + ((chance * 65536).floor() + random >= 65536)
