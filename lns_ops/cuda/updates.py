"""In-place optimizer updates on NVIDIA GPUs: SGD and Adam, in LNS arithmetic, or in float32 on
decoded codes.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lns_ops._compat import foreach_add_
from lns_ops.cuda.elementwise import LISTS, WITH_TABLE, elementwise_kernel
from lns_ops.cuda.runtime import (
    THREADS,
    CudaKernel,
    alignment_flag,
    compile_function,
    compile_options,
    device_tables,
    grid_of,
    kernel_source,
    pointer_of,
    uploaded,
)
from lns_ops.spec.format import LNSFormat, stochastic_steps
from lns_ops.spec.gaussian_log import decay_table, stochastic_tables
from lns_ops.spec.reference_updates import adam_codes, adam_scalars

_FLOAT32_UPDATES = {
    **{
        name.replace("sgd", "sgd_float32"): "PPPPPPqqffiPPPP"
        for name in WITH_TABLE
        if name.startswith("sgd")
    },
    **{
        name.replace("adam", "adam_float32"): "PPPPPPPPPiqqffffffiPPPP"
        for name in WITH_TABLE
        if name.startswith("adam")
    },
}


@lru_cache(maxsize=256)
def _float32_update(name: str, bits: int, fraction_bits: int, device: int) -> CudaKernel:
    defines = {"FAST": 0, "ADAM_KERNELS": int(name.startswith("adam"))}
    options = compile_options(LNSFormat(bits, fraction_bits), device, **defines)
    return CudaKernel(
        compile_function(kernel_source("updates_float32.cu"), f"lns_{name}", options, device),
        _FLOAT32_UPDATES[name],
        0,
    )


atexit.register(_float32_update.cache_clear)  # before CuPy is unloaded; see lns_ops.cuda.runtime


@lru_cache(maxsize=64)
def _fine_table(fraction_bits: int, device: int) -> Tensor:
    """Return the corrections of additions with random rounding.

    They are G+ and G- of each distance, with 16 bits below the ulp.
    """
    return uploaded(np.stack(stochastic_tables(fraction_bits), axis=1), device)


@lru_cache(maxsize=1024)
def _adam_tables(
    beta1: float, beta2: float, eps: float, fmt: LNSFormat, device: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the corrections and eps of each step, and the decay table of the second moment."""
    codes = adam_codes(beta1, beta2, eps, fmt)
    tables = codes.correction, codes.eps_hat, decay_table(beta2, fmt.fraction_bits).table
    correction, eps_hat, decay = (uploaded(table, device) for table in tables)
    return correction, eps_hat, decay


def _check_in_place(weight: Tensor, grad: Tensor, **updated: Tensor | None) -> None:
    for name, tensor in {"weight": weight, **updated}.items():
        if tensor is not None and (not tensor.is_contiguous() or tensor.shape != weight.shape):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: must be"
                f" contiguous, of the weight's shape {tuple(weight.shape)}, to be updated in place"
            )
    if grad.shape != weight.shape:
        raise ValueError(
            f"gradient of shape {tuple(grad.shape)} for a weight of {tuple(weight.shape)}: the"
            " shapes must be equal"
        )


@lru_cache(maxsize=64)
def _stochastic_encoding(fraction_bits: int, device: int) -> tuple[Tensor, Tensor]:
    """Return the tables of stochastic encoding, which ``StochasticEncoder`` looks up."""
    mantissas, reciprocals = stochastic_steps(fraction_bits)
    starts = np.arange(2 << fraction_bits, dtype=np.int64) << (22 - fraction_bits)
    base = np.searchsorted(mantissas, starts, side="right") - 1
    steps = (
        np.stack([mantissas, np.append(reciprocals, 0)], axis=1).astype(np.uint32).view(np.int32)
    )
    return uploaded(base.astype(np.int32), device), uploaded(steps, device)


def _codec(fraction_bits: int, device: int) -> tuple[int, int, int, int]:
    tables, (base, steps) = (
        device_tables(fraction_bits, device),
        _stochastic_encoding(fraction_bits, device),
    )
    return (
        tables.significands.data_ptr(),
        tables.cells.data_ptr(),
        base.data_ptr(),
        steps.data_ptr(),
    )


@lru_cache(maxsize=1024)
def _adam_scalars(beta1: float, beta2: float, eps: float, device: int) -> Tensor:
    return uploaded(adam_scalars(beta1, beta2, eps), device)


