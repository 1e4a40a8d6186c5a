"""Losses leave LNS: they decode their arguments, and the gradient they give back is encoded.

A loss is a number for people and for the first gradient; its softmax spans more octaves than a narrow format has, and the literature's
recipes compute it in float32. So these functions of an LNSTensor return float32 tensors. ``softmax`` itself is not among them: inside a
network it is LNS (:mod:`lns_ops.handlers.attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from lns_ops.tensor import LNSTensor, replaces

LOSSES = (
    F.cross_entropy, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div, F.soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss, F.poisson_nll_loss, F.gaussian_nll_loss,
    F.ctc_loss,
)  # fmt: skip
"""Functions computed in float32."""


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any, **kwargs: Any) -> Any:
        decoded = tree_map(lambda leaf: leaf.to_float() if isinstance(leaf, LNSTensor) else leaf, (args, kwargs))
        return function(*decoded[0], **decoded[1])

    return loss


for _loss in LOSSES:
    replaces(_loss)(_in_float32(_loss))
