"""Counters of an NVIDIA GPU, read through NVML: energy, and activity of the multiprocessors (GPM).

nvidia-smi's "utilisation" only means that some kernel ran. GPM (Hopper and later) measures, between
two samples, the share of busy multiprocessors, the share of resident warps, and the share of time
in tensor and integer operations. A counter is absent from the result if the library, the driver or
the device does not support it, or if the time was too short; values are never guessed. Counters are
for the whole device, including other processes.

The energy counter is updated in steps (ten times a second on an H100), so a short epoch would see
none or a whole step. :class:`EnergyMeter` records the times of the updates and interpolates.

Source: NVML API reference, "GPM Functions" (samples more than 100 ms apart) and
``nvmlDeviceGetTotalEnergyConsumption`` (Volta and later).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

GPM = {
    "sm_busy": "SM_UTIL",
    "sm_occupancy": "SM_OCCUPANCY",
    "integer_busy": "INTEGER_UTIL",
    "tensor_busy": "ANY_TENSOR_UTIL",
}
"""GPM's metrics by our names; GPM has percentages, our values are shares from 0 to 1."""
GPM_SECONDS = 0.1
"""Minimum number of seconds between two GPM samples, their update interval."""
POLL_SECONDS = 0.02
"""Seconds between two polls of the energy counter; a poll took 3 ms on an H100's host."""
STEPS_SECONDS = 1.0
"""Maximum wait for an energy counter's first two updates; a slower counter is ignored."""


class EnergyMeter:
    """A device's energy, interpolated between the updates of its counter.

    If the counter is updated to ``E_i`` at time ``t_i``, the energy is interpolated linearly
    between two updates. After the last update it is extrapolated from the last two, by at most one
    update, because otherwise the counter would have changed::

        E(t) = E_i + (E_{i+1} - E_i) min(2, (t - t_i) / (t_{i+1} - t_i))

    The energy of an epoch after the last update is thus a prediction; the error, known at the next
    update, is added to the next epoch. The sum over epochs equals the counter's, except for the
    last update. :meth:`watch` polls in a thread, which ends with the meter.

    Args:
        read: returns the counter in joules, or None if it cannot be read.
        clock: returns seconds.
    """

    def __init__(
        self, read: Callable[[], float | None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._read, self._clock, self._lock = read, clock, threading.Lock()
        self._steps: list[tuple[float, float]] = []
        self._last: float | None = None
        self._begun: float | None = None
        self._foretold: list[tuple[float, float, float]] = []  # from, to, joules
        self._owed = 0.0
        self._waited = False

    def watch(self) -> None:
        """Poll the counter in a thread, until the meter is garbage-collected."""
        threading.Thread(target=_look, args=(weakref.ref(self),), daemon=True).start()

    def look(self) -> None:
        """Poll the counter once, and record the time if it has changed."""
        with self._lock:
            energy, now = self._read(), self._clock()
            if energy is None:
                self._steps.clear()
                self._foretold.clear()
                self._last, self._begun, self._owed = None, None, 0.0
                return
            if self._last is not None and energy != self._last:
                self._steps.append((now, energy))
                if len(self._steps) > 5:  # two before begin, one after it, and the last two
                    del self._steps[3]
                self._settle()
            self._last = energy

    def begin(self) -> None:
        """Start measuring; the first call waits for the counter's first two updates."""
        deadline = time.monotonic() + STEPS_SECONDS
        while len(self._steps) < 2 and not self._waited and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._waited = True
        with self._lock:
            del self._steps[:-2]
            self._begun = self._clock() if len(self._steps) == 2 else None

    def end(self) -> float | None:
        """Return the joules since :meth:`begin`; None if unknown."""
        self.look()
        with self._lock:
            if self._begun is None:
                return None
            now, known = self._clock(), max(self._begun, self._steps[-1][0])
            found = self._between(self._begun, now) + self._owed
            self._foretold.append((known, now, self._between(known, now)))
            self._owed = min(0.0, found)  # an epoch's energy is never negative
            return max(0.0, found)

    def _settle(self) -> None:
        """Add the errors of earlier predictions, which the new update shows, to the next epoch."""
        for start, stop, joules in self._foretold:
            self._owed += self._between(start, stop) - joules
        self._foretold.clear()

    def _between(self, start: float, stop: float) -> float:
        return self._at(stop) - self._at(start)

    def _at(self, when: float) -> float:
        """Return the energy at a time."""
        later = [place for place, (seen, _) in enumerate(self._steps) if seen > when]
        place = max(1, later[0] if later else len(self._steps) - 1)
        (start, low), (stop, high) = self._steps[place - 1 : place + 1]
        return low + (high - low) * min(2.0, (when - start) / (stop - start))


def _look(meter: weakref.ref[EnergyMeter]) -> None:
    while (found := meter()) is not None:
        found.look()
        del found
        time.sleep(POLL_SECONDS)


class GPUCounters:
    """The counters of one device, between :meth:`begin` and :meth:`end`.

    Args:
        device: index of the device in torch.cuda; None for no GPU.
    """

    def __init__(self, device: int | None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._meter: EnergyMeter | None = None
        self._samples: list[Any] = []
        self._sampled = 0.0
        if device is not None:
            self._open(device)

    def begin(self) -> None:
        """Read the counters; the first call waits up to :data:`STEPS_SECONDS` for the energy."""
        if self._meter is not None:
            self._meter.begin()
        if self._samples:
            self._sampled = time.perf_counter()
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0])

    def end(self) -> dict[str, float]:
        """Return ``joules`` and the shares of :data:`GPM` since :meth:`begin`.

        Counters that the device does not support are absent.
        """
        found: dict[str, float] = {}
        energy = None if self._meter is None else self._meter.end()
        if energy is not None:
            found["joules"] = energy
        if self._samples and time.perf_counter() - self._sampled > GPM_SECONDS:
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[1])
            found |= self._shares()
        return found

    def _open(self, device: int) -> None:
        """Find the device in NVML, and allocate two samples if it supports GPM."""
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES renumbers torch's devices, but not NVML's; the UUID is the same
            # in both.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle, self._nvml = pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml
        except pynvml.NVMLError:
            return
        if _joules(pynvml, self._handle) is not None:
            self._meter = EnergyMeter(partial(_joules, pynvml, self._handle))
            self._meter.watch()
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        except pynvml.NVMLError:
            self._samples = []

    def _shares(self) -> dict[str, float]:
        """Return the shares of :data:`GPM` between the two samples."""
        nvml = self._nvml
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        request.sample1, request.sample2 = self._samples
        for place, name in enumerate(GPM.values()):
            request.metrics[place].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
        try:
            nvml.nvmlGpmMetricsGet(request)
        except nvml.NVMLError:
            return {}
        values = zip(GPM, request.metrics, strict=False)
        return {
            name: metric.value / 100
            for name, metric in values
            if metric.nvmlReturn == nvml.NVML_SUCCESS
        }


def _joules(nvml: Any, handle: Any) -> float | None:
    """Return a device's energy counter in joules; None if unsupported."""
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except nvml.NVMLError:
        return None
