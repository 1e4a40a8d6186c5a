"""LNS operations on int16 codes as torch custom operators: the one interface between tensors and kernels.

Every operator takes codes and a format as two integers (``bits``, ``fraction_bits``), has a fake kernel (shape and dtype, for
``torch.compile`` and FakeTensor) and a kernel per device, registered in :data:`_KERNELS`. They are registered through
``torch.library.Library.define/impl`` rather than ``custom_op``, which costs a few microseconds less a call.

What needs no kernel is plain torch on codes: sign, magnitude and order can be read off a code, so ``neg``, ``absolute``, ``relu``
and the comparisons below run on any device as they are.

Shapes follow torch's broadcasting; results are contiguous. Errors are ``ValueError``; none leaves a result half written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lns_ops import _float32, cpu, cuda
from lns_ops.accumulation import check_accumulation
from lns_ops.format import LNSFormat, logarithm
from lns_ops.reference import LONG_SUM

_LIBRARY = torch.library.Library("lns_ops", "DEF")
_FORMAT = "int bits, int fraction_bits"
_LONG_SUM_OCTAVES = LONG_SUM.bit_length() - 1
_format = lru_cache(LNSFormat)


def _broadcast(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, y.shape))


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


def _sum_shape(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    del shape[dim]
    return x.new_empty(shape)


def _define(name: str, signature: str, kernel: Any, fake: Any, cuda_kernel: Any = None) -> None:
    _LIBRARY.define(f"{name}{signature}")
    _LIBRARY.impl(name, kernel, "CPU")
    _LIBRARY.impl(name, cuda_kernel or getattr(cuda, name), "CUDA")
    torch.library.register_fake(f"lns_ops::{name}", fake, lib=_LIBRARY)


def _whole(x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` broadcast to ``shape`` and contiguous: kernels want whole arrays. Repeating runs is several times faster than torch's copy."""
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
            shape = torch.broadcast_shapes(x.shape, y.shape)
            x, y = _whole(x, shape), _whole(y, shape)
        return torch.from_numpy(kernel(x.contiguous().numpy(), y.contiguous().numpy(), _format(bits, fraction_bits)))

    _define(name, f"(Tensor x, Tensor y, {_FORMAT}) -> Tensor", on_cpu, lambda x, y, bits, fraction_bits: _broadcast(x, y))


def _encode_cpu(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    exact = x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float64)
    return torch.from_numpy(cpu.encode(exact.contiguous().numpy(), _format(bits, fraction_bits)))


def _decode_cpu(codes: Tensor, bits: int, fraction_bits: int, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numpy_dtype = torch.empty((), dtype=wide).numpy().dtype.type
    return torch.from_numpy(cpu.decode(codes.contiguous().numpy(), _format(bits, fraction_bits), numpy_dtype)).to(dtype)


def _sqrt_cpu(x: Tensor, bits: int, fraction_bits: int) -> Tensor:
    return torch.from_numpy(cpu.sqrt(x.contiguous().numpy(), _format(bits, fraction_bits)))


def _sum_cpu(x: Tensor, dim: int, bits: int, fraction_bits: int, shift: int = 0) -> Tensor:
    if x.stride(dim) == 1 and not x.is_contiguous():  # terms beside each other: no need to turn the array around
        x, dim = x.movedim(dim, -1), -1
    return torch.from_numpy(cpu.sum(x.contiguous().numpy(), dim, _format(bits, fraction_bits), shift))


def _matmul_cpu(x: Tensor, y: Tensor, bits: int, fraction_bits: int) -> Tensor:
    fmt = _format(bits, fraction_bits)
    kernel = cpu.matmul if x.dim() == 2 else cpu.matmul_batched
    return torch.from_numpy(kernel(x.numpy(), y.numpy(), fmt))


def _linear_cpu(x: Tensor, y: Tensor, bias: Tensor, bits: int, fraction_bits: int) -> Tensor:
    fmt = _format(bits, fraction_bits)
    product = cpu.matmul(x.numpy(), y.numpy(), fmt)
    return torch.from_numpy(cpu.add(product, bias.expand(product.shape).contiguous().numpy(), fmt))


def _define_update(name: str, schema: str) -> None:
    """An update in place, ``NAME_`` of torch and ``NAME`` of :mod:`lns_ops.cpu`, whose parameters have the names of ``schema``."""
    kernel, names = getattr(cpu, name), [parameter.split()[-1] for parameter in schema.split(", ")]

    def on_cpu(*arguments: Any) -> None:
        *values, bits, fraction_bits = arguments
        options = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in zip(names, values, strict=True)}
        options["step"] = 0 if options["step"] is None else int(options["step"])
        kernel(fmt=_format(bits, fraction_bits), **options)

    _define(f"{name}_", f"({schema}, {_FORMAT}) -> ()", on_cpu, lambda *arguments: None)


