"""Simulated training in any number format: values are rounded to the format, and the arithmetic is
float32.

:func:`simulate_` rounds a module's parameters and hooks its layers. The hooks round inputs of
layers with parameters and outputs of all layers: activations in the forward pass, gradients in the
backward pass. A module with its own forward keeps float inputs, as in LNS, unless it multiplies by
its own matrices (``x @ self.w``). Products are summed in float32, as tensor cores do.
:func:`lns_ops.optim.quantized_updates.quantize_updates_` adds the rest: it rounds gradients of
parameters before an optimizer step, and parameters after it.

>>> import torch
>>> from lns_ops import formats
>>> net = simulate_(torch.nn.Linear(4, 2), "float8_e4m3fn", gradient_format="float8_e5m2")
>>> y = net(torch.ones(3, 4))
>>> torch.equal(y, formats.parse("float8_e4m3fn").quantize(y))
True

*Simulated* training needs as much memory and time as float32; it studies accuracy. Limits: values
that a module computes between its submodules (a residual addition, a functional call) stay float32
until they enter or leave a layer. Layers that do not call ``forward`` of their children
(``nn.MultiheadAttention``'s output projection) are rounded only at their own inputs and outputs.
Losses are float32. Linear layers in ``float8_e4m3fn`` really multiply in 8 bits on GPUs that
support it (Hopper), see :mod:`lns_ops.nn.float8_linear`. With an
:class:`~lns_ops.formats.Accumulation` the running sums of linear layers and convolutions are
rounded, too (:mod:`lns_ops.nn.products.rounded_sums`).

*Loss scaling.* float16 gradients below 2^-24 underflow. Multiplying the loss by S multiplies every
gradient by S and moves it into range. Here gradients are rounded as ``q(S g) / S``, which gives the
same values. S is dynamic as in torch.amp.GradScaler: it is halved after an overflow, whose step
changes no weights, and doubled after 2,000 steps without overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lns_ops._compat import remove_forward_hooks, tree_map
from lns_ops.formats import Accumulation, NumberFormat, parse
from lns_ops.functional.library import refuse_distributed
from lns_ops.nn import own_products
from lns_ops.nn.float8_linear import Float8Linear, real_format
from lns_ops.nn.layer_kinds import has_own_forward, multiplies, without_nested_tensors
from lns_ops.nn.products.rounded_convolutions import (
    RoundedSumsConv1d,
    RoundedSumsConv2d,
    RoundedSumsConv3d,
)
from lns_ops.nn.products.rounded_sums import RoundedSumsLinear
from lns_ops.nn.products.two_forms import in_two_forms
from lns_ops.nn.successors import forget_kinds, keep_kinds
from lns_ops.tensor import LNSTensor

INITIAL_LOSS_SCALE = 2.0**16
GROWTH_INTERVAL = 2_000
_EXACT = (nn.ReLU, nn.Flatten, nn.Unflatten, nn.Identity, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
"""Layers whose outputs are copies of their inputs, so they are already in the format."""
_ROUNDED_SUMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RoundedSumsLinear,
    nn.Conv1d: RoundedSumsConv1d,
    nn.Conv2d: RoundedSumsConv2d,
    nn.Conv3d: RoundedSumsConv3d,
}
"""The layer with rounded sums for each torch layer that has one."""
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    Float8Linear: nn.Linear,
    **{rounded: plain for plain, rounded in _ROUNDED_SUMS.items()},
}
"""The torch layer for each layer that :func:`simulate_` substitutes."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The formats of a simulated layer, stored as the layer's attribute ``simulation``.

    Attributes:
        format: format of parameters and activations.
        gradient_format: format of the gradients of both.
        accumulation: how products of linear layers and convolutions are summed; None for float32.
        root: the module that was passed to :func:`simulate_`; if gradients are scaled, it has the
            buffers ``loss_scale`` and ``growth_tracker``.
    """

    format: NumberFormat
    gradient_format: NumberFormat
    root: nn.Module
    accumulation: Accumulation | None = None

    @property
    def scaled(self) -> bool:
        """Whether gradients are scaled."""
        return self.gradient_format.overflows

    def gradient(self, grad: Tensor) -> Tensor:
        """Round ``grad`` to the gradient format, with loss scaling if enabled; differentiable."""
        if torch.is_grad_enabled():
            return _quantized_gradient(grad, self)
        return self.rounded_gradient(grad)

    def rounded_gradient(self, grad: Tensor) -> Tensor:
        """Return :meth:`gradient` without a graph."""
        if not self.scaled:
            return self.gradient_format.quantize(grad)
        scale = self.root.get_buffer("loss_scale")
        return self.gradient_format.quantize(grad * scale) / scale

    def through(self, x: Any) -> Any:
        """Round ``x`` to the format, and its gradient to the gradient format."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        refuse_distributed(x)
        return _quantized(x, self)


