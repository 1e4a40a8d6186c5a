"""The order of an epoch's examples, and each replica's part of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainers.config import EPOCHS
from trainers.data.split import PIXELS, Examples, Split

if TYPE_CHECKING:
    from torch import Tensor


def epoch_order(examples: int, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch visits its examples, int64 ``[examples]`` on the CPU.

    It is a permutation that depends on (seed, epoch) alone.
    """
    import torch

    return torch.randperm(examples, generator=torch.Generator().manual_seed(seed * EPOCHS + epoch))


def share(order: Tensor, *, batch_size: int, step: int, part: int, parts: int) -> Tensor:
    """Return the ``part``-th of ``parts`` contiguous parts of batch ``step`` in ``order``."""
    size = batch_size // parts
    start = step * batch_size + part * size
    return order[start : start + size]


def batches(
    split: Split, *, batch_size: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Split]:
    """Yield the batches of one epoch in the order of (seed, epoch).

    The last, incomplete batch is left out. Rank ``r`` gets the ``r``-th contiguous part of every
    batch, ``batch_size / world_size`` examples.
    """
    order = epoch_order(len(split.y), seed, epoch)
    yield from split.load(
        (
            share(order, batch_size=batch_size, step=step, part=rank, parts=world_size)
            for step in range(len(order) // batch_size)
        ),
        seed,
    )


EVALUATION_BATCH = {"cpu": 2_000, "cuda": 10_000}
"""Examples evaluated at a time, by device: few fit a CPU's caches, many fill a GPU's launch."""
STREAMED = 250
"""Examples evaluated at a time that are not in memory."""


def evaluation_batches(split: Examples, like: int | None = None) -> Iterator[Split]:
    """Yield copies of ``split``, which a model may change, in parts of :data:`EVALUATION_BATCH`
    examples, fewer where they are larger than 784 values or have several steps; in parts of
    :data:`STREAMED` where they are not in memory.

    With ``like``, yield as many equal parts as ``like`` examples would take instead.
    """
    if not isinstance(split, Split):
        import torch

        places = torch.arange(split.size)
        parts = (
            places.split(STREAMED)
            if like is None
            else places.tensor_split(math.ceil(like / STREAMED))
        )
        yield from split.load(parts, 0)
        return
    size = max(1, EVALUATION_BATCH[split.y.device.type] // _weight(split))
    if like is None:
        parts = zip(split.x.split(size), split.y.split(size), strict=True)
    else:
        count = math.ceil(like / size)
        parts = zip(split.x.tensor_split(count), split.y.tensor_split(count), strict=True)
    for x, y in parts:
        yield Split(x.clone(), y.clone())


def _weight(split: Split) -> int:
    """Return how many small examples one of ``split`` counts for."""
    steps = split.y.shape[1] if split.y.dim() - int(split.y.is_floating_point()) > 1 else 1
    return max(1, steps, split.x[:1].numel() // PIXELS)