for _name in ("add", "sub", "mul", "div"):
    _binary(_name)
_define(
    "encode",
    f"(Tensor x, {_FORMAT}) -> Tensor",
    _encode_cpu,
    lambda x, bits, fraction_bits: torch.empty_like(x, dtype=torch.int16),
)
_define(
    "decode",
    f"(Tensor codes, {_FORMAT}, ScalarType dtype) -> Tensor",
    _decode_cpu,
    lambda codes, bits, fraction_bits, dtype: torch.empty_like(codes, dtype=dtype),
)
_define("sqrt", f"(Tensor x, {_FORMAT}) -> Tensor", _sqrt_cpu, lambda x, bits, fraction_bits: torch.empty_like(x))
_define(
    "sum",
    f"(Tensor x, int dim, {_FORMAT}, int shift=0) -> Tensor",
    _sum_cpu,
    lambda x, dim, bits, fraction_bits, shift=0: _sum_shape(x, dim),
)
_define(
    "matmul", f"(Tensor x, Tensor y, {_FORMAT}) -> Tensor", _matmul_cpu, lambda x, y, bits, fraction_bits: _matmul_shape(x, y)
)
_define(
    "matmul_float32",
    f"(Tensor x, Tensor y, {_FORMAT}) -> Tensor",
    _float32.matmul_cpu,
    lambda x, y, bits, fraction_bits: _matmul_shape(x, y),
    _float32.matmul_cuda,
)
_define(
    "linear",
    f"(Tensor x, Tensor y, Tensor bias, {_FORMAT}) -> Tensor",
    _linear_cpu,
    lambda x, y, bias, bits, fraction_bits: _matmul_shape(x, y),
)
_SGD = "Tensor(a!) weight, Tensor grad, Tensor(b!)? buffer, Tensor(c!)? compensation, Tensor? step"
_ADAM = "Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) root, Tensor(d!)? residue, Tensor(e!)? compensation, Tensor step"
_BETAS = "float beta1, float beta2, float eps"
_define_update("sgd_update", f"{_SGD}, int negative_lr, int? momentum, int? key")
_define_update("sgd_update_float32", f"{_SGD}, float lr, float? momentum, int? key")
_define_update("adam_update", f"{_ADAM}, int negative_lr, {_BETAS}, int? weight_decay, bool decoupled, int? key")
_define_update("adam_update_float32", f"{_ADAM}, float lr, {_BETAS}, float? weight_decay, bool decoupled, int? key")
_OPS = torch.ops.lns_ops


