"""Code that runs in Ray Train's workers, which train one trial together: gloo on CPUs, NCCL on
GPUs.

Each worker runs :func:`train_loop`: an :class:`~trainers.workers.in_process.InProcess` for its
rank, one epoch after another. Rank 0 keeps a checkpoint with every report, so a group that Ray
restarts continues after the last reported epoch and ends with the same bits.

With ``min_workers`` the group is elastic: it starts with as many workers as fit, and continues from
the last checkpoint with fewer workers after the loss of a node, or with more after a node has
joined. Batches and steps stay the same, but a replica's share of a batch changes. Gradients are
then summed in another order, so such a run is not repeatable to the last bit.

Ray Train keeps a checkpoint *before* it calls its callbacks with the report. If the driver dies in
between, the run continues after an epoch that was never reported. Therefore the first report after
a restart repeats the metrics of all earlier epochs, under
:data:`~trainers.workers.messages.HISTORY`, and :func:`read_results` returns all metrics of a
complete run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from ray.train.torch import TorchConfig, TorchTrainer

from trainers.checkpoint.files import load_checkpoint
from trainers.comm import process_group
from trainers.config import TrialConfig
from trainers.data.descriptions import prepare
from trainers.workers.executors import Context
from trainers.workers.in_process import InProcess
from trainers.workers.messages import DETERMINISTIC, HISTORY, ExecutorPlan
from trainers.workers.node import differing, is_compared, versions
from trainers.workers.out_of_memory import is_out_of_memory
from trainers.workers.resources import WorkerResources


class FailAtOnce(UserCallback):  # type: ignore[misc]
    """Ends a run at the first deterministic or out-of-memory error. Ray Train retries after errors
    of workers, but not after errors of callbacks."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise a worker's error in the controller if a retry would not help."""
        for error in worker_exceptions.values():
            if isinstance(error, DETERMINISTIC) or is_out_of_memory(error):
                raise error


class GangPlan(ExecutorPlan):
    """The plan of Ray Train's workers: ``config`` is ``TrialConfig.to_dict()``, ``versions`` are
    those of the submitting machine."""

    config: dict[str, Any]
    versions: dict[str, str]
    resume_from: list[str]


def train_loop(plan: GangPlan) -> None:
    """Train one rank of a trial; every worker runs this function.

    Reports each epoch's metrics, as :meth:`~trainers.workers.executors.Executor.step` returns them;
    the first report after a restart also has :data:`HISTORY`.

    Raises:
        ValueError: this node has other versions or data, the trial cannot be built, or the run's
            checkpoint is damaged.
    """
    check_versions(plan["versions"])
    config = TrialConfig.from_dict(plan["config"])
    check_data(config, plan["data"])
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    if workers > 1:
        process_group.wait_in_training()
    config = replace(config, workers=workers, min_workers=None)
    trial = InProcess(Context(trial="", plan=plan, rank=rank, workers=workers))
    history = _begin(trial, config, plan["resume_from"])
    before = {HISTORY: history} if history else {}
    done = len(history) >= config.epochs
    while not done:
        metrics = trial.step() | before
        done, before = metrics["done"], {}
        keep_profile(trial.profile())
        with tempfile.TemporaryDirectory() as folder:
            trial.save(Path(folder))
            saved = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report(metrics, checkpoint=saved)


def check_versions(wanted: dict[str, str]) -> None:
    """Check that this node has the same versions as the machine that submitted the trial.

    Args:
        wanted: result of :func:`trainers.workers.node.versions` on the submitting machine.

    Raises:
        ValueError: versions differ; the message lists them.
    """
    if wrong := differing(versions(), wanted):
        raise ValueError(
            f"the node {os.uname().nodename} has {', '.join(wrong)}, and this trial was submitted"
            f" with {', '.join(f'{name} {version}' for name, version in wanted.items())}: it could"
            " get other bits; install the same there, and restart its Ray"
        )


