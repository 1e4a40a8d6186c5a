"""Softmax, logsumexp and attention inside a network, in LNS.

The softmax of a loss is in :mod:`lns_ops.tensor.ops.losses`.

``softmax(x) = e / sum(e)`` with ``e = exp(x - max x)``: a difference, a table look-up, a sum in the
contract's order, an exact division. The error comes from the difference: a score of 8 is stored
with an error of half an ulp of 8, which is about 4 % of e at f = 6. A softmax in float32 would not
recover what the score has already lost, and would leave LNS inside the network.

For a masked score e is exactly zero. In attention a row whose scores are all masked is zero (NaN in
torch). An additive mask has ``-inf`` or its dtype's most negative finite value at masked scores; a
row with only the latter has equal weights, as in torch. LNS has no ``-inf``:
``masked_fill(mask, -inf)`` stores the largest magnitude, and so does a sum with such a mask; its e
is zero as well.

The gradient is ``p (g - sum(g p))``, with the mean of g subtracted twice. The rounded p add up to
one only within a few half-ulps. Without the subtraction this error would exceed the gradient if one
p is nearly one, or if g has a large mean. Intermediate results use a format with a wider range, if
there is one: for 1,000 classes g p is below lns12's range but sum(g p) is not. The gradient of
``logsumexp`` is the softmax of its argument. torch's formula ``exp(x - result)`` would turn the
rounding error of the result into a factor, up to e^2.7 for a result of 1,000 in lns16.

Over more scores than the format's largest number (64,830 in lns12, 235 in lns8) the sum can
saturate, and the weights add up to more than one; this warns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops import functional as lns
from lns_ops.functional import unclamped
from lns_ops.functional.indexed import lookup
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import promotion
from lns_ops.tensor.limits.underflow import warn_of_terms
from lns_ops.tensor.lns_tensor import LNSTensor, gradient, operands
from lns_ops.tensor.ops.reductions import centred, dimensions
from lns_ops.tensor.registry import aten, handles, replaces, replaces_untraced

_IN_FLOAT32 = "take it in float32, LNSTensor.from_float(x.to_float().softmax(dim), x.fmt)"


def _exponentials(
    x: Tensor, dims: list[int], fmt: LNSFormat, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest of the codes ``x`` over ``dims``, ``e^(x - largest)``, and its sum."""
    key = lns.order_key(x, fmt)
    if kept is not None:
        key = torch.where(kept, key, -fmt.field_mask)
    largest = lns.from_key(key.amax(dims, keepdim=True), fmt)
    exponentials = lookup(lns.sub(x, largest, fmt), "exp", fmt)
    if kept is not None:
        exponentials = lns.select(kept, exponentials, 0)
    return largest, exponentials, lns.sum(exponentials, dims, fmt, keepdim=True)


def _softmax_codes(x: Tensor, dim: int, fmt: LNSFormat, kept: Tensor | None = None) -> Tensor:
    _, exponentials, total = _exponentials(x, [dim], fmt, kept)
    warn_of_terms("softmax", x.shape[dim], total, fmt, _IN_FLOAT32)
    if kept is None:
        return lns.div(exponentials, total, fmt)
    return lns.div(exponentials, torch.where(total == 0, fmt.bias, total).to(torch.int16), fmt)


@handles(aten.logsumexp.default)
def _logsumexp(func: Any, x: LNSTensor, dim: Any, keepdim: bool = False) -> LNSTensor:
    dims, fmt = dimensions(x, dim), x.fmt
    largest, _, total = _exponentials(x.codes, dims, fmt)
    terms = math.prod(x.shape[d] for d in dims)
    warn_of_terms("logsumexp", terms, total, fmt, "take x.to_float().logsumexp()")
    result = lns.add(lookup(total, "log", fmt), largest, fmt)
    return LNSTensor(result if keepdim else result.squeeze(dims), fmt)


