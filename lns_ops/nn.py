"""convert_: an ordinary torch module becomes an LNS one, in place, keeping its weights.

Two scopes:

- ``matmul``: parameters, activations and gradients stay float32; the products of each linear layer, forward and both backward ones,
  and their sums are LNS. The layer's class becomes :class:`LNSMatmulLinear`; its parameters are untouched.
- ``everywhere``: the parameters become :class:`~lns_ops.tensor.LNSTensor`, and so every operation of forward, backward and update is LNS.
  Converted layers encode float inputs, so the module takes ordinary tensors; layers left out decode LNS inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lns_ops import functional as lns
from lns_ops.accumulation import get_matmul_accumulation
from lns_ops.format import LNSFormat
from lns_ops.tensor import LNSTensor

SCOPES = ("matmul", "everywhere")


class _LinearMatmul(torch.autograd.Function):
    """``y = x w^T`` with both products of the backward pass in LNS as well, all of one accumulation; float32 in and out."""

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
        grad_x = _product(grad, w_codes, ctx.fmt, ctx.accumulation) if ctx.needs_input_grad[0] else None
        grad_w = _product(grad.t(), x_codes, ctx.fmt, ctx.accumulation) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


def _product(x: Tensor, y: Tensor, fmt: LNSFormat, accumulation: str) -> Tensor:
    """The values of ``x @ y``, rounded to the format whatever the accumulation."""
    return lns.decode(lns.matmul(x, y, fmt, accumulation=accumulation), fmt)


class LNSMatmulLinear(nn.Linear):
    """nn.Linear whose matrix products are computed in LNS; parameters, bias addition, inputs and outputs are float32.

    Shapes: input ``[..., in_features]``, output ``[..., out_features]``. Made by :func:`convert_`, not constructed. Products of either
    accumulation (:func:`~lns_ops.accumulation.set_matmul_accumulation`) are rounded to the format, backward ones are of the forward's.

    Attributes:
        fmt: the LNS format of the products.
    """

    fmt: LNSFormat

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight^T`` in LNS, plus ``bias`` in float32.

        Raises:
            ValueError: a NaN or an infinity in the input or the weight.
        """
        flat = input.reshape(-1, self.in_features)
        output = _LinearMatmul.apply(flat, self.weight, self.fmt, get_matmul_accumulation())  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias
        return output.reshape(*input.shape[:-1], self.out_features)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """nn.Linear's line plus the format."""
        return f"{super().extra_repr()}, matmul={self.fmt}"


def _encode_inputs(fmt: LNSFormat) -> Callable[[nn.Module, Any], Any]:
    def hook(module: nn.Module, inputs: Any) -> Any:
        return tuple(
            LNSTensor.from_float(x, fmt) if isinstance(x, Tensor) and not isinstance(x, LNSTensor) else x for x in inputs
        )

    return hook


def _decode_inputs(module: nn.Module, inputs: Any) -> Any:
    return tuple(x.to_float() if isinstance(x, LNSTensor) else x for x in inputs)


def _convert_everywhere(module: nn.Module, fmt: LNSFormat, encoded: dict[nn.Parameter, nn.Parameter]) -> None:
    """``encoded`` maps parameters to their LNS forms, so that layers which share one go on sharing it."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if parameter not in encoded:
            values = LNSTensor(lns.encode(parameter.detach(), fmt), fmt)
            encoded[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        setattr(module, name, encoded[parameter])
    module.register_forward_pre_hook(_encode_inputs(fmt))


def _convert_matmul(module: nn.Linear, fmt: LNSFormat) -> None:
    module.__class__ = LNSMatmulLinear
    module.fmt = fmt  # type: ignore[assignment]


def _owns_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def convert_(
    module: nn.Module,
    fmt: LNSFormat | str,
    scope: str = "matmul",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Convert ``module`` and its submodules to LNS in place; weights are kept (rounded to ``fmt`` in scope ``everywhere``).

    Args:
        module: its layers that own parameters must be ``nn.Linear``, or be left out by ``filter_fn``.
        fmt: the LNS format, or its name.
        scope: ``matmul`` or ``everywhere``, see the head of this file.
        filter_fn: ``filter_fn(submodule, name) -> bool``, True to convert; name is the dotted path, "" for ``module`` itself.

    Returns:
        ``module``, which takes and (in scope ``matmul``) returns float tensors; in scope ``everywhere`` it returns an LNSTensor, on which
        ``F.cross_entropy``, ``argmax`` and ``to_float`` work.

    Raises:
        ValueError: unknown scope, or a layer that cannot be converted; nothing has changed then.

    >>> net = convert_(nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)), lns12, scope="everywhere")
    """
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r}: must be one of {', '.join(SCOPES)}")
    fmt = LNSFormat.of(fmt)
    owners = [(name, m) for name, m in module.named_modules() if _owns_parameters(m)]
    chosen = [(name, m) for name, m in owners if filter_fn is None or filter_fn(m, name)]
    for name, layer in chosen:
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"layer {name or '(root)'!r} is a {type(layer).__name__}: convert_ handles nn.Linear; leave it out with "
                f"filter_fn=lambda module, name: isinstance(module, nn.Linear)"
            )
        if any(isinstance(parameter, LNSTensor) for parameter in layer.parameters(recurse=False)):
            raise ValueError(
                f"layer {name or '(root)'!r}: is LNS already; convert a module once, or leave the layer out with filter_fn"
            )
    encoded: dict[nn.Parameter, nn.Parameter] = {}
    for _, layer in chosen:
        if scope == "matmul":
            assert isinstance(layer, nn.Linear)
            _convert_matmul(layer, fmt)
        else:
            _convert_everywhere(layer, fmt, encoded)
    if scope == "everywhere":
        for _, layer in set(owners) - set(chosen):
            layer.register_forward_pre_hook(_decode_inputs)
    return module
