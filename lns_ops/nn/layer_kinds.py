"""Kinds of layers: which ones a conversion converts, and which of them have no LNS form."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

PRODUCTS_INSIDE = (
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    *((nn.LinearCrossEntropyLoss,) if hasattr(nn, "LinearCrossEntropyLoss") else ()),  # torch 2.13
)
"""The layers that compute products."""


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List a layer's own parameters, with all names of each."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def owners_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules that own parameters, or integers in place of parameters (quantized layers).

    A parametrized layer's original parameters are included.
    """
    return [(name, part) for name, part in module.named_modules() if owns(part)]


def owns(module: nn.Module) -> bool:
    """Return whether a module owns parameters, or integers in place of parameters."""
    return bool(parameters_of(module)) or multiplies(module) or is_quantized(module)


def multiplies(module: nn.Module) -> bool:
    """Return whether scope ``matmul`` converts a layer."""
    return isinstance(module, PRODUCTS_INSIDE) and not _is_complex(module)


def _is_complex(module: nn.Module) -> bool:
    """Return whether the weights of a layer are complex, including parametrized weights."""
    return any(
        parameter.is_complex()
        for name, parameter in module.named_parameters()
        if "weight" in name and ("." not in name or name.startswith("parametrizations."))
    )


def computes_weights(module: nn.Module) -> bool:
    """Return whether a module is one of torch's parametrizations, such as spectral norm, whose
    power iterations stay float32."""
    return type(module).__module__ == parametrizations.__name__


def is_quantized(module: nn.Module) -> bool:
    """Return whether a layer has integers of ``torch.ao.quantization`` in place of parameters."""
    of_torch = type(module).__module__.startswith("torch.ao.nn.")
    has_weights = hasattr(module, "set_weight_bias") and hasattr(module, "from_float")
    return of_torch and has_weights and not parameters_of(module)


def own_format(layer: nn.Module) -> str:
    """Return the dtype of the parameters of a layer that is not converted, as text."""
    if is_quantized(layer):
        return "integers"
    dtypes = (p.dtype for p in layer.parameters() if p.is_floating_point() or p.is_complex())
    return str(next(dtypes, torch.float32)).removeprefix("torch.")


def reason_to_stay(layer: nn.Module) -> str:
    """Return why a layer's products have no LNS form, or an empty text if they have one."""
    if is_quantized(layer):
        return "its weights are quantized by torch.ao.quantization"
    complex_products = isinstance(layer, PRODUCTS_INSIDE) and _is_complex(layer)
    return "LNS values are real" if complex_products else ""


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer's forward was written outside of torch."""
    return not type(layer).forward.__module__.startswith("torch.")


def without_nested_tensors(module: nn.Module) -> None:
    """Make torch's encoders keep padded batches: only fused layers support nested tensors."""
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
