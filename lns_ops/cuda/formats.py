"""Rounding to formats with a scale, and random integers for stochastic rounding, on NVIDIA GPUs.

A call is one kernel, or two if a few long rows must be shared among thread blocks. It replaces
about twenty torch operations, with the same bits; Philox is one kernel instead of a hundred
operations. Kernels are compiled when they are first called, which is not possible during the
capture of a CUDA graph: call once before it.
"""

from __future__ import annotations

import atexit
import struct
from functools import lru_cache

import torch
from torch import Tensor

from lns_ops.cuda import runtime
from lns_ops.cuda.faults import row_for
from lns_ops.cuda.runtime import THREADS
from lns_ops.spec.format import LNSFormat

_GROUPS = "PPqqqq"
_LAYOUTS = {
    "quantize_by_warps": _GROUPS,
    "quantize_by_blocks": _GROUPS,
    "quantize_by_chunks": "PPPqq",
    "random_bits": "PPqQI",
}
_FLOATS, _LOGARITHMS, _INTEGERS = 0, 1, 2
_FORMATS = {_FLOATS: "iiii", _LOGARITHMS: "iPPP", _INTEGERS: "ii"}
"""The arguments for a format, for each kind of format in ``formats.cu``."""
_CHUNK = 4096
"""Number of values that a thread block takes from a row that several blocks share."""
_WARP = 32
_LONG_FOR_WARP, _LONG_FOR_BLOCK = 1024, 16384
"""Group sizes above which a thread block replaces a warp, or several blocks replace one."""
_INFINITY = 0x7F800000


@lru_cache(maxsize=512)
def _kernel(name: str, fmt: LNSFormat | int, device: int) -> runtime.CudaKernel:
    """Return the kernel ``lns_NAME`` of ``formats.cu`` for an LNS format or another kind."""
    if isinstance(fmt, LNSFormat):
        kind, defines = _LOGARITHMS, runtime.compile_options(fmt, device)
    else:
        kind, defines = fmt, ()
    defines = (*defines, f"-DKIND={kind}", f"-DCHUNK={_CHUNK}")
    layout = _LAYOUTS[name] + _FORMATS[kind] * name.startswith("quantize")
    source = runtime.kernel_source("formats.cu")
    function = runtime.compile_function(source, f"lns_{name}", defines, device)
    return runtime.CudaKernel(function, layout, 0)


