"""Modules that compute products themselves: ``x @ self.w``, ``torch.einsum``, an adapter's
``F.linear(x, self.base.weight)``.

They are found by the names that their code calls, in methods and in functions called from there.
:func:`lns_ops.convert_` converts these modules in scope ``matmul``, as it converts layers. Modules
that are left out stay float32, and :func:`lns_ops.summary` lists them. :func:`float32_products`
counts the products with weights that are really computed in float32.

Limits: products of two activations (attention's scores) are float32 in this scope and not counted,
and neither are products with weights that a network computes from activations. Products are not
found in torch's own code (power iterations of spectral norm, a torch.fx.GraphModule), in
``torch.jit.script``, and in functions that a module gets at run time; calls of these are counted.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lns_ops._compat import TorchDispatchMode, tree_leaves

_ANY = {
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "conv_tbc", "multi_head_attention_forward", "matmul", "mm", "bmm", "mv",
    "dot", "einsum", "addmm", "addmv", "addbmm", "baddbmm", "tensordot", "inner", "grouped_mm",
    "_grouped_mm", "addmm_", "addmv_", "addbmm_", "baddbmm_", "@",
}  # fmt: skip
_TRACED = {"linear", "bilinear", "conv_tbc", "multi_head_attention_forward"}
_OPERATORS = {
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution", "linear",
    "_grouped_mm",
}  # fmt: skip


@cache
def _called(kind: type[nn.Module]) -> frozenset[str]:
    """Return the products that a forward calls, directly or not, except in torch's own code."""
    return _reached(kind, *_defined(kind, "forward"))


def _reached(kind: type[nn.Module], *functions: Any) -> frozenset[str]:
    """Return the products that functions call for a module of this class."""
    found: set[str] = set()
    waiting, seen = list(functions), set[int]()
    while waiting:
        function = _function(waiting.pop())
        if function is None or id(function) in seen or _is_foreign(function):
            continue
        seen.add(id(function))
        found |= _named(function.__code__)
        cells = (cell for cell in function.__closure__ or () if cell != CellType())
        waiting += [cell.cell_contents for cell in cells]
        waiting.append(getattr(function, "__wrapped__", None))
        for name in _names(function.__code__):
            waiting += [function.__globals__.get(name), *_defined(kind, name)]
    return frozenset(found)


def _defined(kind: type[nn.Module], name: str) -> list[Any]:
    """Return the members with this name in a class and its bases, without torch's own classes."""
    return [
        vars(each)[name] for each in kind.__mro__ if name in vars(each) and not _is_foreign(each)
    ]


def _is_foreign(x: Any) -> bool:
    """Return whether a class or function belongs to torch or to this package."""
    return str(getattr(x, "__module__", "")).startswith(("torch.", "lns_ops."))


def _function(member: Any) -> FunctionType | None:
    """Return the function behind a method, a property, a static or a class method."""
    member = member.fget if isinstance(member, property) else member
    function = getattr(member, "__func__", member)
    return function if isinstance(function, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _named(code: CodeType) -> set[str]:
    """Return the products that code calls; ``self.linear`` is a layer, so it does not count."""
    found, owner = set(), ""
    mine = code.co_varnames[0] if code.co_argcount else None
    for step in dis.get_instructions(code):
        if "BINARY" in step.opname and "@" in step.argrepr:
            found.add("@")
        if "LOAD" in step.opname:
            if step.argval in _ANY and owner != mine:
                found.add(step.argval)
            owner = step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _named(constant)
    return found


def of_any(kind: type[nn.Module]) -> list[str]:
    """Return the products of a class that torch.fx does not record as calls."""
    return sorted(
        name
        for name in _called(kind) - _TRACED  # type: ignore[arg-type]
        if not name.startswith("conv")
    )


def found_in(module: nn.Module) -> list[str]:
    """Return the names of the products in a module's code, if it has weights for them.

    Functions in the module's attributes are included.
    """
    kind: Any = type(module)
    called = set(_called(kind))
    for value in vars(module).values():
        if isinstance(value, FunctionType):
            called |= _reached(kind, value)
    has_weights = any(is_lazy(p) or p.dim() > 1 for p in module.parameters()) if called else False
    return sorted(called) if has_weights else []


def lines(module: nn.Module) -> list[str]:
    """Return the notes of :func:`lns_ops.summary` on modules that multiply weights in float32."""
    return [
        f"{name or '(root)'} is left out and computes products itself ({', '.join(found)}): those"
        " with weights stay float32; count them with lns_ops.float32_products"
        for name, part in module.named_modules()
        if not hasattr(part, "lns_conversion") and (found := found_in(part))
    ]


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """The context that tracks which tensors are computed only from parameters and buffers."""

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
        """Note that ``x`` has these values; keep it alive, so that its memory is not reused."""
        self._names[x.untyped_storage().data_ptr()] = name
        self._kept.append(x)

    def _name(self, x: Tensor) -> str | None:
        return self._names.get(x.untyped_storage().data_ptr())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        floats = [x for x in leaves if _is_float(x)]
        names = [self._name(x) for x in floats]
        if func.overloadpacket.__name__ in _OPERATORS:
            self.found.update(name for name in names if name in self._weights)
        if names and None not in names and _is_float(result) and not _looks_up(leaves, floats):
            self._keep(result, str(names[0]))
        return result


def _looks_up(leaves: list[Tensor], floats: list[Tensor]) -> bool:
    """Return whether integers select rows of a matrix, so it is an embedding, not a weight."""
    selects = any(not x.is_floating_point() and x.dtype is not torch.bool for x in leaves)
    return selects and max(x.dim() for x in floats) < 3


def _is_float(x: Any) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_floating_point()
        and x.layout is torch.strided  # other layouts have no storage
    )


@contextmanager
def float32_products(module: nn.Module) -> Iterator[Counter[str]]:
    """Count the float32 products in which parameters of ``module`` take part, by parameter.

    >>> class Scores(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.ones(4, 2))
    ...     def forward(self, x):
    ...         return x @ self.w
    >>> model = Scores()
    >>> with float32_products(model) as found:
    ...     y = model(torch.ones(3, 4))
    >>> found
    Counter({'w': 1})
    """
    with _Watch(module) as watch:
        yield watch.found
