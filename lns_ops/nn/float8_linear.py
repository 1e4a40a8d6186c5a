"""Linear layers that multiply in 8 bits with ``torch._scaled_mm``, on GPUs with float8 products
(Ada, Hopper and later).

On other devices the same layer multiplies the same float8 values in float32; only the order and
precision of sums differ. :func:`product_kind` returns which of the two is used. Operands have
float8 values when the layer gets them, so the conversion to float8 is exact. Sums are in float32
(``use_fast_accum=False``). cuBLAS multiplies e4m3 by e4m3 or e5m2, but not e5m2 by e5m2. So a layer
is eligible if weights and activations are ``float8_e4m3fn``, alone or with ``/tensor``, and
gradients are either of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops._compat import is_transforming, scaled_mm
from lns_ops.formats import Encoded, NumberFormat, Scaled, float8_e4m3fn, float8_e5m2

_MULTIPLE = 16
"""The sizes of the product must be multiples of this; smaller operands are padded with zeros."""
_CAPABILITY = (8, 9)


def _base(fmt: NumberFormat) -> NumberFormat:
    return fmt.base if isinstance(fmt, Scaled) and fmt.granularity == "tensor" else fmt


def real_format(fmt: NumberFormat, gradient_format: NumberFormat) -> bool:
    """Return whether GPUs can multiply these formats."""
    return _base(fmt) == float8_e4m3fn and _base(gradient_format) in (float8_e4m3fn, float8_e5m2)


def product_kind(device: torch.device | str) -> str:
    """Return how products of float8 values are computed on ``device``.

    The result is ``torch._scaled_mm``, or ``emulated: `` and the reason.

    >>> product_kind("cpu")
    'emulated: a cpu has no 8-bit products; float32 products of float8 values'
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"emulated: a {device.type} has no 8-bit products; float32 products of float8 values"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return (
            f"emulated: compute capability {capability[0]}.{capability[1]} has no 8-bit products,"
            " 8.9 and later have"
        )
    return "torch._scaled_mm"


def scaled_product(x: Encoded, y: Encoded) -> Tensor:
    """Return ``x @ y`` of float8 codes by ``torch._scaled_mm``, float32 ``[M, N]``.

    Codes are ``[M, K]`` and ``[K, N]`` with one scale each (or none).
    """
    (rows, inner), columns = x.codes.shape, y.codes.shape[1]
    left = _padded(x.codes)
    right = _padded(y.codes.t()).t()  # _scaled_mm needs it column-major
    one = torch.ones((), dtype=torch.float32, device=left.device)
    scales = [one if e.scale is None else e.scale for e in (x, y)]
    out = scaled_mm(
        left, right, scales[0], scales[1], out_dtype=torch.float32, use_fast_accum=False
    )
    assert inner == y.codes.shape[0]
    return out[:rows, :columns]


def _padded(codes: Tensor) -> Tensor:
    """Return contiguous codes with both sizes padded to multiples of 16.

    They are padded as bytes, because torch's padding does not support float8.
    """
    rows, columns = codes.shape
    words = F.pad(
        codes.contiguous().view(torch.uint8), (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE)
    )
    return words.contiguous().view(codes.dtype)


class _ScaledLinear(torch.autograd.Function):
    """The product ``y = x w^T`` and both backward products in float8.

    If a backward product is differentiated again, it is a float32 product of float8 values, as on
    other devices, because cuBLAS cannot multiply two gradients in e5m2.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, simulation: Any) -> Tensor:
        x, w = simulation.format.encode(x_BI), simulation.format.encode(w_OI)
        ctx.save_for_backward(x_BI, w_OI, x.codes, x.scale, w.codes, w.scale)
        ctx.simulation = simulation
        return scaled_product(x, Encoded(w.codes.t(), w.scale))

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BI, w_OI, x, x_scale, w, w_scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            rounded = ctx.simulation.gradient(grad_BO)
            return (
                rounded @ w_OI if ctx.needs_input_grad[0] else None,
                rounded.t() @ x_BI if ctx.needs_input_grad[1] else None,
                None,
            )
        grad = ctx.simulation.gradient_format.encode(grad_BO)
        grad_x = scaled_product(grad, Encoded(w, w_scale)) if ctx.needs_input_grad[0] else None
        grad_w = (
            scaled_product(Encoded(grad.codes.t(), grad.scale), Encoded(x, x_scale))
            if ctx.needs_input_grad[1]
            else None
        )
        return grad_x, grad_w, None


class Float8Linear(nn.Linear):
    """An nn.Linear of float8 values; the bias is added in float32.

    Created by :func:`lns_ops.nn.simulate.simulate_`; do not construct it directly.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight^T + bias``; the product is in 8 bits if the device supports it.

        Within transforms of ``torch.func`` it is a float32 product of float8 values.
        """
        if product_kind(input.device) != "torch._scaled_mm" or is_transforming():
            return super().forward(input)
        flat = input.reshape(-1, self.in_features)
        product: Callable[..., Tensor] = _ScaledLinear.apply
        out = product(flat, self.weight, self.simulation)
        out = out if self.bias is None else out + self.bias
        return out.reshape(*input.shape[:-1], self.out_features)