class _Quantize(torch.autograd.Function):
    """Round values in the forward pass and gradients in the backward pass.

    The derivative of rounding is taken to be 1 (Y. Bengio et al. 2013, arXiv:1308.3432), also in
    double backward (``create_graph=True``).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, simulation: Simulation) -> Tensor:
        return simulation.format.quantize(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.simulation = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.simulation.gradient(grad), None


class _QuantizeGradient(_Quantize):
    """Round a gradient, and the gradient of the gradient in the same way."""

    @staticmethod
    def forward(x: Tensor, simulation: Simulation) -> Tensor:
        return simulation.rounded_gradient(x)


_quantized = in_two_forms(_Quantize)
_quantized_gradient = in_two_forms(_QuantizeGradient)


@dataclass(frozen=True)
class _Inputs:
    """The forward pre-hook that rounds the inputs of layers with parameters."""

    simulation: Simulation

    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        for parameter in module.parameters(recurse=False):
            _check_dtype(f"a {type(module).__name__}", parameter, self.simulation.format)
        named = {
            name: x if "mask" in name else tree_map(self.simulation.through, x)
            for name, x in kwargs.items()
        }
        return tree_map(self.simulation.through, args), named


@dataclass(frozen=True)
class _Outputs:
    """The forward hook that rounds a layer's outputs."""

    simulation: Simulation

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(self.simulation.through, output)


def _check_dtype(layer: str, parameter: Tensor, fmt: NumberFormat) -> None:
    """Reject parameters that are not float32, for example after ``module.double()``."""
    if parameter.is_floating_point() and parameter.dtype != torch.float32:
        raise ValueError(
            f"parameter of {layer} in simulated {fmt}: is {parameter.dtype}, but the values of a"
            " simulated format are stored as float32; call module.float() instead of double(),"
            " half(), bfloat16() or to(dtype)"
        )


