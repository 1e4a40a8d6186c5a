"""Conversion of an ordinary torch module to LNS in place, keeping its weights, and back.

:func:`convert_` converts a module, :func:`revert_` reverts it.

There are two scopes:

- ``matmul``: parameters, activations and gradients stay float32. The products and sums of each
  linear and convolution layer, forward and backward, are LNS. This includes recurrent layers,
  attention's projections, subclasses, and products that a module computes itself with a weight
  (``x @ self.w``, ``torch.einsum``). Products of two activations are float32. A layer's class is
  replaced by one of :mod:`lns_ops.nn.matmul_layers`; its parameters are untouched. Layers without
  products (normalization, embeddings) are not changed. Neither are layers whose products have no
  LNS form (complex or quantized weights); :func:`lns_ops.summary` lists these.
- ``everywhere``: parameters become :class:`~lns_ops.tensor.LNSTensor`, so every operation of
  forward, backward and update is LNS. Converted layers encode float inputs, so the module takes
  ordinary tensors; layers left out decode LNS inputs. Integer parameters are not changed. Buffers
  stay float32, and are encoded when an operation combines them with LNS
  (:mod:`lns_ops.tensor.promotion`). In LNS a counter or a running mean would stop once its steps
  are less than half an ulp, and a frequency that is off by 0.27 % is off by radians at position
  1,000.

Layers may have different formats, and a module may be converted in steps, one scope or format at a
time. If one layer's output enters a layer of another format, it is encoded again. An operation
outside a layer that combines two formats (a residual addition) raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from lns_ops import functional as lns
from lns_ops._compat import is_exporting, is_recorded, remove_forward_hooks, tree_map
from lns_ops.cuda import faults
from lns_ops.formats import NumberFormat, parse
from lns_ops.nn import replicas
from lns_ops.nn.choice import Filter, Format, check, check_ties, choose
from lns_ops.nn.layer_kinds import (
    computes_weights,
    has_own_forward,
    is_quantized,
    multiplies,
    owners_of,
    parameters_of,
    without_nested_tensors,
)
from lns_ops.nn.matmul_layers import layer_class, original_class
from lns_ops.nn.own_products import found_in
from lns_ops.nn.products.context import look_for_others
from lns_ops.nn.products.stepping import StepIn, StepOut
from lns_ops.nn.simulate import simulate_, stop_
from lns_ops.nn.successors import follow, forget_kinds, keep_kinds, successor
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor, in_float32, in_format, integers, promotion
from lns_ops.tensor.limits import decays, underflow

SCOPES = ("matmul", "everywhere")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The record of how a layer was converted, stored as the layer's attribute ``lns_conversion``.

    Attributes:
        scope: ``matmul`` or ``everywhere``.
        fmt: the format.
        name: the layer's path in the module that was converted.
    """

    scope: str
    fmt: LNSFormat
    name: str = field(default="", compare=False)


def _in_lns(x: Any, fmt: LNSFormat, keeps_floats: bool = False) -> Any:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        return x
    promotion.refuse_layout(x)
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"torch.autocast (mixed precision) of a layer in {fmt}: would compute in"
            " float16 or bfloat16 instead; turn it off (bf16=False, mixed_precision='no'), or"
            " disable it around the module (torch.autocast(..., enabled=False))"
        )
    if keeps_floats and not isinstance(x, LNSTensor):
        return x
    return in_format(x, fmt.bits, fmt.fraction_bits)


def _in_float(x: Any) -> Any:
    return in_float32(x) if isinstance(x, LNSTensor) else x


for _name in ("_in_lns", "_in_float"):  # so that torch.fx.symbolic_trace records the hooks
    fx.wrap(_name)


