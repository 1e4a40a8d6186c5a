"""Telemetry: what an epoch of a trial cost, beside what it learned.

With ``telemetry=true`` an epoch reports, over its training steps alone (:data:`NAMES` describes
each):

- **where a step's time goes**. Every worker times its collectives
  (:mod:`trainers.telemetry.spans`). A collective lasts, on the worker that comes to it last, as
  long as its transfer; the others wait for that one. So, step by step, the least time of all
  workers is *communication* (exposed: nothing overlaps it, or it would not be waited for), and what
  a worker spends beyond is *idle*. In a pipeline the time of its schedule in which a worker's
  stages do not compute is idle too: the bubble, transfers between stages included. The rest is
  *compute*. The three add up to the step. The parameter server's replicas keep no common steps;
  there all waiting for it is communication.
- **memory**: of the process on a CPU (its resident set's peak, which Linux can reset), of torch's
  allocator on a GPU.
- **multiply-accumulates** of matrix products and convolutions, counted by torch's FlopCounterMode
  over the trial's first step, and their rate as a share of the kernel's measured ceiling
  (:mod:`trainers.telemetry.roofline`).
- **energy and activity of GPUs** (:mod:`trainers.telemetry.nvml`), of whole devices.

A metric that the hardware or the system does not tell is absent, never estimated. All names begin
with :data:`PREFIX`: they depend on the machine and its mood, and are left out where results are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainers.telemetry.nvml import GPUCounters
from trainers.telemetry.spans import Spans

PREFIX = "telemetry/"
NAMES = {
    "step_seconds": "time of a step, mean over steps and workers",
    "compute_seconds": "of it, computing (fetching the batch and Python included)",
    "communication_seconds": "of it, in collectives that nothing overlaps",
    "idle_seconds": "of it, waiting for other workers; in a pipeline the bubble",
    "peak_memory_bytes": (
        "largest of the workers: resident set (CPU) or torch's allocations (GPU), of the whole"
        " epoch"
    ),
    "macs_per_step": "multiply-accumulates of a step, all workers",
    "ceiling_fraction": (
        "multiply-accumulates a second over what the kernel reaches on a large product, a worker"
    ),
    "joules": "energy of the workers' GPUs during the epoch's training, whole devices",
    "sm_busy": "share of multiprocessors that were busy, mean over time and GPUs",
    "sm_occupancy": "share of the possible warps that were resident",
    "integer_busy": "share of time with integer operations",
    "tensor_busy": "share of time with tensor operations",
}
"""Of the metrics, without the prefix: what they mean."""
_PARTS = ("step", "compute", "communication", "idle")
SHARES = ("sm_busy", "sm_occupancy", "integer_busy", "tensor_busy")
RESET_PEAK = "5"
"""Written to ``/proc/self/clear_refs``: the resident set's peak becomes its present size
(proc(5))."""


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` without those that depend on the machine's mood: speed and telemetry."""
    return {
        name: value
        for name, value in metrics.items()
        if name != "samples_per_second" and not name.startswith(PREFIX)
    }


class Telemetry:
    """Of one worker of a trial.

    Args:
        spans: that the worker's code marks.
        device: where it computes.
        world_size: workers; with more than one the default process group must exist.
        aligned: whether all workers take the same steps.
        ceiling: gives the kernel's multiply-accumulates a second; asked once.
        waits: whether spans tell all waiting; without, a step's time is not divided.
        formulas: of operations, instead of torch's FLOP counter's own.
    """

    def __init__(
        self,
        spans: Spans,
        device: torch.device,
        world_size: int,
        aligned: bool,
        ceiling: Callable[[], float],
        waits: bool = True,
        formulas: dict[Any, Callable[..., int]] | None = None,
    ) -> None:
        self._spans, self._device, self._world_size, self._aligned, self._ceiling = (
            spans,
            device,
            world_size,
            aligned,
            ceiling,
        )
        self._told, self._formulas = _PARTS if waits else _PARTS[:1], formulas
        self._gpu = GPUCounters(torch.cuda.current_device() if device.type == "cuda" else None)
        self._ceiling_rate: float | None = None
        self._macs: float | None = None
        self._resettable = False
        spans.timing = True

    @contextmanager
    def counting(self, steps: int = 1) -> Iterator[None]:
        """Inside runs the first training step, or ``steps`` equal ones: its multiply-accumulates
        are counted."""
        if self._macs is not None:
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=self._formulas) as counter:
            yield
        self._macs = counter.get_total_flops() / 2 / steps

    def begin(self) -> None:
        """Training of an epoch begins."""
        if self._ceiling_rate is None:
            self._ceiling_rate = self._ceiling()
        self._reset_peak()
        self._gpu.begin()
        self._spans.begin()

    def metrics(self, seconds: float) -> dict[str, float]:
        """What to report of the epoch, whose training took ``seconds``; the same on every worker;
        collective."""
        self._spans.end()
        counted, peak = self._gpu.end(), self._peak()  # before what this allocates
        steps, macs, possible = (
            self._spans.steps,
            (self._macs or 0.0) * self._spans.steps,
            (self._ceiling_rate or 0.0) * seconds,
        )
        parts = torch.stack(self._split(self._spans.seconds())).sum(1)
        counts = torch.tensor([steps, macs, possible], dtype=torch.float64)
        *times, all_steps, all_macs, all_possible = self._summed(
            torch.cat([parts, counts])
        ).tolist()
        found = {"peak_memory_bytes": self._over_all(peak, "MAX")}
        if all_steps:
            found |= {
                f"{name}_seconds": value / all_steps
                for name, value in zip(_PARTS, times, strict=True)
                if name in self._told
            }
            found["macs_per_step"] = all_macs / all_steps * self._world_size
            found["ceiling_fraction"] = all_macs / all_possible
        for name in ("joules", *SHARES):
            total = self._over_all(counted.get(name, math.inf), "SUM")
            found[name] = total / (self._world_size if name in SHARES else 1)
        return {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}

    def _split(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every step's seconds: all, compute, communication, idle."""
        total, communication, schedule, stage = table.unbind(1)
        least = communication.clone()
        if self._world_size > 1 and self._aligned and len(least):
            least = self._reduced(least, "MIN")
        idle = (communication - least) + (schedule - stage).clamp(min=0.0)
        return total, total - least - idle, least, idle

    def _summed(self, values: Tensor) -> Tensor:
        return self._reduced(values, "SUM") if self._world_size > 1 else values

    def _over_all(self, value: float, how: str) -> float:
        """An infinity (absent) on one worker is one on all."""
        return (
            float(self._reduced(torch.tensor([value], dtype=torch.float64), how))
            if self._world_size > 1
            else value
        )

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        reduced = values.to(self._device)
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, how))
        return reduced.cpu()

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            self._resettable = True
        except OSError:
            self._resettable = False

    def _peak(self) -> float:
        """Bytes; infinity where the peak of an earlier epoch or trial may be in it."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        if not self._resettable:
            return math.inf
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(
            (1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), math.inf
        )
