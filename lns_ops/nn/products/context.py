"""The context in which a forward pass computes products of float32 tensors in LNS.

Inside the context, linear functions and convolutions are LNS with any weight, and so are functions
composed of these. If the context also tracks weights (:mod:`lns_ops.nn.products.weights`),
all other products with a weight are LNS, too: ``@``, ``torch.einsum``, ``torch.bmm`` ...

If contexts are nested, the innermost one counts. A layer that is left out leaves all of them for
its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lns_ops import _compat
from lns_ops.nn.products import matrices
from lns_ops.nn.products.convolutions import convolution, over_time, transposed_convolution
from lns_ops.nn.products.einsum import einsum
from lns_ops.nn.products.matrices import linear
from lns_ops.nn.products.weights import Weights, is_real
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import in_float32
from lns_ops.tensor.dynamo import allow_in_graph, once_imported
from lns_ops.tensor.registry import REPLACEMENTS

_COMPOSED = (
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm_cell, torch.gru_cell,
    torch.rnn_tanh_cell, torch.rnn_relu_cell, F.multi_head_attention_forward, F.bilinear,
    *((F.linear_cross_entropy,) if hasattr(F, "linear_cross_entropy") else ()),  # torch 2.13
)  # fmt: skip
"""Functions composed of linear functions, as for LNSTensors (:mod:`lns_ops.tensor.ops`)."""
_PLACES = {function: place for place, function in enumerate(_COMPOSED)}
"""The index of each function: graphs hold numbers, not functions."""
_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.linear: lambda *args, **kwargs: linear(*args, **kwargs),
    **dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d), lambda *args, **kwargs: convolution(*args, **kwargs)
    ),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        lambda *args, **kwargs: transposed_convolution(*args, **kwargs),
    ),
    torch.conv_tbc: lambda *args, **kwargs: over_time(*args, **kwargs),
}
"""The torch functions that are LNS with any weight.

They are called by name, because ``fx.wrap`` replaces the names while it traces.
"""
_FORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "mm": (matrices.matmul, (2, 2)),
    "bmm": (matrices.matmul, (3, 3)),
    "mv": (matrices.matmul, (2, 1)),
    "dot": (matrices.matmul, (1, 1)),
    "addmm": (matrices.added, (2, 2)),
    "addmv": (matrices.added, (2, 1)),
    "baddbmm": (matrices.added, (3, 3)),
    "addbmm": (matrices.added_batch, (3, 3)),
}
"""Products by name, with the numbers of dimensions of both factors."""


def _in_place(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a form of a function in :data:`_SUMS` that writes to its first argument."""

    def write(fmt: LNSFormat, input: Tensor, *args: Any, **factors: Any) -> Tensor:
        return input.copy_(form(fmt, input, *args, **factors))

    return write


_SUMS = (matrices.added, matrices.added_batch)
"""Products that are added to their first argument."""
_ANY_DIMENSIONS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), matrices.matmul
    ),
    Tensor.__rmatmul__: lambda fmt, x, y: matrices.matmul(fmt, y, x),
    **dict.fromkeys((torch.inner, Tensor.inner), matrices.inner),
    torch.tensordot: matrices.tensordot,
    **dict.fromkeys((F.grouped_mm, _compat.grouped_mm), matrices.grouped),
}
_OF_WEIGHTS: dict[Any, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    **{getattr(owner, name): form for owner in (torch, Tensor) for name, form in _FORMS.items()},
    **{
        getattr(Tensor, f"{name}_"): (_in_place(form), dims)
        for name, (form, dims) in _FORMS.items()
        if form in _SUMS
    },
    **{function: (form, ()) for function, form in _ANY_DIMENSIONS.items()},
}
"""The torch functions that are LNS if a factor is a weight."""
_OTHERS = {"transformers::grouped_mm_fallback": matrices.grouped}
"""Products that are operators of other libraries (transformers 5.23: in compiled code)."""
_IN_PLACE = {getattr(Tensor, f"{name}_") for name, (form, _) in _FORMS.items() if form in _SUMS}
_OPTIONS = {"alpha", "beta", "offs"}
_NAMES = (
    "input", "self", "a", "mat_a", "mat", "mat1", "batch1", "b", "mat_b", "mat2", "batch2", "vec",
    "other", "tensor", "tensor2", "dims",
)  # fmt: skip
"""The names of their positional arguments, in order."""