@dataclass(frozen=True)
class _Encode:
    """The forward pre-hook that encodes a converted layer's float inputs.

    Masks passed as keyword arguments are not encoded. A layer with its own ``forward`` keeps all
    float inputs. Until :class:`_Leave`, GPU faults are reported with the layer's name.
    """

    fmt: LNSFormat
    keeps_floats: bool = False
    name: str = ""

    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if not torch.compiler.is_compiling():
            faults.enter(self.name)
        if is_exporting() or is_recorded():
            raise NotImplementedError(
                f"torch.export, torch.jit.trace or make_fx of a layer in {self.fmt}: its graph"
                " cannot contain an LNSTensor; export the float module that lns_ops.revert_"
                " returns, or convert with scope='matmul'"
            )
        if not torch.compiler.is_compiling():
            replicas.refuse_around()
            if not kwargs and all(map(self._is_kept, args)):
                return None
        with promotion.named(f"an input of a {type(module).__name__}"):
            named = {
                name: value if "mask" in name else tree_map(self._encoded, value)
                for name, value in kwargs.items()
            }
            return tree_map(self._encoded, args), named

    def _is_kept(self, x: Any) -> bool:
        """Return whether ``x`` is already in the format, the usual case without autocast."""
        return (
            type(x) is LNSTensor
            and x.fmt == self.fmt
            and not torch.is_autocast_enabled(x.codes.device.type)
        )

    def _encoded(self, x: Any) -> Any:
        return _in_lns(x, self.fmt, self.keeps_floats)


