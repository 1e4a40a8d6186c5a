"""The tables of LNS forms of aten operators and torch functions, and decorators to fill them."""

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
"""The torch functions of two LNSTensors that are one node of the graph, or None: tried first."""
VIEWS: set[Any] = set()
"""The handled operators of one tensor, which can meet no float tensor: the most frequent ones."""

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def handles(*operators: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function as the LNS form of aten ``operators``.

    It is called as ``handler(operator, *args, **kwargs)``.

    It computes forward results only: autograd goes on recording torch's own formula, whose
    operators arrive here in turn.
    """

    def register(handler: _Handler) -> _Handler:
        HANDLERS.update(dict.fromkeys(operators, handler))
        return handler

    return register


def replaces(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function as the LNS form of torch ``functions``.

    It is called when an argument is an LNSTensor, with the same signature and no operator.

    For functions whose gradient formula would not do in LNS, or that are best composed of other
    operations; autograd sees what the decorated function does, and so does ``torch.compile``, whose
    tracer of Python code is kept out of it: arguments and results must be tensors, numbers,
    strings, None, or sequences of these.
    """

    def register(replacement: _Handler) -> _Handler:
        allow_in_graph(replacement)
        return replaces_untraced(*functions)(replacement)

    return register


def replaces_untraced(*functions: Any) -> Callable[[_Handler], _Handler]:
    """Register as :func:`replaces` does, for functions that no compiled code calls."""

    def register(replacement: _Handler) -> _Handler:
        REPLACEMENTS.update(dict.fromkeys(functions, replacement))
        return replacement

    return register


def torchs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's own ``function``, whose operators then arrive at the handlers."""
    with DisableTorchFunction():
        return function(*args, **kwargs)


@cache
def parts_of(func: Any) -> tuple[str, str, Any]:
    """Return an operator's name and overload, and of one in place the form out of place."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    return name, overload, getattr(packet, overload or "default", None)
