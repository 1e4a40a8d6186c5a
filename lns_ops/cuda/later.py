"""Read values from a GPU on the host once they are available, without waiting.

A warning that reads values would make the host wait for everything it has queued. Here values are
copied to pinned memory after the kernels that compute them. The host checks whether the copy is
done at later opportunities: when the next value is queued, and where faults are raised (before an
optimizer step, and after the host has waited for a value).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_Action = Callable[[list[float]], None]
_waiting: deque[tuple[Callable[[], bool], Tensor, _Action]] = deque()


def read(values: Tensor, action: _Action) -> None:
    """Call ``action`` with a vector of values: at once on a CPU; for a GPU in a later check, once
    the values have been copied."""
    if not values.is_cuda:
        action(values.tolist())
        return
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))
    wait(copied.query, host, action)


def wait(is_there: Callable[[], bool], host: Tensor, action: _Action) -> None:
    """Let :func:`look` call ``action`` once ``is_there`` returns that ``host`` is filled."""
    _waiting.append((is_there, host, action))


def look() -> None:
    """Process all values that are available, in the order in which they were queued."""
    while _waiting and _waiting[0][0]():
        _, host, action = _waiting.popleft()
        action(host.tolist())
