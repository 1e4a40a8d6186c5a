"""allow_float_fallback: operations without an LNS kernel, computed in float32 and counted.

Inside the context such an operation decodes its LNS arguments, runs torch's float32 operation, and
encodes its floating-point results in the format of the first LNS argument. Each value is rounded
once, but the arithmetic is float32, not LNS. The context counts each operation, so no conversion is
silent.

>>> import torch
>>> from lns_ops import LNSTensor
>>> x = LNSTensor.from_float(torch.tensor([1.0, 2.0]), "lns16")
>>> with allow_float_fallback() as converted:
...     y = torch.i0(x)
>>> converted.counts
Counter({'aten.i0.default': 1})

Limits: views raise, because a converted copy would not share memory. Operations inside a compiled
graph are counted when the graph is traced, not when it runs. The context applies to all threads of
the process, because backward passes on a GPU run in torch's threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_active: list[FloatFallback] = []


class FloatFallback:
    """The counts of :func:`allow_float_fallback`.

    Attributes:
        counts: number of conversions of each operation, by name.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        lines = [f"{count:8d}  {name}" for name, count in self.counts.most_common()]
        return "\n".join(["operations converted to float32:", *(lines or ["    none"])])


@contextmanager
def allow_float_fallback() -> Iterator[FloatFallback]:
    """Compute operations that have no LNS kernel in float32, and count them.

    >>> import torch
    >>> from lns_ops import LNSTensor
    >>> with allow_float_fallback() as converted:
    ...     y = torch.i0(LNSTensor.from_float(torch.tensor([1.0, 2.0]), "lns16"))
    >>> converted.counts
    Counter({'aten.i0.default': 1})

    :mod:`lns_ops.tensor.fallback` lists the limits.
    """
    record = FloatFallback()
    _active.append(record)
    try:
        yield record
    finally:
        _active.remove(record)


def active() -> FloatFallback | None:
    """Return the innermost open context, or None."""
    return _active[-1] if _active else None


def count(name: str) -> None:
    """Count a conversion of the operation ``name`` in every open context."""
    for record in _active:
        record.counts[name] += 1
