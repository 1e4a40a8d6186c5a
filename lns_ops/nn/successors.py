"""Parameters that take the place of others when a module is converted or reverted.

A parameter's format is part of its type, so a conversion makes new ones. They take over attributes
and hooks, and the places of the old ones in containers that the module keeps. What
``load_state_dict(..., assign=True)`` puts in the place of a converted module's parameter becomes of
its kind, as what is copied into it does.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

from torch import Tensor, nn

from lns_ops._compat import MODULE_TABLES, move_tensor_hooks, remove_loading_hooks
from lns_ops.nn import replicas
from lns_ops.tensor import LNSTensor


def successor(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return the parameter of these values that takes another's place: its attributes and hooks.

    A gradient that reaches the old one raises: something kept it and would train it alone.
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
        " trained in place of the network's own; convert tied layers in one call, and take"
        " parameters from the module after the conversion, as attributes or by module.parameters()"
    )


def keep_kinds(layer: nn.Module) -> None:
    """Have parameters that are assigned to a converted layer be in LNS or not, as those before."""
    remove_loading_hooks(layer, _of_its_kind)
    layer.register_load_state_dict_pre_hook(_of_its_kind)


def forget_kinds(layer: nn.Module) -> None:
    """Undo :func:`keep_kinds`."""
    remove_loading_hooks(layer, _of_its_kind)


def _of_its_kind(
    layer: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Encode or decode what is about to be assigned to parameters."""
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
    """Put successors in the place of parameters that lists, dictionaries, ... of a module hold."""
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
    """Return what takes a value's place: itself, where it holds none of the parameters.

    Args:
        value: an attribute, or what one holds.
        successors: parameters by those that they take the place of.
        seen: the ids of lists and dictionaries that were walked, which may hold themselves.
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