def _owners(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers: submodules with parameters of their own, and those without submodules."""
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        or not any(True for _ in layer.children())
    ]


def layer_names(names: list[str]) -> str:
    """List the layer names for an error message."""
    shown = ", ".join(repr(name) for name in names[:20]) or "none"
    return (
        f"there are {shown}{f' and {len(names) - 20} more' if len(names) > 20 else ''} ('' is the"
        " module itself)"
    )


def _chosen(
    module: nn.Module, fmt: NumberFormat, filter_fn: Callable[[nn.Module, str], bool] | None
) -> list[tuple[str, nn.Module]]:
    """Return the layers that a filter selects.

    Raises:
        ValueError: it selects no layer, or a layer that is in a number format already, has
            uninitialized (lazy) parameters, or has parameters that are not float32.
    """
    owners = _owners(module)
    layers = [
        (name, layer) for name, layer in owners if filter_fn is None or filter_fn(layer, name)
    ]
    if not layers:
        raise ValueError(f"filter_fn matches no layer: {layer_names([name for name, _ in owners])}")
    for name, layer in layers:
        if hasattr(layer, "simulation") or any(
            isinstance(p, LNSTensor) for p in layer.parameters(recurse=False)
        ):
            raise ValueError(
                f"layer {name or '(root)'!r}: is in a number format already; convert a module once"
                " (or lns_ops.revert_ it), or leave the layer out with filter_fn"
            )
        refuse_lazy(name, layer)
        for parameter in layer.parameters(recurse=False):
            _check_dtype(f"layer {name or '(root)'!r}", parameter, fmt)
    return layers


def refuse_lazy(name: str, layer: nn.Module) -> None:
    """Reject a lazy layer, which creates its parameters in its first call.

    Raises:
        ValueError: the layer has not been called yet.
    """
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        raise ValueError(
            f"layer {name or '(root)'!r} is a {type(layer).__name__} without parameters so far: run"
            " a batch through the module first, which creates them"
        )


@torch.no_grad()
def simulate_(
    module: nn.Module,
    fmt: NumberFormat | str,
    *,
    gradient_format: NumberFormat | str | None = None,
    accumulation: Accumulation | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Train ``module`` in a number format: round parameters now, and activations and gradients
    during training.

    Args:
        module: any torch module with float32 parameters.
        fmt: the format, or its name (:func:`lns_ops.formats.parse`).
        gradient_format: another format for gradients (``float8_e5m2`` for its range); None for
            ``fmt``.
        accumulation: how products of linear layers and convolutions, forward and backward, are
            summed; None for float32. Other layers with products are rejected then.
        filter_fn: ``filter_fn(layer, name)`` returns whether to convert a layer; None for all.

    Returns:
        ``module``, which takes and returns float tensors. Its optimizer needs
            :func:`lns_ops.optim.quantized_updates.quantize_updates_`.

    Raises:
        ValueError: unknown format, a filter that matches no layer, a layer that is in a number
            format already, or one whose sums ``accumulation`` cannot round. The module is unchanged
            then.
    """
    chosen_format = parse(fmt) if isinstance(fmt, str) else fmt
    chosen_gradient = chosen_format if gradient_format is None else gradient_format
    gradients = parse(chosen_gradient) if isinstance(chosen_gradient, str) else chosen_gradient
    layers = _chosen(module, chosen_format, filter_fn)
    if accumulation is not None:
        _refuse_other_products(layers)
    simulation = Simulation(
        format=chosen_format, gradient_format=gradients, root=module, accumulation=accumulation
    )
    if simulation.scaled:
        device = next((p.device for p in module.parameters()), None)
        module.register_buffer("loss_scale", torch.tensor(INITIAL_LOSS_SCALE, device=device))
        module.register_buffer("growth_tracker", torch.zeros((), dtype=torch.int32, device=device))
    for each in (chosen_format, gradients):
        each.quantize(torch.zeros(1, 1))  # computes constants that a compiler cannot trace
    for _, layer in layers:
        _attach(layer, simulation)
    without_nested_tensors(module)
    return module


def _refuse_other_products(layers: list[tuple[str, nn.Module]]) -> None:
    """Reject layers with products that have no form with rounded sums."""
    for name, layer in layers:
        others = multiplies(layer) or own_products.found_in(layer)
        if type(layer) not in _ROUNDED_SUMS and others:
            raise ValueError(
                f"accumulation with layer {name or '(root)'!r}, a {type(layer).__name__}: only the"
                " sums of nn.Linear and nn.Conv1d to 3d can be rounded; drop accumulation, or keep"
                " this layer in float32 with filter_fn"
            )


def _attach(layer: nn.Module, simulation: Simulation) -> None:
    parameters = list(layer.parameters(recurse=False))
    for parameter in parameters:
        simulation.format.quantize_(parameter)
    if parameters and not _keeps_floats(layer):
        layer.register_forward_pre_hook(_Inputs(simulation), with_kwargs=True)
    if not isinstance(layer, _EXACT):
        layer.register_forward_hook(_Outputs(simulation))
    if simulation.accumulation is not None and type(layer) in _ROUNDED_SUMS:
        layer.__class__ = _ROUNDED_SUMS[type(layer)]
    elif type(layer) is nn.Linear and real_format(simulation.format, simulation.gradient_format):
        layer.__class__ = Float8Linear
    layer.simulation = simulation  # type: ignore[assignment]
    keep_kinds(layer)


def _keeps_floats(layer: nn.Module) -> bool:
    """Return whether a layer gets its float inputs unrounded.

    Code outside torch may compute with positions or times, as in LNS
    (:mod:`lns_ops.tensor.promotion`). If the layer multiplies by its own matrices, the inputs are
    rounded, because in LNS its products would encode them.
    """
    has_matrix = any(p.dim() > 1 for p in layer.parameters(recurse=False))
    multiplies_itself = has_matrix and bool(own_products.found_in(layer))
    return has_own_forward(layer) and not multiplies(layer) and not multiplies_itself


def stop_(module: nn.Module) -> nn.Module:
    """Undo :func:`simulate_`: remove the hooks; parameters keep their current values."""
    for layer in module.modules():
        if not hasattr(layer, "simulation"):
            continue
        remove_forward_hooks(layer, (_Inputs, _Outputs))
        forget_kinds(layer)
        layer.__class__ = _PLAIN.get(type(layer), type(layer))
        simulation: Any = layer.simulation
        if simulation.scaled and hasattr(simulation.root, "loss_scale"):
            del simulation.root.loss_scale, simulation.root.growth_tracker
        del layer.simulation
    return module


@torch.no_grad()
def update_loss_scale_(root: nn.Module, finite: Tensor) -> None:
    """Make one step of dynamic loss scaling: halve the scale after an overflow, double it after
    :data:`GROWTH_INTERVAL` good steps.
    """
    scale, tracker = root.get_buffer("loss_scale"), root.get_buffer("growth_tracker")
    good = torch.where(finite, tracker + 1, torch.zeros_like(tracker))
    grow = good >= GROWTH_INTERVAL
    factor = torch.where(grow, 2.0, torch.where(finite, 1.0, 0.5))
    scale.copy_((scale * factor).clamp(min=2.0**-24, max=2.0**100))
    tracker.copy_(torch.where(grow, 0, good))
