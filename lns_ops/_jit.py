"""numba's decorators as this package uses them: GIL released, machine code cached on disk, types kept for the checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.extending import intrinsic as _intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first call; the cache notices edits of the function's own file only, so tables must be arguments."""
    compiled: F = njit(nogil=True, cache=True)(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes LLVM instructions of its own."""
    compiled: Callable[..., Any] = _intrinsic(function)
    return compiled