atexit.register(_kernel.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


@lru_cache(maxsize=1024)
def _bits(value: float) -> int:
    """Return the bit pattern of a float32."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


def quantize_floats(
    x: Tensor, width: int, length: int, mantissa_bits: int, min_exponent: int, largest: float,
    saturates: bool,
) -> Tensor:  # fmt: skip
    """Round to the nearest binary float times a power of two for each group, the smallest that
    avoids saturation; without a scale if ``length`` is 0.

    Args:
        x: float32, any shape.
        width: number of values of a row.
        length: number of values of a group, at most 16,384 or the row's length; a row's last group
            may have fewer.
        mantissa_bits: significand bits after the binary point.
        min_exponent: exponent of the smallest normal number.
        largest: largest magnitude.
        saturates: whether larger values become ``largest`` instead of infinity. NaNs stay NaN.
    """
    limit = _bits(largest)
    beyond = limit if saturates else _INFINITY
    arguments = limit, beyond, mantissa_bits, min_exponent + 127
    return _quantize(x, width, length, _FLOATS, arguments)


def quantize_logarithms(
    x: Tensor, width: int, length: int, fmt: LNSFormat, largest: float
) -> Tensor:
    """Round to the nearest LNS value times a power of two, as in :func:`quantize_floats`.

    NaNs and infinities are counted as faults (:func:`lns_ops.check_faults`); the result is some
    value.
    """
    device = x.get_device()
    tables = runtime.device_tables(fmt.fraction_bits, device)
    arguments = (
        _bits(largest), tables.cells.data_ptr(), tables.significands.data_ptr(),
        row_for(device, "rounding to a format"),
    )  # fmt: skip
    return _quantize(x, width, length, fmt, arguments)


def quantize_integers(x: Tensor, width: int, length: int, bits: int) -> Tensor:
    """Round to integers of ``bits`` bits times a scale for each group, as
    :class:`lns_ops.formats.Integer` does. NaNs stay NaN."""
    return _quantize(x, width, length, _INTEGERS, ((1 << bits - 1) - 1, bits - 1))


@lru_cache(maxsize=16)
def _listed(device: int) -> runtime.CudaKernel:
    source = runtime.kernel_source("listed.cu")
    function = runtime.compile_function(source, "lns_quantize_listed", (), device)
    return runtime.CudaKernel(function, "PPqPPPii", 0)


atexit.register(_listed.cache_clear)  # before CuPy goes; see lns_ops.cuda.runtime


def quantize_listed(
    x: Tensor, cells: Tensor, ends: Tensor, levels: Tensor, shift: int, not_a_real: bool
) -> Tensor:
    """Round to the nearest of a list, as :func:`lns_ops.formats.list_rounding.index` finds it.

    Args:
        x: float32, any shape.
        cells: int32; see :class:`lns_ops.formats.tabulated.Grid`, as for the next three.
        ends: float32.
        levels: float32.
        shift: bits that ``cells`` leaves out.
        not_a_real: whether infinities become a NaN.
    """
    x, device = x.contiguous(), x.get_device()
    out = torch.empty_like(x)
    if x.numel():
        kernel = _listed(device)
        kernel(
            runtime.grid_of(x.numel(), device, kernel=kernel), THREADS, device,
            x.data_ptr(), out.data_ptr(), x.numel(), cells.data_ptr(), ends.data_ptr(),
            levels.data_ptr(), shift, int(not_a_real),
        )  # fmt: skip
    return out


def _quantize(
    x: Tensor, width: int, length: int, fmt: LNSFormat | int, arguments: tuple[int, ...]
) -> Tensor:
    x, device = x.contiguous(), x.get_device()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    ends, rows = (x.data_ptr(), out.data_ptr()), x.numel() // width
    if 0 < length <= _LONG_FOR_BLOCK:
        by_warp = length <= _LONG_FOR_WARP
        kernel = _kernel(f"quantize_by_{'warps' if by_warp else 'blocks'}", fmt, device)
        a_row = -(-width // length)
        groups, together = rows * a_row, THREADS // _WARP if by_warp else 1
        blocks = min(-(-groups // together), kernel.resident(device))
        shape = width, length, a_row, groups
        kernel((blocks, 1, 1), THREADS, device, *ends, *shape, *arguments)
        return out
    largest = None if length == 0 else torch.linalg.vector_norm(x.view(rows, width), torch.inf, 1)
    kernel = _kernel("quantize_by_chunks", fmt, device)
    chunks = -(-width // _CHUNK)
    given = runtime.pointer_of(largest), width, chunks
    kernel((rows * chunks, 1, 1), THREADS, device, *ends, *given, *arguments)
    return out


def random_bits(count: int, key: int, step: Tensor, slot: int) -> Tensor:
    """Return :func:`lns_ops.reference.random_bits`, int32, with up to seven more than ``count``.

    Args:
        step: 0-dim, on the GPU that computes.
    """
    step, device, blocks = step.to(torch.int64), step.get_device(), -(-count // 8)
    out = torch.empty(8 * blocks, dtype=torch.int32, device=step.device)
    if blocks:
        kernel = _kernel("random_bits", _FLOATS, device)
        kernel(
            (-(-blocks // THREADS), 1, 1), THREADS, device, out.data_ptr(), step.data_ptr(), blocks,
            key & (1 << 64) - 1, slot & (1 << 32) - 1,
        )  # fmt: skip
    return out
