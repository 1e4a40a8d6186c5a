"""Products that modules compute themselves, which scope ``matmul`` leaves in float32.

Scope ``matmul`` converts layers. A module that writes ``x @ self.w``, ``torch.einsum`` or
``F.linear(x, self.base.weight)`` (an adapter, a hand-made expert) has no layer for that product, so
it stays float32. :func:`lns_ops.summary` names such modules by what their code calls;
:func:`float32_products` counts the products that really happen.

Limits: products of two activations (attention's scores) are float32 in this scope and not counted,
nor are weights that a network computes from activations.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lns_ops._compat import TorchDispatchMode, tree_leaves

_OF_WEIGHTS = {
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d",
}  # fmt: skip
_ANY = _OF_WEIGHTS | {
    "matmul", "mm", "bmm", "mv", "einsum", "addmm", "addmv", "baddbmm", "tensordot", "inner", "@",
}  # fmt: skip
_OPERATORS = {
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution", "linear",
    "_grouped_mm",
}  # fmt: skip


@cache
def _called(kind: type[nn.Module]) -> frozenset[str]:
    """Return the products that the code of a module's class names, without torch's own classes."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith(("torch.", "lns_ops.")) or each is object:
            continue
        for function in vars(each).values():
            if isinstance(function, FunctionType):
                found |= _named(function.__code__)
    return frozenset(found)


def _named(code: CodeType) -> set[str]:
    found = set(code.co_names) & _ANY
    if any("@" in step.argrepr for step in dis.get_instructions(code) if "BINARY" in step.opname):
        found.add("@")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _named(constant)
    return found


def _own_products(module: nn.Module) -> list[str]:
    """Return the products by name that a module's code computes with weights, as far as it shows.

    A module without matrices of its own counts only for functions that take weights.
    """
    owns = any(p.dim() > 1 and p.is_floating_point() for p in module.parameters(recurse=False))
    kind: Any = type(module)
    return sorted(_called(kind) & (_ANY if owns else _OF_WEIGHTS))


def lines(module: nn.Module) -> list[str]:
    """Return what :func:`lns_ops.summary` says of modules that multiply weights themselves."""
    return [
        f"{name or '(root)'} computes products itself ({', '.join(found)}), and those with weights"
        " stay float32, also with weights of its converted layers: use nn.Linear and call it, or"
        " count them with lns_ops.float32_products"
        for name, part in module.named_modules()
        if not hasattr(part, "lns_conversion") and (found := _own_products(part))
    ]


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """The context that notes which tensors are made of parameters and buffers alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []
        self._weights = {name for name, p in module.named_parameters() if p.dim() > 1}
        for name, x in (*module.named_buffers(), *module.named_parameters()):
            if type(x.data) is Tensor and x.layout is torch.strided:
                self._keep(x, name)

    def _keep(self, x: Tensor, name: str) -> None:
        """Note whose values ``x`` has; it is held, as memory that is freed would be used anew."""
        self._names[x.untyped_storage().data_ptr()] = name
        self._kept.append(x)

    def _name(self, x: Tensor) -> str | None:
        return self._names.get(x.untyped_storage().data_ptr())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        names = [self._name(x) for x in tree_leaves((args, kwargs)) if _is_float(x)]
        if func.overloadpacket.__name__ in _OPERATORS:
            self.found.update(name for name in names if name in self._weights)
        elif names and None not in names and _is_float(result):
            self._keep(result, str(names[0]))
        return result


def _is_float(x: Any) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_floating_point()
        and x.layout is torch.strided  # others have no storage
    )


@contextmanager
def float32_products(module: nn.Module) -> Iterator[Counter[str]]:
    """Count the products in float32 that parameters of ``module`` take part in, by parameter.

    >>> with float32_products(model) as found:
    ...     model(x)
    >>> found
    Counter({'adapter.base.weight': 1})
    """
    with _Watch(module) as watch:
        yield watch.found
