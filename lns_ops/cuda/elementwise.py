"""Elementwise operations, encoding and decoding on NVIDIA GPUs."""

from __future__ import annotations

import atexit
import math
from functools import lru_cache

import torch
from torch import Tensor

from lns_ops.cpu.arrays import broadcast_shape
from lns_ops.cuda.faults import row_for
from lns_ops.cuda.runtime import (
    REPLICATED_FRACTION_BITS,
    THREADS,
    CudaKernel,
    alignment_flag,
    compile_function,
    compile_options,
    device_tables,
    grid_of,
    kernel_source,
)
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import gaussian_tables, longest_decay_table, stochastic_tables

_SHARED_FRACTION_BITS = 9
"""Largest number of fraction bits with which eight copies of the G table fit, for fast sums."""

_BINARY_LAYOUT = "PPPqqqiiPPP"
_ELEMENTWISE: dict[str, str] = {
    "add": _BINARY_LAYOUT,
    "sub": _BINARY_LAYOUT,
    "mul": _BINARY_LAYOUT,
    "div": _BINARY_LAYOUT,
    "square_root": "PPqiP",
    **{
        f"sgd{momentum}{rounding}": "PiiiPPP"
        for momentum in ("", "_momentum")
        for rounding in ("", "_kahan", "_stochastic")
    },
    **{
        f"adam{decay}{rounding}": "PPPiiiiiPiiiiiPPP"
        for decay in ("", "_l2", "_decoupled")
        for rounding in ("", "_kahan", "_stochastic")
    },
    "sum": "PPPqqqqqqqqqqiiiiPP",
    "normalize": "PPPq" + 4 * "Pqq" + "iPP",
    "normalize_backward": "PPPq" + 2 * "Pqq" + "iPP",
    "normalization": "PPPPPPP" + "qqqqqqqqiiiii" + 2 * "Pqq" + "PiPP",
    "normalization_backward": "PPPPPPP" + "qqqqqqqqiiiii" + "0qiPP",
    "encode": "PPqiPP",
    "encode_double": "PPqPP",
    "decode": "PPqiP",
    "decode_double": "PPqiP",
    "track": "PPPPPqiffP",
}
LISTS = {"sgd": ("PPPPPqqiii", 48), "ada": ("PPPPPPPqqiii", 40)}
"""Layout of an entry in a kernel's parameter list, and the maximum number of entries."""
WITH_TABLE = (
    "add", "sub", "sum",
    *(name for name in _ELEMENTWISE if name.startswith(("normaliz", "sgd", "adam"))),
)  # fmt: skip
COPIES = 8
MOST_CODES = 4096
"""Number of codes that a thread block of a whole normalization keeps."""


@lru_cache(maxsize=512)
def elementwise_kernel(name: str, bits: int, fraction_bits: int, device: int) -> CudaKernel:
    """Return the kernel ``lns_NAME`` of a file in ``src``, compiled once per format and device."""
    fmt = LNSFormat(bits, fraction_bits)
    fast = fraction_bits <= _SHARED_FRACTION_BITS
    shared = (
        len(gaussian_tables(fraction_bits).plus) * 4 * COPIES if fast and name in WITH_TABLE else 0
    )
    defines = {"FAST": int(fast), "COPIES": COPIES, "MOST_CODES": MOST_CODES}
    updates, adam = name.startswith(("sgd", "adam")), name.startswith("adam")
    if updates:
        fine, behind = (
            len(stochastic_tables(fraction_bits).plus),
            fraction_bits <= REPLICATED_FRACTION_BITS,
        )
        defines |= {"MOST_ENTRIES": LISTS[name[:3]][1]}
        defines |= {"ADAM_KERNELS": int(adam), "FINE_LAST": fine - 1, "SHARED_TABLES": int(behind)}
        if behind:
            shared += (
                8 * fine * name.endswith("stochastic")
                + 4 * longest_decay_table(fraction_bits) * adam
            )
    if name in ("sum", "normalization", "normalization_backward"):  # memory its threads share
        shared += THREADS * (4 if fast else 12)
    if name.startswith("normalization"):
        shared += 2 * (MOST_CODES + THREADS)
    files = {"sgd": "updates", "ada": "updates", "sum": "sums", "nor": "normalization"}
    source = kernel_source(f"{files.get(name[:3], 'elementwise')}.cu")
    function = compile_function(
        source, f"lns_{name}", compile_options(fmt, device, **defines), device
    )
    return CudaKernel(function, _ELEMENTWISE[name], shared, *LISTS.get(name[:3], ()))