def check_data(config: TrialConfig, files: Collection[str]) -> None:
    """Check that this node has the same data files as the study, if they are compared.

    Args:
        config: the trial.
        files: SHA-256 of the examples, for each of the study's data sets
            (:attr:`trainers.data.DatasetInfo.files`); empty to accept any data.

    Raises:
        ValueError: the data differ or cannot be read.
    """
    if not files or not is_compared(config):
        return
    info = prepare(config.data)
    if info.files not in files:
        raise ValueError(
            f"the node {os.uname().nodename} has other data than this study ({info.source}, sha256"
            f" {info.files[:16]}): bring the same files there"
        )


def _begin(trial: InProcess, config: TrialConfig, resume_from: list[str]) -> list[dict[str, float]]:
    """Resume from the run's checkpoint, or else from another trial's; return the earlier metrics.

    Without a checkpoint, or if a node lacks the other trial's, the trial starts from scratch.

    Raises:
        ValueError: the trial cannot be built, or the run's checkpoint is damaged.
    """
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        beginning = trial.begin(config, [str(folder)] if folder else resume_from)
    if checkpoint and beginning.damaged:
        raise ValueError(beginning.damaged)
    return beginning.history


def keep_profile(files: dict[str, bytes]) -> None:
    """Write a profile's files to the folder ``profile`` of the run's storage."""
    if not files:
        return
    storage = ray.train.get_context().get_storage()
    folder = f"{storage.experiment_fs_path}/profile"
    for name, content in files.items():
        storage.storage_filesystem.create_dir(folder)
        with storage.storage_filesystem.open_output_stream(f"{folder}/{name}") as stream:
            stream.write(content)


def read_results(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the reported metrics of a complete run, from its last checkpoint.

    These are ``epoch``, ``test/*`` and :data:`HISTORY`. Ray Train's own copy in ``Result.metrics``
    loses the NaNs of a diverged run when it is read back from disk.
    """
    with checkpoint.as_directory() as folder:
        _, state = load_checkpoint(Path(folder))
    return {"epoch": state["epoch"], **state.get("tested", {}), HISTORY: state.get("history", [])}


def build_trainer(
    config: TrialConfig,
    *,
    storage_path: str,
    name: str,
    callbacks: Sequence[Any] = (),
    max_failures: int = 3,
    resize_seconds: float = 60.0,
    origin: dict[str, Any] | None = None,
    resume_from: Sequence[str] = (),
    data: Collection[str] = (),
    labels: dict[str, str] | None = None,
) -> TorchTrainer:
    """Return the TorchTrainer of ``config``; ``.fit()`` runs it.

    Args:
        config: the trial.
        storage_path: absolute folder or URI where Ray Train keeps checkpoints.
        name: name of the run in that folder; the same name continues an earlier run.
        max_failures: maximum number of restarts of a group with a dead worker from its last
            checkpoint; there is no restart after an error in :data:`DETERMINISTIC`.
        resize_seconds: seconds between Ray's checks whether a group with ``min_workers`` can grow.
        origin, data: see :attr:`trainers.training.trainer.Training.origin`, :func:`check_data`.
        resume_from: checkpoints of another trial with the same first epochs, best first; ignored if
            the run has its own checkpoint.
        labels: Ray's label selector for the workers' nodes; None for any node.
        callbacks: such as :class:`trainers.workers.ray_train_run.ReportCallback`.
    """
    most, resume = config.workers, list(resume_from)
    plan: GangPlan = {"config": config.to_dict(), "versions": versions(), "resume_from": resume}
    plan |= {"data": list(data), "origin": origin or {}}
    return TorchTrainer(
        train_loop,
        train_loop_config=plan,
        torch_config=TorchConfig(backend="nccl" if config.device == "cuda" else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=(least, most) if (least := config.min_workers) is not None else most,
            use_gpu=config.device == "cuda",
            resources_per_worker=WorkerResources.of(config).bundles[0],
            elastic_resize_monitor_interval_s=resize_seconds,
            label_selector=labels,
        ),
        run_config=RunConfig(
            storage_path=storage_path,
            name=name,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[*callbacks, FailAtOnce()],
        ),
    )
