"""Leave the contexts of LNS products for a while, so that products in between are float32.

A layer that is left out does so for its forward pass, an LNS product for its own operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lns_ops._compat import function_modes


def step_out() -> list[Any]:
    """Leave all active contexts; return the contexts that this call has left."""
    entered = [mode for mode in function_modes() if getattr(mode, "left", None) == 0]
    for mode in entered:
        mode.left += 1
    return entered


def step_in(entered: list[Any]) -> None:
    """Enter the contexts again that :func:`step_out` has left."""
    for mode in entered:
        mode.left -= 1


@dataclass(frozen=True)
class StepOut:
    """The forward pre-hook of a left-out layer; the hook :class:`StepIn` undoes it."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        for mode in function_modes():
            if hasattr(mode, "left"):
                mode.left += 1


@dataclass(frozen=True)
class StepIn:
    """The forward hook that undoes :class:`StepOut`."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for mode in function_modes():
            if hasattr(mode, "left"):
                mode.left -= 1
