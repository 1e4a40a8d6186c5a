"""One evaluation pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from trainers.data import Split
from trainers.data.batches import evaluation_batches
from trainers.telemetry.tally import Tally


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    combine: Callable[[Tensor], Tensor] = lambda logits: logits,
    like: int | None = None,
) -> Tally:
    """Loss and errors of ``model`` in eval mode on ``split``, in its own arithmetic, of what
    ``combine`` makes of its logits.

    ``like``: see :func:`evaluation_batches`.
    """
    tally, training = Tally(), model.training
    model.eval()
    try:
        for x, y in evaluation_batches(split, like):
            logits = combine(model(x))
            loss = F.cross_entropy(logits, y, reduction="sum").item()
            tally.add(loss, int((logits.argmax(1) != y).sum()), len(y))
    finally:
        model.train(training)
    return tally
