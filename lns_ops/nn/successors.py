"""Parameters that replace others when a module is converted or reverted.

A parameter's format is part of its type, so a conversion creates new parameters. They take over
attributes and hooks of the old ones, and replace them in containers that the module holds.
``load_state_dict(..., assign=True)`` encodes or decodes the assigned tensors, so a parameter stays
LNS or float32, as without ``assign``.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

from torch import Tensor, nn

from lns_ops._compat import MODULE_TABLES, move_tensor_hooks, remove_loading_hooks
from lns_ops.nn import replicas
from lns_ops.tensor import LNSTensor


def successor(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with these values that replaces another, with its attributes and hooks.

    A gradient that reaches the old parameter raises, because some code still holds it and would
    train it instead of the new one.
    """
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    own = ("codes", "fmt")
    made.__dict__ |= {name: value for name, value in vars(parameter).items() if name not in own}
    move_tensor_hooks(parameter, made)
    parameter.lns_replaced = True  # type: ignore[attr-defined]
    if parameter.requires_grad:
        parameter.register_hook(_refuse_gradient)
    return made


def _refuse_gradient(grad: Tensor) -> NoReturn:
    raise ValueError(
        f"gradient of shape {tuple(grad.shape)} for a parameter that convert_ or revert_ replaced:"
        " something kept the old one (a list, a closure, a layer tied to it), which would be"
        " trained instead of the network's own; convert tied layers in one call, and take"
        " parameters from the module after the conversion, as attributes or by module.parameters()"
    )


def keep_kinds(layer: nn.Module) -> None:
    """Make assignments to a converted layer's parameters keep their kind, LNS or float32."""
    remove_loading_hooks(layer, _of_its_kind)
    layer.register_load_state_dict_pre_hook(_of_its_kind)


def forget_kinds(layer: nn.Module) -> None:
    """Undo :func:`keep_kinds`."""
    remove_loading_hooks(layer, _of_its_kind)


def _of_its_kind(
    layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Encode or decode tensors before they are assigned to parameters."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        fmt, given = (x.fmt if isinstance(x, LNSTensor) else None for x in (parameter, value))
        if fmt != given:
            values = value.to_float() if isinstance(value, LNSTensor) else value
            values = values.detach()
            state[prefix + name] = values if fmt is None else LNSTensor.from_float(values, fmt)


def follow(module: nn.Module, successors: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace old parameters in lists, dictionaries, ... of a module by their successors."""
    if not successors:
        return
    replicas.start_over()
    seen: set[int] = set()
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name not in MODULE_TABLES:
                follower = _followed(value, successors, seen)
                if follower is not value:
                    part.__dict__[name] = follower


def _followed(value: Any, successors: dict[nn.Parameter, nn.Parameter], seen: set[int]) -> Any:
    """Return the replacement for a value, or the value itself if it contains no old parameter.

    Args:
        value: an attribute, or an item of a container.
        successors: new parameters by old ones.
        seen: ids of lists and dictionaries that were visited, because they may contain themselves.
    """
    if isinstance(value, nn.Parameter):
        return successors.get(value, value)
    if isinstance(value, tuple | set | frozenset):
        followers = [_followed(v, successors, seen) for v in value]
        if all(a is b for a, b in zip(followers, value, strict=True)):
            return value
        return type(value)._make(followers) if hasattr(value, "_make") else type(value)(followers)
    if isinstance(value, list | deque | dict) and id(value) not in seen:
        seen.add(id(value))
        for key, held in value.items() if isinstance(value, dict) else enumerate(value):
            follower = _followed(held, successors, seen)
            if follower is not held:
                value[key] = follower
    return value
