"""Counters that an NVIDIA GPU offers through NVML.

They are its energy, and how busy its multiprocessors were (GPM). nvidia-smi's "utilisation" says
only that some kernel ran; GPM (Hopper and later) counts, between two samples, the share of
multiprocessors that were busy, of warps that were resident, and of time in tensor and integer
operations. Where the library, the driver or the device does not offer a counter, or the time was
too short for it, it is absent from the result: nothing is made up. Counters are the whole device's,
other processes on it included.

The energy counter moves in steps (ten times a second on an H100), so a short epoch would see none
of them or a whole one: :class:`EnergyMeter` notes when it moves and reads between the steps.

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
"""Our names of GPM's metrics, which are percentages there and shares from 0 to 1 here."""
GPM_SECONDS = 0.1
"""The least time between two samples of GPM, which are made anew that often."""
POLL_SECONDS = 0.02
"""The time between two looks at the energy counter; one took 3 ms on an H100's host."""
STEPS_SECONDS = 1.0
"""The longest wait for an energy counter's first two steps; one that is slower is left out."""


class EnergyMeter:
    """A device's energy, read between the steps in which its counter moves.

    With a step to ``E_i`` seen at ``t_i``, the energy at a time ``t`` is linear between two steps,
    and goes on as between the last two, but by no whole step, as the counter would have moved::

        E(t) = E_i + (E_{i+1} - E_i) min(2, (t - t_i) / (t_{i+1} - t_i))

    What an epoch took after the last step is so foretold; what the next step says otherwise is
    added to the epoch after. The sum over epochs is thus the counter's but for the last step;
    within a step the power counts as even. :meth:`watch` looks from a thread, which ends with the
    meter.

    Args:
        read: returns the counter in joules, or None where it cannot be read.
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
        """Look at the counter from a thread, until the meter is dropped."""
        threading.Thread(target=_look, args=(weakref.ref(self),), daemon=True).start()

    def look(self) -> None:
        """Look at the counter, and note the time if it has moved."""
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
        """Begin to measure; the first time wait for the counter's first two steps."""
        deadline = time.monotonic() + STEPS_SECONDS
        while len(self._steps) < 2 and not self._waited and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._waited = True
        with self._lock:
            del self._steps[:-2]
            self._begun = self._clock() if len(self._steps) == 2 else None

    def end(self) -> float | None:
        """Return the joules since :meth:`begin`, None where they are not known."""
        self.look()
        with self._lock:
            if self._begun is None:
                return None
            now, known = self._clock(), max(self._begun, self._steps[-1][0])
            found = self._between(self._begun, now) + self._owed
            self._foretold.append((known, now, self._between(known, now)))
            self._owed = min(0.0, found)  # an epoch takes no less than nothing
            return max(0.0, found)

    def _settle(self) -> None:
        """Note by how much the step that was just seen departs from what was foretold."""
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
        device: index as torch.cuda counts, None for no GPU.
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
        """Read the counters; wait for those of energy, once, at most :data:`STEPS_SECONDS`."""
        if self._meter is not None:
            self._meter.begin()
        if self._samples:
            self._sampled = time.perf_counter()
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0])

    def end(self) -> dict[str, float]:
        """Return ``joules`` and the shares of :data:`GPM` since :meth:`begin`.

        What the device does not count is absent.
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
        """Find the device in NVML, and allocate two samples where it supports GPM."""
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES renumbers torch's devices but not those of NVML; a UUID names the
            # same device in both.
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
    """Return a device's energy counter, or None where there is none."""
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    except nvml.NVMLError:
        return None
