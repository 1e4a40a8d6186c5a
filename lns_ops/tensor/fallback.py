"""allow_float_fallback: operations without an LNS kernel, computed in float32 and counted.

Inside the context such an operation decodes its LNS arguments, runs as torch's float32 operation,
and encodes its floating-point results in the format of the first LNS argument: one rounding a
value, but the operation's own arithmetic is float32, not LNS. Nothing happens silently: the context
tells how often each operation was converted.

>>> with allow_float_fallback() as converted:
...     y = torch.i0(x)
>>> converted.counts
{'aten.i0.default': 1}

Limits: views are refused, since a converted copy would not share memory; what is computed inside a
compiled graph is counted when the graph is traced, not when it runs. The context holds for all
threads of the process, as backward passes on a GPU run in torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_active: list[FloatFallback] = []


class FloatFallback:
    """The counts of :func:`allow_float_fallback`.

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
    """Compute operations that have no LNS kernel in float32, and count them.

    The head of this file has the limits.
    """
    record = FloatFallback()
    _active.append(record)
    try:
        yield record
    finally:
        _active.remove(record)


def active() -> FloatFallback | None:
    """Return the innermost context, or None outside of any."""
    return _active[-1] if _active else None


def count(name: str) -> None:
    """Count one more conversion of the operation ``name``, in every context that is open."""
    for record in _active:
        record.counts[name] += 1