class _LogSumExp(torch.autograd.Function):
    """``log sum e^x`` over ``dims``, which remain as dimensions of size 1."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, dims: list[int]) -> LNSTensor:
        ctx.save_for_backward(x)
        ctx.dims, ctx.fmt = dims, x.fmt
        return _logsumexp(None, x, dims, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), fmt = ctx.saved_tensors, ctx.fmt
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            return grad * _softmax_over(x, ctx.dims), None
        _, exponentials, total = _exponentials(x.codes, ctx.dims, fmt)
        factors = [(gradient(grad, fmt).codes, 1.0), (exponentials, 1.0), (total, -1.0)]
        return LNSTensor(unclamped.product(factors, fmt), fmt), None


def _softmax_over(x: Tensor, dims: list[int]) -> Tensor:
    """Return the joint softmax over several dimensions."""
    if len(dims) < 2:
        return torch.softmax(x, dims[0] if dims else -1)
    last = tuple(range(-len(dims), 0))
    moved = x.movedim(dims, last)
    return moved.flatten(last[0]).softmax(-1).reshape(moved.shape).movedim(last, dims)


@replaces(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: LNSTensor, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    """Return ``torch.logsumexp``, with the softmax of the input as its gradient."""
    dims = dimensions(input, dim)
    result: Tensor = _LogSumExp.apply(input, dims)  # type: ignore[no-untyped-call]
    return result if keepdim or not dims else result.squeeze(dims)


@handles(aten._softmax.default, aten._safe_softmax.default)
def _softmax(func: Any, x: LNSTensor, dim: int, half_to_float: Any = False) -> LNSTensor:
    if not x.dim() or not x.numel():
        return LNSTensor(torch.full_like(x.codes, x.fmt.bias), x.fmt)
    return LNSTensor(_softmax_codes(x.codes, dim, x.fmt), x.fmt)


@handles(aten._softmax_backward_data.default)
def _softmax_backward(func: Any, grad: LNSTensor, y: LNSTensor, dim: int, dtype: Any) -> LNSTensor:
    g, p, fmt = operands("softmax", grad, y)
    if not y.dim():
        return LNSTensor(torch.zeros_like(g), fmt)
    g, p, wide = unclamped.widened(g, fmt), unclamped.widened(p, fmt), unclamped.roomiest(fmt)
    for _ in range(2):
        g = lns.sub(g, lns.sum(lns.mul(g, p, wide), [dim], wide, keepdim=True), wide)
    return LNSTensor(unclamped.narrowed(lns.mul(p, g, wide), fmt), fmt)


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax over the last dimension of the scores that a boolean mask selects."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor, kept: Tensor) -> LNSTensor:
        y = LNSTensor(_softmax_codes(x.codes, -1, x.fmt, kept), x.fmt)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        grad = gradient(grad, y.fmt)
        if torch.is_grad_enabled():  # the gradient itself needs a gradient (double backward)
            return y * centred(grad, lambda g: (g * y).sum(-1, keepdim=True)), None
        return _softmax_backward(None, grad, y, -1, None), None


def _spreads(shape: torch.Size, over: torch.Size) -> bool:
    """Return whether a tensor of one shape can be expanded to another."""
    last = over[len(over) - len(shape) :]
    return len(shape) <= len(over) and all(a in (1, b) for a, b in zip(shape, last, strict=True))


def _causal_bias(mask: Any, device: torch.device) -> Tensor | None:
    """Return the boolean mask of a ``torch.nn.attention.bias``, which has no values itself."""
    if not hasattr(mask, "variant"):
        return mask  # type: ignore[no-any-return]
    behind = mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0
    shape = (mask.seq_len_q, mask.seq_len_kv)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(behind)


def _masks(
    mask: Tensor | None, is_causal: bool, scores: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of scores to keep, and the values to add to the scores.

    Raises:
        ValueError: the mask does not broadcast to the scores.
    """
    mask = _causal_bias(mask, scores.device)
    if mask is not None and not _spreads(mask.shape, scores.shape):
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} for scores of shape {tuple(scores.shape)}: it"
            " must broadcast to them; from the last dimension on, use sizes equal to theirs or 1"
        )
    kept = None
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None or isinstance(mask, LNSTensor):
        return kept, mask
    if mask.dtype == torch.bool:
        return mask if kept is None else kept & mask, None
    least = torch.finfo(mask.dtype).min  # transformers uses it instead of -inf
    finite = mask > least
    # in a row with only this value it dominates the scores: equal weights, as in torch
    drowned = (mask == least).all(-1, keepdim=True)
    added = torch.where(finite, mask, torch.where(drowned, least, 0))
    finite = finite | drowned
    return finite if kept is None else kept & finite, added


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    kept, added = _masks(mask, is_causal, scores)
    if added is not None:
        scores = scores + added
    if kept is None:
        return torch.softmax(scores, -1)
    if not isinstance(scores, LNSTensor):
        return torch.softmax(scores.masked_fill(~kept, -math.inf), -1)
    apply: Callable[..., Tensor] = _MaskedSoftmax.apply
    return apply(scores, kept.expand(scores.shape))


