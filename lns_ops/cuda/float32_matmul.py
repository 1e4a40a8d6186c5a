"""Matrix products of codes with float32 sums on NVIDIA GPUs.

:mod:`lns_ops.functional.float32_matmul` has the method and the CPU version.

Shape suffixes: M, K, N of a product; B a batch, which may be absent.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops.cuda import elementwise, runtime
from lns_ops.spec.format import LNSFormat, decode_significands

_BFLOAT16_FRACTION_BITS, _TF32_FRACTION_BITS = 6, 9
"""Largest numbers of fraction bits for which bfloat16 and tf32 can distinguish all codes.

Up to these, the formats' steps are wider than the steps of bfloat16 and tf32.
"""
_MANTISSAS = {"bf16": 7, "tf32": 10}
"""Number of significand bits after the binary point."""


def in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """Return ``x`` or its transpose, whichever is contiguous, and whether it is the transpose.

    If neither is contiguous, return a contiguous copy.
    """
    if x.is_contiguous():
        return x, False
    return (x.mT, True) if x.mT.is_contiguous() else (x.contiguous(), False)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which torch.autocast does not change products of tensors like ``x``.

    Otherwise it would round float32 operands to 16 bits.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


_LAYOUTS = {
    "decode_bf16": "PPqPPqPii",
    "decode_tf32": "PPqPPqPii",
    "encode_sums": "PPqPPPPqqqqqqqqq",
    "encode_convolution": "PPqPPPP" + 23 * "q",
}


@lru_cache(maxsize=64)
def float32_kernel(name: str, bits: int, fraction_bits: int, device: int) -> runtime.CudaKernel:
    """Return the kernel ``lns_NAME`` of ``float32.cu`` for a format and a device, compiled once."""
    defines = runtime.compile_options(LNSFormat(bits, fraction_bits), device)
    return runtime.CudaKernel(
        runtime.compile_function(
            runtime.kernel_source("float32.cu"), f"lns_{name}", defines, device
        ),
        _LAYOUTS[name],
        0,
    )


atexit.register(float32_kernel.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


@lru_cache(maxsize=64)
def _mantissas(fraction_bits: int, bits: int, device: int) -> Tensor:
    """Return ``round((2^(j / 2^f) - 1) 2^bits)`` for j in 0 .. 2^f - 1, int16."""
    scaled = np.rint(np.ldexp(decode_significands(fraction_bits), bits)) - (1 << bits)
    return runtime.uploaded(scaled.astype(np.int16), device)


def operand_type(fraction_bits: int) -> str:
    """Return the type in which a GPU multiplies codes: ``bf16``, ``tf32`` or ``float32``."""
    if fraction_bits <= _BFLOAT16_FRACTION_BITS:
        return "bf16"
    return "tf32" if fraction_bits <= _TF32_FRACTION_BITS else "float32"


def decoded_operands(
    x: Tensor, y: Tensor, bits: int, fraction_bits: int, kind: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the values of ``x`` and ``y`` in a type that can represent them, with their shapes.

    ``kind`` may be a wider type than :func:`operand_type` returns; tf32 values are in float32
    tensors.
    """
    (x, x_turned), (y, y_turned) = in_memory_order(x), in_memory_order(y)
    kind, device = kind or operand_type(fraction_bits), x.get_device()
    if kind == "float32":
        left, right = (
            elementwise.decode(codes, bits, fraction_bits, torch.float32) for codes in (x, y)
        )
    else:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        left, right = torch.empty_like(x, dtype=dtype), torch.empty_like(y, dtype=dtype)
        kernel = float32_kernel(f"decode_{kind}", bits, fraction_bits, device)
        kernel(
            runtime.grid_of(x.numel() + y.numel(), device, kernel=kernel), runtime.THREADS, device,
            x.data_ptr(), left.data_ptr(), x.numel(), y.data_ptr(), right.data_ptr(), y.numel(),
            _mantissas(fraction_bits, _MANTISSAS[kind], device).data_ptr(),
            runtime.alignment_flag(x.data_ptr(), left.data_ptr()),
            runtime.alignment_flag(y.data_ptr(), right.data_ptr()),
        )  # fmt: skip
    return left.mT if x_turned else left, right.mT if y_turned else right


_precision = threading.Lock()


@contextmanager
def float32_precision(setting: Any, wanted: str) -> Iterator[None]:
    """Make a library multiply float32 numbers as ``tf32`` or ``ieee`` float32 inside the context.

    ``setting`` is ``torch.backends.cuda.matmul`` or ``torch.backends.cudnn.conv``. It applies to
    the whole process, so float32 products that another thread launches meanwhile use it, too. A
    lock keeps two threads in this context from restoring each other's setting.
    """
    with _precision:
        before = setting.fp32_precision
        if before == wanted:
            yield
            return
        setting.fp32_precision = wanted
        try:
            yield
        finally:
            setting.fp32_precision = before


def float32_product(left: Tensor, right: Tensor, kind: str) -> Tensor:
    """Return ``left @ right`` as contiguous float32, multiplied in the precision ``kind``, one of
    the types of :func:`operand_type`.
    """
    aten = torch.ops.aten
    product = aten.mm if left.dim() == 2 else aten.bmm
    if kind == "bf16":
        sums = product.dtype(left, right, torch.float32)
    else:
        wanted = "tf32" if kind == "tf32" else "ieee"
        with without_autocast(left), float32_precision(torch.backends.cuda.matmul, wanted):
            sums = product.default(left, right)
    return sums.contiguous()  # type: ignore[no-any-return]


def matmul_cuda(x_BMK: Tensor, y_BKN: Tensor, bits: int, fraction_bits: int) -> Tensor:
    """Return ``x @ y`` with float32 sums on tensor cores; three launches."""
    (M, K), N, device = x_BMK.shape[-2:], y_BKN.shape[-1], x_BMK.get_device()
    out = torch.empty((*x_BMK.shape[:-1], N), dtype=torch.int16, device=x_BMK.device)
    if out.numel() == 0 or K == 0:
        return out.zero_()
    left, right = decoded_operands(x_BMK, y_BKN, bits, fraction_bits)
    sums = float32_product(left, right, operand_type(fraction_bits))
    tables, batched = runtime.device_tables(fraction_bits, device), x_BMK.dim() == 3
    kernel = float32_kernel("encode_sums", bits, fraction_bits, device)
    kernel(
        runtime.grid_of(out.numel(), device, per_thread=4, kernel=kernel), runtime.THREADS, device,
        sums.data_ptr(), out.data_ptr(), out.numel(), tables.cells.data_ptr(),
        x_BMK.data_ptr(), y_BKN.data_ptr(), tables.significands_double.data_ptr(), M, N, K,
        x_BMK.stride(0) if batched else 0, x_BMK.stride(-2), x_BMK.stride(-1),
        y_BKN.stride(0) if batched else 0, y_BKN.stride(-2), y_BKN.stride(-1),
    )  # fmt: skip
    return out
