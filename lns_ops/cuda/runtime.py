"""The runtime of all CUDA kernels: CuPy and NVRTC, launches, and tables.

A kernel in ``lns_ops/cuda/src`` is compiled once for a device and a format. Its arguments are
packed in ``struct``'s layout, and it runs on torch's current stream.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lns_ops._compat import cupy_driver, current_device, current_stream
from lns_ops.spec.format import (
    MANTISSA_BITS,
    LNSFormat,
    decode_significands,
    encode_thresholds,
    single_significands,
)
from lns_ops.spec.gaussian_log import gaussian_tables

REPLICATED_FRACTION_BITS = 7
"""Largest number of fraction bits with which 32 copies of the G table fit in shared memory.

The fast GEMM needs them in one multiprocessor.
"""
THREADS = 512


@lru_cache(maxsize=1)
def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        cuda = (torch.version.cuda or "13").partition(".")[0]
        raise RuntimeError(
            f"LNS on a CUDA tensor needs CuPy, which does not import here ({error}): pip install"
            f" cupy-cuda{cuda}x (the extra gpu{cuda} of lns-ops and of lns-study), or move the"
            " tensor to the CPU"
        ) from error
    return cupy


def unavailable() -> str | None:
    """Return the reason why CUDA kernels cannot run, or None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        _cupy()
    except RuntimeError as error:
        return str(error)
    return None


def kernel_info() -> dict[str, str]:
    """Return the ``kernel`` in use (or ``none``) and the ``reason``, as the CPU version does."""
    reason = unavailable()
    if reason is not None:
        return {"kernel": "none", "reason": reason}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "kernel": f"cupy sm_{properties.major}{properties.minor}",
        "reason": (
            f"{properties.name}, CuPy {_cupy().__version__}, NVRTC"
            f" {'.'.join(map(str, _cupy().cuda.nvrtc.getVersion()))}"
        ),
    }


# --- compiling and launching


@lru_cache(maxsize=8)
def kernel_source(name: str) -> str:
    """Return the source of a kernel file, with its includes expanded."""
    file = resources.files("lns_ops.cuda") / "src" / name
    lines = file.read_text().replace("#pragma once\n", "").splitlines(keepends=True)
    return "".join(
        kernel_source(line.split('"')[1]) if line.startswith('#include "') else line
        for line in lines
    )


class _Arguments(threading.local):
    """A thread's memory for the arguments of a launch; the driver copies them when it launches.

    Attributes:
        ready: whether the thread has initialized the runtime.
    """

    def __init__(self) -> None:
        self.ready = False
        self.values = ctypes.create_string_buffer(_MOST_BYTES)
        self.size = ctypes.c_size_t()
        # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._BUFFER_SIZE, ..._END
        self._extra = (ctypes.c_void_p * 5)(
            1, ctypes.addressof(self.values), 2, ctypes.addressof(self.size), 0
        )
        self.address = ctypes.addressof(self._extra)


_MOST_BYTES = 4096
"""CUDA's limit for the bytes of a kernel's arguments."""
_arguments = _Arguments()


class CudaKernel:
    """A compiled kernel with the memory layout of its arguments in ``struct``'s notation.

    A kernel whose last argument is a list has room for ``most`` entries with the layout ``entry``;
    a launch passes as many as it needs. Kernels of one ``function`` with different shared memory
    set its maximum, ``allowed``, because that is a property of the function.
    """

    def __init__(
        self, function: Any, layout: str, shared: int, entry: str = "", most: int = 0,
        allowed: int = 0,
    ) -> None:  # fmt: skip
        if max(shared, allowed) > 48 << 10:
            function.max_dynamic_shared_size_bytes = max(shared, allowed)
        self._pointer = function.kernel.ptr
        self._function = function  # keeps the module loaded
        arguments = struct.Struct("@" + layout + "0q" * bool(entry))
        one = struct.Struct("@" + entry + "0q")
        self._pack, self._head = arguments.pack_into, arguments.size
        self._pack_entry, self._entry = one.pack_into, one.size
        self._size = arguments.size + most * one.size
        self._shared = shared
        self._launch = _driver().launchKernel
        self._resident: dict[int, int] = {}

    def __call__(
        self, grid: tuple[int, int, int], threads: int, device: int, *arguments: float,
        entries: Sequence[Sequence[float]] = (),
    ) -> None:  # fmt: skip
        if current_device() != device:
            with torch.cuda.device(device):
                self(grid, threads, device, *arguments, entries=entries)
            return
        own = _arguments
        if not own.ready:
            # A torch thread, such as autograd's, may not have initialized the runtime yet, and then
            # has no context.
            _cupy().cuda.Device(device).use()
            own.ready = True
        self._pack(own.values, 0, *arguments)
        for number, entry in enumerate(entries):
            self._pack_entry(own.values, self._head + number * self._entry, *entry)
        own.size.value = self._size
        self._launch(
            self._pointer, *grid, threads, 1, 1, self._shared, current_stream(device), 0,
            own.address,
        )  # fmt: skip

    def resident(self, device: int) -> int:
        """Return how many thread blocks of ``_THREADS`` threads the device can hold at once."""
        if device not in self._resident:
            with torch.cuda.device(device):
                _cupy().cuda.Device(device).use()
                a_multiprocessor = _driver().occupancyMaxActiveBlocksPerMultiprocessor(
                    self._pointer, THREADS, self._shared
                )
            self._resident[device] = a_multiprocessor * multiprocessor_count(device)
        return self._resident[device]


@lru_cache(maxsize=1)
def _driver() -> Any:
    _cupy()
    return cupy_driver()


