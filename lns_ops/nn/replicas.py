"""Reject torch's DistributedDataParallel if it wraps parameters that were replaced later.

The wrapper records a module's parameters when it wraps the module, and exchanges the gradients of
these. If a later conversion replaces the parameters, the new gradients stay on each process, and
the replicas would drift apart silently. A wrapper inside the converted module is rejected at once.
A wrapper around it cannot be seen from there and may not be used any more, so it is rejected in the
first forward pass that goes through it.

Limits: nothing is checked after :func:`lns_ops.revert_` of all layers, in compiled code, or if the
wrapper's reducer is torch's compiled one.
"""

from __future__ import annotations

from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lns_ops._compat import active_replicas, replicated_parameters

_checked: WeakSet[DistributedDataParallel] = WeakSet()
"""The wrappers that were checked and have the current parameters of their modules."""


def start_over() -> None:
    """Check each wrapper again, because parameters were replaced."""
    _checked.clear()


def refuse_within(module: nn.Module) -> None:
    """Reject a module that contains a DistributedDataParallel, whose parameters would be replaced.

    Raises:
        ValueError: there is a wrapper in the module.
    """
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "DistributedDataParallel: would keep using the parameters that it wraps instead of"
            " the LNS ones that replace them; call convert_ first, then wrap the model by"
            " lns_ops.distributed_data_parallel"
        )


def refuse_around() -> None:
    """Reject a forward pass within a wrapper whose parameters were replaced.

    Raises:
        ValueError: the forward pass runs within such a wrapper.
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
