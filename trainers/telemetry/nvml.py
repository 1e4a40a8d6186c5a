"""Counters that an NVIDIA GPU offers through NVML.

They are its energy, and how busy its multiprocessors were (GPM). nvidia-smi's "utilisation" says
only that some kernel ran; GPM (Hopper and later) counts, between two samples, the share of
multiprocessors that were busy, of warps that were resident, and of time in tensor and integer
operations. Where the library, the driver or the device does not offer a counter, it is absent from
the result: nothing is estimated. Counters are the whole device's, other processes on it included.

Source: NVML API reference, "GPM Functions" and ``nvmlDeviceGetTotalEnergyConsumption`` (Volta and
later).
"""

from __future__ import annotations

from typing import Any

import torch

GPM = {
    "sm_busy": "SM_UTIL",
    "sm_occupancy": "SM_OCCUPANCY",
    "integer_busy": "INTEGER_UTIL",
    "tensor_busy": "ANY_TENSOR_UTIL",
}
"""Our names of GPM's metrics, which are percentages there and shares from 0 to 1 here."""


class GPUCounters:
    """The counters of one device, between :meth:`begin` and :meth:`end`.

    Args:
        device: index as torch.cuda counts, None for no GPU.
    """

    def __init__(self, device: int | None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._energy: int | None = None
        self._samples: list[Any] = []
        if device is not None:
            self._open(device)

    def begin(self) -> None:
        """Read the counters."""
        self._energy = self._millijoules()
        if self._samples:
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[0])

    def end(self) -> dict[str, float]:
        """Return ``joules`` and the shares of :data:`GPM` since :meth:`begin`.

        What the device does not count is absent.
        """
        found: dict[str, float] = {}
        energy = self._millijoules()
        if energy is not None and self._energy is not None:
            found["joules"] = (energy - self._energy) / 1e3
        if self._samples:
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
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self._samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
        except pynvml.NVMLError:
            self._samples = []

    def _millijoules(self) -> int | None:
        """Return the device's energy counter, or None where there is none."""
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None

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
