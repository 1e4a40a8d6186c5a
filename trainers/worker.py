"""The Ray Train side: several workers train one trial data-parallel over gloo.

Each worker runs :func:`train_loop`: a :class:`~trainers.training.Training` with its rank, an epoch at a time; rank 0 saves a
checkpoint with every report, so a group that Ray restarts continues after the last reported epoch and ends with the same bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from trainers.config import TrialConfig
from trainers.training import Training


def train_loop(values: dict[str, Any]) -> None:
    """What every worker runs; ``values`` is ``TrialConfig.to_dict()``. Reports each epoch's metrics, the last one's with ``test/*``."""
    context = ray.train.get_context()
    training = Training(TrialConfig.from_dict(values), rank=context.get_world_rank(), world_size=context.get_world_size())
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            training.restore(Path(folder))
    while training.epoch < training.config.epochs:
        metrics: dict[str, Any] = training.train_epoch()
        if training.epoch == training.config.epochs:
            metrics |= training.test()
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if training.rank == 0:
                training.save(Path(folder))
                saved = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=saved)


def resources(config: TrialConfig) -> list[dict[str, float]]:
    """The bundles that the gang needs, one a worker."""
    return [{"CPU": float(config.threads)}] * config.workers


def build_trainer(
    config: TrialConfig, *, storage_path: str, name: str, callbacks: Sequence[Any] = (), max_failures: int = 3
) -> TorchTrainer:
    """The TorchTrainer of ``config``; ``.fit()`` runs it.

    Args:
        storage_path: absolute folder or URI where Ray Train keeps checkpoints.
        name: of the run below it; the same name continues an earlier run.
        max_failures: how often a group with a dead worker starts again from its last checkpoint.
        callbacks: ``ray.train.UserCallback``s, such as Ray Tune's ``TuneReportCallback``.
    """
    return TorchTrainer(
        train_loop,
        train_loop_config=config.to_dict(),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config.workers, resources_per_worker=resources(config)[0]),
        run_config=RunConfig(
            storage_path=storage_path,
            name=name,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=list(callbacks),
        ),
    )
