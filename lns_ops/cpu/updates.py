"""In-place optimizer updates on the CPU: SGD and Adam, fused in LNS arithmetic, or in float32 on
decoded codes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lns_ops.cpu.arrays import GRAIN, Codes, flattened
from lns_ops.cpu.compiler.thread_pool import run
from lns_ops.cpu.elementwise import sum_table
from lns_ops.cpu.encoding import decode, encode, encode_stochastic
from lns_ops.cpu.kernels import philox, updates
from lns_ops.spec import reference_updates
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.gaussian_log import decay_table, stochastic_tables
from lns_ops.spec.reference import ROOT_SLOT, WEIGHT_SLOT
from lns_ops.spec.reference_updates import adam_codes


def _in_place(name: str, x: Codes, shape: tuple[int, ...]) -> Codes:
    """Return ``x`` flat, without a copy."""
    if x.dtype != np.int16 or x.shape != shape or not (x.flags.c_contiguous and x.flags.writeable):
        raise ValueError(
            f"{name} of dtype {x.dtype}, shape {x.shape}: an array updated in place must be"
            f" writable, contiguous int16 codes of the weight's shape {shape}; pass the array"
            " itself, not a strided view"
        )
    return x.reshape(-1)


@lru_cache(maxsize=32)
def _fine_table(fraction_bits: int) -> NDArray[np.int32]:
    """Return both tables of additions with random rounding, one after the other."""
    return np.concatenate(stochastic_tables(fraction_bits))


def random_bits(count: int, key: int, step: int, slot: int) -> NDArray[np.uint16]:
    """Return :func:`lns_ops.reference.random_bits`, with up to seven more than ``count``."""
    blocks = -(-count // 8)
    out = np.empty(8 * blocks, np.uint16)
    key &= (1 << 64) - 1
    signed = key - (key >> 63 << 64)  # kernels take signed 64-bit numbers
    run(philox.random_bits, blocks, GRAIN // 16, out, out, signed, step, slot)
    return out


def _absent(x: Codes | None, w: Codes) -> Codes:
    """Return ``x``, or for None a separate array that the kernel does not access.

    If one array were passed for several arguments, they would overlap and prevent vectorization.
    """
    return np.empty(w.size, np.int16) if x is None else x


def sgd_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    negative_lr: int,
    momentum: int | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
) -> None:
    """Make one SGD step in LNS operations, fused, in place.

    It changes ``weight``, ``buffer`` and ``compensation``.

    ``buffer = momentum buffer + grad`` (if momentum and a buffer are given), ``update = -lr
    buffer``, then ``weight += update`` or, with Kahan compensation (W. Kahan 1965)::

        compensation = compensation + update
        new = weight + compensation
        compensation = compensation - (new - weight)

    Args:
        weight: int16 codes, contiguous, updated.
        grad: int16 codes with the same shape; not changed.
        fmt: the format.
        negative_lr: the code of ``-lr`` (an integer, or an array with one element).
        momentum: the code of the momentum factor.
        buffer: momentum buffer, like ``weight``, updated.
        compensation: Kahan's running error, like ``weight``, updated.
        key, step: round ``weight + update`` at random with the bits of (key, step); the
            compensation is not used then.

    Raises:
        ValueError: an array to update is not writable, contiguous int16 with the weight's shape, or
            ``grad``'s shape differs.
    """
    w, g = _in_place("weight", weight, weight.shape), _gradient(grad, weight)
    use_momentum = momentum is not None and buffer is not None
    b = _absent(
        _in_place("buffer", buffer, weight.shape) if use_momentum and buffer is not None else None,
        w,
    )
    kernels, extra, sums = _rounded(weight, fmt, compensation, key, step)
    grain = GRAIN // 2 if kernels is updates.PLAIN else GRAIN // 4
    run(
        kernels.sgd, w.size, grain, w, g, b, extra, *sums, fmt.bias, fmt.field_mask,
        _scalar(negative_lr), _scalar(momentum), use_momentum,
    )  # fmt: skip


def _rounded(
    weight: Codes, fmt: LNSFormat, compensation: Codes | None, key: int | None, step: int
) -> tuple[updates.Rounded, Codes, tuple[NDArray[np.int32], NDArray[np.int32], int, int]]:
    """Return the kernels for this rounding, their ``extra`` array, and the tables for sums.

    The latter are ``table, fine, last, fine_last``.
    """
    table = fine = sum_table(fmt.fraction_bits)
    kernels, extra = updates.PLAIN, weight.reshape(-1)
    if key is not None:
        kernels, fine = updates.STOCHASTIC, _fine_table(fmt.fraction_bits)
        extra = random_bits(weight.size, key, step, WEIGHT_SLOT).view(np.int16)
    elif compensation is not None:
        kernels, extra = updates.KAHAN, _in_place("compensation", compensation, weight.shape)
    return kernels, extra, (table, fine, table.size // 2 - 1, fine.size // 2 - 1)


def _gradient(grad: Codes, weight: Codes) -> Codes:
    if grad.shape != weight.shape:
        raise ValueError(f"grad of shape {grad.shape}: must have the weight's shape {weight.shape}")
    return flattened(grad)


def adam_update(
    weight: Codes, grad: Codes, fmt: LNSFormat, *, step: int, exp_avg: Codes, root: Codes,
    residue: Codes | None = None, compensation: Codes | None = None, negative_lr: int, beta1: float,
    beta2: float, eps: float, weight_decay: int | None = None, decoupled: bool = False,
    key: int | None = None,
) -> None:  # fmt: skip
    """Make one Adam or AdamW step in LNS operations, fused, in place.

    :func:`lns_ops.reference.adam_update` has the equations.

    Args:
        weight, exp_avg, root, compensation: int16 codes, contiguous, with one shape, updated.
        grad: int16 codes with that shape; not changed.
        residue: the root's bits below the ulp, int16, updated; required unless ``key`` is given.
        step: 1 for the first step.
        negative_lr, weight_decay: codes of scalars.
        key: round weight and root at random with the bits of (key, step); residue and compensation
            are not used then.

    Raises:
        ValueError: an array to update is not writable, contiguous int16 with the weight's shape,
            ``grad``'s shape differs, a residue is missing, or a scalar is out of range.
    """
    codes, decay = adam_codes(beta1, beta2, eps, fmt), decay_table(beta2, fmt.fraction_bits)
    w, g = _in_place("weight", weight, weight.shape), _gradient(grad, weight)
    m, r = _in_place("exp_avg", exp_avg, weight.shape), _in_place("root", root, weight.shape)
    if key is not None:
        lacks = random_bits(w.size, key, step, ROOT_SLOT).view(np.int16)
    elif residue is not None:
        lacks = _in_place("residue", residue, weight.shape)
    else:
        raise ValueError(
            "residue=None: without it or a key the second moment would never change; pass int16"
            " zeros of the weight's shape"
        )
    kernels, extra, (table, *sums) = _rounded(weight, fmt, compensation, key, step)
    now = min(step, len(codes.correction)) - 1
    run(
        kernels.adam, w.size, GRAIN // 8, w, g, m, r, lacks, extra, table, decay.table, *sums,
        fmt.bias, fmt.field_mask, _scalar(negative_lr), codes.beta1, codes.one_minus_beta1,
        int(codes.correction[now]), int(codes.eps_hat[now]), _scalar(weight_decay),
        weight_decay is not None and not decoupled, weight_decay is not None and decoupled,
        decay.first, decay.keep, decay.take,
    )  # fmt: skip


_CODEC = reference_updates.Float32Codec(
    decode, encode, lambda x, fmt, bits: encode_stochastic(x, fmt, bits.astype(np.uint16))
)


def sgd_update_float32(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    **options: Any,
) -> None:
    """Make one SGD step in float32 operations, in place; not fused on a CPU.

    It changes ``weight``, ``buffer`` and ``compensation``;
    :func:`lns_ops.reference.sgd_update_float32` has the equations.
    """
    updated = reference_updates.sgd_update_float32(
        weight, grad, fmt, buffer=buffer, compensation=compensation, codec=_CODEC, **options
    )
    _store((weight, buffer, compensation), updated)


def adam_update_float32(
    weight: Codes, grad: Codes, fmt: LNSFormat, *, exp_avg: Codes, root: Codes,
    residue: Codes | None = None, compensation: Codes | None = None, **options: Any,
) -> None:  # fmt: skip
    """Make one Adam or AdamW step in float32 operations, in place; not fused on a CPU.

    It changes all arrays except ``grad``; :func:`lns_ops.reference.adam_update_float32` has the
    equations.
    """
    state: dict[str, Any] = {
        "exp_avg": exp_avg,
        "root": root,
        "residue": residue,
        "compensation": compensation,
    }
    updated = reference_updates.adam_update_float32(
        weight, grad, fmt, codec=_CODEC, **state, **options
    )
    _store((weight, *state.values()), updated)


def _store(arrays: tuple[Codes | None, ...], values: tuple[Codes | None, ...]) -> None:
    for array, value in zip(arrays, values, strict=True):
        if array is not None and value is not None and value is not array:
            array[...] = value


def _scalar(code: Any) -> int:
    return 0 if code is None else int(np.asarray(code).reshape(()))
