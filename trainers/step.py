"""One training step and one evaluation pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lns_ops import NonFiniteError
from trainers.data import Split
from trainers.spans import Spans
from trainers.synchroniser import Synchroniser, Updater

EVALUATION_BATCH = {"cpu": 2_000, "cuda": 10_000}
"""Examples at a time, by device: few enough for the caches, or many to a launch."""


@dataclass
class Tally:
    """Running sums of loss (nats), wrong answers and examples."""

    loss: float = 0.0
    wrong: int = 0
    examples: int = 0

    def add(self, loss: float, wrong: int, examples: int) -> None:
        """Count one batch."""
        self.loss += loss
        self.wrong += wrong
        self.examples += examples

    def metrics(self, split: str) -> dict[str, float]:
        """``split/loss``, the mean in nats, and ``split/error``, a fraction in 0 .. 1; NaN where nothing was counted."""
        count = self.examples or float("nan")
        return {f"{split}/loss": self.loss / count, f"{split}/error": self.wrong / count}


def train_step(
    model: nn.Module,
    optimizer: Updater,
    batch: Split,
    sync: Synchroniser | None = None,
    micro_batches: int = 1,
    spans: Spans | None = None,
) -> tuple[float, int]:
    """Forward, backward, synchronise the replicas, update; returns the batch's summed loss and wrong answers before it.

    Where a loss is not finite, no rank that knows of it updates and all of those return a NaN loss. The batch is taken in
    ``micro_batches`` equal parts, whose gradients are added up in order, in the gradients' own arithmetic.
    """
    sync, spans = sync or Synchroniser(), spans or Spans()
    optimizer.zero_grad(set_to_none=True)
    sync.begin_step(micro_batches)
    loss, wrong = accumulate(model, batch, micro_batches, spans)
    with spans("synchronise"):
        go = sync.gradients(model.parameters(), math.isfinite(loss))
    with spans("update"):
        updated = go and sync.update(optimizer)
    return loss if updated else math.nan, wrong


def accumulate(model: nn.Module, batch: Split, micro_batches: int, spans: Spans | None = None) -> tuple[float, int]:
    """Add the gradients of ``micro_batches`` equal parts of ``batch`` to those there are; summed loss (NaN if one is) and wrong answers."""
    loss, wrong, size = 0.0, 0, len(batch.y) // micro_batches
    for x, y in zip(batch.x.split(size), batch.y.split(size), strict=True):
        part_loss, part_wrong = _forward_backward(model, Split(x, y), spans or Spans())
        loss, wrong = loss + part_loss, wrong + part_wrong
    return loss, wrong


def _forward_backward(model: nn.Module, batch: Split, spans: Spans) -> tuple[float, int]:
    """Summed loss and wrong answers; NaN where a float part of the model has overflowed on its way into LNS."""
    try:
        with spans("forward"):
            logits = model(batch.x)
            loss = F.cross_entropy(logits, batch.y, reduction="sum")
        with spans("backward"):
            loss.backward()
    except NonFiniteError:
        return math.nan, len(batch.y)
    return loss.item(), int((logits.argmax(1) != batch.y).sum())


def evaluation_batches(split: Split, like: int | None = None) -> Iterator[Split]:
    """``split`` in parts of :data:`EVALUATION_BATCH` examples, or in as many equal ones as ``like`` examples would take."""
    size = EVALUATION_BATCH[split.y.device.type]
    if like is None:
        yield from map(Split, split.x.split(size), split.y.split(size))
    else:
        parts = math.ceil(like / size)
        yield from map(Split, split.x.tensor_split(parts), split.y.tensor_split(parts))


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Split, combine: Callable[[Tensor], Tensor] = lambda logits: logits, like: int | None = None
) -> Tally:
    """Loss and errors of ``model`` on ``split``, in the model's own arithmetic, of what ``combine`` makes of its logits.

    ``like``: see :func:`evaluation_batches`.
    """
    tally = Tally()
    for x, y in evaluation_batches(split, like):
        logits = combine(model(x))
        loss = F.cross_entropy(logits, y, reduction="sum").item()
        tally.add(loss, int((logits.argmax(1) != y).sum()), len(y))
    return tally
