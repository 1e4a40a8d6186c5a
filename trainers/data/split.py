"""Examples in memory: one split, a data set's three splits, and the description of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIXELS, CLASSES = 784, 10


class Split(NamedTuple):
    """Examples ``x`` [N, ...], float32 (ours in [0, 1]) or int64 (tokens), and targets ``y``
    [N, ...], int64 (classes, -100 where none is asked for) or float32 (labels)."""

    x: Tensor
    y: Tensor


class Dataset(NamedTuple):
    """The three splits of a data set."""

    train: Split
    validation: Split
    test: Split


def count_classes(data: Dataset) -> int:
    """Return how many classes there are: one more than the largest of any split, or as many as an
    answer has labels."""
    if data.train.y.is_floating_point():
        return data.train.y.shape[-1]
    return 1 + max(int(split.y.max()) for split in data)


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The description of a trial's data: source, digests, and sizes in examples.

    Attributes:
        digest: SHA-256 of the examples that were chosen.
        files: SHA-256 of all examples that there are to choose from, whatever was chosen.
    """

    name: str
    source: str
    digest: str
    files: str
    root: str | None
    train: int
    validation: int
    test: int
    inputs: int
    classes: int


def scaled(pixels: NDArray[np.generic], labels: NDArray[np.generic], largest: int) -> Split:
    """Return a split whose float32 pixels are ``pixels / largest``."""
    return Split(
        torch.from_numpy(pixels.astype(np.float32)) / largest,
        torch.from_numpy(labels.astype(np.int64)),
    )