@atexit.register
def _forget() -> None:
    """Unload modules when the interpreter exits, before CuPy is torn down.

    Later their destructors would print errors. Files that cache kernels register their
    ``cache_clear`` after this function, so these run first.
    """
    shared_base.cache_clear()
    if "cupy" in sys.modules:
        sys.modules["cupy"].clear_memo()


def compile_function(source: str, name: str, options: tuple[str, ...], device: int) -> Any:
    """Compile the function ``name`` of CUDA C++ ``source`` for a device."""
    cupy = _cupy()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context exist and be current
        with cupy.cuda.Device(device):
            return cupy.RawModule(code=source, options=("-std=c++17", *options)).get_function(name)


@lru_cache(maxsize=16)
def most_shared_bytes(device: int) -> int:
    """Return the maximum amount of shared memory of a thread block on a device."""
    return int(_cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@lru_cache(maxsize=16)
def shared_base(device: int) -> int:
    """Return the start of dynamic shared memory in the shared window.

    It is a constant of the device, with which kernels are compiled.
    """
    source = r"""extern "C" __global__ void base(unsigned* out) {
        extern __shared__ unsigned memory[];
        *out = (unsigned)__cvta_generic_to_shared(memory);
    }"""
    out = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
    CudaKernel(compile_function(source, "base", (), device), "P", 16)(
        (1, 1, 1), 1, device, out.data_ptr()
    )
    return int(out)


def compile_options(fmt: LNSFormat, device: int, **more: int) -> tuple[str, ...]:
    """Return the macro definitions for a format and a device, and ``more``."""
    tables = gaussian_tables(fmt.fraction_bits)
    values = {
        "BITS": fmt.bits,
        "FRACTION_BITS": fmt.fraction_bits,
        "SQUARE_BITS": fmt.of_squares.bits,
        "LAST": len(tables.plus) - 1,
        "DRIFT": -int(tables.minus[1:].min(initial=0)),
        "SHARED_BASE": shared_base(device),
        **more,
    }
    return tuple(f"-D{name}={value}" for name, value in values.items())


class _Tables(NamedTuple):
    """The tables on a device; the headers of the ``.cu`` files describe them."""

    packed: Tensor
    signed: Tensor
    gauss: Tensor
    cells: Tensor
    thresholds: Tensor
    significands: Tensor
    significands_double: Tensor


def uploaded(table: np.ndarray[Any, Any], device: int) -> Tensor:
    """Return a copy of a host table on a device, for permanent use.

    A separate thread makes the copy on the default stream, because
    ``torch.compile(mode="reduce-overhead")`` reuses the memory that its caller allocates, and
    raises if some of it outlives the step. If a table were freed, its memory could be reused while
    kernels on a stream still read it, so callers cache more tables than a process needs.
    """
    host = torch.from_numpy(np.array(table))
    made: list[Tensor] = []
    failed: list[Exception] = []

    def copy() -> None:
        try:
            made.append(host.to(torch.device("cuda", device)))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=copy, name="lns_ops-table")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


@lru_cache(maxsize=64)
def device_tables(fraction_bits: int, device: int) -> _Tables:
    """Return the tables of a format on a device, uploaded once."""
    plus, minus = (table.astype(np.int64) for table in gaussian_tables(fraction_bits))
    drift = -int(minus[1:].min(initial=0))
    packed = ((plus + drift) & 0xFFFF) | ((minus + drift) << 16)
    # G-(0): a negative half-word, which is NaN as a number
    packed[0] = (plus[0] + drift) | (0x8000 << 16) - (1 << 32)
    signed = (plus & 0xFFFF) | (np.append(-0x8000, minus[1:]) << 16)
    thresholds = encode_thresholds(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (MANTISSA_BITS - fraction_bits - 1)
    below = np.searchsorted(thresholds, starts + (1 << MANTISSA_BITS), side="left")
    mantissas = (np.append(thresholds, 2 << MANTISSA_BITS) - (1 << MANTISSA_BITS)) >> (
        MANTISSA_BITS - 23
    )
    cells = np.stack([below, mantissas[below]], axis=1).astype(np.int32)

    def upload(table: np.ndarray[Any, Any]) -> Tensor:
        return uploaded(table, device)

    return _Tables(
        upload(packed[::-1].astype(np.int32)),
        upload(signed[::-1].astype(np.int32)),
        upload(np.stack([plus, minus], axis=1).astype(np.int32)),
        upload(cells),
        upload(thresholds),
        upload(single_significands(fraction_bits)),
        upload(decode_significands(fraction_bits)),
    )


@lru_cache(maxsize=16)
def multiprocessor_count(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def grid_of(
    n: int, device: int, *, per_thread: int = 8, kernel: CudaKernel | None = None, waves: int = 8
) -> tuple[int, int, int]:
    """Return the number of thread blocks for ``n`` elements.

    A ``kernel`` that fills tables first gets at most ``waves`` times as many blocks as the device
    can hold at once. More than one wave brings simultaneous accesses closer together: 3 to 8 % more
    bandwidth on an H200.
    """
    blocks = -(-n // (per_thread * THREADS))
    return (
        min(blocks, waves * kernel.resident(device) if kernel is not None else (1 << 31) - 1),
        1,
        1,
    )


def alignment_flag(*addresses: int) -> int:
    """Return 1 if all addresses are multiples of 16, for wide loads, else 0; 0 means absent."""
    together = 0
    for address in addresses:
        together |= address
    return int(together % 16 == 0)


def pointer_of(tensor: Tensor | None) -> int:
    """Return a tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
