"""One training step: forward, backward, synchronisation of the replicas, update."""

from __future__ import annotations

import math

from torch import nn

from lns_ops import NonFiniteError
from trainers.data import Split
from trainers.models.loss import CROSS_ENTROPY, Loss
from trainers.sync.base import Synchroniser, Updater
from trainers.telemetry.spans import Spans
from trainers.telemetry.tally import Tally, faulty, tallied


def train_step(
    model: nn.Module,
    optimizer: Updater,
    batch: Split,
    sync: Synchroniser | None = None,
    micro_batches: int = 1,
    spans: Spans | None = None,
    loss: Loss = CROSS_ENTROPY,
) -> Tally:
    """Take one training step; return the batch's losses and answers before the update.

    If a loss is not finite, the ranks that know it skip the update and return a NaN loss. The batch
    is processed in ``micro_batches`` equal parts, whose gradients are added up in order, in the
    gradients' own arithmetic.
    """
    sync, spans = sync or Synchroniser(), spans or Spans()
    optimizer.zero_grad(set_to_none=True)
    sync.begin_step(micro_batches)
    tally = accumulate(model, batch, micro_batches, spans, loss)
    with spans("synchronise"):
        update = sync.gradients(model.parameters(), finite=math.isfinite(tally.loss))
    with spans("update"):
        if not (update and sync.update(optimizer)):
            tally.loss = math.nan
    return tally


def accumulate(
    model: nn.Module,
    batch: Split,
    micro_batches: int,
    spans: Spans | None = None,
    loss: Loss = CROSS_ENTROPY,
) -> Tally:
    """Add the gradients of ``micro_batches`` equal parts of ``batch`` to the present ones.

    Return the losses (NaN if a part's is) and answers.
    """
    tally, size = Tally(), len(batch.y) // micro_batches
    for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True):
        tally.add(_forward_backward(model, Split(x, y), spans or Spans(), loss))
    return tally


def _forward_backward(model: nn.Module, batch: Split, spans: Spans, loss: Loss) -> Tally:
    """Run forward and backward; return the losses and answers.

    The loss is NaN if a float part of the model overflowed in the conversion to LNS.
    """
    try:
        with spans("forward"):
            outputs = model(batch.x)
            summed = loss(outputs, batch.y)
        with spans("backward"):
            summed.backward()
    except NonFiniteError:
        return faulty(batch.size, loss.answers_each(batch.y))
    return tallied(outputs, batch, summed, loss)
