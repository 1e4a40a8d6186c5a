"""The module that an optimizer steps where it is not the model itself: with shards of its
parameters (:mod:`trainers.parallel.partitioned`), or copies of them on the CPU
(:mod:`trainers.optim.offload`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def stepped_module(
    module: nn.Module,
    made_of: Callable[[Tensor], Tensor],
    made: dict[Tensor, nn.Parameter] | None = None,
) -> nn.Module:
    """Make a module like ``module`` without its code, with parameters made of its own.

    Buffers are shared, the number format of each layer is kept, and tied parameters stay tied.

    Args:
        module: the original module.
        made_of: returns the values of a new parameter, given the original parameter's values.
        made: new parameters by original parameter, for parameters that were already converted.
    """
    own, made = nn.Module(), {} if made is None else made
    for name, parameter in module.named_parameters(recurse=False):
        if parameter not in made:
            values = made_of(parameter.detach())
            made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        own.register_parameter(name, made[parameter])
    for name, buffer in module.named_buffers(recurse=False):
        own.register_buffer(name, buffer)
    for name, child in module.named_children():
        own.add_module(name, stepped_module(child, made_of, made))
    if hasattr(module, "simulation"):
        own.simulation = module.simulation
    return own