def sgd_update_float32_(
    weight: Tensor, grad: Tensor, buffer: Tensor | None, compensation: Tensor | None,
    step: Tensor | None, lr: float, momentum: float | None, key: int | None,
    rate: Tensor | None, bits: int, fraction_bits: int,
) -> None:  # fmt: skip
    """Make one SGD step with float32 operations, in place.

    :func:`lns_ops.reference.sgd_update_float32` is the definition; the device reads step and rate.
    """
    _check_in_place(weight, grad, buffer=buffer, compensation=compensation)
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        name = f"sgd_float32{'_momentum' * (momentum is not None)}{_rounding(key, compensation)}"
        kernel = _float32_update(name, bits, fraction_bits, device)
        arrays = _pointers(weight, grad, None if momentum is None else buffer, compensation)
        kernel(
            grid_of(weight.numel(), device, kernel=kernel, waves=2), THREADS, device,
            *arrays, pointer_of(step), pointer_of(rate), weight.numel(), key or 0, -lr,
            momentum or 0.0, alignment_flag(*arrays), *_codec(fraction_bits, device),
        )  # fmt: skip


def adam_update_float32_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, root: Tensor, residue: Tensor | None,
    compensation: Tensor | None, step: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float | None, decoupled: bool, key: int | None, rate: Tensor | None, bits: int,
    fraction_bits: int,
) -> None:  # fmt: skip
    """Make one Adam or AdamW step with float32 operations, in place.

    :func:`lns_ops.reference.adam_update_float32` is the definition; the device reads step and rate.
    """
    _check_in_place(
        weight, grad, exp_avg=exp_avg, root=root, residue=residue, compensation=compensation
    )
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        scalars = _adam_scalars(beta1, beta2, eps, device)
        form = "" if weight_decay is None else "_decoupled" if decoupled else "_l2"
        kernel = _float32_update(
            f"adam_float32{form}{_rounding(key, compensation)}", bits, fraction_bits, device
        )
        arrays = _pointers(weight, grad, exp_avg, root, residue, compensation)
        kernel(
            grid_of(weight.numel(), device, kernel=kernel, waves=2), THREADS, device,
            *arrays, step.data_ptr(), pointer_of(rate), scalars.data_ptr(), len(scalars),
            weight.numel(), key or 0, -lr, beta1, 1 - beta1, beta2, 1 - beta2, weight_decay or 0.0,
            alignment_flag(*arrays), *_codec(fraction_bits, device),
        )  # fmt: skip


