"""Telemetry: time, memory and energy of a trial's epochs.

With ``telemetry=true`` an epoch reports the following metrics (:data:`NAMES` describes each). They
cover only its training steps, without the capture of a CUDA graph before the first one:

- **parts of a step's time**. Every worker times its collectives (:mod:`trainers.telemetry.spans`).
  For the worker that arrives last, a collective takes only as long as its transfer; the other
  workers also wait for that worker. So in each step, the shortest time over workers is
  *communication* (exposed, that is not overlapped by computation), and the excess of each worker is
  *idle*. In a pipeline, the part of the schedule in which a worker's stages do not compute is also
  idle: the bubble, including transfers between stages. The rest is *compute*. The three add up to
  the step. The replicas of a parameter server have no common steps; there all waiting for the
  server is communication.
- **memory**: on a CPU the process's peak resident set, which Linux can reset; on a GPU the peak of
  torch's allocator since the trial's first epoch, because the memory of a CUDA graph is allocated
  during its capture.
- **tensors**: peak number of bytes of the tensors made in the trial's first step, including
  activations and gradients, independent of the allocator (:mod:`trainers.telemetry.tensors`).
- **multiply-accumulates** of matrix products and convolutions, counted by torch's FlopCounterMode
  in the trial's first step, and their rate as a share of the kernel's measured ceiling
  (:mod:`trainers.telemetry.roofline`). Absent if it does not count an operator: torch's fused
  recurrent layers in float32, and attention on a CPU.
- **energy and activity of GPUs** (:mod:`trainers.telemetry.nvml`), for whole devices.
- **modelled energy** of the products, in hardware built for their format
  (:mod:`trainers.telemetry.energy`): the only metric that is not measured.

Metrics that the hardware or the system does not support are absent. All names begin with
:data:`PREFIX`. Times, memory and energy depend on the machine and its load; ``tensor_bytes`` and
the counts do not. Comparisons of results ignore all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainers.telemetry.nvml import GPUCounters
from trainers.telemetry.spans import Spans
from trainers.telemetry.tensors import TensorBytes

PREFIX = "telemetry/"
NAMES = {
    "step_seconds": "time of a step, mean over steps and workers",
    "compute_seconds": "part of a step: computing (fetching the batch and Python included)",
    "communication_seconds": "part of a step: collectives that are not overlapped",
    "idle_seconds": "part of a step: waiting for other workers; in a pipeline the bubble",
    "peak_memory_bytes": (
        "largest of the workers: resident set of the epoch (CPU), or torch's allocations so far"
        " (GPU)"
    ),
    "tensor_bytes": (
        "largest of the workers: tensors that the trial's first step makes and holds at once"
    ),
    "macs_per_step": "multiply-accumulates of a step, all workers",
    "ceiling_fraction": (
        "multiply-accumulates a second over what the kernel reaches on a large product, a worker"
    ),
    "joules": (
        "energy of the workers' GPUs during the epoch's training, whole devices; within a step of"
        " their counters (0.1 s on an H100) foretold, and set right in the epoch after"
    ),
    "modelled_joules": (
        "energy of the epoch's products by a model of single operations' energies, all workers; not"
        " measured"
    ),
    "sm_busy": (
        "share of multiprocessors that were busy, mean over time and GPUs; these shares are of"
        " epochs that train for more than 0.1 s"
    ),
    "sm_occupancy": "share of the possible warps that were resident",
    "integer_busy": "share of time with integer operations",
    "tensor_busy": "share of time with tensor operations",
}
"""Descriptions of the metrics, by name without prefix."""
_PARTS = ("step", "compute", "communication", "idle")
SHARES = ("sm_busy", "sm_occupancy", "integer_busy", "tensor_busy")
RESET_PEAK = "5"
"""Text to write to ``/proc/self/clear_refs`` to reset the peak resident set (proc(5))."""


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    """Return ``metrics`` without the ones that depend on the machine's load: speed and
    telemetry."""
    return {
        name: value
        for name, value in metrics.items()
        if name != "samples_per_second" and not name.startswith(PREFIX)
    }


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mv", "addmv", "addr", "dot", "vdot", "_trilinear", "_cdist_forward")
)
"""Torch operators with products that FlopCounterMode does not count."""


def _uncounted(operator: Any, counter: FlopCounterMode) -> bool:
    """Return whether an operator contains products without a formula in the counter: torch's fused
    recurrent layers, attention on a CPU, and products with vectors."""
    name = str(operator)
    whole = any(word in name for word in ("rnn", "lstm", "gru", "attention"))
    inside = (whole and "_thnn_fused" not in name) or operator in _PRODUCTS
    return inside and operator not in counter.flop_registry


class _WholeModel(nullcontext[None]):
    """Replacement for FlopCounterMode's module tracker, whose hooks keep activations alive that a
    step with activation checkpoints would free; the peak would then include all activations."""

    parents = frozenset({"Global"})


class Telemetry:
    """The telemetry of one worker of a trial.

    Args:
        spans: the worker's time marks.
        device: the worker's device.
        world_size: number of workers; with more than one, the default process group must exist.
        ceiling: returns the kernel's multiply-accumulates per second; called once.
        aligned: whether all workers take the same steps.
        waits: whether the spans contain all waiting; if not, a step's time is not divided.
        formulas: FLOP formulas by operation, which override the formulas of torch's counter.
        picojoules: returns the energy of an operator's multiply-accumulate, given the operator's
            name; infinite if unknown.
    """

    def __init__(
        self,
        spans: Spans,
        device: torch.device,
        world_size: int,
        ceiling: Callable[[], float],
        *,
        aligned: bool,
        waits: bool = True,
        formulas: dict[Any, Callable[..., int]] | None = None,
        picojoules: Callable[[str], float] = lambda _: math.inf,
    ) -> None:
        self._spans, self._device, self._world_size, self._aligned, self._ceiling = (
            spans,
            device,
            world_size,
            aligned,
            ceiling,
        )
        self._reported, self._formulas = _PARTS if waits else _PARTS[:1], formulas
        self._gpu = GPUCounters(torch.cuda.current_device() if device.type == "cuda" else None)
        self._ceiling_rate: float | None = None
        self._macs: float | None = None
        self._tensor_bytes = math.inf
        self._picojoules, self._step_joules = picojoules, math.inf
        self._resettable = self._begun = False
        self._began = self._prepared = 0.0
        spans.timing = True

    @contextmanager
    def counting(self, steps: int = 1) -> Iterator[None]:
        """Count multiply-accumulates and tensors of the training steps in this context.

        They are the trial's first ``steps`` steps, which must be equal; later contexts do nothing.
        """
        if self._macs is not None:
            yield
            return
        counter = FlopCounterMode(display=False, custom_mapping=self._formulas)
        counter.mod_tracker = _WholeModel()  # type: ignore[assignment]
        with counter, TensorBytes() as tensors:
            yield
        self._tensor_bytes = tensors.peak
        if any(_uncounted(operator, counter) for operator in tensors.operators):
            self._macs = math.nan
            return
        self._macs = counter.get_total_flops() / 2 / steps
        counts = counter.get_flop_counts().get("Global", {})
        self._step_joules = 1e-12 * sum(
            count / 2 / steps * self._picojoules(str(operator))
            for operator, count in counts.items()
        )

    def begin(self) -> None:
        """Start measuring an epoch's training."""
        if self._ceiling_rate is None:
            self._ceiling_rate = self._ceiling()
        if self._device.type != "cuda" or not self._begun:
            self._reset_peak()
        self._gpu.begin()
        self._spans.begin()
        self._begun, self._began, self._prepared = True, time.perf_counter(), 0.0

    def begin_steps(self) -> None:
        """Restart the measurement of time, energy and activity at the first step.

        It excludes the compilation and capture of the CUDA graph, once per trial.
        """
        self._gpu.begin()
        self._spans.begin()
        self._prepared = time.perf_counter() - self._began

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the metrics of an epoch whose training took ``seconds``.

        A collective; the result is the same on every worker.
        """
        seconds -= self._prepared
        self._spans.end()
        counted, peak = self._gpu.end(), self._peak()  # before this method allocates
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
        found = {
            "peak_memory_bytes": self._over_all(peak, "MAX"),
            "tensor_bytes": self._over_all(self._tensor_bytes, "MAX"),
        }
        if all_steps:
            found |= {
                f"{name}_seconds": value / all_steps
                for name, value in zip(_PARTS, times, strict=True)
                if name in self._reported
            }
            found["macs_per_step"] = all_macs / all_steps * self._world_size
            found["ceiling_fraction"] = all_macs / all_possible
        counted["modelled_joules"] = self._step_joules * steps if steps else 0.0
        for name in ("joules", "modelled_joules", *SHARES):
            total = self._over_all(counted.get(name, math.inf), "SUM")
            found[name] = total / (self._world_size if name in SHARES else 1)
        return {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}

    def _split(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return every step's seconds: total, compute, communication, idle."""
        total, communication, schedule, stage = table.unbind(1)
        least = communication.clone()
        if self._world_size > 1 and self._aligned and len(least):
            least = self._reduced(least, "MIN")
        idle = (communication - least) + (schedule - stage).clamp(min=0.0)
        return total, total - least - idle, least, idle

    def _summed(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the workers."""
        return self._reduced(values, "SUM") if self._world_size > 1 else values

    def _over_all(self, value: float, how: str) -> float:
        """Return ``value`` reduced over the workers; infinite (absent) if it is so on one
        worker."""
        return (
            float(self._reduced(torch.tensor([value], dtype=torch.float64), how))
            if self._world_size > 1
            else value
        )

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        """Return ``values`` after an all-reduce over the workers, on the CPU."""
        reduced = values.to(self._device)
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, how))
        return reduced.cpu()

    def _reset_peak(self) -> None:
        """Reset the memory peak, and remember whether the system allows it."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            self._resettable = True
        except OSError:
            self._resettable = False

    def _peak(self) -> float:
        """Return the memory peak in bytes; infinite if it could not be reset for this epoch."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated())
        if not self._resettable:
            return math.inf
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(
            (1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), math.inf
        )
