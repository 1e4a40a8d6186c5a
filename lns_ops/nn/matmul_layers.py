"""Layers of scope ``matmul``: LNS products between float32 parameters, inputs and outputs.

The forward product, both backward products, and the products of second derivatives are LNS, and so
are their sums.

:func:`lns_ops.convert_` changes only a layer's class to one of these, and :func:`lns_ops.revert_`
changes it back. Operands are encoded and the product's codes are decoded, so results are rounded to
the format with either accumulation. The bias is added in float32. The operands themselves are saved
for the backward pass; usually the graph keeps them anyway.

A module that computes more than one of torch's products keeps its forward, and a context computes
the products inside it in LNS (:class:`~lns_ops.nn.products.context.Products`). Examples are a
subclass with its own forward, a module that multiplies by its weights itself, nn.LSTM and
nn.MultiheadAttention. Products of two activations, such as attention's scores, stay float32, and so
does the second sum of nn.Bilinear.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from lns_ops._compat import reversed_padding
from lns_ops.cuda import faults
from lns_ops.nn import own_products
from lns_ops.nn.layer_kinds import PRODUCTS_INSIDE
from lns_ops.nn.products.context import Products
from lns_ops.nn.products.convolutions import convolution
from lns_ops.nn.products.matrices import linear
from lns_ops.spec.format import LNSFormat

for _name in ("linear", "convolution"):
    fx.wrap(_name)  # so that torch.fx.symbolic_trace records calls of these functions


def _named(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's forward so that GPU faults inside it are reported with the layer's name."""

    @wraps(forward)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        faults.enter(getattr(getattr(self, "lns_conversion", None), "name", ""))
        try:
            return forward(self, *args, **kwargs)
        finally:
            faults.leave()

    return named


class LNSMatmulLinear(nn.Linear):
    """An nn.Linear whose matrix products are computed in LNS.

    Parameters, bias addition, inputs and outputs are float32; outputs have the input's dtype.

    Shapes: input ``[..., in_features]``, output ``[..., out_features]``. Created by
    :func:`lns_ops.convert_`; do not construct it directly. Products are rounded to the format with
    either accumulation (:func:`~lns_ops.accumulation.set_matmul_accumulation`); the backward pass
    uses the accumulation of the forward pass.

    Attributes:
        fmt: the LNS format of the products.
    """

    fmt: LNSFormat

    @_named
    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight^T`` in LNS, plus ``bias`` in float32.

        Raises:
            ValueError: a NaN or an infinity in the input or the weight, or an integer input.
        """
        return linear(self.fmt, input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return nn.Linear's line plus the format."""
        return f"{super().extra_repr()}, matmul={self.fmt}"


class _LNSMatmulConv:
    """The common part of the convolutions: torch's layer with another ``forward``."""

    fmt: LNSFormat

    @_named
    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the convolution of ``[B, I, ...]`` as ``[B, O, ...]``, or both without B."""
        x, padding = input, self.padding
        if self.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            x, padding = F.pad(x, reversed_padding(self), mode=mode), 0
        return convolution(
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
"""The scope-``matmul`` layer for each torch layer that computes one product."""


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
        """Return what pickle stores: the original class, from which this one is recreated."""
        reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return _new, (original_class(type(self)),), *reduced[2:]  # type: ignore[arg-type]


def _forward_of(original: type[nn.Module]) -> Callable[..., Any]:
    """Return a layer's own forward with its products in LNS, keeping its signature."""
    follows = not original.forward.__module__.startswith("torch.")

    @_named
    @wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, fx.Proxy) for x in (*args, *kwargs.values())):
            _warn_of_tracing(original)
        products = Products(self.fmt, self if follows else None)
        with products:  # no `as` name: torch.compile would set it to None
            result = original.forward(self, *args, **kwargs)
        self.stays_float32 = not products.used
        return result

    return forward


def _warn_of_tracing(original: type[nn.Module]) -> None:
    """Warn that torch.fx records products outside of layers in float32."""
    if named := own_products.of_any(original):
        warnings.warn(
            f"torch.fx.symbolic_trace of the inside of a {original.__name__}: its products"
            f" ({', '.join(named)}) are recorded in float32; trace nn.Sequential(module), which"
            " keeps the module whole, or compile it (torch.compile)",
            stacklevel=3,
        )


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
        # torch.fx does not trace into layers of torch.nn, which it recognizes by this name
        whole = original.__module__.startswith(("torch.nn", "torch.ao.nn")) or not issubclass(
            original, PRODUCTS_INSIDE
        )
        own = {"__module__": "torch.nn" if whole else __name__, "forward": _forward_of(original)}
        _MADE[original] = type(f"LNSMatmul{original.__name__}", (_KeepsForward, original), own)
    return _MADE[original]


def _is_parametrized(kind: type[nn.Module]) -> bool:
    """Return whether torch created the class for one parametrized layer."""
    return kind.__module__ == parametrize.__name__


def _on(base: type[nn.Module], parametrized: type[nn.Module]) -> type[nn.Module]:
    """Return a parametrized layer's class with another base as the only one, as torch expects."""
    own = {k: v for k, v in vars(parametrized).items() if k not in ("__dict__", "__weakref__")}
    return type(f"Parametrized{base.__name__}", (base,), own)


def original_class(made: type[nn.Module]) -> type[nn.Module]:
    """Return the class from which :func:`layer_class` made this one, or the class itself."""
    if _is_parametrized(made):
        base = original_class(made.__bases__[0])
        return made if base is made.__bases__[0] else _on(base, made)
    own = {layer: original for original, layer in LAYERS.items()}.get(made)
    if own is not None:
        return own  # type: ignore[return-value]
    return made.__bases__[1] if made.__bases__[0] is _KeepsForward else made
