"""allow_float_fallback: operations without an LNS kernel, computed in float32 and counted.

Inside the context such an operation decodes its LNS arguments, runs as torch's float32 operation, and encodes its floating-point results
in the format of the first LNS argument: one rounding a value, but the operation's own arithmetic is float32, not LNS. Nothing happens
silently: the context tells how often each operation was converted.

>>> with allow_float_fallback() as converted:
...     y = torch.erf(x)
>>> converted.counts
{'aten.erf.default': 1}

Limits: views are refused, since a converted copy would not share memory; what is computed inside a compiled graph is counted when the
graph is traced, not when it runs. The context holds for all threads of the process, as backward passes on a GPU run in torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_active: list[FloatFallback] = []


class FloatFallback:
    """What :func:`allow_float_fallback` yields.

    Attributes:
        counts: how often each operation was converted, by its name.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        lines = [f"{count:8d}  {name}" for name, count in self.counts.most_common()]
        return "\n".join(["operations converted to float32:", *(lines or ["    none"])])


@contextmanager
def allow_float_fallback() -> Iterator[FloatFallback]:
    """Compute operations that have no LNS kernel in float32, counting them; see the head of this file."""
    record = FloatFallback()
    _active.append(record)
    try:
        yield record
    finally:
        _active.remove(record)


def active() -> FloatFallback | None:
    """The innermost context, or None outside of any."""
    return _active[-1] if _active else None


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on decoded arguments, its floating-point results encoded.

    Raises:
        NotImplementedError: ``func`` returns a view, or writes to an ``out=`` argument.
        ValueError: a result is a NaN or an infinity (``NonFiniteError``).
    """
    from lns_ops import functional as lns
    from lns_ops.tensor import LNSTensor

    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if func.is_view or any(a.kwarg_only for a in written):
        raise NotImplementedError(
            f"{func} has no LNS kernel and {'returns a view' if func.is_view else 'writes to out='}, which float32 cannot stand in for: "
            "call it on x.to_float(), or leave the module that calls it unconverted (filter_fn of lns_ops.convert_)"
        )
    fmt = next(leaf.fmt for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LNSTensor))
    decoded = tree_map(lambda leaf: lns.decode(leaf.codes, leaf.fmt) if isinstance(leaf, LNSTensor) else leaf, (args, kwargs))
    result = func(*decoded[0], **decoded[1])
    for record in _active:
        record.counts[str(func)] += 1
    encoded = tree_map(lambda leaf: LNSTensor(lns.encode(leaf, fmt), fmt) if _is_real(leaf) else leaf, result)
    return args[0].copy_(encoded) if written else encoded


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
