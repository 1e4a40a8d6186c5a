"""Spans: named periods of a worker's time, for telemetry (seconds per step) and profiles (traces).

Code marks its activity by ``with spans("communication", "all_reduce"):``, whether it is recorded or
not. With telemetry off and no profile running, a span costs a function call. On a GPU a span is a
pair of events in the stream; the host does not wait for them until the epoch's end.

Timed kinds: ``communication`` (in a collective, or waiting for the result of an asynchronous one),
``schedule`` (in a pipeline's schedule) and ``stage`` (the part of a schedule in which a stage
computes). A worker's idle time is the time of its schedules minus the time of its stages. Any other
kind is only a name in the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

Mark = float | torch.cuda.Event
KINDS = ("communication", "schedule", "stage")
"""The kinds of spans that are timed."""


class Spans:
    """The spans of one worker; nothing is recorded until :attr:`timing` or :attr:`naming` is set.

    Args:
        device: the worker's device.
        clock: returns seconds, for workers on a CPU.

    Attributes:
        timing: whether to record the seconds of :data:`KINDS`.
        naming: whether to pass the spans' names to torch's profiler.
        steps: number of steps since :meth:`begin`.
    """

    def __init__(
        self, device: torch.device | str = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._cuda = torch.device(device).type == "cuda"
        self.timing = self.naming = False
        self.steps = 0
        self._marks: list[Mark] = []
        self._spent: list[tuple[int, int, Mark, Mark]] = []

    def __call__(self, kind: str, name: str = "") -> AbstractContextManager[None]:
        """Return a context whose time counts as ``kind`` and whose name in a trace is ``name``."""
        looked_at = self.naming or (self.timing and kind in KINDS)
        return self._span(kind, name or kind) if looked_at else nullcontext()

    def begin(self) -> None:
        """Discard all records and start the first step."""
        self.steps = 0
        self._spent.clear()
        self._marks = [self._now()] if self.timing else []

    def step(self, steps: int = 1) -> None:
        """End a step, or ``steps`` steps that form one row, and start the next."""
        self.steps += steps
        if self.timing:
            self._marks.append(self._now())

    def end(self) -> None:
        """Extend the last step to the current time."""
        if self.timing and len(self._marks) > 1:
            self._marks[-1] = self._now()

    def seconds(self) -> Tensor:
        """Return each step's total seconds, and its seconds in each of :data:`KINDS`.

        A float64 tensor ``[rows, 1 + kinds]`` on the CPU. Synchronises with the GPU.
        """
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        table = torch.zeros(max(0, len(self._marks) - 1), 1 + len(KINDS), dtype=torch.float64)
        for step, (start, end) in enumerate(zip(self._marks, self._marks[1:], strict=False)):
            table[step, 0] = self._between(start, end)
        for step, kind, start, end in self._spent:
            if len(table):
                table[min(step, len(table) - 1), 1 + kind] += self._between(start, end)
        return table

    @contextmanager
    def _span(self, kind: str, name: str) -> Iterator[None]:
        """Time the context as ``kind`` if :attr:`timing`; name it in the trace if
        :attr:`naming`."""
        timed = self.timing and kind in KINDS
        start = self._now() if timed else 0.0
        try:
            with record_function(name) if self.naming else nullcontext():
                yield
        finally:
            if timed:
                self._spent.append((len(self._marks) - 1, KINDS.index(kind), start, self._now()))

    def _now(self) -> Mark:
        """Return the time: a number on a CPU, an event in the stream on a GPU."""
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(start: Mark, end: Mark) -> float:
        """Return the seconds from ``start`` to ``end``."""
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end)) / 1e3
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
