"""Ray Train's side: its workers train one trial together, over gloo on CPUs, over NCCL on GPUs.

Each worker runs :func:`train_loop`: an :class:`~trainers.workers.in_process.InProcess` with its
rank, an epoch at a time; rank 0 keeps a checkpoint with every report, so a group that Ray restarts
continues after the last reported epoch and ends with the same bits.

With ``min_workers`` the group is elastic: it begins with as many workers as there is room for, goes
on with fewer where a node is lost and with more where one comes, each time from the last
checkpoint. Batches and steps stay the same, a replica's share of them changes; the sums of
gradients are then taken in another order, so such a run does not repeat to the last bit.

Ray Train keeps a checkpoint *before* it tells its callbacks of the report that came with it. If the
driver dies in between, the run continues after an epoch that nobody has heard of. Therefore the
first report after a restart repeats the metrics of all epochs before it, under
:data:`~trainers.workers.messages.HISTORY`, and :func:`read_results` has them all once the run is
complete.
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
from trainers.workers.messages import DETERMINISTIC, HISTORY
from trainers.workers.node import differing, is_compared, versions
from trainers.workers.out_of_memory import is_out_of_memory
from trainers.workers.resources import WorkerResources


class FailAtOnce(UserCallback):  # type: ignore[misc]
    """Ends a run at the first deterministic error, and where memory ran out. Ray Train retries the
    errors of workers; those of callbacks it does not."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise a worker's error here, in the controller, if trying again would not help."""
        for error in worker_exceptions.values():
            if isinstance(error, DETERMINISTIC) or is_out_of_memory(error):
                raise error


def train_loop(plan: dict[str, Any]) -> None:
    """Train a worker's rank of a trial; every worker runs it.

    Reports each epoch's metrics, as :meth:`~trainers.workers.executors.Executor.step` returns them;
    the first report after a restart also has :data:`HISTORY`.

    Args:
        plan: ``config``, as ``TrialConfig.to_dict()`` has it, ``versions`` of who submitted it,
            ``data``, ``origin`` and ``resume_from``.

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
    """Refuse to train on a node that has not the versions of who submitted the trial.

    Args:
        wanted: those, as :func:`trainers.workers.node.versions` returns them.

    Raises:
        ValueError: with what differs, the rule and the remedy.
    """
    if wrong := differing(versions(), wanted):
        raise ValueError(
            f"the node {os.uname().nodename} has {', '.join(wrong)}, and this trial was submitted"
            f" with {', '.join(f'{name} {version}' for name, version in wanted.items())}: it could"
            " get other bits; install the same there, and restart its Ray"
        )


def check_data(config: TrialConfig, files: Collection[str]) -> None:
    """Refuse to train on a node whose data are not the study's, where they are compared.

    Args:
        config: the trial.
        files: SHA-256 of the examples of each data set of the study
            (:attr:`trainers.data.DatasetInfo.files`); empty for any.

    Raises:
        ValueError: with what differs and the remedy, or the data cannot be read.
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
    """Begin at the run's checkpoint, or else at another trial's, and return the metrics before.

    Without either, or where a node has not the other's, the trial begins from scratch.

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
    """Return what a complete run has reported, from its last checkpoint.

    That is ``epoch``, ``test/*`` and :data:`HISTORY`. Ray Train's own copy in ``Result.metrics``
    loses NaNs (a diverged run's) when the run is read back from disk.
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
        storage_path: absolute folder or URI where Ray Train keeps checkpoints.
        name: name of the run below it; the same name continues an earlier run.
        max_failures: how often a group with a dead worker starts again from its last checkpoint;
            after one of the errors in :data:`DETERMINISTIC` none does.
        resize_seconds: how often Ray asks whether a group with ``min_workers`` may be larger.
        origin, data: see :attr:`trainers.training.trainer.Training.origin`, :func:`check_data`.
        resume_from: checkpoints of another trial that began alike, the best first; a run that has
            one of its own goes on from that.
        labels: Ray's label selector for the workers' nodes; None for any node.
        callbacks: such as :class:`trainers.workers.ray_train_run.ReportCallback`.
    """
    most = config.workers
    plan = {"config": config.to_dict(), "versions": versions(), "data": list(data)}
    plan |= {"origin": origin or {}, "resume_from": list(resume_from)}
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