@replaces(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: LNSTensor, key: LNSTensor, value: LNSTensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``softmax(scale q k^T + mask) v``.

    The scale (``1 / sqrt(d)``) is applied to the queries as one LNS product.

    Shapes: query ``[..., L, D]``, key ``[..., S, D]``, value ``[..., S, E]``, output ``[..., L,
    E]``. A boolean mask is True for scores to keep; a float mask is added, with ``-inf`` for masked
    scores.
    """
    if enable_gqa:
        heads = query.shape[-3]
        key = key.repeat_interleave(heads // key.shape[-3], -3)  # type: ignore[assignment]
        value = value.repeat_interleave(heads // value.shape[-3], -3)  # type: ignore[assignment]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = _weights((query * factor) @ key.transpose(-2, -1), attn_mask, is_causal)
    return F.dropout(weights, dropout_p) @ value if dropout_p else weights @ value


def _heads(x: Tensor, heads: int) -> Tensor:
    """Reshape ``[L, B, E]`` to ``[B, heads, L, E / heads]``."""
    length, batch, width = x.shape
    return x.reshape(length, batch, heads, width // heads).permute(1, 2, 0, 3)


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None
) -> list[Tensor]:
    """Return query, key and value projections, with a stacked or with separate weights."""
    each = weights.chunk(3) if isinstance(weights, Tensor) else weights
    biases = bias.chunk(3) if bias is not None else (None, None, None)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), each, biases, strict=True)]


def _with_more_keys(
    states: Sequence[Tensor], bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool
) -> tuple[list[Tensor], int]:
    """Return query, keys and values with learned and zero entries appended, and their number."""
    q, k, v = states
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, b.expand(1, *x.shape[1:])]) for x, b in ((k, bias_k), (v, bias_v)))
    if add_zero_attn:
        k, v = (torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v))
    return [q, k, v], len(k) - len(states[1])


def _padding_mask(
    mask: Tensor | None, key_padding: Tensor | None, heads: int, more: int
) -> Tensor | None:
    """Merge torch's two masks, in which True means *left out*, into one in which True means kept.

    Float masks are merged into an additive mask; the ``more`` appended keys are always kept.
    """
    mask, key_padding = (None if m is None else F.pad(m, (0, more)) for m in (mask, key_padding))
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(-1, heads, *mask.shape[1:])
    if key_padding is not None:
        key_padding = key_padding[:, None, None, :]
    parts = [m for m in (mask, key_padding) if m is not None]
    if not parts:
        return None
    if all(m.dtype == torch.bool for m in parts):
        return ~parts[0] if len(parts) == 1 else ~(parts[0] | parts[1])
    added = [
        (
            torch.zeros(m.shape, device=m.device).masked_fill(m, -math.inf)
            if m.dtype == torch.bool
            else m
        )
        for m in parts
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


@replaces(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None,
    bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
    out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run nn.MultiheadAttention: projections, attention of each head, output projection.

    Source: A. Vaswani et al. 2017 (arXiv:1706.03762).

    Raises:
        NotImplementedError: static keys or values, which no torch layer passes.
    """
    if static_k is not None or static_v is not None:
        raise NotImplementedError(
            "multi-head attention with static keys or values has no LNS form: leave them out"
        )
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = key_padding_mask[None] if key_padding_mask is not None else None
    weights: Any = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else in_proj_weight
    )
    states, more = _with_more_keys(
        _projected(query, key, value, weights, in_proj_bias), bias_k, bias_v, add_zero_attn
    )
    q, k, v = (_heads(x, num_heads) for x in states)
    mask = _padding_mask(attn_mask, key_padding_mask, num_heads, more)
    causal = is_causal and mask is None and not need_weights
    probabilities = _weights((q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1), mask, causal)
    mixed = (F.dropout(probabilities, dropout_p) if training and dropout_p else probabilities) @ v
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    shown = None
    if need_weights:
        shown = probabilities.mean(1) if average_attn_weights else probabilities
        shown = shown.squeeze(0) if unbatched else shown
    return (out.squeeze(1) if unbatched else out), shown


_FLEX, _DEPTH = "torch.nn.attention.flex_attention", 6
"""A torch module, and the maximum number of stack frames between it and the function below."""


@replaces_untraced(Tensor.is_nested.__get__)  # type: ignore[attr-defined]
def is_nested(self: Tensor) -> bool:
    """Return False. Raise if ``flex_attention`` calls, which checks this before it compiles itself.

    Raises:
        NotImplementedError: the caller is ``flex_attention``.
    """
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is not None and frame.f_globals.get("__name__") == _FLEX:
            promotion.refuse_flex_attention()
        frame = None if frame is None else frame.f_back
    return False
