"""A gang: the worker processes of one trial, kept for the next trial of the same size.

Ray Train starts processes anew for every run, 10 to 30 s before the first step. Here every rank is a Ray actor in a bundle of one
placement group, so a gang gets all its processes or none; they meet once through torch.distributed and then train trial after trial.
What decides a result is made anew for each (:class:`~trainers.training.Training`), so nothing leaks from one to the next.

Every rank runs the same calls in the same order; a rank that raises leaves the others waiting in a collective, so after any error the
whole gang is ended and made anew. Between two trials a rank puts back what the first left behind (:mod:`trainers.leftovers`). Whoever
drives a gang needs no torch, whose seconds of loading the ranks go through meanwhile. Limits: no elasticity, and no restart within: whoever
drives the gang starts it again from a checkpoint (for trials that should restart by themselves see :mod:`trainers.worker`).
"""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainers.bundles import Shape
from trainers.records import STATE, Beginning

if TYPE_CHECKING:
    from trainers.leftovers import Leftovers
    from trainers.training import Training

MEET_SECONDS = 120
"""How long ranks wait for each other at the start, and in a collective."""


class Worker:
    """One rank, in a process of its own."""

    _training: Training
    _leftovers: Leftovers | None = None

    def where(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def join(self, rank: int, world_size: int, address: str, port: int, backend: str) -> int:
        """Meet the other ranks; the process's id."""
        from trainers import groups

        groups.join(backend, f"tcp://{address}:{port}", rank, world_size, timedelta(seconds=MEET_SECONDS))
        self._rank, self._world_size = rank, world_size
        return os.getpid()

    def begin(self, values: dict[str, Any], checkpoints: list[str]) -> Beginning:
        """Build the trial, continued from the first whole checkpoint."""
        from trainers.config import TrialConfig
        from trainers.leftovers import Leftovers
        from trainers.restore import begin

        if self._leftovers is None:
            self._leftovers = Leftovers()
        else:
            self._leftovers.clear()
        self._training, beginning = begin(TrialConfig.from_dict(values), checkpoints, self._rank, self._world_size)
        return beginning

    def step(self) -> dict[str, Any]:
        """Train an epoch, and test after the last; a trial restored after its last epoch only tests."""
        return step(self._training)

    def save(self) -> dict[str, bytes]:
        """The files of a checkpoint of the trial; every rank must be asked, one has them."""
        with tempfile.TemporaryDirectory() as folder:
            self._training.save(Path(folder))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def profile(self) -> dict[str, bytes]:
        """The files of a profile that the last step completed."""
        return self._training.profiler.take()


def step(training: Training) -> dict[str, Any]:
    """One epoch of a trial, and its test after the last; ``done`` says whether that was it."""
    epochs = training.config.epochs
    metrics: dict[str, Any] = training.train_epoch() if training.epoch < epochs else {"epoch": float(epochs)}
    done = training.epoch >= epochs
    return {**metrics, **(training.test() if done else {}), "done": done}


class Gang:
    """The ranks of one trial after another.

    Args:
        shape: of all its trials.
        group: placement group with a bundle for every rank.

    Raises:
        ray.exceptions.RayError: a rank's process died or none could be started.
    """

    def __init__(self, shape: Shape, group: PlacementGroup) -> None:
        actor = ray.remote(Worker)
        self._workers = [
            actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote()
            for rank, bundle in enumerate(shape.bundles)
        ]
        address, port = ray.get(self._workers[0].where.remote())
        backend = "nccl" if shape.device == "cuda" else "gloo"
        self.pids: list[int] = ray.get(
            [worker.join.remote(rank, shape.workers, address, port, backend) for rank, worker in enumerate(self._workers)]
        )
        """Of the ranks' processes."""

    def begin(self, values: dict[str, Any], checkpoints: list[str]) -> Beginning:
        """Build a trial of ``TrialConfig.to_dict()`` on every rank, continued from the first whole checkpoint.

        Raises:
            ValueError: the trial cannot be built.
        """
        beginning: Beginning = self._all("begin", values, checkpoints)[0]
        return beginning

    def step(self) -> dict[str, Any]:
        """One epoch; the metrics, the same on every rank but for times: rank 0's."""
        metrics: dict[str, Any] = self._all("step")[0]
        return metrics

    def save(self, folder: Path) -> None:
        """Write the trial's state; the files come through Ray, since a rank may be on another node."""
        write_files(folder, self._files("save"))

    def profile(self) -> dict[str, bytes]:
        """The files of a profile that the last step completed, of all ranks."""
        return self._files("profile")

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            ray.kill(worker)

    def _files(self, method: str) -> dict[str, bytes]:
        return {name: content for of_rank in self._all(method) for name, content in of_rank.items()}

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Call every rank; at the first that raises, without waiting for those that wait for it."""
        waiting = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        results: dict[Any, Any] = dict.fromkeys(waiting)
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            results[ready] = ray.get(ready)
        return list(results.values())


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Files by name; of a checkpoint its ``state.json`` last: without it there is no checkpoint."""
    if not files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == STATE):
        (folder / name).write_bytes(files[name])
