"""Layers of scope ``matmul``: LNS products between float32 parameters, inputs and outputs.

The forward product and both backward ones, and their sums, are LNS.

A layer's class changes to one of these and back (:func:`lns_ops.convert_`,
:func:`lns_ops.revert_`); nothing else of it does. Operands are encoded, the product's codes
decoded, so results are rounded to the format whatever the accumulation. The bias is added in
float32. What is saved for the backward pass are codes, 2 bytes a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import functional as lns
from lns_ops._compat import reversed_padding
from lns_ops.functional import convolution as conv
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.spec.format import LNSFormat


class _LinearMatmul(torch.autograd.Function):
    """The product ``y = x w^T`` and both its backward products in LNS; float32 in and out.

    All three take the same accumulation.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, w_OI: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
        x_codes, w_codes = lns.encode(x_BI, fmt), lns.encode(w_OI, fmt)
        ctx.save_for_backward(x_codes, w_codes)
        ctx.fmt, ctx.accumulation = fmt, accumulation
        return _product(x_codes, w_codes.t(), fmt, accumulation)

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_codes, w_codes = ctx.saved_tensors
        grad = lns.encode(grad_BO, ctx.fmt)
        grad_x = (
            _product(grad, w_codes, ctx.fmt, ctx.accumulation) if ctx.needs_input_grad[0] else None
        )
        grad_w = (
            _product(grad.t(), x_codes, ctx.fmt, ctx.accumulation)
            if ctx.needs_input_grad[1]
            else None
        )
        return grad_x, grad_w, None, None


def _product(x: Tensor, y: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
    """Return the values of ``x @ y``, rounded to the format whatever the accumulation."""
    return lns.decode(lns.matmul(x, y, fmt, accumulation=accumulation), fmt)


class LNSMatmulLinear(nn.Linear):
    """An nn.Linear whose matrix products are computed in LNS.

    Parameters, bias addition, inputs and outputs are float32.

    Shapes: input ``[..., in_features]``, output ``[..., out_features]``. Made by
    :func:`lns_ops.convert_`, not constructed. Products of either accumulation
    (:func:`~lns_ops.accumulation.set_matmul_accumulation`) are rounded to the format, backward ones
    are of the forward's.

    Attributes:
        fmt: the LNS format of the products.
    """

    fmt: LNSFormat

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight^T`` in LNS, plus ``bias`` in float32.

        Raises:
            ValueError: a NaN or an infinity in the input or the weight.
        """
        flat = input.reshape(-1, self.in_features)
        output = _LinearMatmul.apply(flat, self.weight, self.fmt, get_matmul_accumulation())  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.reshape(*input.shape[:-1], self.out_features)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return nn.Linear's line plus the format."""
        return f"{super().extra_repr()}, matmul={self.fmt}"


class _ConvolutionMatmul(torch.autograd.Function):
    """A convolution and its two gradients in LNS; float32 in and out."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        geometry: conv.Geometry,
        fmt: LNSFormat,
        accumulation: str,
    ) -> Tensor:
        x_codes, w_codes = lns.encode(x, fmt), lns.encode(weight, fmt)
        ctx.save_for_backward(x_codes, w_codes)
        ctx.geometry, ctx.fmt, ctx.accumulation = geometry, fmt, accumulation
        return lns.decode(
            conv.convolution(x_codes, w_codes, geometry, fmt, accumulation=accumulation), fmt
        )

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_codes, w_codes = ctx.saved_tensors
        grad, fmt, options = (
            lns.encode(grad_out, ctx.fmt),
            ctx.fmt,
            {"accumulation": ctx.accumulation},
        )
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = lns.decode(
                conv.input_gradient(grad, w_codes, x_codes.shape[2:], ctx.geometry, fmt, **options),
                fmt,
            )
        if ctx.needs_input_grad[1]:
            grad_w = lns.decode(
                conv.weight_gradient(
                    grad, x_codes, w_codes.shape[2:], ctx.geometry, fmt, **options
                ),
                fmt,
            )
        return grad_x, grad_w, None, None, None


def _convolve(layer: Any, input: Tensor) -> Tensor:
    """Run the forward pass of torch's layer with the convolution in LNS."""
    weight, bias = layer.weight, layer.bias
    dims = weight.dim() - 2
    single = input.dim() == dims + 1
    x, padding = input[None] if single else input, layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = F.pad(x, reversed_padding(layer), mode=mode), (0,)
    geometry = conv.Geometry.of(dims, layer.stride, padding, layer.dilation, layer.groups)
    out: Tensor = _ConvolutionMatmul.apply(
        x, weight, geometry, layer.fmt, get_matmul_accumulation()
    )  # type: ignore[no-untyped-call]
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return out[0] if single else out


class _LNSMatmulConv:
    """The common part of the convolutions: torch's layer with another ``forward``."""

    fmt: LNSFormat

    def forward(self, input: Tensor) -> Tensor:
        """``[B, I, ...]`` to ``[B, O, ...]``, or without B."""
        return _convolve(self, input)

    def extra_repr(self) -> str:
        """Return the layer's line plus the format."""
        return f"{super().extra_repr()}, matmul={self.fmt}"  # type: ignore[misc]


class LNSMatmulConv1d(_LNSMatmulConv, nn.Conv1d):
    """An nn.Conv1d whose products are computed in LNS.

    See :class:`LNSMatmulLinear` and :mod:`lns_ops.functional.convolution`.
    """


class LNSMatmulConv2d(_LNSMatmulConv, nn.Conv2d):
    """An nn.Conv2d whose products are computed in LNS.

    See :class:`LNSMatmulLinear` and :mod:`lns_ops.functional.convolution`.
    """


class LNSMatmulConv3d(_LNSMatmulConv, nn.Conv3d):
    """An nn.Conv3d whose products are computed in LNS.

    See :class:`LNSMatmulLinear` and :mod:`lns_ops.functional.convolution`.
    """


LAYERS: dict[Callable[..., nn.Module], type[nn.Module]] = {
    nn.Linear: LNSMatmulLinear,
    nn.Conv1d: LNSMatmulConv1d,
    nn.Conv2d: LNSMatmulConv2d,
    nn.Conv3d: LNSMatmulConv3d,
}
"""The layer of scope ``matmul`` for each of torch's."""
