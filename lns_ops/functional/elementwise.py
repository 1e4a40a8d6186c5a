"""Elementwise operations on codes: encoding, decoding, arithmetic, signs and comparisons.

Sign, magnitude and order can be read from a code, so ``neg``, ``absolute``, ``relu`` and the
comparisons are plain torch operations, which run on any device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lns_ops import cpu
from lns_ops.cpu import arrays, small
from lns_ops.functional.library import (
    FORMAT,
    cached_format,
    define_operator,
    operators_for,
    refuse_distributed,
)
from lns_ops.spec.format import LNSFormat, logarithm


def broadcast_shape(x: torch.Size, y: torch.Size) -> Sequence[int]:
    """Return the shape to which two shapes broadcast, also for traced sizes.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    try:
        shape: Sequence[int] = arrays.broadcast_shape(x, y)
    except TypeError:  # symbolic sizes have no hash
        shape = torch.broadcast_shapes(x, y)
    return shape


def whole(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` broadcast to ``shape`` and contiguous, as kernels need it.

    Repeating contiguous runs is several times faster than torch's copy.
    """
    if x.shape == shape:
        return x
    total, sizes = math.prod(shape), [1] * (len(shape) - x.dim()) + list(x.shape)
    kept = [d for d, size in enumerate(sizes) if size != 1]
    repeated_between = kept and any(sizes[d] == 1 != shape[d] for d in range(kept[0], kept[-1]))
    if repeated_between or not total:
        return x.expand(shape).contiguous()
    run_length = math.prod(shape[kept[-1] + 1 :]) if kept else total
    return torch.from_numpy(cpu.repeat(x.contiguous().numpy(), total, run_length)).view(shape)


def _binary(name: str) -> None:
    kernel = getattr(cpu, name)

    def on_cpu(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
        if x.shape != y.shape:
            shape = arrays.broadcast_shape(x.shape, y.shape)
            if math.prod(shape) > small.ELEMENTS:  # smaller ones are broadcast by the kernel
                x, y = whole(x, shape), whole(y, shape)
        return torch.from_numpy(
            kernel(
                x.contiguous().numpy(), y.contiguous().numpy(), cached_format(bits, fraction_bits)
            )
        )

    define_operator(
        name,
        f"(Tensor x, Tensor y, {FORMAT}) -> Tensor",
        on_cpu,
        # A number's code is always on the CPU. In traced code it may be a constant, whose new_empty
        # would be a constant as well.
        lambda x, y, bits, fraction_bits: torch.empty(
            broadcast_shape(x.shape, y.shape),
            dtype=x.dtype,
            device=y.device if x.device.type == "cpu" else x.device,
        ),
    )


def values_of(x: Tensor) -> NDArray[Any]:
    """Return the values of ``x``, sharing memory.

    ``x.numpy()`` pins memory that FSDP frees later; the alternative takes 3 microseconds more.
    torch's optimizers import FSDP's module, but it is used only with a process group.
    """
    if "torch.distributed.fsdp" in sys.modules and torch.distributed.is_initialized():
        return np.from_dlpack(x.detach())
    return x.numpy() if not x.requires_grad else x.detach().numpy()  # the latter: torch.export


def _encode_cpu(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    exact = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float64)
    return torch.from_numpy(
        cpu.encode(values_of(exact.contiguous()), cached_format(bits, fraction_bits))
    )


def _decode_cpu(codes: Tensor, bits: int, fraction_bits: int, dtype: torch.dtype) -> Tensor:
    fmt, wide = cached_format(bits, fraction_bits), np.float32
    if dtype is torch.float64:
        wide = np.float64  # type: ignore[assignment]
    values = torch.from_numpy(cpu.decode(codes.contiguous().numpy(), fmt, wide))
    return values if values.dtype is dtype else values.to(dtype)


def _sqrt_cpu(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    return torch.from_numpy(cpu.sqrt(x.contiguous().numpy(), cached_format(bits, fraction_bits)))


for _name in ("add", "sub", "mul", "div"):
    _binary(_name)
define_operator(
    "encode",
    f"(Tensor x, {FORMAT}) -> Tensor",
    _encode_cpu,
    lambda x, bits, fraction_bits: x.new_empty(x.shape, dtype=torch.int16),
)
define_operator(
    "decode",
    f"(Tensor codes, {FORMAT}, ScalarType dtype) -> Tensor",
    _decode_cpu,
    lambda codes, bits, fraction_bits, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
define_operator(
    "sqrt",
    f"(Tensor x, {FORMAT}) -> Tensor",
    _sqrt_cpu,
    lambda x, bits, fraction_bits: x.new_empty(x.shape),
)


def encode(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the int16 codes nearest to ``x`` in logarithm, with the same shape.

    >>> from lns_ops import lns12
    >>> codes = encode(torch.tensor([1.0, -3.0]), lns12)
    >>> codes, decode(codes, lns12)
    (tensor([1024, -923], dtype=torch.int16), tensor([ 1.0000, -2.9858]))

    Raises:
        ValueError: ``x`` is complex or a DTensor, or contains a NaN or an infinity
            (``NonFiniteError``).
    """
    refuse_distributed(x)
    if x.is_complex():
        raise ValueError(
            f"{x.dtype} tensor to encode: LNS values are real; encode x.real and x.imag separately"
        )
    return operators_for(x).encode(x, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def number_code(value: float, fmt: LNSFormat) -> int:
    """Return the code of a Python number.

    Raises:
        ValueError: a NaN or an infinity (``NonFiniteError``).
    """
    return int(cpu.encode(np.array(value, np.float64), fmt))


def encode_number(value: float, fmt: LNSFormat) -> Tensor:
    """Return the code of a Python number: a 0-dim CPU tensor, accepted by operations on any device.

    Raises:
        ValueError: a NaN or an infinity (``NonFiniteError``).
    """
    return torch.tensor(number_code(value, fmt), dtype=torch.int16)


@lru_cache(maxsize=4096)
def logarithm_beyond(value: float, fmt: LNSFormat) -> int:
    """Return the logarithm, in ulps, of the magnitude of a Python number above the range, else 0.

    Numbers within the range have a code (:func:`number_code`); smaller ones are zero.

    Raises:
        ValueError: a NaN or an infinity (``NonFiniteError``).
    """
    number_code(value, fmt)  # raises if not finite
    log = logarithm(abs(value), fmt.fraction_bits) if value else 0
    return log if log > fmt.max_log else 0


def shifted(x: Tensor, shift: int, fmt: LNSFormat) -> Tensor:
    """Return ``x`` with ``shift`` ulps added to the logarithms: a factor that may have no code.

    The result saturates and underflows as in :func:`mul`.
    """
    field = (x & fmt.field_mask).int()
    moved = (field + shift).clamp(max=fmt.field_mask)
    code = torch.where((field == 0) | (moved <= 0), 0, moved).to(torch.int16)
    return torch.where((x < 0) & (code != 0), code | fmt.sign_mask, code)


def square(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the squares of codes, in ``fmt.of_squares``."""
    if fmt.of_squares == fmt:
        return mul(x, x, fmt)
    return (x & fmt.field_mask) << 1


def within(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Convert nonnegative codes of ``fmt.of_squares`` to ``fmt``.

    They saturate above its range and are zero below it.
    """
    more = fmt.of_squares.bias - fmt.bias
    return (x - more).clamp(0, fmt.field_mask) if more else x


def decode(codes: Tensor, fmt: LNSFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of int16 ``codes``.

    With float32 and float64 every value encodes back to its code.
    """
    result: Tensor = operators_for(codes).decode(codes, fmt.bits, fmt.fraction_bits, dtype)
    return result


def add(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x + y = sign(larger) x 2^(max + G+-(distance))``, correctly rounded."""
    return operators_for(x, y).add(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def sub(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x - y``, correctly rounded; ``x - x`` is zero."""
    return operators_for(x, y).sub(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def mul(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x y``: logarithms add; exact except for saturation and underflow."""
    return operators_for(x, y).mul(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def div(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x / y``: logarithms subtract; exact except for saturation and underflow.

    Raises:
        ValueError: a divisor is zero.
    """
    return operators_for(x, y).div(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def sqrt(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``x^(1/2)``: half the logarithm, rounded half to even.

    Raises:
        ValueError: an element is negative.
    """
    return operators_for(x).sqrt(x, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def select(condition: Tensor, x: Tensor | int, y: Tensor | int) -> Tensor:
    """Return ``x`` where ``condition`` (boolean) is true, else ``y``; int16 codes, or 0.

    On a CPU it uses bit operations, 0.4 ns a value; torch's own selection takes 4 ns a value if the
    condition is unpredictable.
    """
    if condition.is_cuda:
        return torch.where(condition, x, y).to(torch.int16)
    mask = -condition.to(torch.int16)
    if isinstance(y, int):
        assert y == 0
        return x & mask
    return y ^ ((x ^ y) & mask)


def neg(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``-x``, exact: flip the sign bits of nonzero codes."""
    nonzero = (x | -x) >> 15  # all bits set, or none
    return x ^ (nonzero & fmt.sign_mask)


def absolute(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return ``|x|``, exact: clear the sign bits."""
    return x & fmt.field_mask


def sign(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return -1, 0 or 1 as codes."""
    nonzero = -(x & fmt.field_mask) >> 15
    return (fmt.bias | (x >> 15 & fmt.sign_mask)) & nonzero


def relu(x: Tensor) -> Tensor:
    """Return ``max(x, 0)``: a code is negative exactly if its value is."""
    return x.clamp_min(0)


def order_key(x: Tensor, fmt: LNSFormat) -> Tensor:
    """Return int16 keys in the order of the values: the field, negated for negative values."""
    negative = x >> 15
    return ((x & fmt.field_mask) ^ negative) - negative


def from_key(key: Tensor, fmt: LNSFormat) -> Tensor:
    """Return the codes of int16 keys."""
    negative = key >> 15
    return ((key ^ negative) - negative) | (negative & fmt.sign_mask)
