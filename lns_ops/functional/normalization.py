"""The elementwise part of normalizations and of their gradients: one kernel each on a GPU.

:mod:`lns_ops.tensor.ops.normalization` has the equations. Every step rounds to the format, as the
operations of :mod:`lns_ops.functional` that they are made of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lns_ops.functional.elementwise import add, mul, sub
from lns_ops.functional.library import FORMAT, OPS, cached_format, define_operator
from lns_ops.spec.format import LNSFormat


def _normalize(
    x: Tensor, mean: Tensor | None, scale: Tensor, weight: Tensor | None, bias: Tensor | None,
    bits: int, fraction_bits: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    fmt = cached_format(bits, fraction_bits)
    y = mul(x if mean is None else sub(x, mean, fmt), scale, fmt)
    if weight is None and bias is None:
        return y, x.new_empty(0)
    out = y if weight is None else mul(y, weight, fmt)
    return y, out if bias is None else add(out, bias, fmt)


def _backward(
    grad: Tensor, y: Tensor, mean: Tensor | None, along: Tensor, scale: Tensor,
    bits: int, fraction_bits: int,
) -> Tensor:  # fmt: skip
    fmt = cached_format(bits, fraction_bits)
    rest = grad if mean is None else sub(grad, mean, fmt)
    return mul(sub(rest, mul(y, along, fmt), fmt), scale, fmt)


def _shapes(x: Tensor, mean: Any, scale: Any, weight: Any, bias: Any, *fmt: int) -> Any:
    affine = weight is not None or bias is not None
    return x.new_empty(x.shape), x.new_empty(x.shape if affine else 0)


define_operator(
    "normalize",
    "(Tensor x, Tensor? mean, Tensor scale, Tensor? weight, Tensor? bias,"
    f" {FORMAT}) -> (Tensor, Tensor)",
    _normalize,
    _shapes,
)
define_operator(
    "normalize_backward",
    f"(Tensor grad, Tensor y, Tensor? mean, Tensor along, Tensor scale, {FORMAT}) -> Tensor",
    _backward,
    lambda grad, *rest: grad.new_empty(grad.shape),
)


def normalize(
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    fmt: LNSFormat,
) -> tuple[Tensor, Tensor]:
    """Return ``y = (x - mean) scale`` and ``y weight + bias``.

    All but ``x`` and ``scale`` may be absent; what there is broadcasts to the shape of ``x``.
    """
    y, out = OPS.normalize(x, mean, scale, weight, bias, fmt.bits, fmt.fraction_bits)
    return y, y if weight is None and bias is None else out


def normalize_backward(
    grad: Tensor, y: Tensor, mean: Tensor | None, along: Tensor, scale: Tensor, fmt: LNSFormat
) -> Tensor:
    """Return ``((grad - mean) - y along) scale``; ``mean`` may be absent."""
    return OPS.normalize_backward(  # type: ignore[no-any-return]
        grad, y, mean, along, scale, fmt.bits, fmt.fraction_bits
    )
