"""The device that a trial computes on, and its memory."""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"
"""The library of NVIDIA's driver, without which torch finds no GPU."""
_M_MMAP_THRESHOLD = -3
"""The name of the setting in glibc's malloc.h."""
MAPPED_FROM = 128 << 10
"""Bytes from which an allocation is mapped by itself, glibc's default before it adapts."""
_returns_memory = False


def resolve_device(name: str) -> str:
    """Return ``cuda`` or ``cpu`` for ``auto``, and any other name as it is.

    ``auto`` is ``cuda`` where torch finds a GPU and LNS kernels can run there.
    """
    if name != "auto":
        return name
    return "cuda" if computes_on_gpus() else "cpu"


def computes_on_gpus() -> bool:
    """Tell whether torch finds a GPU and LNS kernels can run there.

    Where NVIDIA's driver is not installed torch is not loaded to ask it.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    from lns_ops import cuda

    return cuda.unavailable() is None


def gpu_models() -> list[str]:
    """Return the models of this machine's GPUs that this process may use.

    NVIDIA's NVML is asked, which neither takes the seconds in which torch is loaded nor starts
    CUDA; torch is where there is a driver and no NVML, and where GPUs are of several models: CUDA
    puts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML never does (CUDA C++
    Programming Guide, "CUDA Environment Variables").
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return []
    try:
        return _models_by_nvml(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except NoNVMLError:
        import torch

        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


class NoNVMLError(Exception):
    """NVML is not installed, or cannot say what it is asked for."""


def _models_by_nvml(visible: str | None) -> list[str]:
    """Return the models of GPUs by their indices or UUIDs, with commas between; of all for None."""
    try:
        import pynvml
    except ImportError as error:
        raise NoNVMLError from error
    try:
        pynvml.nvmlInit()
        every = range(pynvml.nvmlDeviceGetCount())
        kinds = {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in every}
        if len(kinds) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise NoNVMLError(f"another order than CUDA's of {', '.join(map(str, kinds))}")
        if visible is None:
            visible = ",".join(map(str, every))
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible.split(",")
            if name
        ]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        raise NoNVMLError from error


def check_device(name: str) -> None:
    """Refuse a device that this process does not have.

    Raises:
        ValueError: the device is missing; the message says why.
    """
    if name != "cuda":
        return
    from lns_ops import cuda

    if (reason := cuda.unavailable()) is not None:
        raise ValueError(f"device=cuda: {reason}; use device=cpu")


def return_freed_memory() -> None:
    """Have the C library give memory back to the system as soon as it is freed, from now on.

    glibc keeps freed tensors of up to 32 MiB in a heap that fragments. A net of 400 layers that
    keeps 81 MB of activations with checkpoints, 448 without, took 1,970 MB instead of 1,480 of its
    process; it takes 680 after this call, in up to twice the time, since every tensor's pages are
    new. The setting belongs to the process and cannot be taken back (mallopt(3)). Where the C
    library is another, nothing happens.
    """
    global _returns_memory
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        _returns_memory = bool(change(_M_MMAP_THRESHOLD, MAPPED_FROM))


def returns_memory() -> bool:
    """Tell whether :func:`return_freed_memory` has changed this process."""
    return _returns_memory
