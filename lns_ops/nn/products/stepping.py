"""Stepping out of the contexts of products: what is computed in between is none of theirs.

A layer that is left out steps out for its forward pass, an LNS product for its own operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lns_ops._compat import function_modes


def step_out() -> list[Any]:
    """Step out of the contexts around, and return those that were not left yet."""
    entered = [mode for mode in function_modes() if getattr(mode, "left", None) == 0]
    for mode in entered:
        mode.left += 1
    return entered


def step_in(entered: list[Any]) -> None:
    """Step into contexts that :func:`step_out` has left."""
    for mode in entered:
        mode.left -= 1


@dataclass(frozen=True)
class StepOut:
    """The forward hook of a layer that is left out, until the hook :class:`StepIn`."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        for mode in function_modes():
            if hasattr(mode, "left"):
                mode.left += 1


@dataclass(frozen=True)
class StepIn:
    """The forward hook that ends :class:`StepOut`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for mode in function_modes():
            if hasattr(mode, "left"):
                mode.left -= 1
