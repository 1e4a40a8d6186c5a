"""Refusal of torch's DistributedDataParallel where it goes on with parameters that are no more.

It takes note of a module's parameters as it wraps it, and exchanges the gradients of those. A
conversion that comes later puts others in their place, whose gradients stay on each process:
training would go on, and the replicas drift apart. A wrapper within the module that is converted is
refused at once. One around it cannot be seen from there, and may be about to be thrown away: it is
refused in the first forward pass that goes through it.

Limits: :func:`lns_ops.revert_` of all layers leaves none that looks; nor is compiled code looked
at, nor a wrapper whose reducer is torch's compiled one.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lns_ops._compat import active_replicas, replicated_parameters

_checked: WeakSet[DistributedDataParallel] = WeakSet()
"""The wrappers that know the parameters that their modules have."""


def start_over() -> None:
    """Look at each wrapper again: parameters were replaced."""
    _checked.clear()


def refuse_within(module: nn.Module) -> None:
    """Refuse a module whose parameters DistributedDataParallel knows, as they would be replaced.

    Raises:
        ValueError: there is a wrapper in it.
    """
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "DistributedDataParallel: would go on with the parameters that it wraps, and not with"
            " the LNS ones that take their place; call convert_ first, then wrap the model by"
            " lns_ops.distributed_data_parallel"
        )


def refuse_around() -> None:
    """Refuse a forward pass within a wrapper of parameters that were replaced since.

    Raises:
        ValueError: it is one.
    """
    wrapper = active_replicas()
    if wrapper is None or wrapper in _checked:
        return
    if any(hasattr(parameter, "lns_replaced") for parameter in replicated_parameters(wrapper)):
        raise ValueError(
            "DistributedDataParallel: wraps parameters that convert_ or revert_ replaced later, so"
            " gradients of the new ones would not be exchanged and the replicas would drift apart;"
            " call convert_ first, then wrap the model by lns_ops.distributed_data_parallel"
            " (here: lns_ops.distributed_data_parallel(wrapper.module))"
        )
    _checked.add(wrapper)
