"""The specification of optimizer updates: SGD and Adam in LNS or in float32 operations.

With float32 operations, codes are decoded when loaded and encoded when stored. Arrays are never
changed; updates return new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference import (
    ROOT_SLOT,
    WEIGHT_SLOT,
    Codes,
    add,
    add_stochastic,
    decode,
    div,
    encode,
    encode_stochastic,
    mul,
    random_bits,
    root_mean_square,
    sub,
)

ARITHMETICS = ("lns", "float32")
"""The arithmetics for updates of LNS parameters."""


def _updated(
    weight: Codes,
    update: Codes,
    fmt: LNSFormat,
    compensation: Codes | None,
    bits: NDArray[np.int64] | None,
) -> tuple[Codes, Codes | None]:
    """Return ``weight + update``: with Kahan compensation, rounded at random, or to nearest."""
    if bits is not None:
        return add_stochastic(weight, update, fmt, bits), compensation
    if compensation is None:
        return add(weight, update, fmt), None
    compensation = add(compensation, update, fmt)
    new = add(weight, compensation, fmt)
    return new, sub(compensation, sub(new, weight, fmt), fmt)


def _bits_like(weight: Codes, key: int | None, step: int, slot: int) -> NDArray[np.int64] | None:
    """Return the random bits of every element, or None without a key."""
    if key is None:
        return None
    return random_bits(weight.size, key, step, slot).reshape(weight.shape)


def sgd_update(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    negative_lr: Codes,
    momentum: Codes | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
) -> tuple[Codes, Codes | None, Codes | None]:
    """Return weight, buffer and compensation after one SGD step in LNS operations.

    ``buffer = momentum * buffer + grad`` (if momentum is given), ``update = -lr * buffer``, then
    ``weight + update`` or, with Kahan compensation (W. Kahan 1965)::

        compensation = compensation + update
        new = weight + compensation
        compensation = compensation - (new - weight)

    or, with a ``key``, rounded at random by ``random_bits(weight.size, key, step, 0)``.

    ``negative_lr`` and ``momentum`` are codes of scalars.
    """
    direction = grad
    if momentum is not None and buffer is not None:
        direction = buffer = add(mul(momentum, buffer, fmt), grad, fmt)
    bits = _bits_like(weight, key, step, WEIGHT_SLOT)
    new, compensation = _updated(weight, mul(negative_lr, direction, fmt), fmt, compensation, bits)
    return new, buffer, compensation


class AdamCodes(NamedTuple):
    """Adam's scalars as codes of a format.

    The bias correction after t steps is entry ``min(t, len) - 1``; later entries would be equal.

    ``correction = sqrt(1 - beta2^t) / gain_t``, ``eps_hat = eps sqrt(1 - beta2^t)`` (D. Kingma, J.
    Ba 2015, the end of section 2), at least the format's smallest magnitude. ``gain_t`` is the
    :func:`gain` of the first average, which is ``1 - beta1^t`` without rounding.
    """

    beta1: int
    one_minus_beta1: int
    correction: Codes
    eps_hat: Codes


def check_adam(beta1: float, beta2: float, eps: float) -> None:
    """Check Adam's hyperparameters, independent of the format.

    Raises:
        ValueError: beta1 is not in [0, 1), beta2 not in [10^-6, 1), or eps not positive and finite.
    """
    if not 0 <= beta1 < 1:
        raise ValueError(f"beta1={beta1}: must be in [0, 1), for example 0.9")
    if not 1e-6 <= beta2 < 1:
        raise ValueError(f"beta2={beta2}: must be at least 1e-6 and below 1, for example 0.999")
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps={eps}: must be positive and finite, for example 1e-8")


def gain(keep: float, rest: float, steps: Any) -> Any:
    """Return the value of an average of a constant 1 after ``steps`` steps from 0.

    ``average = keep average + rest x`` has the gain ``rest (1 - keep^t) / (1 - keep)``, with the
    factors rounded to the format: in lns16 a beta of 0.997 becomes 0.9946, and the gain after 100
    steps is 0.42 instead of 0.26.
    """
    return rest / (1 - keep) * (1 - keep**steps)


@lru_cache(maxsize=64)
def adam_codes(beta1: float, beta2: float, eps: float, fmt: LNSFormat) -> AdamCodes:
    """Return the codes of Adam's scalars.

    ``1 - beta1`` is computed from the rounded beta1, so that the average has gain 1.

    Raises:
        ValueError: as for :func:`check_adam`, or beta1 rounds to 1, so that the average would never
            forget.
    """
    check_adam(beta1, beta2, eps)
    first = encode(np.array(beta1), fmt)
    held = float(decode(first, fmt, np.float64))
    if held >= 1:
        raise ValueError(
            f"beta1={beta1}: rounds to 1 in {fmt}, so the average would never forget; use beta1 <="
            f" {1 / (1 + fmt.epsilon):.3g}"
        )
    second = encode(np.array(1 - held), fmt)
    rest = float(decode(second, fmt, np.float64))
    # 1 - beta^t is 1 to within 2^-40 after this many steps.
    steps = np.arange(1, 2 + int(28 / -np.log(max(held, beta2))), dtype=np.float64)
    root = np.sqrt(1 - beta2**steps)
    correction = encode(root / gain(held, rest, steps), fmt)
    eps_hat = np.maximum(encode(eps * root, fmt), 1)
    length = (
        1
        + int(
            np.flatnonzero((correction != correction[-1]) | (eps_hat != eps_hat[-1])).max(
                initial=-1
            )
        )
        + 1
    )
    return AdamCodes(
        int(first), int(second), correction[:length], eps_hat[:length].astype(np.int16)
    )


def adam_update(
    weight: Codes, grad: Codes, fmt: LNSFormat, *, step: int, exp_avg: Codes, root: Codes,
    residue: Codes | None = None, compensation: Codes | None = None, negative_lr: Codes,
    beta1: float, beta2: float, eps: float, weight_decay: Codes | None = None,
    decoupled: bool = False, key: int | None = None,
) -> tuple[Codes, Codes, Codes, Codes | None, Codes | None]:  # fmt: skip
    """Return an Adam parameter's state after one step in LNS operations (D. Kingma, J. Ba 2015).

    ::

        grad = grad + weight_decay weight                      (if given and not decoupled)
        exp_avg = beta1 exp_avg + (1 - beta1) grad
        root = sqrt(beta2 root^2 + (1 - beta2) grad^2)         root_mean_square: one operation, so
                                                               no square leaves the range
        direction = correction exp_avg / (root + eps_hat)
        direction = direction + weight_decay weight            (if given and decoupled: AdamW, I.
                                                               Loshchilov, F. Hutter 2019)
        weight = weight + (-lr) direction                      to nearest, with Kahan compensation,
                                                               or at random

    Args:
        step: 1 for the first step.
        root: the root of the second moment; ``residue`` holds its bits below the ulp, unless it is
            rounded at random with a ``key``.
        negative_lr, weight_decay: codes of scalars.
        key: key of :func:`random_bits`, slot 0 for the weight and 1 for the root.

    Returns:
        weight, exp_avg, root, residue, compensation.
    """
    codes = adam_codes(beta1, beta2, eps, fmt)
    now = min(step, len(codes.correction)) - 1
    if weight_decay is not None and not decoupled:
        grad = add(grad, mul(weight_decay, weight, fmt), fmt)
    keep, rest = np.array(codes.beta1, np.int16), np.array(codes.one_minus_beta1, np.int16)
    exp_avg = add(mul(keep, exp_avg, fmt), mul(rest, grad, fmt), fmt)
    weight_bits, root_bits = (_bits_like(weight, key, step, s) for s in (WEIGHT_SLOT, ROOT_SLOT))
    root, residue = root_mean_square(
        root, grad, fmt, beta2, residue=None if key is not None else residue, bits=root_bits
    )
    direction = mul(
        codes.correction[now], div(exp_avg, add(root, codes.eps_hat[now], fmt), fmt), fmt
    )
    if weight_decay is not None and decoupled:
        direction = add(direction, mul(weight_decay, weight, fmt), fmt)
    weight, compensation = _updated(
        weight, mul(negative_lr, direction, fmt), fmt, compensation, weight_bits
    )
    return weight, exp_avg, root, residue, compensation


class Float32Codec(NamedTuple):
    """The functions by which updates in float32 load and store codes.

    It has ``decode(codes, fmt)``, ``encode(x, fmt)`` and ``encode_stochastic(x, fmt, bits)``.
    """

    decode: Callable[..., Any]
    encode: Callable[..., Any]
    encode_stochastic: Callable[..., Any]


_F32 = np.float32
_LARGEST = np.finfo(np.float32).max


def _inside(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``x`` clamped to float32's largest number, so that an overflow causes no NaN later."""
    return np.clip(x, -_LARGEST, _LARGEST)


