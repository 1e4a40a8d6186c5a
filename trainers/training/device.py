"""The device of a trial, and its memory."""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"
"""Library of NVIDIA's driver, which torch needs to use a GPU."""
_M_MMAP_THRESHOLD = -3
"""Number of the setting in glibc's malloc.h."""
MAPPED_FROM = 128 << 10
"""Allocations of at least this many bytes are mapped separately; glibc's default before it
adapts."""
_returns_memory = False


def resolve_device(name: str) -> str:
    """Return ``cuda`` or ``cpu`` for ``auto``, and any other name unchanged.

    ``auto`` is ``cuda`` if torch finds a GPU that can run LNS kernels.
    """
    if name != "auto":
        return name
    return "cuda" if computes_on_gpus() else "cpu"


def computes_on_gpus() -> bool:
    """Return whether torch finds a GPU that can run LNS kernels.

    Does not import torch if NVIDIA's driver is not installed.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    from lns_ops import cuda

    return cuda.unavailable() is None


def gpu_models() -> list[str]:
    """Return the models of this machine's GPUs that this process may use.

    Uses NVIDIA's NVML, because the import of torch takes seconds and starts CUDA. Uses torch if
    NVML is missing, or if there are GPUs of several models: CUDA sorts them by speed unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID, NVML never does (CUDA C++ Programming Guide, "CUDA Environment
    Variables").
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
    """NVML is not installed, or cannot answer a query."""


def _models_by_nvml(visible: str | None) -> list[str]:
    """Return the models of the GPUs with these comma-separated indices or UUIDs; None for all."""
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
    """Check that this process can use a device.

    Raises:
        ValueError: it cannot; the message has the reason.
    """
    if name != "cuda":
        return
    from lns_ops import cuda

    if (reason := cuda.unavailable()) is not None:
        raise ValueError(f"device=cuda: {reason}; use device=cpu")


def return_freed_memory() -> None:
    """Make the C library return freed memory to the system immediately, from now on.

    glibc keeps freed tensors of up to 32 MiB in a heap that fragments. Example: a net of 400 layers
    has 81 MB of activations with checkpoints and 448 MB without. Its process took 1,970 MB with
    checkpoints and 1,480 MB without; after this call it takes 680 MB, but up to twice the time,
    because every tensor gets new pages. The setting is process-wide and permanent (mallopt(3)). It
    has no effect with other C libraries.
    """
    global _returns_memory
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        _returns_memory = bool(change(_M_MMAP_THRESHOLD, MAPPED_FROM))


def returns_memory() -> bool:
    """Return whether :func:`return_freed_memory` was called in this process."""
    return _returns_memory
