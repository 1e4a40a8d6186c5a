"""The choice of layers to convert, and of their formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from lns_ops.nn.layer_kinds import parameters_of
from lns_ops.nn.simulate import layer_names, refuse_lazy
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor

Format = LNSFormat | str
Filter = Callable[[nn.Module, str], "bool | Format | None"]


def _matched(formats: Mapping[str, Format], name: str) -> Format | None:
    return next((fmt for pattern, fmt in formats.items() if fnmatchcase(name, pattern)), None)


def _check_patterns(formats: Mapping[str, Format], names: list[str]) -> None:
    """Reject patterns without effect: no layer matches, or earlier patterns take all that match.

    Raises:
        ValueError: there is such a pattern.
    """
    taken: dict[str, str] = {}  # layer name -> the first pattern that matches it
    for pattern in formats:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"format for {pattern!r} matches no layer: {layer_names(names)}")
        if all(name in taken for name in matched):
            earlier = ", ".join(map(repr, dict.fromkeys(taken[name] for name in matched)))
            raise ValueError(
                f"format for {pattern!r} applies to no layer: {earlier} before it takes every layer"
                " that it matches, because the first matching pattern counts; put the more specific"
                " pattern first"
            )
        taken = dict.fromkeys(matched, pattern) | taken


def choose(
    owners: list[tuple[str, nn.Module]],
    fmt: Format | Mapping[str, Format],
    filter_fn: Filter | None,
) -> list[tuple[str, nn.Module, LNSFormat]]:
    """Return the layers to convert, with names and formats.

    Raises:
        ValueError: a pattern of ``fmt``, or ``filter_fn``, matches no layer, or ``fmt`` has no
            pattern.
    """
    names, chosen = [name for name, _ in owners], []
    if isinstance(fmt, Mapping):
        _check_patterns(fmt, names)
        if not fmt and filter_fn is None:  # filter_fn could return formats
            raise ValueError(
                "fmt={}: has no pattern, so no layer would be converted; give patterns of layer"
                f" names and their formats, {{'*': 'lns16'}}: {layer_names(names)}"
            )
    for name, layer in owners:
        default = _matched(fmt, name) if isinstance(fmt, Mapping) else fmt
        answer = filter_fn(layer, name) if filter_fn is not None else True
        picked = default if answer is True else answer
        if picked is not None and picked is not False:
            chosen.append((name, layer, LNSFormat.of(picked)))
    if filter_fn is not None and owners and not chosen:
        raise ValueError(f"filter_fn matches no layer: {layer_names(names)}")
    return chosen


def check(name: str, layer: nn.Module) -> None:
    """Check that a layer can be converted.

    Raises:
        ValueError: the layer is LNS already, is scripted, or has uninitialized (lazy) parameters.
    """
    if hasattr(layer, "lns_conversion") or any(
        isinstance(p, LNSTensor) for p in layer.parameters(recurse=False)
    ):
        raise ValueError(
            f"layer {name or '(root)'!r}: is LNS already; convert a module once (or revert_ it), or"
            " leave the layer out with filter_fn"
        )
    if isinstance(layer, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name or '(root)'!r}: is scripted, so hooks cannot be added; convert the module"
            " before"
            " torch.jit.script, or leave the layer out with filter_fn"
        )
    refuse_lazy(name, layer)


def check_ties(
    owners: list[tuple[str, nn.Module]], chosen: list[tuple[str, nn.Module, LNSFormat]]
) -> None:
    """Reject conversions that would split a parameter that layers share.

    Raises:
        ValueError: layers that share a parameter would have different formats, or one of them was
            converted earlier without the others.
    """
    formats, first = (
        {layer: fmt for _, layer, fmt in chosen},
        dict[nn.Parameter, tuple[str, nn.Module]](),
    )
    for name, layer in owners:
        for its_name, parameter in parameters_of(layer):
            if layer in formats and hasattr(parameter, "lns_replaced"):
                raise ValueError(
                    f"layer {name!r}: its {its_name} was converted with another layer before, which"
                    " would keep its own copy from now on; convert layers that share a parameter in"
                    " one call, or give the layer a parameter of its own"
                )
            other_name, other = first.setdefault(parameter, (name, layer))
            if formats.get(layer) != formats.get(other):
                mine, theirs = (str(formats.get(each, "as it is")) for each in (layer, other))
                raise ValueError(
                    f"layers {other_name!r} and {name!r} share the parameter {its_name}, and would"
                    f" be {theirs} and {mine}: convert both in the same way or neither (filter_fn,"
                    " formats by name), or give one of them a parameter of its own"
                )
