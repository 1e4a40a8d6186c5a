"""One evaluation pass over a split."""

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
    """Return loss and errors of ``model`` on ``split``, in the model's own arithmetic.

    Args:
        model: the model.
        split: examples, on the model's device.
        combine: turns the model's logits into the logits that are evaluated.
        like: see :func:`evaluation_batches`.
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
