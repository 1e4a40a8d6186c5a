"""Sums of the gradients that reach one tensor, in float32 from the third one on.

autograd adds the gradients of a tensor's uses one by one, and those of several backward passes to
``p.grad``. One by one LNS sums stick, as :mod:`lns_ops.spec.reference` says: 512 equal gradients
add up to 370 times one of them in lns16 and to 185 times in lns12. So the sum of two gradients is
an LNS sum, and that of more is kept in float32 beside the codes, which are the encoded sum.

- Within a backward pass the engine adds up what reaches one place of the graph. Its sums are known
  by their caller, the engine, and by the nodes that the gradient is on its way to. A sum that has
  arrived is a gradient like any other: those of layers that are chained are not one sum.
- Between passes ``p.grad`` keeps the float32 sum, 4 bytes an element, once it has been added to.
  Whatever writes to ``p.grad`` otherwise (``zero_``, clipping) ends that sum: the next gradient is
  added to what stands there. So does the begin of a CUDA graph's capture, since a replay knows
  nothing of what has been written since.

float32 additions of two numbers are rounded in one way only, so the bits are the same on every
device. Sums beyond float32's range stay at its end.

:func:`set_gradient_accumulation` brings the LNS additions back, to study what they lose. What is
added by Python code (``acc = acc + x``), by compiled autograd and by transforms is always theirs.
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
"""Where a gradient is on its way to that is added to ``p.grad``."""


class _Sum(NamedTuple):
    """What is behind the codes of a sum of gradients.

    Attributes:
        ends: numbers of the nodes that it may be on its way to.
        terms: two gradients, or the sum itself in float32.
        versions: of the gradients, or of the sum's codes: nobody may have written to them since.
        captured: whether a CUDA graph was captured as it was made.
    """

    ends: frozenset[int]
    terms: tuple[Tensor, ...]
    versions: tuple[int, ...]
    captured: bool


class _Unread(LNSTensor):
    """A sum that is encoded as it is read, and then an LNSTensor like any other.

    Most sums are not read: another term is added to them.
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
    """Return numbers that change as something is written to gradients or to their codes."""
    return tuple(
        v
        for g in gradients
        for v in (g._version, *([] if type(g) is _Unread else [g.codes._version]))
    )


def _ends(shape: torch.Size) -> frozenset[int] | None:
    """Return where a gradient of ``shape`` goes that the engine adds up now; None if it does no
    such thing."""
    if graph_task() == -1 or get_gradient_accumulation() != "float32":
        return None
    caller = sys._getframe(3)  # of the handler
    while caller is not None and caller.f_code.co_name in dispatching:
        caller = caller.f_back  # type: ignore[assignment]
    if caller is not None and caller.f_code is not engine_code:
        return None
    nodes = next_nodes(shape)
    return _LEAF if nodes is None else frozenset(nodes)


def _captures(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _found(x: LNSTensor, ends: frozenset[int]) -> _Sum | None:
    """Return what is behind the codes of ``x`` if it is the sum that goes to ``ends``."""
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
    """Return the sum of a sum and ``y`` in float32; ``into``: in the memory of the former."""
    first, *others = (x,) if known is None else known.terms
    if isinstance(first, LNSTensor):
        first, into = lns.decode(first.codes, x.fmt), True
    for term in (*others, y):
        value = lns.decode(term.codes, x.fmt)  # type: ignore[attr-defined]
        first = first.add_(value) if into else first + value
    return first.clamp_(-_MOST, _MOST) if x.fmt.largest > 2.0**100 else first


def summed(x: Any, y: Any) -> LNSTensor | None:
    """Return the sum of two gradients that the engine adds up; None if these are not such."""
    if graph_task() == -1:
        return None
    with DisableTorchFunction():  # every attribute that is read would call a function of ours
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
    """Add the gradient ``y`` to the ``x`` of a leaf, if that is what the engine does."""
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
    # torch counts an operation in place once it is done
    x.__dict__["_sum"] = _Sum(_LEAF, (total,), (version + 1, of_codes), _captures(x))


@torch.no_grad()
def add_gradient_(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter of any kind as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif get_gradient_accumulation() == "float32" and _is_sum(parameter.grad, gradient):
        _accumulate_(parameter.grad, gradient)  # type: ignore[arg-type]
        torch.autograd.graph.increment_version(parameter.grad)
    else:
        parameter.grad = parameter.grad + gradient
