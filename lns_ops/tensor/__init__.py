"""LNSTensor: a torch.Tensor of LNS codes, two bytes a value, with LNS arithmetic.

A wrapper subclass: torch sees a float32 tensor of the same shape, autograd runs its own formulas,
and each aten operation that reaches ``__torch_dispatch__`` is looked up in a table of LNS kernels.
nn.Module parameters, hooks, ``state_dict`` and deepcopy work unmodified. Conversions are few and
written down: functions without an arithmetic in LNS are computed in float32 and encoded once, by
name (:mod:`lns_ops.tensor.decoded`); float tensors that meet LNS ones are encoded by one rule, and
counted (:mod:`lns_ops.tensor.promotion`), as Python numbers, booleans and integers are. Any other
operation without an LNS kernel raises with its name (or is computed in float32 and counted, inside
:func:`lns_ops.allow_float_fallback`). At the edge of a network the
losses (``cross_entropy``, ``log_softmax``, ``mse_loss``, ...: see :mod:`lns_ops.tensor.ops.losses`)
take the values out to float32 first, so that the gradient of the loss is computed in float32 and
enters the network as LNS codes.

Operations live in :mod:`lns_ops.tensor.ops`, one topic a file, and register themselves in
:mod:`lns_ops.tensor.registry`: :func:`handles` for aten operators, and :func:`replaces` for torch
functions whose LNS form has gradient formulas of its own. An operator in place takes its form out
of place; a composite one that arrives whole (under ``torch.inference_mode``) is taken apart by
torch's own decomposition.

Two functions cross the border, differentiable both ways: :meth:`LNSTensor.from_float` and
:meth:`LNSTensor.to_float`; the gradient crosses in the opposite direction by the opposite
conversion.
"""

from lns_ops.tensor.lns_tensor import (
    LNSTensor,
    _rebuilt,
    in_float32,
    in_format,
    operands,
    storage_of,
)
from lns_ops.tensor.registry import aten, handles, replaces, replaces_untraced

__all__ = [
    "LNSTensor",
    "_rebuilt",
    "aten",
    "handles",
    "in_float32",
    "in_format",
    "operands",
    "replaces",
    "replaces_untraced",
    "storage_of",
]