def look_for_others() -> None:
    """Add the operators of :data:`_OTHERS` whose library is loaded."""
    for name, form in _OTHERS.items():
        library, _, operator = name.partition("::")
        if (found := getattr(getattr(torch.ops, library), operator, None)) is not None:
            _OF_WEIGHTS[found] = form, ()


class Products(TorchFunctionMode):
    """The context in which products of float32 tensors are LNS.

    Attributes:
        used: whether a product was computed in LNS.
        graded: whether gradients were recorded when the context was entered.
        left: number of nested left-out layers that are running.
    """

    def __init__(self, fmt: LNSFormat, module: nn.Module | None = None) -> None:
        super().__init__()
        self.fmt, self.used, self.left = fmt, False, 0
        self.graded = torch.is_grad_enabled()
        self.weights = None if module is None else Weights(module)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.left:
            return func(*args, **kwargs)
        result = self._product(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        else:
            self.used = True
            if self.graded and not torch.is_grad_enabled():
                _refuse_if_run_anew()
        if self.weights is not None:
            self.weights.note(func, args, kwargs, result)
        return result

    def _product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return a product in LNS, or None for other functions and operands."""
        if func in _PRODUCTS:
            real = _has_real_weight(args, kwargs)
            return _PRODUCTS[func](self.fmt, *args, **kwargs) if real else None
        if func in _PLACES:
            named = self.fmt.bits, self.fmt.fraction_bits, _PLACES[func]
            return _composed(*named, *args, **kwargs)
        return None if self.weights is None else self._of_weights(func, args, kwargs)

    def _of_weights(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return a product of weights in LNS, or None for other functions and operands."""
        assert self.weights is not None
        if func is torch.einsum:
            return einsum(self.fmt, self.weights, *args) if not kwargs else None
        form = _OF_WEIGHTS.get(func)
        if form is None:
            return None
        call, dims = form
        args = (*args, *(kwargs[name] for name in _NAMES if name in kwargs))
        rest = {k: v for k, v in kwargs.items() if k not in _NAMES and v is not None}
        first = 1 if call in _SUMS or func in _IN_PLACE else 0
        if not rest.keys() <= _OPTIONS or len(args) < first + 2:
            return None
        x, y = args[first : first + 2]
        if not self.weights.multiply(x, y):
            return None
        if dims and (x.dim(), y.dim()) != dims:
            return None  # torch's own error
        dtype = (y if x in self.weights else x).dtype
        x, y = in_float32(x), in_float32(y)
        out = call(self.fmt, *args[:first], x, y, *args[first + 2 :], **rest)
        return out if out.dtype == dtype else out.to(dtype)


def _refuse_if_run_anew() -> None:
    if not torch.compiler.is_compiling() and _compat.is_run_anew():
        raise RuntimeError(
            "torch.utils.checkpoint runs a function of a module whose products are LNS (scope"
            " matmul): with use_reentrant=True its backward pass would recompute them outside"
            " the module, in float32, and give other gradients; pass a module to checkpoint instead"
            " of the function, or leave the module out of the conversion (filter_fn)"
        )


def _has_real_weight(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a weight is real and not LNS (as it is in scope ``everywhere``).

    Tensors that torch.fx traces count as such.
    """
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    return is_real(weight) or isinstance(weight, fx.Proxy)


def _composed(bits: int, fraction_bits: int, which: int, /, *args: Any, **kwargs: Any) -> Any:
    """Return a function of :data:`_COMPOSED` with its products in LNS.

    A compiled graph calls it as one operator, as it calls the original, so the context applies.
    """
    return _in_context(LNSFormat(bits, fraction_bits), which, args, kwargs)


def _in_context(fmt: LNSFormat, which: int, args: Any, kwargs: Any) -> Any:
    with Products(fmt):
        return REPLACEMENTS[_COMPOSED[which]](*args, **kwargs)


def _keep_whole() -> None:
    """Make torch.compile skip :func:`_in_context`; its graphs would lack the context itself.

    The compiler reaches it if it runs a layer uncompiled and traces what the layer calls, as for
    nn.LSTM.
    """
    global _in_context
    _in_context = torch.compiler.disable(_in_context)


allow_in_graph(_composed)
once_imported(_keep_whole)
for _name in ("linear", "convolution", "transposed_convolution", "over_time", "_composed"):
    fx.wrap(_name)  # so that torch.fx.symbolic_trace records calls of these functions
