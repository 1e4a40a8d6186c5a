"""One training step: forward, backward, synchronisation of the replicas, update."""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812
from torch import nn

from lns_ops import NonFiniteError
from trainers.data import Split
from trainers.sync.base import Synchroniser, Updater
from trainers.telemetry.spans import Spans


def train_step(
    model: nn.Module,
    optimizer: Updater,
    batch: Split,
    sync: Synchroniser | None = None,
    micro_batches: int = 1,
    spans: Spans | None = None,
) -> tuple[float, int]:
    """Take one training step; return the batch's summed loss and wrong answers before the update.

    Where a loss is not finite, no rank that knows of it updates, and all those ranks return a NaN
    loss. The batch is taken in ``micro_batches`` equal parts, whose gradients are added up in
    order, in the gradients' own arithmetic.
    """
    sync, spans = sync or Synchroniser(), spans or Spans()
    optimizer.zero_grad(set_to_none=True)
    sync.begin_step(micro_batches)
    loss, wrong = accumulate(model, batch, micro_batches, spans)
    with spans("synchronise"):
        update = sync.gradients(model.parameters(), math.isfinite(loss))
    with spans("update"):
        updated = update and sync.update(optimizer)
    return loss if updated else math.nan, wrong


def accumulate(
    model: nn.Module, batch: Split, micro_batches: int, spans: Spans | None = None
) -> tuple[float, int]:
    """Add the gradients of ``micro_batches`` equal parts of ``batch`` to the present ones.

    Return the summed loss (NaN if a part's is) and the number of wrong answers.
    """
    loss, wrong, size = 0.0, 0, len(batch.y) // micro_batches
    for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True):
        part_loss, part_wrong = _forward_backward(model, Split(x, y), spans or Spans())
        loss, wrong = loss + part_loss, wrong + part_wrong
    return loss, wrong


def _forward_backward(model: nn.Module, batch: Split, spans: Spans) -> tuple[float, int]:
    """Run forward and backward; return the summed loss and the number of wrong answers.

    The loss is NaN where a float part of the model has overflowed on its way into LNS.
    """
    try:
        with spans("forward"):
            logits = model(batch.x)
            loss = F.cross_entropy(logits, batch.y, reduction="sum")
        with spans("backward"):
            loss.backward()
    except NonFiniteError:
        return math.nan, len(batch.y)
    return loss.item(), int((logits.argmax(1) != batch.y).sum())