atexit.register(elementwise_kernel.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


@lru_cache(maxsize=4096)
def repetition(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return ``(div, mod)`` by which a contiguous tensor of shape ``own`` repeats in ``shape``.

    Element i of ``shape`` uses its element ``i // div % mod``. Returns None if it repeats in
    another way.
    """
    sizes = [1] * (len(shape) - len(own)) + list(own)
    full = [d for d, size in enumerate(shape) if size != 1]
    kept = [d for d in full if sizes[d] != 1]
    if not kept:
        return None
    run = [d for d in full if kept[0] <= d <= kept[-1]]
    if run != kept:
        return None
    div = 1
    for d in full:
        if d > kept[-1]:
            div *= shape[d]
    return div, math.prod(own)


def _binary(name: str, x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    shape = broadcast_shape(x.shape, y.shape)
    cuda = x if x.is_cuda else y
    device = cuda.get_device()
    if not x.is_cuda:
        x = torch.full(shape, int(x), dtype=torch.int16, device=cuda.device)
    x = x.expand(shape).contiguous()
    z = torch.empty(shape, dtype=torch.int16, device=cuda.device)
    code, div, mod = 0, 1, x.numel()
    if not y.is_cuda:
        code, mod = int(y), 0
    else:
        found = repetition(y.shape, shape) if y.shape != shape else None
        if found is None:
            y = y.expand(shape).contiguous()
        else:
            y, (div, mod) = y.contiguous(), found
    if x.numel():
        tables, kernel = (
            device_tables(fraction_bits, device),
            elementwise_kernel(name, bits, fraction_bits, device),
        )
        a, b, c = x.data_ptr(), y.data_ptr() if mod else 0, z.data_ptr()
        kernel(
            grid_of(x.numel(), device, kernel=kernel), THREADS, device, a, b, c, x.numel(), div,
            mod, code, alignment_flag(a, b, c), tables.signed.data_ptr(), tables.gauss.data_ptr(),
            row_for(device, name),
        )  # fmt: skip
    return z


def add(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x + y``, broadcast; one of them may be a 0-dim CPU tensor."""
    return (
        _binary("add", x, y, bits, fraction_bits)
        if x.is_cuda
        else _binary("add", y, x, bits, fraction_bits)
    )


def sub(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x - y``, broadcast."""
    return _binary("sub", x, y, bits, fraction_bits)


def mul(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x y``, broadcast."""
    return (
        _binary("mul", x, y, bits, fraction_bits)
        if x.is_cuda
        else _binary("mul", y, x, bits, fraction_bits)
    )


def div(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x / y``, broadcast.

    Zero divisors are counted (:func:`check_faults`) and give zero.
    """
    return _binary("div", x, y, bits, fraction_bits)


def sqrt(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return the square root; negatives are counted (:func:`check_faults`) and give zero."""
    x, device = x.contiguous(), x.get_device()
    z = torch.empty_like(x)
    if x.numel():
        elementwise_kernel("square_root", bits, fraction_bits, device)(
            grid_of(x.numel(), device),
            THREADS,
            device,
            x.data_ptr(),
            z.data_ptr(),
            x.numel(),
            alignment_flag(x.data_ptr(), z.data_ptr()),
            row_for(device, "sqrt"),
        )
    return z


def encode(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return the codes nearest in logarithm.

    NaN and infinities are counted (:func:`check_faults`).
    """
    double = x.dtype == torch.float64 or not x.dtype.is_floating_point
    x, device = x.contiguous().to(torch.float64 if double else torch.float32), x.get_device()
    out = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    if x.numel():
        tables, kernel = (
            device_tables(fraction_bits, device),
            elementwise_kernel(
                "encode_double" if double else "encode", bits, fraction_bits, device
            ),
        )
        grid = grid_of(x.numel(), device, per_thread=4, kernel=kernel)
        if double:
            kernel(
                grid,
                THREADS,
                device,
                x.data_ptr(),
                out.data_ptr(),
                x.numel(),
                tables.thresholds.data_ptr(),
                row_for(device, "encode"),
            )
        else:
            kernel(
                grid, THREADS, device, x.data_ptr(), out.data_ptr(), x.numel(),
                alignment_flag(x.data_ptr(), out.data_ptr()), tables.cells.data_ptr(),
                row_for(device, "encode"),
            )  # fmt: skip
    return out


def decode(codes: Tensor, bits: int, fraction_bits: int, dtype: torch.dtype) -> Tensor:
    """Return the values of ``codes`` in ``dtype``.

    float64 values are exact to float64; others are rounded to float32 and then to ``dtype``.
    """
    double = dtype == torch.float64
    codes, device = codes.contiguous(), codes.get_device()
    out = torch.empty(
        codes.shape, dtype=torch.float64 if double else torch.float32, device=codes.device
    )
    if codes.numel():
        tables, kernel = (
            device_tables(fraction_bits, device),
            elementwise_kernel(
                "decode_double" if double else "decode", bits, fraction_bits, device
            ),
        )
        kernel(
            grid_of(codes.numel(), device, per_thread=4, kernel=kernel), THREADS, device,
            codes.data_ptr(), out.data_ptr(), codes.numel(),
            alignment_flag(codes.data_ptr(), out.data_ptr()),
            (tables.significands_double if double else tables.significands).data_ptr(),
        )  # fmt: skip
    return out.to(dtype)
