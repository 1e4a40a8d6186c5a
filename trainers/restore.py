"""Beginning a trial where an earlier attempt left off."""

from __future__ import annotations

from pathlib import Path

from trainers.config import TrialConfig
from trainers.training import Training


def begin(config: TrialConfig, checkpoints: list[str], rank: int = 0, world_size: int = 1) -> tuple[Training, str]:
    """A trial continued from the first whole one of ``checkpoints``, from scratch if there is none; the result is the same.

    Returns:
        The trial, and what is wrong with the checkpoints before that one ("" if nothing).

    Raises:
        ValueError: the trial cannot be built.
    """
    damaged: list[str] = []
    for path in checkpoints:
        training = Training(config, rank=rank, world_size=world_size)
        try:
            training.restore(Path(path))
        except Exception as error:  # whatever a damaged file leads to, the epochs can be computed again
            damaged.append(" ".join(str(error).split()) or type(error).__name__)
        else:
            return training, "; ".join(damaged)
    return Training(config, rank=rank, world_size=world_size), "; ".join(damaged)