def _stored(
    x: NDArray[np.float32],
    fmt: LNSFormat,
    codec: Float32Codec,
    bits: NDArray[np.int64] | None = None,
) -> Codes:
    """Return the codes of ``x``; float32 overflows saturate."""
    inside = _inside(x)
    codes: Codes = (
        codec.encode(inside, fmt) if bits is None else codec.encode_stochastic(inside, fmt, bits)
    )
    return codes


def _updated_float32(
    weight: NDArray[np.float32], update: NDArray[np.float32], fmt: LNSFormat,
    compensation: Codes | None, bits: NDArray[np.int64] | None, codec: Float32Codec,
) -> tuple[Codes, Codes | None]:  # fmt: skip
    if bits is not None or compensation is None:
        return _stored(weight + update, fmt, codec, bits), compensation
    kept = _inside(codec.decode(compensation, fmt) + update)
    new = _stored(weight + kept, fmt, codec)
    return new, _stored(kept - (codec.decode(new, fmt) - weight), fmt, codec)


def sgd_update_float32(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    lr: float,
    momentum: float | None = None,
    buffer: Codes | None = None,
    compensation: Codes | None = None,
    key: int | None = None,
    step: int = 0,
    codec: Float32Codec | None = None,
) -> tuple[Codes, Codes | None, Codes | None]:
    """Return weight, buffer and compensation after one SGD step with float32 operations.

    Codes are decoded, every operation is a float32 operation (rounded to nearest, not fused), and
    stored values are encoded. Kahan's compensation refers to the stored weight.

    ``buffer = momentum buffer + grad``; ``update = -lr buffer``, with the buffer before it is
    rounded to the format.
    """
    codec = codec or REFERENCE_CODEC
    with np.errstate(over="ignore"):
        direction = codec.decode(grad, fmt)
        if momentum is not None and buffer is not None:
            direction = _inside(_F32(momentum) * codec.decode(buffer, fmt) + direction)
            buffer = _stored(direction, fmt, codec)
        bits = _bits_like(weight, key, step, WEIGHT_SLOT)
        new, compensation = _updated_float32(
            codec.decode(weight, fmt), _F32(-lr) * direction, fmt, compensation, bits, codec
        )
    return new, buffer, compensation


