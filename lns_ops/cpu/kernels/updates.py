"""Compiled kernels of optimizer updates: fused SGD and Adam steps, and the update directions of
composed optimizers.

A step composes the primitives of :mod:`lns_ops.cpu.kernels.elementwise`. Signs and fields stay in
registers between operations, and each array is read and written once. Every intermediate result is
clamped as in the reference.

The directions use the operations that :mod:`lns_ops.optim` composes, in the same order;
:mod:`lns_ops.functional.directions` calls them. A direction is stored, and then SGD's kernel
updates the weight. This costs one more pass over two bytes a weight, but saves three versions of
each kernel (one for each way to round a weight).

Kernels return 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import int16, int32, int64
from numpy.typing import NDArray

from lns_ops.cpu.compiler.intrinsics import get, helper, look_up, put
from lns_ops.cpu.compiler.object_cache import Kernel, kernel
from lns_ops.cpu.kernels.elementwise import add_fields, add_fields_stochastic, code_of, mul_fields

_I16 = NDArray[np.int16]
_U16 = NDArray[np.uint16]
_I32 = NDArray[np.int32]
_I64 = NDArray[np.int64]


@helper
def _direction(
    grad: Any, buffer: Any, i: Any, table: Any, last: Any, bias: Any, mask: Any, momentum: Any,
    use_momentum: Any
) -> Any:  # fmt: skip
    """Return the pair of ``grad``, or with momentum the pair of ``momentum buffer + grad``, which
    also becomes the buffer.
    """
    g = int32(get(grad, i))
    sign, field = g >> 31, g & mask
    if use_momentum:
        b = int32(get(buffer, i))
        decayed = mul_fields(b & mask, momentum & mask, bias, mask)
        sign, field = add_fields((b ^ momentum) >> 31, decayed, sign, field, table, last, mask)
        put(buffer, i, code_of(sign, field, mask))
    return sign, field


@helper
def _add_plain(
    weight: Any, extra: Any, i: Any, su: Any, fu: Any, table: Any, last: Any, fine: Any,
    fine_last: Any, mask: Any,
) -> None:  # fmt: skip
    """Add ``weight += update``, the update a (sign, field) pair, rounded to nearest."""
    w = int32(get(weight, i))
    sn, fn = add_fields(w >> 31, w & mask, su, fu, table, last, mask)
    put(weight, i, code_of(sn, fn, mask))


@helper
def _add_kahan(
    weight: Any, extra: Any, i: Any, su: Any, fu: Any, table: Any, last: Any, fine: Any,
    fine_last: Any, mask: Any,
) -> None:  # fmt: skip
    """Add with Kahan compensation: ``c += update; new = w + c; c -= new - w; w = new``."""
    c, w = int32(get(extra, i)), int32(get(weight, i))
    sw, fw = w >> 31, w & mask
    sc, fc = add_fields(c >> 31, c & mask, su, fu, table, last, mask)
    sn, fn = add_fields(sw, fw, sc, fc, table, last, mask)
    sd, fd = add_fields(sn, fn, ~sw, fw, table, last, mask)
    sc, fc = add_fields(sc, fc, ~sd, fd, table, last, mask)
    put(weight, i, code_of(sn, fn, mask))
    put(extra, i, code_of(sc, fc, mask))


@helper
def _add_stochastic(
    weight: Any, extra: Any, i: Any, su: Any, fu: Any, table: Any, last: Any, fine: Any,
    fine_last: Any, mask: Any,
) -> None:  # fmt: skip
    """Add ``weight += update``, the sum rounded at random."""
    w, chance = int32(get(weight, i)), _unsigned(extra, i)
    sn, fn = add_fields_stochastic(w >> 31, w & mask, su, fu, chance, fine, fine_last, mask)
    put(weight, i, code_of(sn, fn, mask))


@helper
def _unsigned(bits: Any, i: Any) -> Any:
    """Return 16 random bits as a number from 0 to 65535."""
    return int32(get(bits, i)) & int32(0xFFFF)


def _sgd(rounding: str, add: Callable[..., Any]) -> Kernel:
    """Return the kernel of :func:`lns_ops.reference.sgd_update` that adds with ``add``."""

    def sgd(
        weight: _I16, grad: _I16, buffer: _I16, extra: _I16, table: _I32, fine: _I32, last: int,
        fine_last: int, bias: int, mask: int, negative_lr: int, momentum: int, use_momentum: bool,
        start: int, stop: int,
    ) -> int:  # fmt: skip
        """Compute ``buffer = momentum buffer + grad; weight += negative_lr buffer`` in place.

        Without momentum, ``grad`` itself is used instead of the buffer.
        """
        last_, fine_last_, bias_, mask_ = int32(last), int32(fine_last), int32(bias), int32(mask)
        lr, mu = int32(negative_lr), int32(momentum)
        for i in range(start, stop):
            ss, fs = _direction(grad, buffer, i, table, last_, bias_, mask_, mu, use_momentum)
            su, fu = ss ^ (lr >> 31), mul_fields(fs, lr & mask_, bias_, mask_)
            add(weight, extra, i, su, fu, table, last_, fine, fine_last_, mask_)
        return 0

    sgd.__qualname__ = f"sgd_{rounding}"
    return kernel(sgd)


@helper
def _root(
    root: Any, x: Any, residue: Any, added: Any, decay: _I32, first: Any, last: Any, keep: Any,
    take: Any, bias: Any
) -> Any:  # fmt: skip
    """Return the logarithm of ``sqrt(beta root^2 + (1 - beta) x^2)``, plus ``added``.

    It has 16 bits below the ulp; ``root`` and ``x`` are fields, 0 for zero.
    """
    index = max(min(int32(x - root), last), first)
    correction = int64(look_up(decay, int32(index - first)))
    nothing = int64(-(1 << 40))
    kept = (int64(int32(root - bias)) << 16) + residue + keep if root > 0 else nothing
    taken = (int64(int32(x - bias)) << 16) + take if x > 0 else nothing
    return max(kept, taken) + (correction if min(root, x) > 0 else int64(0)) + added


@helper
def _bounded(fine: Any, bias: Any, mask: Any) -> Any:
    """Return the field of a logarithm with 16 bits below the ulp, which are truncated."""
    return int32(max(min((fine >> 16) + bias, int64(mask)), int64(0)))


@helper
def _advance(
    root: Any, residue: Any, i: Any, field: Any, decay: _I32, first: Any, last: Any, keep: Any,
    take: Any, bias: Any, mask: Any
) -> Any:  # fmt: skip
    """Update the root with ``field``, store it and its residue, and return its field."""
    lacks, half = int64(get(residue, i)), int64(1 << 15)
    old = int32(get(root, i))
    rounded = _root(old, field, lacks, half, decay, first, last, keep, take, bias)
    new = _bounded(rounded, int64(bias), mask)
    inside = (new > 0) & ((rounded >> 16) + int64(bias) <= int64(mask))
    put(root, i, int16(new))
    put(residue, i, int16((rounded & 0xFFFF) - half) if inside else int16(0))
    return new


@helper
def _advance_stochastic(
    root: Any, bits: Any, i: Any, field: Any, decay: _I32, first: Any, last: Any, keep: Any,
    take: Any, bias: Any, mask: Any
) -> Any:  # fmt: skip
    """Update the root with ``field``, rounded at random; store it, and return its field."""
    old, chance = int32(get(root, i)), int64(_unsigned(bits, i))
    rounded = _root(old, field, int64(0), chance, decay, first, last, keep, take, bias)
    new = _bounded(rounded, int64(bias), mask)
    put(root, i, int16(new))
    return new


@helper
def _decayed(
    grad: Any, weight: Any, i: Any, table: Any, last: Any, bias: Any, mask: Any, decay: Any,
    use: Any
) -> Any:  # fmt: skip
    """Return the pair of ``grad``, or of ``grad + decay weight``."""
    g = int32(get(grad, i))
    sign, field = g >> 31, g & mask
    if use:
        w = int32(get(weight, i))
        fw = mul_fields(w & mask, decay & mask, bias, mask)
        sign, field = add_fields(sign, field, (w ^ decay) >> 31, fw, table, last, mask)
    return sign, field


@helper
def _average(
    average: Any, i: Any, sg: Any, fg: Any, table: Any, last: Any, bias: Any, mask: Any, beta: Any,
    rest: Any
) -> Any:  # fmt: skip
    """Store ``average = beta average + rest x``, both factors positive; return the pair."""
    m = int32(get(average, i))
    fm, fx = mul_fields(m & mask, beta, bias, mask), mul_fields(fg, rest, bias, mask)
    sign, field = add_fields(m >> 31, fm, sg, fx, table, last, mask)
    put(average, i, code_of(sign, field, mask))
    return sign, field


@helper
def _ratio(x: Any, y: Any, bias: Any, mask: Any) -> Any:
    """Return the field of ``x / y``, both fields; y is not zero."""
    return max(min(int32(int32(x - y) + bias), mask), int32(0)) if x > 0 else int32(0)


@helper
def _adam_update(
    weight: Any, i: Any, sm: Any, fm: Any, root: Any, table: Any, last: Any, bias: Any, mask: Any,
    negative_lr: Any, correction: Any, eps: Any, decay: Any, use: Any,
) -> Any:  # fmt: skip
    """Return the pair of ``-lr (correction average / (root + eps) + decay weight)``.

    eps is positive.
    """
    _, below = add_fields(int32(0), root, int32(0), eps, table, last, mask)
    sign, field = sm, mul_fields(_ratio(fm, below, bias, mask), correction, bias, mask)
    if use:
        w = int32(get(weight, i))
        fw = mul_fields(w & mask, decay & mask, bias, mask)
        sign, field = add_fields(sign, field, (w ^ decay) >> 31, fw, table, last, mask)
    return sign ^ (negative_lr >> 31), mul_fields(field, negative_lr & mask, bias, mask)


@kernel
def follow(
    root: _I16, residue: _I16, x: _I16, decay: _I32, first: int, keep: int, take: int, bias: int,
    mask: int, start: int, stop: int
) -> int:  # fmt: skip
    """Compute one step of :func:`lns_ops.reference.followed`, in place on root and residue."""
    bias_, mask_, first_ = int32(bias), int32(mask), int32(first)
    end, keep_, take_ = int32(first + len(decay) - 1), int64(keep), int64(take)
    for i in range(start, stop):
        field = int32(get(x, i)) & mask_
        _advance(root, residue, i, field, decay, first_, end, keep_, take_, bias_, mask_)
    return 0


def _adam(rounding: str, add: Callable[..., Any], advance: Callable[..., Any]) -> Kernel:
    """Return the kernel of :func:`lns_ops.reference.adam_update` that adds with ``add``.

    ``advance`` updates the root with its residue or with random bits (``lacks``).
    """

    def adam(
        weight: _I16, grad: _I16, average: _I16, root: _I16, lacks: _I16, extra: _I16, table: _I32,
        decay: _I32, fine: _I32, last: int, fine_last: int, bias: int, mask: int, negative_lr: int,
        beta: int, rest: int, correction: int, eps: int, weight_decay: int, into_grad: bool,
        decoupled: bool, first: int, keep: int, take: int, start: int, stop: int,
    ) -> int:  # fmt: skip
        """Compute one step in place."""
        last_, fine_last_, bias_, mask_ = int32(last), int32(fine_last), int32(bias), int32(mask)
        lr, wd, first_ = int32(negative_lr), int32(weight_decay), int32(first)
        end, keep_, take_ = int32(first + len(decay) - 1), int64(keep), int64(take)
        for i in range(start, stop):
            sg, fg = _decayed(grad, weight, i, table, last_, bias_, mask_, wd, into_grad)
            sm, fm = _average(
                average, i, sg, fg, table, last_, bias_, mask_, int32(beta), int32(rest)
            )
            fr = advance(root, lacks, i, fg, decay, first_, end, keep_, take_, bias_, mask_)
            su, fu = _adam_update(
                weight, i, sm, fm, fr, table, last_, bias_, mask_, lr, int32(correction),
                int32(eps), wd, decoupled,
            )  # fmt: skip
            add(weight, extra, i, su, fu, table, last_, fine, fine_last_, mask_)
        return 0

    adam.__qualname__ = f"adam_{rounding}"
    return kernel(adam)


class Rounded(NamedTuple):
    """The kernels for one way to round a weight.

    All have the same arguments: ``extra`` is Kahan's compensation, or random bits; ``fine`` is the
    table of sums with random rounding; ``lacks`` is the root's residue, or random bits. A kernel
    does not read arguments that its rounding does not need, so any array may be passed there.
    """

    sgd: Kernel
    adam: Kernel


PLAIN = Rounded(_sgd("plain", _add_plain), _adam("plain", _add_plain, _advance))
KAHAN = Rounded(_sgd("kahan", _add_kahan), _adam("kahan", _add_kahan, _advance))
STOCHASTIC = Rounded(
    _sgd("stochastic", _add_stochastic), _adam("stochastic", _add_stochastic, _advance_stochastic)
)


@helper
def _blend(
    x: Any, y: Any, table: _I32, last: Any, bias: Any, mask: Any, keep: Any, rest: Any
) -> Any:
    """Return the pair of ``keep x + rest y`` for codes, both factors positive."""
    fx, fy = mul_fields(x & mask, keep, bias, mask), mul_fields(y & mask, rest, bias, mask)
    return add_fields(x >> 31, fx, y >> 31, fy, table, last, mask)


@kernel
def nesterov(
    weight: _I16, grad: _I16, buffer: _I16, out: _I16, table: _I32, last: int, bias: int, mask: int,
    momentum: int, decay: int, use_decay: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """Compute Nesterov's direction.

    ``g = grad + decay weight; buffer = momentum buffer + g; out = g + momentum buffer``.
    """
    last_, bias_, mask_, mu = int32(last), int32(bias), int32(mask), int32(momentum)
    for i in range(start, stop):
        sg, fg = _decayed(grad, weight, i, table, last_, bias_, mask_, int32(decay), use_decay)
        sb, fb = _average(buffer, i, sg, fg, table, last_, bias_, mask_, mu, bias_)
        so, fo = add_fields(sg, fg, sb, mul_fields(fb, mu, bias_, mask_), table, last_, mask_)
        put(out, i, code_of(so, fo, mask_))
    return 0


@kernel
def lion(
    weight: _I16, grad: _I16, average: _I16, out: _I16, table: _I32, last: int, bias: int,
    mask: int, keep: int, rest: int, average_keep: int, average_rest: int, decay: int,
    use_decay: bool, start: int, stop: int,
) -> int:  # fmt: skip
    """Compute Lion's direction, then update its average.

    ``out = sign(keep average + rest grad) + decay weight; average = average_keep average +
    average_rest grad``.
    """
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    for i in range(start, stop):
        g, m = int32(get(grad, i)), int32(get(average, i))
        so, field = _blend(m, g, table, last_, bias_, mask_, int32(keep), int32(rest))
        fo = bias_ if field > 0 else int32(0)
        if use_decay:
            w = int32(get(weight, i))
            fw = mul_fields(w & mask_, int32(decay), bias_, mask_)
            so, fo = add_fields(so, fo, w >> 31, fw, table, last_, mask_)
        put(out, i, code_of(so, fo, mask_))
        sm, fm = _blend(m, g, table, last_, bias_, mask_, int32(average_keep), int32(average_rest))
        put(average, i, code_of(sm, fm, mask_))
    return 0


@kernel
def normed(
    weight: _I16, grad: _I16, root: _I16, residue: _I16, out: _I16, table: _I32, squares: _I32,
    last: int, bias: int, mask: int, decay: int, use_decay: bool, first: int, keep: int, take: int,
    eps: int, factor: int, bound: int, start: int, stop: int,
) -> int:  # fmt: skip
    """Compute ``out = (g / (root + eps)) factor``, at most ``bound``.

    ``g = grad + decay weight``; first the root is updated by the table ``squares``.
    """
    last_, bias_, mask_ = int32(last), int32(bias), int32(mask)
    first_, end = int32(first), int32(first + len(squares) - 1)
    keep_, take_ = int64(keep), int64(take)
    for i in range(start, stop):
        sg, fg = _decayed(grad, weight, i, table, last_, bias_, mask_, int32(decay), use_decay)
        fr = _advance(root, residue, i, fg, squares, first_, end, keep_, take_, bias_, mask_)
        _, below = add_fields(int32(0), fr, int32(0), int32(eps), table, last_, mask_)
        fo = mul_fields(_ratio(fg, below, bias_, mask_), int32(factor), bias_, mask_)
        put(out, i, code_of(sg, min(fo, int32(bound)), mask_))
    return 0


@kernel
def multiply(
    weight: _I16, x: _I16, residue: _I16, bits: _U16, table: _I64, words: int, bias: int, mask: int,
    highest: int, start: int, stop: int
) -> int:  # fmt: skip
    """Compute ``weight *= 2^(-sign(weight) table[x])``; zero weights stay zero.

    The definition is :func:`lns_ops.optim.moments.multiply_`; ``highest`` is a field.
    """
    for i in range(start, stop):
        w = int64(get(weight, i))
        field = w & mask
        octaves = look_up(table, int32(int32(get(x, i)) & int32(words)))
        moved = ((field - bias) << 16) + (octaves if w < 0 else -octaves) + int64(get(residue, i))
        rounded = ((moved + int64(get(bits, i))) >> 16) + bias
        new = min(max(rounded, int64(1)), int64(highest))
        put(
            residue,
            i,
            int16(moved - ((rounded - bias) << 16)) if (new == rounded) & (field > 0) else int16(0),
        )
        put(weight, i, int16(new | (w & ~int64(mask))) if field > 0 else int16(0))
    return 0