def encode(x: Tensor, fmt: LNSFormat) -> Tensor:
    """int16 codes nearest to ``x`` in logarithm, same shape.

    Raises:
        ValueError: ``x`` is complex, or holds a NaN or an infinity (``NonFiniteError``).
    """
    if x.is_complex():
        raise ValueError(f"{x.dtype} tensor to encode: LNS values are real; encode x.real and x.imag apart")
    return _OPS.encode(x, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def decode(codes: Tensor, fmt: LNSFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of int16 ``codes``; float32 and float64 hold every code exactly enough to encode back to it."""
    return _OPS.decode(codes, fmt.bits, fmt.fraction_bits, dtype)  # type: ignore[no-any-return]


def add(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """``x + y = sign(larger) x 2^(max + G+-(distance))``, correctly rounded."""
    return _OPS.add(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def sub(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """``x - y``, correctly rounded; ``x - x`` is zero."""
    return _OPS.sub(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def mul(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """``x y``: logarithms add; exact within the range."""
    return _OPS.mul(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def div(x: Tensor, y: Tensor, fmt: LNSFormat) -> Tensor:
    """``x / y``: logarithms subtract; exact within the range.

    Raises:
        ValueError: a divisor is zero.
    """
    return _OPS.div(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def sqrt(x: Tensor, fmt: LNSFormat) -> Tensor:
    """``x^(1/2)``: half the logarithm, rounded half to even.

    Raises:
        ValueError: an element is negative.
    """
    return _OPS.sqrt(x, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]


def sum(x: Tensor, dims: Sequence[int], fmt: LNSFormat, *, keepdim: bool = False) -> Tensor:
    """Sum over ``dims``, taken together in row-major order, in blocks of 64 as the contract says.

    More than ``LONG_SUM = 4096`` terms are cut into pieces of 4096, ascending, whose sums (codes of the format) are summed in turn: 64
    terms a block and 64 blocks a piece are where adding one by one still keeps most of what is added. One sequence of the block totals
    of 131,072 ones would stick at a tenth of them at f = 6. :func:`lns_ops.reference.long_sum` is the specification.
    """
    flat, shape = _reduced_first(x, dims, keepdim)
    if flat is x:
        return x.clone()
    while flat.shape[0] > LONG_SUM:
        flat = _pieces(flat, fmt, 0)
    return _OPS.sum(flat, 0, fmt.bits, fmt.fraction_bits).reshape(shape)  # type: ignore[no-any-return]


def mean(x: Tensor, dims: Sequence[int], fmt: LNSFormat, *, keepdim: bool = False) -> Tensor:
    """:func:`sum` divided by the encoded number of terms, without saturation in between: 1,000 times 100 leave lns12, their mean does not.

    Raises:
        ValueError: there are no terms.
    """
    flat, shape = _reduced_first(x, dims, keepdim)
    if flat is x:
        return x.clone()
    terms, scale = flat.shape[0], 1
    if terms == 0:
        raise ValueError("a mean of 0 values: LNS has no NaN; leave empty reductions out")
    while flat.shape[0] > LONG_SUM:  # every piece is divided by 4096, exactly
        flat, scale = _pieces(flat, fmt, -_LONG_SUM_OCTAVES << fmt.fraction_bits), scale * LONG_SUM
    log = logarithm(terms / scale, fmt.fraction_bits)
    return _OPS.sum(flat, 0, fmt.bits, fmt.fraction_bits, -log).reshape(shape)  # type: ignore[no-any-return]


def _reduced_first(x: Tensor, dims: Sequence[int], keepdim: bool) -> tuple[Tensor, list[int]]:
    """The terms along dimension 0, row-major; ``x`` itself if nothing is reduced. And the shape of the result."""
    reduced = sorted({d % x.dim() for d in dims}) if x.dim() else []
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [1 if d in reduced else x.shape[d] for d in range(x.dim())] if keepdim else [x.shape[d] for d in kept]
    if not reduced:
        return x, shape
    terms = math.prod(x.shape[d] for d in reduced)
    return x.permute(*reduced, *kept).reshape(terms, *(x.shape[d] for d in kept)), shape


def _pieces(flat: Tensor, fmt: LNSFormat, shift: int) -> Tensor:
    """The sums of pieces of ``LONG_SUM`` terms, and of what is left."""
    whole = flat.shape[0] // LONG_SUM * LONG_SUM
    sums = [_OPS.sum(flat[:whole].reshape(-1, LONG_SUM, *flat.shape[1:]), 1, fmt.bits, fmt.fraction_bits, shift)]
    if whole < flat.shape[0]:
        sums.append(_OPS.sum(flat[whole:], 0, fmt.bits, fmt.fraction_bits, shift)[None])
    return torch.cat(sums)


def matmul(x: Tensor, y: Tensor, fmt: LNSFormat, *, accumulation: str = "contract") -> Tensor:
    """``x_MK @ y_KN`` or ``x_BMK @ y_BKN``: exact products; transposed views cost nothing.

    More than ``LONG_SUM = 4096`` products are summed as :func:`sum` sums that many terms: in pieces of 4096, ascending, whose sums (codes
    of the format) are summed in turn; :func:`lns_ops.reference.long_matmul` is the specification. Sums in float32 are not cut.

    Args:
        accumulation: of the sums over k: ``contract``, LNS additions in blocks of 64, or ``float32``; see :mod:`lns_ops.accumulation`.

    Raises:
        ValueError: the shapes do not fit, or no such accumulation.
    """
    if x.dim() != y.dim() or x.dim() not in (2, 3) or x.shape[-1] != y.shape[-2] or x.shape[:-2] != y.shape[:-2]:
        raise ValueError(f"matmul of shapes {tuple(x.shape)} and {tuple(y.shape)}: need [M, K] @ [K, N] or [B, M, K] @ [B, K, N]")
    if check_accumulation(accumulation) != "contract":
        return _OPS.matmul_float32(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]
    if x.shape[-1] <= LONG_SUM:
        return _OPS.matmul(x, y, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]
    cuts = zip(x.split(LONG_SUM, -1), y.split(LONG_SUM, -2), strict=True)
    return sum(torch.stack([_OPS.matmul(a, b, fmt.bits, fmt.fraction_bits) for a, b in cuts]), [0], fmt)


def linear(x: Tensor, y: Tensor, bias: Tensor, fmt: LNSFormat, *, accumulation: str = "contract") -> Tensor:
    """``x_MK @ y_KN + bias_N``: the product as in :func:`matmul`, then an LNS addition; of ``contract``, one kernel on a GPU.

    Raises:
        ValueError: the shapes do not fit, or no such accumulation.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0] or bias.shape != y.shape[1:]:
        raise ValueError(
            f"linear of shapes {tuple(x.shape)}, {tuple(y.shape)} and bias {tuple(bias.shape)}: need [M, K] @ [K, N] + [N]"
        )
    if check_accumulation(accumulation) == "contract" and x.shape[1] <= LONG_SUM:
        return _OPS.linear(x, y, bias, fmt.bits, fmt.fraction_bits)  # type: ignore[no-any-return]
    return add(matmul(x, y, fmt, accumulation=accumulation), bias, fmt)


def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    negative_lr: int,
    momentum: int | None = None,
    buffer: Tensor | None = None,
    compensation: Tensor | None = None,
    step: Tensor | None = None,
    key: int | None = None,
) -> None:
    """One SGD step in place, every operation in LNS; see :func:`lns_ops.reference.sgd_update` for the equations.

    ``negative_lr`` and ``momentum`` are codes; ``weight``, ``buffer`` and ``compensation`` are contiguous and change. With a
    ``key`` the sum of weight and update rounds at random by the bits of (key, step); ``step`` is a 0-dim int64 tensor on the
    weight's device.
    """
    if (step is None) != (key is None):
        raise ValueError(f"step={step}, key={key}: rounding at random needs both; pass both or neither")
    _OPS.sgd_update_(weight, grad, buffer, compensation, step, negative_lr, momentum, key, fmt.bits, fmt.fraction_bits)


