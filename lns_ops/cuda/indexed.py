"""Table look-ups and sums by destination on NVIDIA GPUs, for :mod:`lns_ops.functional.indexed`."""

from __future__ import annotations

import atexit
from functools import lru_cache

import torch
from torch import Tensor

from lns_ops.cuda import runtime
from lns_ops.cuda.faults import row_for
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.unary_functions import table, undefined

_LAYOUTS = {"lookup": "PPqiPP", "segment_sum": "PPPPqqP"}


@lru_cache(maxsize=64)
def _kernel(name: str, bits: int, fraction_bits: int, device: int) -> runtime.CudaKernel:
    fmt = LNSFormat(bits, fraction_bits)
    defines = runtime.compile_options(fmt, device, FAST=0, UNDEFINED=undefined(fmt))
    return runtime.CudaKernel(
        runtime.compile_function(
            runtime.kernel_source("indexed.cu"), f"lns_{name}", defines, device
        ),
        _LAYOUTS[name],
        0,
    )


atexit.register(_kernel.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


@lru_cache(maxsize=1024)
def function_table(
    function: str, parameters: tuple[float, ...], fmt: LNSFormat, device: int
) -> Tensor:
    """Return a function's result for each code, as a table on a device, uploaded once."""
    return runtime.uploaded(table(function, parameters, fmt), device)


def lookup(
    x: Tensor, function: str, parameters: list[float], bits: int, fraction_bits: int
) -> Tensor:
    """Return ``function`` of the codes by table look-up.

    Arguments without a result are counted (:func:`lns_ops.check_faults`) and give zero.
    """
    x, device = x.contiguous(), x.get_device()
    out = torch.empty_like(x)
    results = function_table(function, tuple(parameters), LNSFormat(bits, fraction_bits), device)
    if x.numel():
        kernel = _kernel("lookup", bits, fraction_bits, device)
        source, target = x.data_ptr(), out.data_ptr()
        kernel(
            runtime.grid_of(x.numel(), device, kernel=kernel), runtime.THREADS, device,
            source, target, x.numel(), runtime.alignment_flag(source, target), results.data_ptr(),
            row_for(device, function),
        )  # fmt: skip
    return out


def segment_sum(x: Tensor, order: Tensor, starts: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return in row r the sum of rows ``order[starts[r] : starts[r + 1]]`` of ``x``, in the
    contract's order.
    """
    x, order, starts, device = (
        x.contiguous(),
        order.contiguous(),
        starts.contiguous(),
        x.get_device(),
    )
    rows, width = starts.numel() - 1, x.shape[1]
    out = torch.empty((rows, width), dtype=torch.int16, device=x.device)
    if out.numel():
        kernel = _kernel("segment_sum", bits, fraction_bits, device)
        kernel(
            runtime.grid_of(out.numel(), device, per_thread=1, kernel=kernel), runtime.THREADS,
            device, x.data_ptr(), out.data_ptr(), order.data_ptr(), starts.data_ptr(), rows, width,
            runtime.device_tables(fraction_bits, device).gauss.data_ptr(),
        )  # fmt: skip
    return out
