"""Values of a GPU that the host reads once they are there, without waiting for them.

A warning that looks at values would have the host wait for all that it has queued. Here values are
copied to pinned memory behind the kernels that compute them, and the host asks whether the copy is
done where it comes by: as the next value is looked at, and where faults are raised (before an
optimizer's step, and after the host has waited for a value).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_Action = Callable[[list[float]], None]
_waiting: deque[tuple[Callable[[], bool], Tensor, _Action]] = deque()


def read(values: Tensor, action: _Action) -> None:
    """Call ``action`` with a vector of values: at once on a CPU, from a GPU as soon as they are
    there and the host comes by."""
    if not values.is_cuda:
        action(values.tolist())
        return
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))
    wait(copied.query, host, action)


def wait(is_there: Callable[[], bool], host: Tensor, action: _Action) -> None:
    """Have :func:`look` call ``action`` once ``is_there`` says that ``host`` is filled."""
    _waiting.append((is_there, host, action))


def look() -> None:
    """Read what is there by now, in the order in which it was asked for."""
    while _waiting and _waiting[0][0]():
        _, host, action = _waiting.popleft()
        action(host.tolist())
