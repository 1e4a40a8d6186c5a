"""Operators on lists of tensors (``torch._foreach_add_``), applied to one tensor at a time."""

from __future__ import annotations

from typing import Any

import torch

from lns_ops.tensor.registry import HANDLERS, aten


def is_foreach(func: Any) -> bool:
    """Return whether an operator applies the same operation to each tensor of a list."""
    return func not in HANDLERS and func.overloadpacket.__name__.startswith("_foreach_")


def one_by_one(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on each tensor of a list, LNS or not, with its items of further lists."""
    name = func.overloadpacket.__name__
    operator, results = getattr(aten, name.removeprefix("_foreach_")), []
    for i in range(len(args[0])):
        own = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        scale = {"value": own.pop()} if "addc" in name and len(own) > 3 else {}
        results.append(operator(*own, **scale, **kwargs))
    if name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])  # torch's list kernels do this themselves
    return None if name.endswith("_") else results