def _pointers(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _rounding(key: int | None, compensation: Tensor | None) -> str:
    return "_stochastic" if key is not None else "_kahan" if compensation is not None else ""


class _Waiting(threading.local):
    """The queue of a thread's updates that are launched together.

    Attributes:
        steps: step counters to increment before.
        updates: updates to launch, by kernel; None if updates are not queued.
    """

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.updates: dict[tuple[Any, ...], list[tuple[Sequence[int], Any]]] | None = None


_waiting = _Waiting()


@contextmanager
def updates_together() -> Iterator[None]:
    """Launch LNS updates of several parameters together, whenever a kernel's list is full.

    Until the context ends, results must not be read, and two updates must not write to the same
    memory.
    """
    if _waiting.updates is not None:
        yield
        return
    updates = _waiting.updates = {}
    try:
        yield
    finally:
        _waiting.updates = None
        _advance()
        for kernel, waiting in updates.items():
            _launch(kernel, waiting)


def may_wait(weight: Tensor) -> bool:
    """Return whether the update of ``weight`` can be launched together with others.

    It cannot in code that torch.compile traces, because an operator must have written its results
    when it returns.
    """
    return (
        not torch.compiler.is_compiling()
        and _waiting.updates is not None
        and type(weight) is Tensor
        and weight.is_cuda
    )


def advance(step: Tensor) -> None:
    """Add 1 to a step counter on its device; together with queued updates, if there are any."""
    if may_wait(step):
        _waiting.steps.append(step)
    else:
        step.add_(1)


def _advance() -> None:
    steps, _waiting.steps = _waiting.steps, []
    if steps:
        foreach_add_(steps, 1)


def _update(kernel: tuple[Any, ...], entry: Sequence[int], used: Any, wait: bool) -> None:
    """Launch the update of a parameter, or queue it.

    Args:
        kernel: name, bits, fraction bits and device, and the arguments shared by all parameters.
        entry: addresses, number of elements and key, as in the kernel's list.
        used: tensors to keep alive until the launch.
        wait: whether it may be queued (:func:`may_wait`).
    """
    if not wait or _waiting.updates is None:
        _launch(kernel, [(entry, used)])
        return
    updates = _waiting.updates.setdefault(kernel, [])
    updates.append((entry, used))
    if len(updates) == LISTS[kernel[0][:3]][1]:
        _advance()
        _launch(kernel, updates)
        updates.clear()


def _launch(key: tuple[Any, ...], updates: Sequence[tuple[Sequence[int], Any]]) -> None:
    name, bits, fraction_bits, device, *shared = key
    kernel, tables = (
        elementwise_kernel(name, bits, fraction_bits, device),
        device_tables(fraction_bits, device),
    )
    random = name.endswith("_stochastic")
    fine = _fine_table(fraction_bits, device) if random else None
    entries, blocks = [], 0
    for (*addresses, n, number), _ in updates:
        own, _, _ = grid_of(n, device, kernel=kernel, waves=2)
        aligned = alignment_flag(*addresses[:-1])  # the last one is the step's address
        entries.append((*addresses, n, number, blocks, own, aligned))
        blocks += own
    if entries:
        kernel(
            (blocks, 1, 1), THREADS, device, *shared, len(entries), tables.signed.data_ptr(),
            tables.gauss.data_ptr(), pointer_of(fine), entries=entries,
        )  # fmt: skip


def sgd_update_(
    weight: Tensor, grad: Tensor, buffer: Tensor | None, compensation: Tensor | None,
    step: Tensor | None, negative_lr: int, momentum: int | None, key: int | None,
    rate: Tensor | None, bits: int, fraction_bits: int, wait: bool = False,
) -> None:  # fmt: skip
    """Make one SGD step in LNS operations, in place.

    :func:`lns_ops.reference.sgd_update` is the definition; the device reads step and rate.
    """
    _check_in_place(weight, grad, buffer=buffer, compensation=compensation)
    grad, device = grad.contiguous(), weight.get_device()
    if weight.numel():
        name = f"sgd{'_momentum' * (momentum is not None)}{_rounding(key, compensation)}"
        arrays = _pointers(weight, grad, None if momentum is None else buffer, compensation, step)
        _update(
            (name, bits, fraction_bits, device, pointer_of(rate), negative_lr, momentum or 0),
            (*arrays, weight.numel(), key or 0),
            (grad, rate),
            wait,
        )


def adam_update_(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, root: Tensor, residue: Tensor | None,
    compensation: Tensor | None, step: Tensor, negative_lr: int, beta1: float, beta2: float,
    eps: float, weight_decay: int | None, decoupled: bool, key: int | None, rate: Tensor | None,
    bits: int, fraction_bits: int, wait: bool = False,
) -> None:  # fmt: skip
    """Make one Adam or AdamW step in LNS operations, in place.

    :func:`lns_ops.reference.adam_update` is the definition; the device reads step and rate.
    """
    _check_in_place(
        weight, grad, exp_avg=exp_avg, root=root, residue=residue, compensation=compensation
    )
    grad, device, fmt = grad.contiguous(), weight.get_device(), LNSFormat(bits, fraction_bits)
    if weight.numel():
        codes, decay = adam_codes(beta1, beta2, eps, fmt), decay_table(beta2, fraction_bits)
        correction, eps_hat, moves = _adam_tables(beta1, beta2, eps, fmt, device)
        form = "" if weight_decay is None else "_decoupled" if decoupled else "_l2"
        name = f"adam{form}{_rounding(key, compensation)}"
        arrays = _pointers(weight, grad, exp_avg, root, residue, compensation, step)
        shared = (
            pointer_of(rate), correction.data_ptr(), eps_hat.data_ptr(), len(codes.correction),
            negative_lr, codes.beta1, codes.one_minus_beta1, weight_decay or 0, moves.data_ptr(),
            decay.first, decay.first + len(decay.table) - 1, decay.keep, decay.take,
        )  # fmt: skip
        _update(
            (name, bits, fraction_bits, device, *shared),
            (*arrays, weight.numel(), key or 0),
            (grad, rate, correction, eps_hat, moves),
            wait,
        )
