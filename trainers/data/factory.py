"""Data sets that a user's factory makes.

The factory is called once for each part: as ``factory(split="train" | "validation" | "test",
**data.args)`` where it has a parameter ``split``, else as ``factory(train=True | False,
**data.args)``; then the last ``data.validation_size`` training examples validate, a tenth where
that is not set. It returns a pair ``(x, y)`` of tensors or arrays, or a map-style
``torch.utils.data.Dataset`` of such pairs. Examples ``x`` [N, ...] of 32 or 64 bit whole numbers
stay whole (tokens), all others become float32. Targets ``y`` [N, ...] are whole numbers (classes)
or become float32, whichever the loss takes (:mod:`trainers.models.loss`). All examples are kept in
memory.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.config import DataConfig
from trainers.data.split import Split
from trainers.user_code import call, load_code

KEY = "data.name"
TOKENS = (torch.int32, torch.int64)
"""Types of examples that stay whole numbers."""
VALIDATION_SHARE = 10
"""One part in so many validates, where nothing is said."""


def load_own(config: DataConfig) -> tuple[Split, Split | None, Split]:
    """Return the training, validation (None where it must be cut from training) and test examples.

    Raises:
        ValueError: the factory cannot be loaded or called, or returns no examples with targets.
    """
    factory = load_code(KEY, config.name, config.code)
    if "split" not in inspect.signature(factory).parameters:
        train, test = (
            _examples(config, call(KEY, config.name, factory, config.args, train=train))
            for train in (True, False)
        )
        return train, None, test
    train, validation, test = (
        _examples(config, call(KEY, config.name, factory, config.args, split=split))
        for split in ("train", "validation", "test")
    )
    return train, validation, test


def _examples(config: DataConfig, made: Any) -> Split:
    """Return what a factory made as tensors."""
    if isinstance(made, torch.utils.data.Dataset):
        made = _collected(made)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ValueError(
            f"{KEY}={config.name!r}: returned a {type(made).__name__}; return a pair (x, y) of"
            " tensors or arrays, or a torch.utils.data.Dataset of such pairs"
        )
    x, y = (_tensor(part) for part in made)
    if not x.dim() or not y.dim() or len(x) != len(y) or not len(y):
        raise ValueError(
            f"{KEY}={config.name!r}: returned examples of shape {tuple(x.shape)} and targets of"
            f" shape {tuple(y.shape)}; return as many targets as examples, at least one"
        )
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise ValueError(
            f"{KEY}={config.name!r}: returned examples or targets that are not finite; mend them"
        )
    x = x.long() if x.dtype in TOKENS else x.float()
    y = y.float() if y.is_floating_point() else y.long()
    return Split(x.contiguous(), y.contiguous())


def _collected(dataset: Any) -> tuple[Tensor, ...]:
    """Return all of a map-style data set's pairs."""
    pairs = [dataset[index] for index in range(len(dataset))]
    return tuple(torch.stack([_tensor(pair[part]) for pair in pairs]) for part in (0, 1))


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
