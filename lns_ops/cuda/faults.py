"""Faults on a GPU: values without an LNS code, counted by kernels and raised by the host.

A kernel that detects a fault (a NaN to encode, a zero divisor, ...) increments a counter in device
memory. There is a counter for each kind of fault, operation, and converted module whose forward
pass launched the kernel; backward passes have no module. The first fault also writes a word of
pinned host memory, so the host notices it without waiting for the GPU. The host reads that word
before it launches a kernel that can fault, before an optimizer step and a graph's replay, and after
it has waited for a value (``item()``, ``cpu()``), and raises the error there. Kernels that were
queued before still run; CUDA queues about a thousand.

A program that must handle faults at defined places, for example because its ranks must agree, turns
this off with :func:`raise_only_when_asked` and calls :func:`check_faults`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from lns_ops._compat import current_stream
from lns_ops.cuda import later, runtime
from lns_ops.spec.format import NonFiniteError

NON_FINITE, ZERO_DIVISOR, NEGATIVE_ROOT, NO_VALUE = range(4)
"""Kinds of faults; positions in a row of counters. ``src/faults.cuh`` has the same values."""
_ERRORS = (
    (
        "NaN or infinity to encode: LNS has no code for either; clean the input first",
        NonFiniteError,
    ),
    ("division by zero: LNS has no infinity; mask zero divisors first", ValueError),
    (
        "square root of a negative number: LNS values are real; mask or clamp the input first",
        ValueError,
    ),
    (
        (
            "a function of a number for which it has no finite real value, such as log of zero:"
            " mask or clamp the input first"
        ),
        ValueError,
    ),
)
_ROW = 8
"""Number of int32 words of a row: a counter for each kind, the host word's address, padding."""
_ROWS = 2048
"""Number of operations that are counted separately; further operations share row 0."""
_SHOWN = 3
"""Number of operations that an error message names."""

_operations: dict[str, int] = {"other operations": 0}
"""The rows of operations, named with the module whose forward pass launched them."""
_entered = threading.local()
"""The names of the converted modules whose forward passes run in a thread, the innermost last."""
_naming = threading.Lock()
_asked_only = False


def enter(module: str) -> None:
    """Use a module's name for faults of kernels that are launched until :func:`leave`."""
    names = getattr(_entered, "names", None)
    if names is None:
        names = _entered.names = []
    names.append(module)


def leave() -> None:
    """Undo the last :func:`enter`."""
    if names := getattr(_entered, "names", None):
        names.pop()


def _named(operation: str) -> str:
    names = getattr(_entered, "names", None)
    return f"{operation} of module {names[-1]!r}" if names and names[-1] else operation


class Counters:
    """Counters of faults on one device.

    Attributes:
        seen: the host word, which the first fault sets; not 0 once a fault has reached the host.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        # can be read in a tenth of the time of a tensor's element
        self.seen = memoryview(self._pinned.numpy().data)
        rows = np.zeros((_ROWS, _ROW), np.int32)
        rows.view(np.int64)[:, len(_ERRORS) // 2] = self._pinned.data_ptr()
        self._rows = runtime.uploaded(rows, device)
        self._start = self._rows.data_ptr()

    def address(self, operation: str) -> int:
        """Return the address of an operation's row."""
        operation = _named(operation)
        row = _operations.get(operation)
        return self._start + 4 * _ROW * (_new_row(operation) if row is None else row)

    def check(self) -> None:
        """Wait for the current stream and raise faults that were counted since the last call.

        Raises:
            ValueError: see :func:`check_faults`.
        """
        torch.cuda.current_stream(self._device).synchronize()
        if not self.seen[0]:
            return
        self.seen[0] = 0
        counts = self._rows[:, : len(_ERRORS)]
        found = counts.cpu()
        counts.zero_()
        for kind, (message, error) in enumerate(_ERRORS):
            if total := int(found[:, kind].sum()):
                where = [name for name, row in _operations.items() if found[row, kind]]
                named = ", ".join(where[:_SHOWN]) + ", ..." * (len(where) > _SHOWN)
                raised: Any = error(
                    f"{message} ({total} values on cuda:{self._device}, in {named})"
                )
                raised.operation = named  # the operation with the fault, not the current one
                raise raised


def _new_row(operation: str) -> int:
    with _naming:
        if len(_operations) == _ROWS:
            return 0
        return _operations.setdefault(operation, len(_operations))


_of_devices: dict[int, Counters] = {}
_of_streams: dict[tuple[int, int], Counters] = {}
"""Counters of streams with their own counters, by device and CUDA's handle of the stream."""


def _counters(device: int) -> Counters | None:
    """Return the counters for kernels launched now; None if no kernel was launched so far."""
    own = _of_streams.get((device, current_stream(device))) if _of_streams else None
    return own or _of_devices.get(device)


def row_for(device: int, operation: str) -> int:
    """Return the address of the counters for a kernel of ``operation``.

    Raises:
        ValueError: an earlier kernel has detected a fault, see :func:`raise_seen`.
    """
    counters = _counters(device)
    if counters is None:
        counters = _of_devices.setdefault(device, Counters(device))
    elif counters.seen[0]:
        _raise(counters)
    return counters.address(operation)


def raise_seen(device: int) -> None:
    """Raise the faults of a GPU that have already reached the host; does not wait for more.

    Values queued by :mod:`.later` are read, too.

    Does nothing on a CPU (device -1, as returned by ``Tensor.get_device``), while a graph is
    captured, and after :func:`raise_only_when_asked`.

    Raises:
        ValueError: see :func:`check_faults`.
    """
    later.look()
    counters = _counters(device) if _of_devices else None
    if counters is not None and counters.seen[0]:
        _raise(counters)


def _raise(counters: Counters) -> None:
    if not _asked_only and not torch.cuda.is_current_stream_capturing():
        counters.check()


def raise_only_when_asked() -> None:
    """Raise faults of this process only in :func:`check_faults` from now on."""
    global _asked_only
    _asked_only = True


def count_faults_apart(stream: torch.cuda.Stream) -> None:
    """Count the faults of kernels on ``stream`` separately from now on.

    :func:`check_faults` reads only these counters if it is called on that stream. This is for
    programs in which several threads compute on one device, each on its own stream.
    """
    key = stream.device.index, stream.cuda_stream
    if key not in _of_streams:
        _of_streams[key] = Counters(stream.device.index)


def check_faults(device: int | torch.device | None = None) -> None:
    """Wait for ``device`` and raise the faults that LNS kernels have counted since the last call.

    The default is the current device. A fault is also raised without this call, by the next LNS
    operation, optimizer step, ``item()`` or ``cpu()`` after the GPU has detected it; this call
    waits for all faults.

    On a stream with its own counters (:func:`lns_ops.cuda.count_faults_apart`) only faults of
    kernels on that stream are raised.

    Raises:
        NonFiniteError: (a ValueError) a NaN or an infinity was encoded.
        ValueError: a divisor was zero, or a root's argument negative.
    """
    if runtime.unavailable() is not None:
        return
    chosen = (
        torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    )
    if chosen.type == "cuda":
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        counters = _counters(index)
        if counters is not None:
            counters.check()
