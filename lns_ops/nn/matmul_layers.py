"""Layers of scope ``matmul``: LNS products between float32 parameters, inputs and outputs.

The forward product and both backward ones, and their sums, are LNS; so are those of a gradient that
is differentiated in its turn.

A layer's class changes to one of these and back (:func:`lns_ops.convert_`,
:func:`lns_ops.revert_`); nothing else of it does. Operands are encoded, the product's codes
decoded, so results are rounded to the format whatever the accumulation. The bias is added in
float32. What is saved for the backward pass are the operands themselves, which the graph mostly
holds anyway.

A layer that does more than torch's own (a subclass with a forward of its own, nn.LSTM,
nn.MultiheadAttention) keeps its forward; within it, the functions of :data:`_PRODUCTS` are
LNS (:class:`_Products`). The scores of attention are no layer and stay float32, in
nn.MultiheadAttention as elsewhere; so does the second sum of nn.Bilinear.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from lns_ops import functional as lns
from lns_ops._compat import reversed_padding
from lns_ops.functional import convolution as conv
from lns_ops.functional.accumulation import get_matmul_accumulation
from lns_ops.nn.two_forms import in_two_forms
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import in_float32, promotion, underflow
from lns_ops.tensor.dynamo import allow_in_graph, once_imported
from lns_ops.tensor.ops import convolution as transposed
from lns_ops.tensor.registry import REPLACEMENTS


def _product_form(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return how to call a product, which has no forward mode."""
    call = in_two_forms(function)

    def product(*inputs: Any) -> Tensor:
        promotion.refuse_tangents("a product in LNS", *inputs)
        return call(*inputs)

    return product


