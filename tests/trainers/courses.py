"""One rank's part of a test trial of four epochs.

The last two epochs are trained again by new objects, from the checkpoint after the second.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from trainers.config import TrialConfig
from trainers.telemetry.metrics import repeatable
from trainers.training.trainer import Training

Metrics = list[dict[str, float]]


def broken_off(
    config: TrialConfig, rank: int, world_size: int, folder: Path
) -> tuple[Training, Metrics, Metrics]:
    """Return the trial after four epochs, their metrics, and the metrics of the two repeated
    epochs, without times."""
    training = Training(config, rank=rank, world_size=world_size)
    metrics = [training.train_epoch() for _ in range(2)]
    training.save(folder)
    dist.barrier()
    metrics += [training.train_epoch() for _ in range(2)]
    again = Training(config, rank=rank, world_size=world_size)
    again.restore(folder)
    resumed = [again.train_epoch() for _ in range(2)]
    return (
        training,
        [repeatable(values) for values in metrics],
        [repeatable(values) for values in resumed],
    )
