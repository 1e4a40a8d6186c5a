"""Losses: they decode their arguments to float32, and encode the gradient that they return.

A loss is a number for people and the start of the backward pass. Its softmax spans more octaves
than a narrow format has, and the recipes in the literature compute it in float32. So these
functions return float32 tensors. ``softmax`` itself is not among them: inside a network it is LNS
(:mod:`lns_ops.tensor.ops.attention`).

The gradient of a mean over n terms is n times smaller, so it underflows sooner when it is encoded:
in lns12 entries below ``n 2^-16`` of a term's own gradient are lost. If that limit is more than
:data:`LOST`, the loss warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lns_ops._compat import tree_map
from lns_ops.tensor.lns_tensor import LNSTensor
from lns_ops.tensor.promotion import takes_floats
from lns_ops.tensor.registry import replaces, replaces_untraced

LOSSES = (
    F.cross_entropy, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, F.nll_loss,
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.poisson_nll_loss,
    F.gaussian_nll_loss, F.ctc_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
"""The functions computed in float32."""


LOST = 2.0**-10
"""The smallest fraction of a term's gradient that a mean must preserve."""
_OF_CLASSES = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
"""Losses with one term for each position; dimension 1 holds the classes."""


def _warn_of_mean(function: Callable[..., Any], x: Any, reduction: str) -> None:
    if reduction != "mean" or not isinstance(x, LNSTensor) or not x.requires_grad:
        return
    of_classes = function in _OF_CLASSES and x.dim() and x.numel()
    terms = x.numel() // (x.shape[min(1, x.dim() - 1)] if of_classes else 1)
    # skipped while shapes are symbolic
    if isinstance(terms, int) and terms > 1 and terms * x.fmt.smallest > LOST:
        warnings.warn(
            f"{function.__name__}: the gradient of a mean over {terms:,} terms loses entries below"
            f" {terms * x.fmt.smallest:.2g} of a term's own to underflow in {x.fmt}: use"
            f" reduction='sum' with lr / {terms}, or multiply the loss by a power of two (Adam"
            " needs no other lr, SGD one that is as many times smaller)",
            stacklevel=4,
        )


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    reduces = function.__name__ != "log_softmax"

    def loss(*args: Any, **kwargs: Any) -> Any:
        if reduces:
            reduction = next(
                (a for a in args if isinstance(a, str)), kwargs.get("reduction", "mean")
            )
            _warn_of_mean(function, args[0] if args else kwargs.get("input"), reduction)
        decoded = tree_map(
            lambda leaf: leaf.to_float() if isinstance(leaf, LNSTensor) else leaf, (args, kwargs)
        )
        return function(*decoded[0], **decoded[1])

    return loss


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
    label_smoothing: float = 0.0, options: object = None,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of an LNS product ``[N, C, ...]`` and a target.

    The product is not computed in chunks, so ``options``, which control them, have no effect.
    """
    classes = linear_weight.shape[:-1]
    bias = None if linear_bias is None else linear_bias.flatten()
    scores = F.linear(input, linear_weight.flatten(0, -2), bias)
    return F.cross_entropy(
        scores.reshape(*input.shape[:-1], *classes), target, weight,
        ignore_index=-100 if ignore_index is None else ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    replaces_untraced(F.linear_cross_entropy)(linear_cross_entropy)
takes_floats(*LOSSES)
for _loss in LOSSES:
    replaces(_loss)(_in_float32(_loss))
