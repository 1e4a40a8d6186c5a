"""Rounding to a list of values (:mod:`lns_ops.formats.tabulated`) with torch operations.

A list is cached on each device on which it was used, because a CUDA graph cannot copy it there
during capture. In compiled code an operator returns it: constants of torch.compile need unique
names, and within an autograd function they do not have them (torch 2.13).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from lns_ops.formats.bit_views import bit_view
from lns_ops.functional.library import LIBRARY


class Listed(Protocol):
    """The part of a format that this module uses."""

    def __hash__(self) -> int:
        """Return the key under which the format's arrays are cached."""
        raise NotImplementedError

    @property
    def grid(self) -> Any:
        """The arrays, a :class:`~lns_ops.formats.tabulated.Grid`."""

    @property
    def name(self) -> str:
        """The format's name."""

    @property
    def storage(self) -> torch.dtype:
        """The dtype of codes."""


@lru_cache(maxsize=256)
def _kept(fmt: Listed, name: str, device: torch.device) -> Tensor:
    array = torch.from_numpy(getattr(fmt.grid, name))
    return array.to(device, fmt.storage if name == "codes" else array.dtype)


_compiled: dict[str, Listed] = {}
"""The formats of compiled code, by unique names."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _key(fmt: Listed) -> str:
    """Return a format's name in compiled code; for a list from a file it has the values' digest."""
    key = f"{fmt.name} {getattr(fmt, 'digest', '')}"
    _compiled[key] = fmt
    return key


def _array(like: Tensor, key: str, name: str) -> Tensor:
    return _kept(_compiled[key], name, like.device)


def _fake_array(like: Tensor, key: str, name: str) -> Tensor:
    fmt, array = _compiled[key], getattr(_compiled[key].grid, name)
    dtype = fmt.storage if name == "codes" else torch.from_numpy(array[:0]).dtype
    return like.new_empty(array.shape, dtype=dtype)


LIBRARY.define("listed(Tensor like, str key, str name) -> Tensor")
LIBRARY.impl("listed", _array, "CompositeExplicitAutograd")
torch.library.register_fake("lns_ops::listed", _fake_array, lib=LIBRARY)


def kept(fmt: Listed, name: str, like: Tensor) -> Tensor:
    """Return the array of a format's grid with this name, on the device of ``like``."""
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return torch.ops.lns_ops.listed(like, _key(fmt), name)  # type: ignore[no-any-return]
    return _kept(fmt, name, like.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _shift(fmt: Listed) -> int | None:
    shift: int | None = fmt.grid.shift
    return shift


def _nearest(fmt: Listed, x: Tensor) -> Tensor:
    shift = _shift(fmt)
    if shift is None:
        thresholds = kept(fmt, "thresholds", x)
        return torch.searchsorted(thresholds, x.contiguous(), right=True)
    cell = bit_view(x, torch.int32) >> shift & (1 << 32 - shift) - 1
    place = kept(fmt, "cells", x)[cell]
    return place + (x >= kept(fmt, "ends", x)[place])


def index(fmt: Listed, x: Tensor, random: Tensor | None) -> Tensor:
    """Return the indices in the list of float32 values, rounded to nearest or at random."""
    if random is None:
        return _nearest(fmt, x)
    levels = kept(fmt, "levels", x)
    place = _nearest(fmt, x)
    below = (place - (x < levels[place]).to(place.dtype)).clamp(0, len(levels) - 2)
    # In float64 the difference between neighbours is exact enough and cannot overflow.
    low, high = levels[below].double(), levels[below + 1].double()
    chance = ((x.double() - low) / (high - low)).clamp(0, 1)
    return below + ((chance * 65536).floor() + random >= 65536)
