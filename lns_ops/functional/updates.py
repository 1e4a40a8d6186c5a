"""In-place optimizer updates as torch operators: SGD and Adam, in LNS or float32 arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lns_ops import cpu, cuda
from lns_ops.cuda.updates import advance, may_wait, updates_together
from lns_ops.functional.library import FORMAT, cached_format, define_operator, operators_for
from lns_ops.spec.format import LNSFormat

__all__ = [
    "adam_update_", "adam_update_float32_", "advance", "sgd_update_", "sgd_update_float32_",
    "updates_together",
]  # fmt: skip


def _define_update(name: str, schema: str) -> None:
    """Define an in-place update, called ``NAME_`` in torch and ``NAME`` in :mod:`lns_ops.cpu`.

    Its parameters have the names in ``schema``. ``rate`` is for GPUs: a tensor there that replaces
    ``negative_lr`` (int16) or ``lr`` (float64).
    """
    kernel, names = getattr(cpu, name), [parameter.split()[-1] for parameter in schema.split(", ")]

    def on_cpu(*arguments: Any) -> None:
        *values, bits, fraction_bits = arguments
        options = {
            k: v.numpy() if isinstance(v, Tensor) else v for k, v in zip(names, values, strict=True)
        }
        options["step"] = 0 if options["step"] is None else int(options["step"])
        del options["rate"]
        kernel(fmt=cached_format(bits, fraction_bits), **options)

    define_operator(f"{name}_", f"({schema}, {FORMAT}) -> ()", on_cpu, lambda *arguments: None)


def _number_or_tensor(value: Any, weight: Tensor) -> tuple[Any, Tensor | None]:
    """Split a rate into the operator's arguments: the number, or 0 and the tensor on its GPU."""
    if not isinstance(value, Tensor):
        return value, None
    if not weight.is_cuda or value.device != weight.device:
        return value.item(), None
    return 0, value.double() if value.is_floating_point() else value


_SGD = "Tensor(a!) weight, Tensor grad, Tensor(b!)? buffer, Tensor(c!)? compensation, Tensor? step"
_ADAM = (
    "Tensor(a!) weight, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) root, Tensor(d!)? residue,"
    " Tensor(e!)? compensation, Tensor step"
)
_BETAS = "float beta1, float beta2, float eps"
_LAST = "int? key, Tensor? rate"
_define_update("sgd_update", f"{_SGD}, int negative_lr, int? momentum, {_LAST}")
_define_update("sgd_update_float32", f"{_SGD}, float lr, float? momentum, {_LAST}")
_define_update(
    "adam_update", f"{_ADAM}, int negative_lr, {_BETAS}, int? weight_decay, bool decoupled, {_LAST}"
)
_define_update(
    "adam_update_float32",
    f"{_ADAM}, float lr, {_BETAS}, float? weight_decay, bool decoupled, {_LAST}",
)


def sgd_update_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    negative_lr: int | Tensor,
    momentum: int | None = None,
    buffer: Tensor | None = None,
    compensation: Tensor | None = None,
    step: Tensor | None = None,
    key: int | None = None,
) -> None:
    """Make one SGD step in place, every operation in LNS.

    :func:`lns_ops.reference.sgd_update` has the equations.

    ``negative_lr`` and ``momentum`` are codes. ``negative_lr`` may be a 0-dim int16 tensor on the
    weight's device, where it is read. ``weight``, ``buffer`` and ``compensation`` are contiguous
    and change in place. With a ``key`` the sum of weight and update is rounded at random with the
    bits of (key, step); ``step`` is a 0-dim int64 tensor on the weight's device.
    """
    if (step is None) != (key is None):
        raise ValueError(
            f"step={step}, key={key}: random rounding needs both; pass both or neither"
        )
    number, rate = _number_or_tensor(negative_lr, weight)
    update = (
        partial(cuda.sgd_update_, wait=True)
        if may_wait(weight)
        else operators_for(weight).sgd_update_
    )
    update(
        weight, grad, buffer, compensation, step, number, momentum, key, rate, fmt.bits,
        fmt.fraction_bits,
    )  # fmt: skip


def adam_update_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    step: Tensor,
    exp_avg: Tensor,
    root: Tensor,
    residue: Tensor | None = None,
    compensation: Tensor | None = None,
    negative_lr: int | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: int | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> None:
    """Make one Adam or AdamW step in place, every operation in LNS.

    :func:`lns_ops.reference.adam_update` has the equations.

    ``weight``, ``exp_avg``, ``root``, ``residue`` and ``compensation`` are contiguous int16 with
    the same shape and change in place; ``step`` is a 0-dim int64 tensor on the weight's device, 1
    for the first step; ``negative_lr`` (as for :func:`sgd_update_`) and ``weight_decay`` are codes.
    Either ``residue`` or ``key`` must be given.
    """
    if residue is None and key is None:
        raise ValueError(
            "residue=None, key=None: the second moment would never change; pass a residue (int16"
            " zeros) or a key"
        )
    number, rate = _number_or_tensor(negative_lr, weight)
    update = (
        partial(cuda.adam_update_, wait=True)
        if may_wait(weight)
        else operators_for(weight).adam_update_
    )
    update(
        weight, grad, exp_avg, root, residue, compensation, step, number, beta1, beta2, eps,
        weight_decay, decoupled, key, rate, fmt.bits, fmt.fraction_bits,
    )  # fmt: skip


def sgd_update_float32_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    lr: float | Tensor,
    momentum: float | None = None,
    buffer: Tensor | None = None,
    compensation: Tensor | None = None,
    step: Tensor | None = None,
    key: int | None = None,
) -> None:
    """Make one SGD step in place, with float32 operations on decoded codes.

    Arguments are as for :func:`sgd_update_`, with ``lr`` a number or a 0-dim float tensor;
    :func:`lns_ops.reference.sgd_update_float32` has the equations.
    """
    if (step is None) != (key is None):
        raise ValueError(
            f"step={step}, key={key}: random rounding needs both; pass both or neither"
        )
    number, rate = _number_or_tensor(lr, weight)
    operators_for(weight).sgd_update_float32_(
        weight, grad, buffer, compensation, step, number, momentum, key, rate, fmt.bits,
        fmt.fraction_bits,
    )  # fmt: skip


def adam_update_float32_(
    weight: Tensor,
    grad: Tensor,
    fmt: LNSFormat,
    *,
    step: Tensor,
    exp_avg: Tensor,
    root: Tensor,
    residue: Tensor | None = None,
    compensation: Tensor | None = None,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | None = None,
    decoupled: bool = False,
    key: int | None = None,
) -> None:
    """Make one Adam or AdamW step in place, with float32 operations on decoded codes.

    Arguments are as for :func:`adam_update_`, with ``lr`` a number or a 0-dim float tensor;
    :func:`lns_ops.reference.adam_update_float32` has the equations.
    """
    if residue is None and key is None:
        raise ValueError(
            "residue=None, key=None: the second moment would never change; pass a residue (int16"
            " zeros) or a key"
        )
    number, rate = _number_or_tensor(lr, weight)
    operators_for(weight).adam_update_float32_(
        weight, grad, exp_avg, root, residue, compensation, step, number, beta1, beta2, eps,
        weight_decay, decoupled, key, rate, fmt.bits, fmt.fraction_bits,
    )  # fmt: skip
