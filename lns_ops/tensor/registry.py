"""Tables of the LNS forms of aten operators and torch functions, with decorators to fill them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from lns_ops._compat import DisableTorchFunction
from lns_ops.tensor.dynamo import allow_in_graph

aten = torch.ops.aten
HANDLERS: dict[Any, Callable[..., Any]] = {}
REPLACEMENTS: dict[Any, Callable[..., Any]] = {}
PAIRS: dict[Any, Callable[[Any, Any], Any]] = {}
"""Torch functions of two LNSTensors in one graph node, or None; looked up first."""
VIEWS: set[Any] = set()
"""Handled operators of one tensor, so without float operands; the most frequent ones."""

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def handles(*operators: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function as the LNS form of aten ``operators``.

    It is called as ``handler(operator, *args, **kwargs)`` and computes only the forward result.
    autograd still records torch's own formula, whose operators are handled in turn.
    """

    def register(handler: _Handler) -> _Handler:
        HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def replaces(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function as the LNS form of torch ``functions``.

    It is called with the same signature if an argument is an LNSTensor.

    Use it for functions whose gradient formula is unsuitable for LNS, or that are best composed of
    other operations. autograd and ``torch.compile`` see the operations of the decorated function,
    but the compiler does not trace its Python code. So arguments and results must be tensors,
    numbers, strings, None, or sequences of these.
    """

    def register(replacement: _Handler) -> _Handler:
        allow_in_graph(replacement)
        return replaces_untraced(*functions)(replacement)

    return register


def replaces_untraced(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Register as :func:`replaces` does, for functions that compiled code does not call."""

    def register(replacement: _Handler) -> _Handler:
        REPLACEMENTS.update(dict.fromkeys(functions, replacement))
        return replacement

    return register


def torchs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's own ``function``, whose operators are then dispatched to the handlers."""
    with DisableTorchFunction():
        return function(*args, **kwargs)


@cache
def parts_of(func: Any) -> tuple[str, str, Any]:
    """Return an operator's name, overload, and for an in-place one its out-of-place form."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return name, overload, getattr(packet, overload or "default", None)
