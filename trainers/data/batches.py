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
    """Return the order of an epoch's examples, int64 ``[examples]`` on the CPU.

    It is a permutation that only depends on (seed, epoch).
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
"""Number of examples per evaluation batch, by device: small enough for a CPU's caches, large enough
to fill a GPU."""
STREAMED = 250
"""Number of examples per evaluation batch for examples that are not in memory."""


def evaluation_batches(split: Examples, like: int | None = None) -> Iterator[Split]:
    """Yield ``split`` in batches for evaluation, as copies that a model may change.

    A batch has :data:`EVALUATION_BATCH` examples, or fewer if they have more than 784 values or
    several steps; :data:`STREAMED` if they are not in memory. With ``like``, the number of batches
    is the same as for ``like`` examples, and they have equal sizes.
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
    """Return the size of an example of ``split``, relative to a small one."""
    steps = split.y.shape[1] if split.y.dim() - int(split.y.is_floating_point()) > 1 else 1
    return max(1, steps, split.x[:1].numel() // PIXELS)