def adam_update_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    step: Tensor,
    exp_avg: Tensor,
    root: Tensor,
    residue: Tensor | None = None,
    compensation: Tensor | None = None,
    negative_lr: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: int | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> None:
    """One Adam or AdamW step in place, every operation in LNS; see :func:`lns_ops.reference.adam_update` for the equations.

    ``weight``, ``exp_avg``, ``root``, ``residue`` and ``compensation`` are contiguous int16 of one shape and change; ``step``
    is a 0-dim int64 tensor on the weight's device, 1 for the first step; ``negative_lr`` and ``weight_decay`` are codes. Either
    ``residue`` or ``key`` must be given.
    """
    if residue is None and key is None:
        raise ValueError("residue=None, key=None: the second moment would never move; pass a residue (int16 zeros) or a key")
    _OPS.adam_update_(
        weight, grad, exp_avg, root, residue, compensation, step, negative_lr, beta1, beta2, eps, weight_decay, decoupled, key,
        fmt.bits, fmt.fraction_bits,
    )  # fmt: skip


def sgd_update_float32_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    lr: float,
    momentum: float | None = None,
    buffer: Tensor | None = None,
    compensation: Tensor | None = None,
    step: Tensor | None = None,
    key: int | None = None,
) -> None:
    """As :func:`sgd_update_`, with float32 operations between loads and stores; :func:`lns_ops.reference.sgd_update_float32`."""
    if (step is None) != (key is None):
        raise ValueError(f"step={step}, key={key}: rounding at random needs both; pass both or neither")
    _OPS.sgd_update_float32_(weight, grad, buffer, compensation, step, lr, momentum, key, fmt.bits, fmt.fraction_bits)


