"""Attention: multi-head and scaled dot products, compared with float64, and their masks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from lns_ops import LNSTensor, lns12, lns16
from tests.lns_ops.lns_formats import half_ulp
from tests.lns_ops.tensor.twins import FMT, ROUNDINGS, check, values


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention(options: dict[str, Any], need_weights: bool) -> None:
    torch.manual_seed(1)
    k, v = options.get("kdim", 8), options.get("vdim", 8)
    inputs = torch.randn(4, 2, 8), torch.randn(6, 2, k), torch.randn(6, 2, v)
    check(
        nn.MultiheadAttention(8, 2, **options), inputs, ROUNDINGS["some"], need_weights=need_weights
    )


def test_the_masks_of_multi_head_attention() -> None:
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = (
        torch.randn(2, 5, 8),
        torch.tensor([[False] * 5, [False, False, False, True, True]]),
    )
    for mask in (
        torch.ones(5, 5, dtype=torch.bool).triu(1),
        nn.Transformer.generate_square_subsequent_mask(5),
        torch.randn(4, 5, 5),
    ):
        for key_padding in (None, padding):
            check(
                copy.deepcopy(attention),
                (x, x, x),
                ROUNDINGS["some"],
                attn_mask=mask,
                key_padding_mask=key_padding,
            )


def test_causal_biases_without_values() -> None:
    q, k = (
        LNSTensor.from_float(torch.randn(shape, generator=torch.Generator().manual_seed(1)), lns16)
        for shape in ((1, 2, 4, 8), (1, 2, 6, 8))
    )
    for bias, behind in ((causal_lower_right(4, 6), 2), (causal_upper_left(4, 6), 0)):
        kept = torch.ones(4, 6, dtype=torch.bool).tril(behind)
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=kept)
        found = F.scaled_dot_product_attention(q, k, k, attn_mask=bias)
        assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float", "inf"])
def test_scaled_dot_product_attention(causal: bool, mask: str | None) -> None:
    if causal and mask is not None:
        pytest.skip("torch takes one of them")
    torch.manual_seed(1)
    shapes = [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)]
    inputs = [LNSTensor.from_float(torch.randn(s), FMT).detach().requires_grad_() for s in shapes]
    exact = [values(x).requires_grad_() for x in inputs]
    masks = {
        None: None,
        "bool": torch.rand(5, 6) > 0.4,
        "float": torch.randn(5, 6),
        "inf": torch.zeros(5, 6).fill_diagonal_(-torch.inf),
    }
    chosen = masks[mask]
    got = F.scaled_dot_product_attention(*inputs, attn_mask=chosen, is_causal=causal)
    want = F.scaled_dot_product_attention(
        *exact,
        attn_mask=chosen.double() if chosen is not None and chosen.dtype != torch.bool else chosen,
        is_causal=causal,
    )
    weight = values(LNSTensor.from_float(torch.randn(want.shape), FMT))
    got.backward(LNSTensor.from_float(weight, FMT))
    want.backward(weight)
    for a, b in zip(
        [got, *(x.grad for x in inputs)], [want, *(x.grad for x in exact)], strict=True
    ):
        assert (values(a) - values(b)).norm() <= ROUNDINGS["some"] * half_ulp(FMT) * values(
            b
        ).norm()


def test_a_masked_score_takes_no_part() -> None:
    q, k, v = (LNSTensor.from_float(torch.randn(1, 4, 8), lns12) for _ in range(3))
    kept = torch.tensor([[True, False, True, False]])
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=kept)
    k.codes[:, 1::2], v.codes[:, 1::2] = 321, 1234
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=kept).codes, got.codes)
    nothing = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 4, dtype=torch.bool))
    assert not nothing.codes.any()


MASKED = {
    "masked_fill": lambda x: x.masked_fill(torch.tensor([False, True, False]), -math.inf),
    "scatter": lambda x: x.scatter(-1, torch.tensor([1]), -math.inf),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([1]), -math.inf),
    "where": lambda x: torch.where(torch.tensor([True, False, True]), x, -math.inf),
    "added": lambda x: x + torch.tensor([0.0, -math.inf, 0.0]),
}


@pytest.mark.parametrize("name", MASKED)
def test_minus_infinity_masks_scores_before_a_softmax(name: str) -> None:
    scores = MASKED[name](LNSTensor.from_float(torch.tensor([1.0, 2.0, 3.0]), lns12))
    weights = F.softmax(scores, -1)
    assert isinstance(weights, LNSTensor)
    torch.testing.assert_close(
        weights.to_float(), torch.tensor([0.1192, 0.0, 0.8808]), rtol=0.03, atol=0
    )
    assert weights.codes[1] == 0


def test_values_have_their_own_number_of_heads() -> None:
    query, key, value = (random_values(1, heads, 5, 4) for heads in (8, 4, 2))
    got = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    repeated = (x.repeat_interleave(8 // x.shape[1], 1) for x in (query, key, value))
    assert torch.equal(got.codes, F.scaled_dot_product_attention(*repeated).codes)


def test_a_row_masked_by_the_least_number_has_equal_weights() -> None:
    least = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, least, 0.0, 0.0], [least] * 4])
    query, key, value = random_values(1, 2, 4), random_values(1, 4, 4), random_values(1, 4, 4)
    got = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).to_float()
    floats = (x.to_float() for x in (query, key, value))
    wanted = F.scaled_dot_product_attention(*floats, attn_mask=mask)
    torch.testing.assert_close(got, wanted, rtol=0.03, atol=0.03)
    hidden = F.scaled_dot_product_attention(query, key, value, attn_mask=mask * 2)
    assert not hidden.codes[0, 1].any()


def random_values(*shape: int) -> LNSTensor:
    return LNSTensor.from_float(torch.randn(shape), lns16)