@lru_cache(maxsize=64)
def adam_scalars(beta1: float, beta2: float, eps: float) -> NDArray[np.float32]:
    """Return ``correction`` and ``eps_hat`` of steps 1, 2, ..., float32 [steps, 2].

    :class:`AdamCodes` has their equations. Later steps use the last entry.

    Raises:
        ValueError: as for :func:`check_adam`.
    """
    check_adam(beta1, beta2, eps)
    steps = np.arange(1, 2 + int(28 / -np.log(max(beta1, beta2))), dtype=np.float64)
    root = np.sqrt(1 - beta2**steps)
    table = np.stack([root / (1 - beta1**steps), eps * root], axis=1).astype(np.float32)
    length = 1 + int(np.flatnonzero((table != table[-1]).any(axis=1)).max(initial=-1)) + 1
    return table[:length].copy()


def adam_update_float32(
    weight: Codes,
    grad: Codes,
    fmt: LNSFormat,
    *,
    step: int,
    exp_avg: Codes,
    root: Codes,
    residue: Codes | None = None,
    compensation: Codes | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float | None = None,
    decoupled: bool = False,
    key: int | None = None,
    codec: Float32Codec | None = None,
) -> tuple[Codes, Codes, Codes, Codes | None, Codes | None]:
    """Return an Adam parameter's state after one step with float32 operations.

    It is :func:`adam_update` with the operations of :func:`sgd_update_float32`; ``residue`` holds
    codes here: the exact root minus the stored one.
    """
    codec = codec or REFERENCE_CODEC
    scalars = adam_scalars(beta1, beta2, eps)
    correction, eps_hat = scalars[min(step, len(scalars)) - 1]
    with np.errstate(over="ignore", divide="ignore"):
        w, g = codec.decode(weight, fmt), codec.decode(grad, fmt)
        if weight_decay is not None and not decoupled:
            g = _inside(g + _F32(weight_decay) * w)
        average = _F32(beta1) * codec.decode(exp_avg, fmt) + _F32(1 - beta1) * g
        weight_bits, root_bits = (
            _bits_like(weight, key, step, slot) for slot in (WEIGHT_SLOT, ROOT_SLOT)
        )
        r = codec.decode(root, fmt)
        if key is None and residue is not None:
            r = r + codec.decode(residue, fmt)
        r = np.sqrt(_F32(beta2) * (r * r) + _F32(1 - beta2) * (g * g))
        root = _stored(r, fmt, codec, root_bits)
        if key is None and residue is not None:
            residue = _stored(r - codec.decode(root, fmt), fmt, codec)
        direction = _inside(correction * (average / (r + eps_hat)))
        if weight_decay is not None and decoupled:
            direction = direction + _F32(weight_decay) * w
        weight, compensation = _updated_float32(
            w, _F32(-lr) * direction, fmt, compensation, weight_bits, codec
        )
    return weight, _stored(average, fmt, codec), root, residue, compensation


REFERENCE_CODEC = Float32Codec(decode, encode, encode_stochastic)
