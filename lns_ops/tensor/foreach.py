"""Operators on lists of tensors (``torch._foreach_add_``), taken one tensor after the other."""

from __future__ import annotations

from typing import Any

import torch

from lns_ops.tensor.registry import HANDLERS, aten


def is_foreach(func: Any) -> bool:
    """Return whether an operator does the same to each tensor of a list."""
    return func not in HANDLERS and func.overloadpacket.__name__.startswith("_foreach_")


def one_by_one(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on each tensor of a list, LNS or not, with its share of further lists."""
    name = func.overloadpacket.__name__
    operator, results = getattr(aten, name.removeprefix("_foreach_")), []
    for i in range(len(args[0])):
        own = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        scale = {"value": own.pop()} if "addc" in name and len(own) > 3 else {}
        results.append(operator(*own, **scale, **kwargs))
    if name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])  # torch leaves it to kernels of lists
    return None if name.endswith("_") else results
