"""Sums of three or more gradients of one tensor, in float32.

If a tensor is used several times, autograd adds the gradients of these uses one by one. It also
adds the gradients of several backward passes to ``p.grad``. Repeated LNS additions stick, as
:mod:`lns_ops.spec.reference` explains: 512 equal gradients add up to 370 times one of them in lns16
and to 185 times in lns12. So the sum of two gradients is an LNS sum, and a sum of more is kept in
float32 beside the codes, which hold the encoded sum.

- Within a backward pass the engine adds the gradients that arrive at one place of the graph. Its
  additions are recognized by their caller, the engine, and by the nodes to which the gradient goes
  next. Once it has arrived, a sum is a gradient like any other; sums of consecutive layers are
  separate.
- Between passes ``p.grad`` keeps the float32 sum, 4 bytes an element, from the first addition. Any
  other write to ``p.grad`` (``zero_``, clipping) ends that sum, and the next gradient is added to
  the written value. The start of a CUDA graph capture ends it, too, because a replay would not
  notice later writes.

A float32 addition of two numbers is rounded in only one way, so the bits are the same on every
device. Sums beyond float32's range are clamped to it.

:func:`set_gradient_accumulation` restores LNS additions, to study what they lose. Additions in
Python code (``acc = acc + x``), in compiled autograd and in transforms are always LNS additions.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import (
    DisableTorchFunction,
    dispatching,
    engine_code,
    graph_task,
    make_wrapper_subclass,
    next_nodes,
)
from lns_ops.functional.accumulation import get_gradient_accumulation
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor.lns_tensor import LNSTensor

_MOST = torch.finfo(torch.float32).max
_LEAF = frozenset({-1})
"""The destination of a gradient that is added to ``p.grad``."""


class _Sum(NamedTuple):
    """The exact data of a sum of gradients, of which the codes hold the rounded value.

    Attributes:
        ends: ids of the nodes to which it may go.
        terms: two gradients, or the sum itself in float32.
        versions: versions of the gradients, or of the sum's codes, to detect later writes.
        captured: whether a CUDA graph was being captured when it was created.
    """

    ends: frozenset[int]
    terms: tuple[Tensor, ...]
    versions: tuple[int, ...]
    captured: bool


class _Unread(LNSTensor):
    """A sum that is encoded when it is first read, and is an ordinary LNSTensor afterwards.

    Most sums are never read, because another term is added to them.
    """

    @staticmethod
    def __new__(cls, total: Tensor, fmt: LNSFormat) -> _Unread:
        self: _Unread = make_wrapper_subclass(
            cls, total.shape, strides=total.stride(), dtype=torch.float32, device=total.device
        )
        self.fmt = fmt
        return self

    def __getattr__(self, name: str) -> Any:
        if name != "codes":
            raise AttributeError(f"LNSTensor has no attribute {name!r}")
        known: _Sum = self.__dict__["_sum"]
        self.codes = lns.encode(known.terms[0], self.fmt)
        self.__dict__["_sum"] = known._replace(versions=(*known.versions, self.codes._version))
        self.__class__ = LNSTensor  # type: ignore[assignment]
        return self.codes


def _versions(*gradients: Any) -> tuple[int, ...]:
    """Return the versions of gradients and of their codes, which change with every write."""
    return tuple(
        v
        for g in gradients
        for v in (g._version, *([] if type(g) is _Unread else [g.codes._version]))
    )


def _ends(shape: torch.Size) -> frozenset[int] | None:
    """Return the nodes to which a gradient of ``shape`` goes that the engine is adding up, or None
    if the engine is not adding."""
    if graph_task() == -1 or get_gradient_accumulation() != "float32":
        return None
    caller = sys._getframe(3)  # the caller of the handler
    while caller is not None and caller.f_code.co_name in dispatching:
        caller = caller.f_back  # type: ignore[assignment]
    if caller is not None and caller.f_code is not engine_code:
        return None
    nodes = next_nodes(shape)
    return _LEAF if nodes is None else frozenset(nodes)


def _captures(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _found(x: LNSTensor, ends: frozenset[int]) -> _Sum | None:
    """Return the data of ``x`` if it is the sum that goes to ``ends``, otherwise None."""
    known: _Sum | None = x.__dict__.get("_sum")
    if known is None or not known.ends & ends or known.captured != _captures(x):
        return None
    written = known.terms if len(known.terms) > 1 else (x,)
    return known if _versions(*written) == known.versions else None


def _is_sum(x: Any, y: Any) -> bool:
    return (
        isinstance(x, LNSTensor)
        and isinstance(y, LNSTensor)
        and x.fmt == y.fmt
        and x.shape == y.shape
    )


def _total(known: _Sum | None, x: LNSTensor, y: LNSTensor, into: bool = False) -> Tensor:
    """Return a known sum plus ``y`` in float32; with ``into``, in the memory of the known sum."""
    first, *others = (x,) if known is None else known.terms
    if isinstance(first, LNSTensor):
        first, into = lns.decode(first.codes, x.fmt), True
    for term in (*others, y):
        value = lns.decode(term.codes, x.fmt)  # type: ignore[attr-defined]
        first = first.add_(value) if into else first + value
    return first.clamp_(-_MOST, _MOST) if x.fmt.largest > 2.0**100 else first


def summed(x: Any, y: Any) -> LNSTensor | None:
    """Return the sum of two gradients that the engine adds, or None in any other case."""
    if graph_task() == -1:
        return None
    with DisableTorchFunction():  # otherwise every attribute access would call our function
        if not _is_sum(x, y):
            return None
        ends = _ends(x.shape)
        if ends is None:
            return None
        known, fmt = _found(x, ends), x.fmt
        if known is None:
            result: LNSTensor = LNSTensor(lns.add(x.codes, y.codes, fmt), fmt)
            terms: tuple[Tensor, ...] = (x, y)
            versions = _versions(x, y)
        else:
            total, ends = _total(known, x, y), ends & known.ends
            # and the encoding must be recorded, too
            recorded = type(total) is not Tensor or _captures(total)
            result = LNSTensor(lns.encode(total, fmt), fmt) if recorded else _Unread(total, fmt)
            terms, versions = (total,), _versions(result)
        result.__dict__["_sum"] = _Sum(ends, terms, versions, _captures(x))
        return result


def add_(x: Any, y: Any) -> bool:
    """Add the gradient ``y`` to a leaf's gradient ``x`` if the engine is doing that."""
    added = graph_task() != -1 and _is_sum(x, y) and _ends(x.shape) == _LEAF
    if added:
        _accumulate_(x, y)
    return added


def _accumulate_(x: LNSTensor, y: LNSTensor) -> None:
    known = _found(x, _LEAF)
    total = _total(known, x, y, into=True)
    codes = lns.add(x.codes, y.codes, x.fmt) if known is None else lns.encode(total, x.fmt)
    x.codes.copy_(codes)
    version, of_codes = _versions(x)
    # torch counts the write of an in-place operation when it is done
    x.__dict__["_sum"] = _Sum(_LEAF, (total,), (version + 1, of_codes), _captures(x))


@torch.no_grad()
def add_gradient_(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter, LNS or float, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif get_gradient_accumulation() == "float32" and _is_sum(parameter.grad, gradient):
        _accumulate_(parameter.grad, gradient)  # type: ignore[arg-type]
        torch.autograd.graph.increment_version(parameter.grad)
    else:
        parameter.grad = parameter.grad + gradient
