"""Simulated training in any number format: values on the format's grid, arithmetic in float32.

:func:`simulate_` puts a module's parameters on the grid and hooks its layers, so that what goes
into a layer with parameters and what comes out of any layer is rounded to the grid, activations on
the way forward, gradients on the way back. Float inputs of a module with a forward of its own stay
as they are, as in LNS, unless it multiplies by matrices of its own (``x @ self.w``). A product of
grid values is summed in float32, which is what tensor cores do.
:func:`lns_ops.optim.quantized_updates.quantize_updates_` does the rest: gradients of parameters are
rounded before an optimizer's step, parameters after it.

*Simulated* means that memory and time are float32's: what is studied is accuracy. Limits: what a
module computes between its submodules (a residual addition, a functional call) stays float32 until
it enters or leaves a layer; layers that call no ``forward`` of their children
(``nn.MultiheadAttention``'s output projection) are rounded at their own border only; losses are
float32. Linear layers in ``float8_e4m3fn`` on a GPU that has them (Hopper) really multiply in 8
bits, see :mod:`lns_ops.nn.float8_linear`. With an :class:`~lns_ops.formats.Accumulation` the sums
of linear layers and convolutions are rounded as they grow
(:mod:`lns_ops.nn.products.rounded_sums`).

*Loss scaling.* float16 gradients below 2^-24 vanish. Scaling the loss by S, which scales every
gradient, moves them into range; here gradients are rounded as ``q(S g) / S``, the same values. S is
dynamic as in torch.amp.GradScaler: halved after an overflow, whose step changes no weight, doubled
after 2,000 steps without one.
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
"""The layers whose outputs are among their inputs, which are on the grid already."""
_ROUNDED_SUMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RoundedSumsLinear,
    nn.Conv1d: RoundedSumsConv1d,
    nn.Conv2d: RoundedSumsConv2d,
    nn.Conv3d: RoundedSumsConv3d,
}
"""The layer with rounded sums for each of torch's that there is one for."""
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    Float8Linear: nn.Linear,
    **{rounded: plain for plain, rounded in _ROUNDED_SUMS.items()},
}
"""Torch's layer for each that :func:`simulate_` puts in its place."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The formats of a simulated layer: kept as its attribute ``simulation``.

    Attributes:
        format: format of parameters and activations.
        gradient_format: format of the gradients of both.
        accumulation: how products of linear layers and convolutions are summed; None for float32.
        root: the module that :func:`simulate_` was called with; it has the buffers ``loss_scale``
            and ``growth_tracker`` if gradients are scaled.
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
        """Round ``grad`` to its grid, scaled meanwhile if gradients are scaled; differentiable."""
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
        """Round ``x`` to the grid, and its gradient to the gradients' grid."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        refuse_distributed(x)
        return _quantized(x, self)


class _Quantize(torch.autograd.Function):
    """The rounding of values forward and of gradients backward.

    The derivative of rounding is taken to be 1 (Y. Bengio et al. 2013, arXiv:1308.3432), in the
    backward pass of a backward pass (``create_graph=True``) as well.
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
    """The rounding of a gradient, whose own gradient is rounded alike."""

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
    """Refuse parameters of another float dtype, as after ``module.double()``."""
    if parameter.is_floating_point() and parameter.dtype != torch.float32:
        raise ValueError(
            f"parameter of {layer} in simulated {fmt}: is {parameter.dtype}, and values on a"
            " format's grid are kept as float32; call module.float(), in place of double(), half(),"
            " bfloat16() or to(dtype)"
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
    """Describe the layers that there are, for an error message."""
    shown = ", ".join(repr(name) for name in names[:20]) or "none"
    return (
        f"there are {shown}{f' and {len(names) - 20} more' if len(names) > 20 else ''} ('' is the"
        " module itself)"
    )


def _chosen(
    module: nn.Module, fmt: NumberFormat, filter_fn: Callable[[nn.Module, str], bool] | None
) -> list[tuple[str, nn.Module]]:
    """Return the layers that a filter chooses.

    Raises:
        ValueError: it chooses none, one in a format already, one without parameters so far, or one
            whose parameters are no float32.
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
    """Refuse a layer that makes its parameters when it is called for the first time.

    Raises:
        ValueError: it has not been.
    """
    if any(is_lazy(p) for p in layer.parameters(recurse=False)):
        raise ValueError(
            f"layer {name or '(root)'!r} is a {type(layer).__name__} without parameters so far: run"
            " a batch through the module first, which makes them"
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
    """Put ``module`` into a number format: parameters now, activations and gradients when computed.

    Args:
        module: any torch module of float32 parameters.
        fmt: the format, or its name (:func:`lns_ops.formats.parse`).
        gradient_format: format of gradients that need another (``float8_e5m2`` for its range);
            None for ``fmt``.
        accumulation: how products of linear layers and convolutions, forward and backward, are
            summed; None for float32. Other layers with products are refused then.
        filter_fn: ``filter_fn(layer, name)``: which layers; None for all.

    Returns:
        ``module``, which takes and returns float tensors. Its optimizer needs
            :func:`lns_ops.optim.quantized_updates.quantize_updates_`.

    Raises:
        ValueError: no such format, a filter that matches no layer, a layer that is in one already,
            or one whose sums ``accumulation`` cannot round; nothing has changed then.
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
        each.quantize(torch.zeros(1, 1))  # computes its constants, which a compiler cannot trace
    for _, layer in layers:
        _attach(layer, simulation)
    without_nested_tensors(module)
    return module


def _refuse_other_products(layers: list[tuple[str, nn.Module]]) -> None:
    """Refuse layers that compute products and have no form with rounded sums."""
    for name, layer in layers:
        others = multiplies(layer) or own_products.found_in(layer)
        if type(layer) not in _ROUNDED_SUMS and others:
            raise ValueError(
                f"accumulation with layer {name or '(root)'!r}, a {type(layer).__name__}: only the"
                " sums of nn.Linear and nn.Conv1d to 3d can be rounded; leave accumulation out, or"
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
    """Return whether a layer's code takes its float inputs as they are.

    Code outside of torch may compute with positions or times, as in LNS
    (:mod:`lns_ops.tensor.promotion`). Where it multiplies by matrices of its own, products of LNS
    would encode the inputs, so here they are rounded first.
    """
    has_matrix = any(p.dim() > 1 for p in layer.parameters(recurse=False))
    multiplies_itself = has_matrix and bool(own_products.found_in(layer))
    return has_own_forward(layer) and not multiplies(layer) and not multiplies_itself


def stop_(module: nn.Module) -> nn.Module:
    """Undo :func:`simulate_`: remove the hooks; parameters keep the values that they have."""
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
    """Make one step of dynamic loss scaling.

    Halve the scale after an overflow, double it after :data:`GROWTH_INTERVAL` good steps.
    """
    scale, tracker = root.get_buffer("loss_scale"), root.get_buffer("growth_tracker")
    good = torch.where(finite, tracker + 1, torch.zeros_like(tracker))
    grow = good >= GROWTH_INTERVAL
    factor = torch.where(grow, 2.0, torch.where(finite, 1.0, 0.5))
    scale.copy_((scale * factor).clamp(min=2.0**-24, max=2.0**100))
    tracker.copy_(torch.where(grow, 0, good))
