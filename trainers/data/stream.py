"""Examples that are loaded on demand, by separate processes.

A :class:`Stream` replaces a :class:`~trainers.data.split.Split` for map-style data sets that do not
fit into memory or that change their examples at random. torch's ``DataLoader`` loads them in
``data.num_workers`` processes, a few batches ahead. A data set's random numbers only depend on
(seed, epoch, rank) and the number of these processes, so an interrupted trial resumes with the same
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from trainers.data.split import Split

Change = Callable[[Split], Split]


class Stream:
    """Examples of a map-style data set.

    Args:
        dataset: map-style data set of pairs (x, y).
        num_workers: number of processes that load examples.
        outputs: number of model outputs per answer.
        changes: functions that are applied to every batch, in this order.
        device: device that batches are moved to.

    Attributes:
        outputs: number of model outputs per answer.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int,
        outputs: int,
        changes: tuple[Change, ...] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self._dataset, self._num_workers, self.outputs = dataset, num_workers, outputs
        self._changes, self._device = changes, torch.device(device)

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self._dataset)

    def part(self, chosen: slice) -> Stream:
        """Return the examples at the ``chosen`` indices."""
        return self._with(Subset(self._dataset, range(self.size)[chosen]))

    def to(self, device: torch.device) -> Stream:
        """Return the same examples, moved to a device."""
        return self._with(device=device)

    def map(self, change: Change) -> Stream:
        """Return the same examples with ``change`` applied to every batch."""
        return self._with(changes=(*self._changes, change))

    def head(self, examples: int) -> Split:
        """Return the first examples, loaded in this process."""
        places = range(min(examples, self.size))
        return self._finished(default_collate([self._dataset[place] for place in places]))

    def load(self, batches: Iterable[Tensor], seed: int) -> Iterator[Split]:
        """Yield the examples at the indices of each of ``batches``.

        Args:
            batches: indices of examples, int64.
            seed: seed of the data set's random numbers.
        """
        loader = DataLoader(
            self._dataset,
            batch_sampler=[batch.tolist() for batch in batches],
            num_workers=self._num_workers,
            generator=torch.Generator().manual_seed(seed),
            pin_memory=self._device.type == "cuda",
            multiprocessing_context="fork",  # other methods could not find the user file's classes
        )
        for pair in loader:
            yield self._finished(pair)

    def _finished(self, pair: Any) -> Split:
        x, y = pair
        split = Split(x, y)
        for change in self._changes:
            split = change(split)
        return split.to(self._device)

    def _with(
        self,
        dataset: Any = None,
        changes: tuple[Change, ...] | None = None,
        device: torch.device | None = None,
    ) -> Stream:
        return Stream(
            self._dataset if dataset is None else dataset,
            self._num_workers,
            self.outputs,
            self._changes if changes is None else changes,
            self._device if device is None else device,
        )
