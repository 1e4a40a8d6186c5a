"""Products of many factors, sums of such products and quotients by counts, clamped only at the end.

A product of LNS values is a sum of logarithms. In int32 it cannot leave the range. So ``g a / (b
b)`` gets the code of its exact value if it has one, even if ``a / b / b`` underflows. Everything is
plain integer arithmetic in torch, so every device gives the same bits. On a CPU one kernel computes
products of up to three factors (:mod:`lns_ops.cpu.products`), with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lns_ops.cpu import products
from lns_ops.functional.elementwise import encode, number_code, whole
from lns_ops.functional.indexed import index_sum
from lns_ops.functional.library import FORMAT, cached_format, define_operator, operators_for
from lns_ops.functional.reductions import mean
from lns_ops.spec.format import LNSFormat, logarithm

_NOWHERE = -(1 << 26)
"""A logarithm below the logarithms of all products."""
_FURTHEST = 1 << 24
"""The largest magnitude of the logarithm of a power."""


class Unclamped(NamedTuple):
    """Values whose logarithms may be outside a format's range.

    Attributes:
        logs: int32, in ulps.
        signs: int16; all bits are set for a negative value, otherwise none.
        alive: int16; all bits are set for a nonzero value, otherwise none.
    """

    logs: Tensor
    signs: Tensor
    alive: Tensor


def unpacked(codes: Tensor, fmt: LNSFormat) -> Unclamped:
    """Return the values of codes."""
    field = codes & fmt.field_mask
    return Unclamped(field.int() - fmt.bias, codes >> 15, -field >> 15)


def packed(x: Unclamped, fmt: LNSFormat) -> Tensor:
    """Return codes: clamped to the range, zero below it."""
    field = (x.logs + fmt.bias).clamp_(0, fmt.field_mask).to(torch.int16).bitwise_and_(x.alive)
    nonzero = field.neg().bitwise_right_shift_(15).bitwise_and_(fmt.sign_mask)
    return field.bitwise_or_(nonzero.bitwise_and_(x.signs))


def raised(codes: Tensor, power: float, fmt: LNSFormat) -> Unclamped:
    """Return powers of codes; a fractional power rounds the logarithm half to even.

    All powers of zero except the zeroth are zero, and a fractional power of a negative number is
    ``|x|^power``: callers must reject powers without a value.
    """
    logs, signs, alive = unpacked(codes, fmt)
    if power == 1:
        return Unclamped(logs, signs, alive)
    if power == round(power) and abs(power) <= 512:  # then no logarithm exceeds _FURTHEST
        logs = logs * int(power)
    else:
        logs = (logs.double() * power).round_().clamp_(-_FURTHEST, _FURTHEST).int()
    signs = signs if power % 2 == 1 else torch.zeros_like(signs)
    return Unclamped(logs, signs, alive if power else torch.full_like(alive, -1))


def raised_to_each(codes: Tensor, exponents: Tensor, fmt: LNSFormat) -> Unclamped:
    """Return powers of codes by float64 exponents, broadcast; otherwise as :func:`raised`."""
    x = unpacked(codes, fmt)
    logs = (x.logs.double() * exponents).round_().clamp_(-_FURTHEST, _FURTHEST).int()
    half = exponents * 0.5
    odd = -(half.sub_(half.floor()) == 0.5).to(torch.int16)
    ones = -(exponents == 0).to(torch.int16)
    return Unclamped(logs, x.signs & odd, x.alive | ones)


def times(x: Unclamped, y: Unclamped) -> Unclamped:
    """Return the product, broadcast."""
    return Unclamped(x.logs + y.logs, x.signs ^ y.signs, x.alive & y.alive)


def log_of(number: float, fmt: LNSFormat) -> int:
    """Return the logarithm of a number's magnitude, of any size, rounded as in encoding.

    Raises:
        ValueError: the number is a NaN or an infinity (``NonFiniteError``).
    """
    number_code(number, fmt)  # raises if not finite
    return logarithm(abs(number), fmt.fraction_bits)


def scaled(x: Unclamped, number: float, over: float, fmt: LNSFormat) -> Unclamped:
    """Return ``x number / over``, for numbers of any size."""
    if number == 0:
        return x._replace(alive=torch.zeros_like(x.alive))
    log = log_of(number, fmt) - log_of(over, fmt)
    signs = ~x.signs if (number < 0) != (over < 0) else x.signs
    return Unclamped(x.logs + log if log else x.logs, signs, x.alive)


def _product(
    factors: Sequence[Tensor], powers: Sequence[float], shift: int, negative: bool, bits: int,
    fraction_bits: int,
) -> Unclamped:  # fmt: skip
    """Return the product of codes raised to powers, broadcast: the definition in torch operations.

    ``shift`` is added to the logarithms; if ``negative``, all signs are flipped.
    """
    fmt = cached_format(bits, fraction_bits)
    made = [raised(codes, power, fmt) for codes, power in zip(factors, powers, strict=True)]
    logs, signs, alive = reduce(times, made)
    return Unclamped(logs + shift if shift else logs, ~signs if negative else signs, alive)


def _codes(*arguments: Any) -> Tensor:
    """Return the codes of :func:`_product`."""
    return packed(_product(*arguments), cached_format(*arguments[-2:]))


def _on_cpu(kernel: Any, otherwise: Any) -> Any:
    """Return a function that calls a kernel, or ``otherwise`` if there are too many factors."""

    def call(
        factors: Sequence[Tensor], powers: Sequence[float], shift: int, negative: bool, bits: int,
        fraction_bits: int,
    ) -> Any:  # fmt: skip
        if len(factors) > products.FACTORS:
            return otherwise(factors, powers, shift, negative, bits, fraction_bits)
        shape = torch.broadcast_shapes(*(x.shape for x in factors))
        arrays = [whole(x, shape).contiguous().numpy() for x in factors]
        fmt = cached_format(bits, fraction_bits)
        found = kernel(arrays, powers, shift, negative, _FURTHEST, fmt)
        if isinstance(found, tuple):
            return tuple(torch.from_numpy(part) for part in found)
        return torch.from_numpy(found)

    return call


def _fake(factors: Sequence[Tensor], *_: Any) -> Tensor:
    return factors[0].new_empty(torch.broadcast_shapes(*(x.shape for x in factors)))


def _fake_parts(factors: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    signs = _fake(factors)
    return torch.empty_like(signs, dtype=torch.int32), signs, torch.empty_like(signs)


_SIGNATURE = f"(Tensor[] factors, float[] powers, int shift, bool negative, {FORMAT})"
define_operator(
    "product", f"{_SIGNATURE} -> Tensor", _on_cpu(products.product, _codes), _fake, _codes
)
define_operator(
    "product_parts", f"{_SIGNATURE} -> (Tensor, Tensor, Tensor)",
    _on_cpu(products.product_parts, _product), _fake_parts, _product,
)  # fmt: skip

Factors = Sequence[tuple[Tensor, float]]
"""Codes and their exponents."""


def _arguments(factors: Factors, fmt: LNSFormat, number: float, over: float) -> tuple[Any, ...]:
    """Return the arguments of the operators."""
    shift = log_of(number, fmt) - log_of(over, fmt) if number != over else 0
    codes, powers = [x for x, _ in factors], [float(p) for _, p in factors]
    return codes, powers, shift, (number < 0) != (over < 0), fmt.bits, fmt.fraction_bits


def product(factors: Factors, fmt: LNSFormat, number: float = 1.0, over: float = 1.0) -> Tensor:
    """Return codes of ``number / over`` times codes raised to powers, broadcast, clamped once."""
    codes = factors[0][0]
    if number == 0:
        return codes.new_zeros(torch.broadcast_shapes(*(x.shape for x, _ in factors)))
    given = _arguments(factors, fmt, number, over)
    return operators_for(codes).product(*given)  # type: ignore[no-any-return]


def product_parts(
    factors: Factors, fmt: LNSFormat, number: float = 1.0, over: float = 1.0
) -> Unclamped:
    """Return :func:`product`, not clamped."""
    if number == 0:
        return unpacked(product(factors, fmt, number), fmt)
    given = _arguments(factors, fmt, number, over)
    return Unclamped(*operators_for(factors[0][0]).product_parts(*given))


def roomiest(fmt: LNSFormat) -> LNSFormat:
    """Return the format with the same ulp and the widest range."""
    return LNSFormat(min(16, fmt.fraction_bits + 9), fmt.fraction_bits)


def total(x: Unclamped, dims: Sequence[int], fmt: LNSFormat) -> Unclamped:
    """Return sums over ``dims``, which remain with size 1, in the contract's order.

    A factor common to all terms changes no bit of a sum. So the largest term of each sum is moved
    to the end of the range of :func:`roomiest`, and the mean is computed, which never exceeds it.
    """
    terms = math.prod(x.logs.shape[d] for d in dims)
    if not dims or not terms:
        return (
            x if not dims else Unclamped(*(part.sum(list(dims), True).to(part.dtype) for part in x))
        )
    wide = roomiest(fmt)
    peak = x.logs.masked_fill(x.alive == 0, _NOWHERE).amax(tuple(dims), keepdim=True)
    codes = packed(x._replace(logs=x.logs + (wide.max_log - peak)), wide)
    logs, signs, alive = unpacked(mean(codes, dims, wide, keepdim=True), wide)
    return Unclamped(logs + (peak - wide.max_log) + log_of(terms, fmt), signs, alive)


def over_counts(x: Unclamped, counts: Tensor, fmt: LNSFormat) -> Unclamped:
    """Return quotients by integers of at least 1, of any size, broadcast. The integers' logarithms
    are rounded as in encoding.
    """
    wide = roomiest(fmt)
    significands, exponents = torch.frexp(counts.double())
    low = exponents << fmt.fraction_bits
    logs = (encode(significands, wide).int() - wide.bias) + low
    return x._replace(logs=x.logs - logs)


def divided(codes: Tensor, counts: Tensor, fmt: LNSFormat) -> Tensor:
    """Return codes divided by integers (:func:`over_counts`)."""
    x = unpacked(codes, fmt)
    shape = torch.broadcast_shapes(codes.shape, counts.shape)
    return packed(over_counts(Unclamped(*(part.expand(shape) for part in x)), counts, fmt), fmt)


def total_by_index(codes: Tensor, index: Tensor, rows: int, fmt: LNSFormat) -> Unclamped:
    """Return :func:`lns_ops.functional.indexed.index_sum` without clamping the sums to the range.

    The sums are computed in the format of :func:`roomiest`. If the terms of a destination could
    leave its range, they are divided by a power of two first.
    """
    wide, count = roomiest(fmt), max(1, len(codes))
    more, room = wide.bias - fmt.bias, wide.max_log - fmt.max_log
    if room >= log_of(count, fmt):
        x = unpacked(codes, fmt)
        return unpacked(index_sum(packed(x, wide), index, rows, wide), wide)
    flat = codes.reshape(len(codes), -1)
    at = torch.where((index < 0) | (index >= rows), rows, index.reshape(-1))
    field = flat & fmt.field_mask
    peak = field.new_zeros(rows + 1, flat.shape[1]).scatter_reduce(
        0, at[:, None].expand(field.shape), field, "amax"
    )
    down = (peak.int() + more + log_of(count, fmt) - wide.field_mask).clamp_min_(0)
    logs, signs, alive = unpacked(flat, fmt)
    moved = packed(Unclamped(logs - down.index_select(0, at), signs, alive), wide)
    logs, signs, alive = unpacked(index_sum(moved, index, rows, wide), wide)
    found = Unclamped(logs + down[:rows], signs, alive)
    return Unclamped(*(part.reshape(rows, *codes.shape[1:]) for part in found))


def repeated(shape: Sequence[int], of: Sequence[int]) -> list[int]:
    """Return the dimensions of ``shape`` along which a tensor of shape ``of`` was broadcast."""
    new = len(shape) - len(of)
    return [d for d, n in enumerate(shape) if d < new or of[d - new] == 1 != n]


def folded(
    factors: Factors, shape: Sequence[int], fmt: LNSFormat, number: float = 1.0, over: float = 1.0
) -> Tensor:
    """Return codes ``shape``: :func:`product` summed over the dimensions that were broadcast."""
    dims = repeated(torch.broadcast_shapes(*(x.shape for x, _ in factors)), shape)
    if not dims:
        return product(factors, fmt, number, over).reshape(tuple(shape))
    return folded_parts(product_parts(factors, fmt, number, over), shape, fmt)


def folded_parts(x: Unclamped, shape: Sequence[int], fmt: LNSFormat) -> Tensor:
    """Return codes ``shape``: summed over the dimensions that were broadcast, clamped once."""
    return packed(total(x, repeated(x.logs.shape, shape), fmt), fmt).reshape(tuple(shape))


def widened(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Return codes of :func:`roomiest` with the same values."""
    wide = roomiest(fmt)
    if wide == fmt:
        return codes
    field = codes & fmt.field_mask
    nonzero = field.neg().bitwise_right_shift_(15)
    signs = (codes >> 15).bitwise_and_(wide.sign_mask)
    return field.add_(wide.bias - fmt.bias).bitwise_or_(signs).bitwise_and_(nonzero)


def narrowed(codes: Tensor, fmt: LNSFormat) -> Tensor:
    """Convert codes of :func:`roomiest` to ``fmt``, clamped to its range."""
    wide = roomiest(fmt)
    if wide == fmt:
        return codes
    field = (codes & wide.field_mask).sub_(wide.bias - fmt.bias).clamp_(0, fmt.field_mask)
    nonzero = field.neg().bitwise_right_shift_(15)
    signs = (codes >> 15).bitwise_and_(fmt.sign_mask).bitwise_and_(nonzero)
    return field.bitwise_or_(signs)
