"""LNSTensor: a torch.Tensor of LNS codes, two bytes a value, with LNS arithmetic.

LNSTensor is a wrapper subclass. torch sees a float32 tensor of the same shape, autograd uses its
own formulas, and each aten operation that reaches ``__torch_dispatch__`` is looked up in a table of
LNS kernels. nn.Module parameters, hooks, ``state_dict`` and deepcopy work unmodified.

There are few conversions between LNS and float, and all are documented:

- Functions without an LNS arithmetic are computed in float32 and encoded once. They are listed by
  name (:mod:`lns_ops.tensor.decoded`).
- If an operation combines float tensors with LNS, the floats are encoded by one rule, and counted
  (:mod:`lns_ops.tensor.promotion`). Python numbers, booleans and integers are encoded, too.
- Any other operation without an LNS kernel raises with its name. Inside
  :func:`lns_ops.allow_float_fallback` it is computed in float32 and counted.
- Losses (``cross_entropy``, ``log_softmax``, ``mse_loss``, ...: see
  :mod:`lns_ops.tensor.ops.losses`) first decode their inputs to float32, so the gradient of the
  loss is computed in float32 and enters the network as LNS codes.

Operations are defined in :mod:`lns_ops.tensor.ops`, one topic a file, and registered in
:mod:`lns_ops.tensor.registry`: with :func:`handles` for aten operators, and with :func:`replaces`
for torch functions whose LNS form has its own gradient formulas. An in-place operator uses its
out-of-place form. A composite operator that is not decomposed before dispatch (under
``torch.inference_mode``) uses torch's decomposition.

:meth:`LNSTensor.from_float` and :meth:`LNSTensor.to_float` convert explicitly. Both are
differentiable; each one's gradient is converted by the other.
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
