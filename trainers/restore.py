"""What every executor does with a trial: begin it where an earlier attempt left off, and train it an epoch at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainers.config import TrialConfig
from trainers.records import Beginning
from trainers.training import Training


def begin(config: TrialConfig, checkpoints: list[str], rank: int = 0, world_size: int = 1) -> tuple[Training, Beginning]:
    """A trial continued from the first whole one of ``checkpoints``, from scratch if there is none; the result is the same.

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
            return training, Beginning(damaged="; ".join(damaged), history=[dict(metrics) for metrics in training.history])
    return Training(config, rank=rank, world_size=world_size), Beginning(damaged="; ".join(damaged))


def step(training: Training) -> dict[str, Any]:
    """One epoch of a trial, and its test after the last; ``done`` says whether that was it.

    A trial restored after its last epoch only tests.
    """
    epochs = training.config.epochs
    metrics: dict[str, Any] = training.train_epoch() if training.epoch < epochs else {"epoch": float(epochs)}
    done = training.epoch >= epochs
    return {**metrics, **(training.test() if done else {}), "done": done}
