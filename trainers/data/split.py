"""Examples: one split in memory, a data set's three splits, and the description of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIXELS = 784
IGNORED = -100
"""Target of positions without an answer, torch's ``ignore_index``."""


class Examples(Protocol):
    """Examples of one split, in memory (:class:`Split`) or not
    (:class:`trainers.data.stream.Stream`)."""

    @property
    def size(self) -> int:
        """The number of examples."""

    @property
    def outputs(self) -> int:
        """Number of model outputs per answer: one per class, or one per number to predict."""

    def head(self, examples: int) -> Split:
        """Return a copy of the first examples."""

    def part(self, chosen: slice) -> Examples:
        """Return the examples at the ``chosen`` indices."""

    def to(self, device: torch.device) -> Examples:
        """Return the same examples on a device."""

    def map(self, change: Callable[[Split], Split]) -> Examples:
        """Return the examples with ``change`` applied to every batch."""

    def load(self, batches: Iterable[Tensor], seed: int) -> Iterator[Split]:
        """Yield the examples at the indices (int64) of each of ``batches``; ``seed`` is the seed of
        random changes."""


class Split(NamedTuple):
    """Examples ``x`` [N, ...], float32 (built-in data: in [0, 1]) or int64 (tokens), and targets
    ``y`` [N, ...], int64 (classes, -100 to ignore) or float32 (labels, numbers)."""

    x: Tensor
    y: Tensor

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.y)

    @property
    def outputs(self) -> int:
        """Number of model outputs per answer; for classes, the largest class in the split plus
        1."""
        if self.y.is_floating_point():
            return self.y.shape[-1] if self.y.dim() > 1 else 1
        return 1 + int(self.y.max())

    def head(self, examples: int) -> Split:
        """Return copies of the first examples."""
        return Split(self.x[:examples].clone(), self.y[:examples].clone())

    def part(self, chosen: slice) -> Split:
        """Return the examples at the ``chosen`` indices, as a view."""
        return Split(self.x[chosen], self.y[chosen])

    def to(self, device: torch.device) -> Split:
        """Return the same examples on a device."""
        return Split(self.x.to(device), self.y.to(device))

    def map(self, change: Callable[[Split], Split]) -> Split:
        """Return the examples with ``change`` applied."""
        return change(self)

    def load(self, batches: Iterable[Tensor], seed: int) -> Iterator[Split]:
        """Yield the examples at the indices of each of ``batches``."""
        for chosen in batches:
            yield Split(self.x[chosen], self.y[chosen])


class Dataset(NamedTuple):
    """The three splits of a data set."""

    train: Examples
    validation: Examples
    test: Examples

    @property
    def outputs(self) -> int:
        """Number of model outputs per answer."""
        return max(split.outputs for split in self)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The description of a trial's data: source, digests, and sizes in examples.

    Attributes:
        args: the data set's own arguments, as in the config.
        identity: settings that determine the examples of a user's factory, as one line; "" for
            built-in data.
        digest: SHA-256 of the examples in the splits.
        files: SHA-256 of all available examples, independent of the split sizes.
    """

    name: str
    args: dict[str, Any]
    source: str
    digest: str
    files: str
    root: str | None
    train: int
    validation: int
    test: int
    inputs: int
    classes: int
    identity: str = ""


def scaled(pixels: NDArray[np.generic], labels: NDArray[np.generic], largest: int) -> Split:
    """Return a split whose float32 pixels are ``pixels / largest``."""
    import torch

    return Split(
        torch.from_numpy(pixels.astype(np.float32)) / largest,
        torch.from_numpy(labels.astype(np.int64)),
    )