class _LinearMatmul(torch.autograd.Function):
    """The product ``y = x w^T`` and both its backward products in LNS; float32 in and out.

    All three take the same accumulation.
    """

    generate_vmap_rule = True  # for torch.func.vmap and torch.func.grad around a network

    @staticmethod
    def forward(x_BI: Tensor, w_OI: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
        with promotion.named("a product in LNS"):
            x_codes, w_codes = lns.encode(x_BI, fmt), lns.encode(w_OI, fmt)
        return lns.decode(lns.matmul(x_codes, w_codes.t(), fmt, accumulation=accumulation), fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_BI, w_OI, *options = inputs
        ctx.save_for_backward(x_BI, w_OI)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, grad_BO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        underflow.warn_of_underflow(grad_BO, ctx.options[0])
        grad_x = _product(grad_BO, w.t(), *ctx.options) if ctx.needs_input_grad[0] else None
        grad_w = _product(grad_BO.t(), x.t(), *ctx.options) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


_product = _product_form(_LinearMatmul)


def _float_input(x: Tensor) -> Tensor:
    """Return a layer's input, decoded if it comes of a layer that is LNS everywhere.

    Raises:
        ValueError: it holds integers or booleans, of whose dtype the result would be, too.
    """
    if not x.dtype.is_floating_point and not x.dtype.is_complex:  # encoding refuses the latter
        raise ValueError(
            f"an input of dtype {x.dtype} in a layer of scope matmul: it must be of a floating"
            " dtype, as for torch's own layer; give it x.float()"
        )
    return in_float32(x)


def _linear(fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight^T`` in LNS, plus ``bias`` in float32."""
    promotion.refuse_layout(input)
    input = _float_input(input)
    flat = input.reshape(-1, input.shape[-1])
    rows = weight if weight.dim() == 2 else weight[None]
    output = _product(flat, rows, fmt, get_matmul_accumulation())
    if bias is not None:
        output = output + bias
    shape = (*input.shape[:-1], *weight.shape[:-1])
    return (output if output.shape == shape else output.reshape(shape)).to(input.dtype)


class LNSMatmulLinear(nn.Linear):
    """An nn.Linear whose matrix products are computed in LNS.

    Parameters, bias addition, inputs and outputs are float32; outputs have the input's dtype.

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
            ValueError: a NaN or an infinity in the input or the weight, or an input of integers.
        """
        return _linear(self.fmt, input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return nn.Linear's line plus the format."""
        return f"{super().extra_repr()}, matmul={self.fmt}"


class _ConvolutionMatmul(torch.autograd.Function):
    """A convolution ``y = x * w``, or one of its gradients, in LNS; float32 in and out.

    ``result`` says which of the three is computed from the other two (and what they are): ``y``
    from x and w, ``x`` from y and w (a transposed convolution), ``w`` from y and x. The gradient of
    each is made of the other two. ``size`` is the spatial size of the result; None for that of y.
    A ``y`` that is a gradient may be cut to it: where a transposed convolution's output_padding is
    as long as its stride, one more window fits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(result: str, a: Tensor, b: Tensor, size: Any, options: Any) -> Tensor:
        geometry, fmt, accumulation = options
        with promotion.named("a convolution in LNS"):
            first, second = lns.encode(a, fmt), lns.encode(b, fmt)
        sizes = () if result == "y" else (size,)
        codes = _CONVOLUTIONS[result](
            first, second, *sizes, geometry, fmt, accumulation=accumulation
        )
        return lns.decode(codes if size is None else transposed.cut(codes, size), fmt)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.result, a, b, _, ctx.options = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        underflow.warn_of_underflow(grad, ctx.options[1])
        # operands of each result, with the incoming gradient in the place of that result
        of_a, of_b = {
            "y": (("x", grad, b, a), ("w", grad, a, b)),
            "x": (("y", grad, b, a), ("w", a, grad, b)),
            "w": (("y", b, grad, a), ("x", a, grad, b)),
        }[ctx.result]
        grads = [
            _convolved(wanted, p, q, tuple(like.shape[2:]), ctx.options) if needed else None
            for needed, (wanted, p, q, like) in zip(
                ctx.needs_input_grad[1:3], (of_a, of_b), strict=True
            )
        ]
        return None, *grads, None, None


_convolved = _product_form(_ConvolutionMatmul)


_CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    "y": conv.convolution,
    "x": conv.input_gradient,
    "w": conv.weight_gradient,
}


def _convolution(
    fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return torch's convolution ``[B, I, ...]`` to ``[B, O, ...]`` (or without B), in LNS."""
    input, dims = _float_input(input), weight.dim() - 2
    single = input.dim() == dims + 1
    x = input[None] if single else input
    if isinstance(padding, str):
        x, padding = _padded(x, weight, padding, dilation), 0
    options = _options(fmt, dims, stride, padding, dilation, groups)
    out = _convolved("y", x, weight, None, options)
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return (out[0] if single else out).to(input.dtype)


def _options(
    fmt: LNSFormat, dims: int, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[conv.Geometry, LNSFormat, str]:
    s, p, d = ([v] if isinstance(v, int) else v for v in (stride, padding, dilation))
    return conv.Geometry.of(dims, s, p, d, groups), fmt, get_matmul_accumulation()


def _padded(x: Tensor, weight: Tensor, padding: str, dilation: Any) -> Tensor:
    """Return the input with the zeros that ``padding="same"`` asks for around it."""
    if padding == "valid":
        return x
    dims = weight.dim() - 2
    spread = (
        [dilation] * dims
        if isinstance(dilation, int)
        else list(dilation) * (dims if len(dilation) == 1 else 1)
    )
    amounts: list[int] = []
    for kernel, d in zip(reversed(weight.shape[2:]), reversed(spread), strict=True):
        total = d * (kernel - 1)
        amounts += [total // 2, total - total // 2]
    return F.pad(x, amounts)


def _transposed_convolution(
    fmt: LNSFormat, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    """Return torch's transposed convolution ``[B, O, ...]`` to ``[B, I, ...]``, in LNS."""
    input, dims = _float_input(input), weight.dim() - 2
    single = input.dim() == dims + 1
    y = input[None] if single else input
    options = _options(fmt, dims, stride, padding, dilation, groups)
    extra = [output_padding] if isinstance(output_padding, int) else output_padding
    size = transposed.transposed_size(y, weight, options[0], extra)
    out = _convolved("x", y, weight, size, options)
    if bias is not None:
        out = out + bias.reshape(-1, *[1] * dims)
    return (out[0] if single else out).to(input.dtype)


class _LNSMatmulConv:
    """The common part of the convolutions: torch's layer with another ``forward``."""

    fmt: LNSFormat

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the convolution of ``[B, I, ...]``: ``[B, O, ...]``, or both without B."""
        x, padding = input, self.padding
        if self.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x, padding = F.pad(x, reversed_padding(self), mode=mode), 0
        return _convolution(
            self.fmt, x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )

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
"""The layer of scope ``matmul`` for each of torch's that computes one product."""

_COMPOSED = (
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell,
    torch.rnn_tanh_cell, torch.rnn_relu_cell, F.multi_head_attention_forward, F.bilinear,
    *((F.linear_cross_entropy,) if hasattr(F, "linear_cross_entropy") else ()),  # torch 2.13
)  # fmt: skip
"""Functions that are composed of linear ones, as for LNSTensors (:mod:`lns_ops.tensor.ops`)."""
_PLACES = {function: place for place, function in enumerate(_COMPOSED)}
"""Where each is: graphs hold numbers, not functions."""
_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: lambda *args, **kwargs: _linear(*args, **kwargs),
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d), lambda *args, **kwargs: _convolution(*args, **kwargs)
    ),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        lambda *args, **kwargs: _transposed_convolution(*args, **kwargs),
    ),
}
"""The torch functions that are LNS within a layer that keeps its forward.

They are called by their names, to which ``fx.wrap`` gives others while it traces.
"""


class _Products(TorchFunctionMode):
    """The context in which linear functions and convolutions of float32 tensors are LNS."""

    def __init__(self, fmt: LNSFormat) -> None:
        super().__init__()
        self.fmt = fmt
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS:
            self.used = True
            return _PRODUCTS[func](self.fmt, *args, **(kwargs or {}))
        if func in _PLACES:
            self.used = True
            named = self.fmt.bits, self.fmt.fraction_bits, _PLACES[func]
            return _composed(*named, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _composed(bits: int, fraction_bits: int, which: int, /, *args: Any, **kwargs: Any) -> Any:
    """Return a function of :data:`_COMPOSED` with its products in LNS.

    A compiled graph calls it as a whole, as it calls those functions, and so within the context.
    """
    return _in_context(LNSFormat(bits, fraction_bits), which, args, kwargs)


def _in_context(fmt: LNSFormat, which: int, args: Any, kwargs: Any) -> Any:
    with _Products(fmt):
        return REPLACEMENTS[_COMPOSED[which]](*args, **kwargs)


def _keep_whole() -> None:
    """Have the tracer leave the context alone, of which its graphs would have the inside alone.

    It meets it where it runs a layer as it is and looks at what the layer calls, as of nn.LSTM.
    """
    global _in_context
    _in_context = torch.compiler.disable(_in_context)


allow_in_graph(_composed)
once_imported(_keep_whole)
for _name in ("_linear", "_convolution", "_transposed_convolution", "_composed"):
    fx.wrap(_name)  # torch.fx.symbolic_trace records calls of them as such


class _KeepsForward:
    """The common part of layers that keep their forward.

    Attributes:
        fmt: the LNS format of the products.
        stays_float32: whether the last forward had no product in LNS.
    """

    fmt: LNSFormat
    stays_float32 = False

    def extra_repr(self) -> str:
        """Return the layer's line plus the format."""
        of_layer = super().extra_repr()  # type: ignore[misc]
        return ", ".join(part for part in (of_layer, f"matmul={self.fmt}") if part)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what pickle keeps: the class of before, of which this one is made again."""
        reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return _new, (original_class(type(self)),), *reduced[2:]  # type: ignore[arg-type]


def _forward_of(original: type[nn.Module]) -> Callable[..., Any]:
    """Return a layer's own forward with its products in LNS, and with its signature."""

    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        products = _Products(self.fmt)
        with products:  # whose name torch.compile would give to None
            result = original.forward(self, *args, **kwargs)
        self.stays_float32 = not products.used
        return result

    return forward


def _new(original: type[nn.Module]) -> nn.Module:
    made = layer_class(original)
    return made.__new__(made)


_MADE: dict[type[nn.Module], type[nn.Module]] = {}


def layer_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class of scope ``matmul`` for a layer's class."""
    if original in LAYERS:
        return LAYERS[original]
    if _is_parametrized(original):
        return _on(layer_class(original.__bases__[0]), original)
    if original not in _MADE:
        # torch.fx leaves layers of torch.nn whole, and finds them by this
        of_torch = original.__module__.startswith(("torch.nn", "torch.ao.nn"))
        own = {"__module__": "torch.nn" if of_torch else __name__, "forward": _forward_of(original)}
        _MADE[original] = type(f"LNSMatmul{original.__name__}", (_KeepsForward, original), own)
    return _MADE[original]


def _is_parametrized(kind: type[nn.Module]) -> bool:
    """Return whether torch made a class for one parametrized layer."""
    return kind.__module__ == parametrize.__name__


def _on(base: type[nn.Module], parametrized: type[nn.Module]) -> type[nn.Module]:
    """Return a parametrized layer's class on another base, the only one, where torch finds it."""
    own = {k: v for k, v in vars(parametrized).items() if k not in ("__dict__", "__weakref__")}
    return type(f"Parametrized{base.__name__}", (base,), own)


def original_class(made: type[nn.Module]) -> type[nn.Module]:
    """Return the class of which :func:`layer_class` made this one, or the class itself."""
    if _is_parametrized(made):
        base = original_class(made.__bases__[0])
        return made if base is made.__bases__[0] else _on(base, made)
    own = {layer: original for original, layer in LAYERS.items()}.get(made)
    if own is not None:
        return own  # type: ignore[return-value]
    return made.__bases__[1] if made.__bases__[0] is _KeepsForward else made
