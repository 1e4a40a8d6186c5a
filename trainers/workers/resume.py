"""Resuming a trial from a checkpoint, the same one on all its ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from trainers.checkpoint.files import load_checkpoint
from trainers.checkpoint.manifest import STATE, digest_file
from trainers.checkpoint.remote import fetched
from trainers.config import TrialConfig
from trainers.training.trainer import Training
from trainers.workers.messages import Beginning


def resume(
    config: TrialConfig, checkpoints: list[str], rank: int = 0, world_size: int = 1
) -> tuple[Training, Beginning]:
    """Return a trial resumed from the first complete checkpoint, or started from scratch.

    The result of the trial is the same either way. All ranks resume from the same checkpoint: the
    first one in rank 0's list that every rank reads with equal content. (A network file system may
    show the newest checkpoint only to some ranks.)

    Raises:
        ValueError: the trial cannot be built.
    """
    damaged: list[str] = []
    for path in of_first(checkpoints, world_size):
        wrong = _differing(path, world_size)
        training = Training(config, rank=rank, world_size=world_size)
        if not wrong:
            try:
                training.restore(fetched(path))
            # any error of a damaged file: the epochs can be repeated
            except Exception as error:
                wrong = in_a_line(error)
            wrong = first_of(gathered(wrong, world_size))
        if not wrong:
            return training, Beginning(
                damaged="; ".join(damaged), history=[dict(metrics) for metrics in training.history]
            )
        damaged.append(wrong)
    return Training(config, rank=rank, world_size=world_size), Beginning(damaged="; ".join(damaged))


def _differing(path: str, world_size: int) -> str:
    """Return the reason why the ranks cannot all resume from a checkpoint; "" if they can.

    With a single rank, it is not checked here but when the checkpoint is loaded.
    """
    if world_size == 1:
        return ""
    digest = wrong = ""
    try:
        folder = fetched(path)
        load_checkpoint(folder)
        digest = digest_file(folder / STATE)
    except (ValueError, OSError) as error:
        wrong = in_a_line(error)
    found = gathered((digest, wrong), world_size)
    wrong = first_of([text for _, text in found])
    return wrong or (
        ""
        if len(set(found)) == 1
        else f"{path}: not the same checkpoint on every rank; the file system lags"
    )


def of_first(checkpoints: list[str], world_size: int) -> list[str]:
    """Return rank 0's list; collective."""
    lists: list[list[str]] = gathered(checkpoints, world_size)
    return lists[0]


def gathered(value: Any, world_size: int) -> list[Any]:
    """Return every rank's value; collective."""
    if world_size == 1:
        return [value]
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def first_of(texts: list[str]) -> str:
    """Return the first text that is not empty; "" if all are."""
    return next(filter(None, texts), "")


def in_a_line(error: Exception) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
