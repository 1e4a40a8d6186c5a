"""Trials that run out of memory: detection of the error, and changes for the next attempt.

Every allocator has its own error: torch's ``OutOfMemoryError`` on a GPU, a ``RuntimeError`` of
torch's allocator on a CPU, CuPy's error, Python's ``MemoryError``. If the trial shares a GPU, the
next attempt gets a whole one, which does not change the result. Otherwise it uses smaller
micro-batches; their gradients add up to the batch's, but with different rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainers.config import TrialConfig

_SAID = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "unable to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error``, or one of its causes, means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def relief(config: TrialConfig) -> dict[str, Any] | None:
    """Return changed keys with which the trial needs less memory or gets more; None if
    impossible."""
    if config.device == "cuda" and config.workers == 1 and (config.gpus or 1.0) < 1:
        return {"gpus": 1.0}
    if config.own_loop or config.model.normed or config.model.own or config.loss.own:
        return None  # smaller micro-batches may change the function that is trained
    parts = config.layout.micro_batches
    while (parts := 2 * parts) <= config.batch_size:
        try:
            replace(config, layout=replace(config.layout, micro_batches=parts))
        except ValueError:
            continue
        return {"layout.micro_batches": parts}
    return None