@dataclass(frozen=True)
class _Leave:
    """The forward hook that ends :class:`_Encode`: GPU faults no longer get the layer's name."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            faults.leave()


@dataclass(frozen=True)
class _Decode:
    """The forward hook that decodes a float layer's LNS inputs to float32."""

    def __call__(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        # called by its name, because fx.wrap replaces the name while torch.fx traces
        decoded: tuple[Any, dict[str, Any]] = tree_map(lambda x: _in_float(x), (args, kwargs))
        return decoded


def _unhook(module: nn.Module) -> None:
    remove_forward_hooks(module, (_Encode, _Leave, _Decode, _OwnForward, StepOut, StepIn))


def _hook(module: nn.Module, hook: _Encode | _Decode) -> None:
    _unhook(module)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _encoded(chosen: list[tuple[str, nn.Module, LNSFormat]]) -> dict[nn.Parameter, LNSTensor]:
    """Return the LNS values of the layers' parameters; integer parameters are left out.

    Raises:
        ValueError: a parameter is complex, or contains a NaN or an infinity.
    """
    found: dict[nn.Parameter, LNSTensor] = {}
    for name, layer, fmt in chosen:
        for its_name, parameter in parameters_of(layer):
            if parameter.is_floating_point() or parameter.is_complex():
                try:
                    found[parameter] = LNSTensor(lns.encode(parameter.detach(), fmt), fmt)
                except (ValueError, NotImplementedError) as error:  # the latter: other subclasses
                    raise type(error)(
                        f"parameter {its_name} of layer {name or '(root)'!r}: {error}; or leave the"
                        " layer out with filter_fn"
                    ) from error
    return found


def _convert_everywhere(
    module: nn.Module, fmt: LNSFormat, path: str, successors: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Replace a layer's parameters, which several layers may share, by LNS, and hook its inputs."""
    for name, parameter in parameters_of(module):
        if parameter in successors:
            setattr(module, name, successors[parameter])
    _hook(module, _Encode(fmt, has_own_forward(module), path))
    module.register_forward_hook(_Leave(), always_call=True)


@dataclass(frozen=True)
class _OwnForward:
    """A forward hook without effect. If it is present, torch does not use its fused encoder layer,
    which would multiply in float32 in evaluation mode (torch.nn.TransformerEncoderLayer).
    """

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


def _convert_matmul(module: nn.Module, fmt: LNSFormat) -> None:
    module.__class__ = layer_class(type(module))
    module.fmt = fmt  # type: ignore[assignment]
    if isinstance(module, nn.MultiheadAttention):
        module.register_forward_pre_hook(_OwnForward())


def convert_(
    module: nn.Module,
    fmt: Format | NumberFormat | Mapping[str, Format],
    scope: str = "matmul",
    filter_fn: Filter | None = None,
) -> nn.Module:
    """Convert ``module`` and its submodules to LNS in place, keeping the weights.

    In scope ``everywhere`` the weights are rounded to ``fmt``.

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> net = convert_(net, "lns12", scope="everywhere")
    >>> net(torch.ones(3, 8)).fmt.name
    'lns12'

    Args:
        module: any torch module; :mod:`lns_ops.nn.convert` describes the effect on its layers.
        fmt: the LNS format, or its name; or a mapping from patterns of layer names to formats, such
            as ``{"layer1.*": "lns12", "*": "lns16"}``. The first matching pattern counts; layers
            without one are not converted. Any other number format, or its name (``bfloat16``,
            ``int8/channel``), is simulated (:mod:`lns_ops.nn.simulate`); it needs scope
            ``everywhere``.
        scope: ``matmul`` or ``everywhere``, see :mod:`lns_ops.nn.convert`.
        filter_fn: ``filter_fn(submodule, name)`` returns True to convert the layer, False or None
            to leave it out, or its format; name is the dotted path, "" for ``module`` itself.

    Returns:
        ``module``. In scope ``matmul`` it takes and returns float tensors. In scope ``everywhere``
            it takes float tensors and returns an LNSTensor, on which ``F.cross_entropy``,
            ``argmax`` and ``to_float`` work.

    Raises:
        ValueError: unknown scope or format; a filter or pattern that matches no layer; a pattern
            whose layers all match earlier ones; an empty mapping; a layer that cannot be
            converted; or (in scope ``everywhere``) layers that share a parameter but would have
            different formats. The module is unchanged then.

    In scope ``everywhere`` the module has new parameters afterwards. Create the optimizer after the
    conversion; the step of an older one raises.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r}: must be one of {', '.join(SCOPES)}")
    if isinstance(fmt, str) and ("/" in fmt or not fmt.startswith("lns")):
        fmt = parse(fmt)
    if isinstance(fmt, NumberFormat):
        return _simulate(module, fmt, scope, filter_fn)
    for each in fmt.values() if isinstance(fmt, Mapping) else [fmt]:
        LNSFormat.of(each)
    _convert_to_lns(module, fmt, scope, filter_fn)
    return module


def _simulate(
    module: nn.Module, fmt: NumberFormat, scope: str, filter_fn: Filter | None
) -> nn.Module:
    if scope != "everywhere":
        raise ValueError(
            f"scope={scope!r} with format {fmt}: only LNS has scopes; use scope='everywhere'"
        )
    chosen = None if filter_fn is None else lambda m, name: bool(filter_fn(m, name))
    return simulate_(module, fmt, filter_fn=chosen)


def _convert_to_lns(
    module: nn.Module, fmt: Format | Mapping[str, Format], scope: str, filter_fn: Filter | None
) -> None:
    everywhere = scope == "everywhere"
    if everywhere:
        replicas.refuse_within(module)
    owners = owners_of(module)
    relevant = (
        [(n, m) for n, m in owners if multiplies(m) or not is_quantized(m)]
        if everywhere
        else [(n, m) for n, m in module.named_modules() if multiplies(m) or found_in(m)]
    )
    chosen = choose(relevant, fmt, filter_fn)
    for name, layer, _ in chosen:
        check(name, layer)
    if everywhere:
        check_ties(owners, chosen)
    underflow.start_over()
    integers.start_over()
    decays.start_over()
    follow(module, _convert_layers(chosen, scope))
    if not everywhere:
        look_for_others()
        _leave_out(module, relevant)
    else:
        _decode_at_float_layers(owners)


def _convert_layers(
    chosen: list[tuple[str, nn.Module, LNSFormat]], scope: str
) -> dict[nn.Parameter, nn.Parameter]:
    """Convert layers, and return the new parameter for each replaced one."""
    encoded = _encoded(chosen) if scope == "everywhere" else {}
    successors = {parameter: successor(parameter, x) for parameter, x in encoded.items()}
    for name, layer, picked in chosen:
        path = name or "(root)"
        if scope == "matmul":
            _convert_matmul(layer, picked)
        else:
            _convert_everywhere(layer, picked, path, successors)
        conversion = Conversion(scope=scope, fmt=picked, name=path)
        layer.lns_conversion = conversion  # type: ignore[assignment]
        keep_kinds(layer)
    return successors


def _leave_out(module: nn.Module, relevant: list[tuple[str, nn.Module]]) -> None:
    """Keep modules that are left out outside the LNS products of the modules around them."""
    without_nested_tensors(module)
    around = [
        f"{name}." if name else ""
        for name, layer in relevant
        if hasattr(layer, "lns_conversion") and has_own_forward(layer)
    ]
    of_torch = [(n, m) for n, m in module.named_modules() if computes_weights(m)]
    for name, layer in (*relevant, *of_torch):
        remove_forward_hooks(layer, (StepOut, StepIn))
        if not hasattr(layer, "lns_conversion") and any(map(name.startswith, around)):
            layer.register_forward_pre_hook(StepOut())
            layer.register_forward_hook(StepIn(), always_call=True)


def _decode_at_float_layers(owners: list[tuple[str, nn.Module]]) -> None:
    for _, layer in owners:
        conversion: Any = getattr(layer, "lns_conversion", None)
        if conversion is None or conversion.scope == "matmul":
            _hook(layer, _Decode())


def _stays_float(module: nn.Module, name: str, value: Any) -> Tensor | None:
    """Return the float32 values of an LNS value that is assigned to a float buffer, otherwise None.

    An example is ``self.mean = 0.9 * self.mean + 0.1 * x``, because float32 + LNS is LNS.
    """
    if not isinstance(value, LNSTensor):
        return None
    old = dict(module.named_buffers(recurse=False)).get(name)
    if old is None or isinstance(old, LNSTensor):
        return None
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"buffer {name!r} of a {type(module).__name__} is replaced by a value in {value.fmt}."
            " It is decoded to float32, but was rounded before, so a moving average would stop:"
            f" change the buffer in place (self.{name}.lerp_(x, 0.01), or mul_ and add_), or"
            " compute with x.to_float()",
            stacklevel=3,
        )
    return value.to_float()


register_module_buffer_registration_hook(_stays_float)  # type: ignore[arg-type]


def revert_(module: nn.Module) -> nn.Module:
    """Undo :func:`convert_` or :func:`simulate_` in place.

    Layers get their original classes back, and LNS parameters and buffers become float32. Weights
    of scope ``everywhere`` keep their rounded values. Gradients are dropped; shared parameters stay
    shared.

    >>> revert_(convert_(nn.Linear(4, 2), "lns12", scope="everywhere"))
    Linear(in_features=4, out_features=2, bias=True)

    Returns:
        ``module``.
    """
    stop_(module)
    decoded: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        _unhook(layer)
        forget_kinds(layer)
        original = original_class(type(layer))
        if original is not type(layer):
            layer.__class__ = original
            layer.__dict__.pop("stays_float32", None)
            del layer.fmt
        for name, parameter in parameters_of(layer):
            if isinstance(parameter, LNSTensor):
                if parameter not in decoded:
                    values = lns.decode(parameter.codes, parameter.fmt)
                    decoded[parameter] = successor(parameter, values)
                setattr(layer, name, decoded[parameter])
        for name, buffer in list(layer.named_buffers(recurse=False, remove_duplicate=False)):
            if isinstance(buffer, LNSTensor):
                setattr(layer, name, lns.decode(buffer.codes, buffer.fmt))
        if hasattr(layer, "lns_conversion"):
            del layer.lns_conversion
    follow(module, decoded)
    return module
