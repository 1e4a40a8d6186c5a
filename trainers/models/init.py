"""Initial weights that only depend on the seed and the parameter's name.

They do not depend on the layout or the order of creation, because every parameter has its own
generator, seeded by (seed, name). The distribution is torch's default for the kind of layer:

- linear, convolution and transposed convolution layers: weight and bias uniform in
  ``+- 1 / sqrt(fan_in)``;
- LSTM, GRU and RNN: uniform in ``+- 1 / sqrt(hidden_size)``;
- embeddings: standard normal, zero at ``padding_idx``;
- norms: weight one, bias zero;
- multi-head attention: projections of the inputs uniform in ``+- sqrt(6 / (fan_in + fan_out))``
  (X. Glorot, Y. Bengio 2010), their bias zero, ``bias_k`` and ``bias_v`` normal with standard
  deviation ``sqrt(2 / (fan_in + fan_out))``; the output projection is a linear layer;

unless the model sets a normal distribution by :func:`normal_`, which is required for its own bare
parameters, or a constant by :func:`constant_`. A parameter without a distribution is an error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Draw = Callable[[nn.Module, str, Tensor, torch.Generator], None]

_STD = "initial_std"
"""Attribute of a module with the arguments of :func:`normal_`."""
_CONSTANT = "initial_constant"
"""Attribute of a module with the arguments of :func:`constant_`."""


def normal_(module: nn.Module, **std: float) -> None:
    """Make :func:`initialize_` draw parameters of ``module`` from normal distributions of mean 0.

    Args:
        module: module that owns the parameters.
        std: standard deviation by parameter name; 0 for zeros.
    """
    setattr(module, _STD, std)


def constant_(module: nn.Module, **values: float) -> None:
    """Make :func:`initialize_` fill parameters of ``module`` with constants, given by name."""
    setattr(module, _CONSTANT, values)


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator seeded with a hash of ``seed`` and the parameter's name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _uniform(parameter: Tensor, bound: float, generator: torch.Generator) -> None:
    parameter.uniform_(-bound, bound, generator=generator)


def _fan_in(layer: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    _uniform(parameter, layer.get_parameter("weight")[0].numel() ** -0.5, generator)


def _recurrent(layer: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    assert isinstance(layer, nn.RNNBase | nn.RNNCellBase)
    _uniform(parameter, layer.hidden_size**-0.5, generator)


def _embedding(layer: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    assert isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    parameter.normal_(generator=generator)
    if layer.padding_idx is not None:
        parameter[layer.padding_idx] = 0


def _norm(layer: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    parameter.fill_(0.0 if name == "bias" else 1.0)


def _attention(layer: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    if name == "in_proj_bias":
        parameter.zero_()
    elif name in ("bias_k", "bias_v"):
        parameter.normal_(0, (2 / (2 * parameter.numel())) ** 0.5, generator=generator)
    else:
        _uniform(parameter, math.sqrt(6 / sum(parameter.shape)), generator)


_LAYERS: tuple[tuple[tuple[type[nn.Module], ...], Draw], ...] = (
    (
        (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
         nn.ConvTranspose3d),
        _fan_in,
    ),
    ((nn.RNNBase, nn.RNNCellBase), _recurrent),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm,
         nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        _norm,
    ),
    ((nn.MultiheadAttention,), _attention),
)  # fmt: skip
"""Kinds of layers with known parameters, and the functions that draw them."""


@torch.no_grad()
def initialize_(model: nn.Module, seed: int) -> nn.Module:
    """Draw every parameter of ``model`` in place, and return the model.

    The same seed and names give the same float32 bits on any layout. A shared parameter is drawn
    once, under its first name.

    Raises:
        ValueError: a parameter has no distribution; the message has its name.
    """
    drawn: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        asked: dict[str, float] = getattr(module, _STD, {})
        constants: dict[str, float] = getattr(module, _CONSTANT, {})
        draw = next((draw for kinds, draw in _LAYERS if isinstance(module, kinds)), None)
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if parameter in drawn:
                continue
            drawn.add(parameter)
            if name in asked:
                parameter.normal_(0, asked[name], generator=_generator(seed, full))
            elif name in constants:
                parameter.fill_(constants[name])
            elif draw is not None:
                draw(module, name, parameter, _generator(seed, full))
            else:
                raise ValueError(
                    f"parameter {full.lstrip('.')!r} of a {type(module).__name__}: no rule draws it"
                    f" from the seed; call normal_(module, {name}=0.02) where the module is made,"
                    " or make it of layers of torch"
                )
    return model