def adam_update_float32_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    step: Tensor,
    exp_avg: Tensor,
    root: Tensor,
    residue: Tensor | None = None,
    compensation: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> None:
    """As :func:`adam_update_`, with float32 operations between loads and stores; :func:`lns_ops.reference.adam_update_float32`."""
    if residue is None and key is None:
        raise ValueError("residue=None, key=None: the second moment would never move; pass a residue (int16 zeros) or a key")
    _OPS.adam_update_float32_(
        weight, grad, exp_avg, root, residue, compensation, step, lr, beta1, beta2, eps, weight_decay, decoupled, key, fmt.bits,
        fmt.fraction_bits,
    )  # fmt: skip


def select(condition: Tensor, x: Tensor | int, y: Tensor | int) -> Tensor:
    """``x`` where ``condition`` (boolean) holds, else ``y``; int16 codes, or 0. On a CPU in bit operations.

    torch's own selection there takes 4 ns a value when the condition is as good as random, these 0.4.
    """
    if condition.is_cuda:
        return torch.where(condition, x, y).to(torch.int16)
    mask = -condition.to(torch.int16)
    if isinstance(y, int):
        assert y == 0
        return x & mask
    return y ^ ((x ^ y) & mask)


def neg(x: Tensor, fmt: LNSFormat) -> Tensor:
    """``-x``, exact: flips the sign bits of nonzero codes."""
    nonzero = (x | -x) >> 15  # all bits, or none
    return x ^ (nonzero & fmt.sign_mask)


def absolute(x: Tensor, fmt: LNSFormat) -> Tensor:
    """``|x|``, exact: clears the sign bits."""
    return x & fmt.field_mask


def sign(x: Tensor, fmt: LNSFormat) -> Tensor:
    """-1, 0 or 1 as codes."""
    nonzero = -(x & fmt.field_mask) >> 15
    return (fmt.bias | (x >> 15 & fmt.sign_mask)) & nonzero


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``: negative codes are the negative values."""
    return x.clamp_min(0)


def order_key(x: Tensor, fmt: LNSFormat) -> Tensor:
    """int16 keys that compare as the values do: the field, negated for negative values."""
    negative = x >> 15
    return ((x & fmt.field_mask) ^ negative) - negative


def from_key(key: Tensor, fmt: LNSFormat) -> Tensor:
    """The codes of int16 keys."""
    negative = key >> 15
    return ((key ^ negative) - negative) | (negative & fmt.sign_mask)
