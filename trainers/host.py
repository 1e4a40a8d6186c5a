"""A host: several one-worker trials at once in one process, each in a thread of its own and, on a GPU, on a stream of its own.

Processes that share a GPU take turns on it; streams of one process run side by side, so that small nets fill the GPU together. An epoch
is a row of CUDA graphs, launched without Python's global lock. Trials are free to differ in everything but what :func:`key_of` names,
which is the process's and not a thread's. What decides a result is the trial's own, so it comes out as in a process of its own, bit for
bit.

A host is one Ray actor a GPU, or a node for trials on the CPU, found by its name and made by the first trial that asks. :class:`Lane`
is a trial's end of it. An error that is not the trial's own (CUDA's context is lost for all) ends the host; every trial in it
begins again in a new one, at its last checkpoint. A host that nobody has called for :data:`IDLE_SECONDS` ends by itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lns_ops import cuda, set_matmul_accumulation
from trainers.config import TrialConfig
from trainers.device import check_device, resolve_device
from trainers.gang import step
from trainers.records import Beginning
from trainers.restore import begin
from trainers.training import Training, set_threads

MOST = 32
"""Trials at once in a host: CUDA streams that torch gives a process."""
IDLE_SECONDS = 300.0
SWITCH_SECONDS = 1e-4
"""After how long a thread that computes in Python lets another one go on, which may only want to launch its next step."""
NAMESPACE = "lns-study"
_STARTS = 5
"""Tries to reach a host: one that is found may be about to end."""


def key_of(config: TrialConfig) -> tuple[Any, ...]:
    """What trials must share to run in one host: settings of a process."""
    return (config.device, config.threads, config.precision.accumulation)


@dataclass
class _Trial:
    """One trial in a host; ``lock`` keeps its calls one after another."""

    stream: torch.cuda.Stream | None
    training: Training | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Host:
    """Trains several trials at once. Calls may come from any thread, those of different trials at the same time.

    Args:
        config: of any trial that it will train; the others have the same :func:`key_of`.

    Raises:
        ValueError: the trials' device is not there.
    """

    def __init__(self, config: TrialConfig) -> None:
        self._key = key_of(config)
        check_device(resolve_device(config.device))
        set_matmul_accumulation(config.precision.accumulation)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._device = resolve_device(config.device)
        self._trials: dict[str, _Trial] = {}
        self._streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()

    def begin(self, name: str, config: TrialConfig, checkpoints: list[str]) -> Beginning:
        """Build the trial ``name``, continued from the first whole checkpoint; one of that name is replaced.

        Raises:
            ValueError: the trial cannot be built, or differs from the host's others in what :func:`key_of` names, or is one too many.
        """
        if key_of(config) != self._key:
            raise ValueError(
                f"trial of {key_of(config)} (device, threads, accumulation) in a host of {self._key}: take another host"
            )
        trial = self._enter(name)
        with trial.lock, trial.current():
            try:
                trial.training, beginning = begin(config, checkpoints)
            except Exception:
                self._leave(name)
                raise
            return beginning

    def step(self, name: str) -> dict[str, Any]:
        """One epoch of the trial ``name``; see :func:`trainers.gang.step`."""
        trial = self._trials[name]
        with trial.lock, trial.current():
            assert trial.training is not None
            set_threads(trial.training.config.threads)  # torch's count is a thread's own
            return step(trial.training)

    def save(self, name: str, folder: Path) -> None:
        """Write the trial's state."""
        trial = self._trials[name]
        with trial.lock, trial.current():
            assert trial.training is not None
            trial.training.save(folder)

    def profile(self, name: str) -> dict[str, bytes]:
        """The files of a profile that the last step completed."""
        training = self._trials[name].training
        return {} if training is None else training.profiler.take()

    def end(self, name: str) -> None:
        """Forget the trial ``name``, if it is there."""
        trial = self._trials.get(name)
        if trial is not None:
            with trial.lock, trial.current():
                if trial.stream is not None:
                    trial.stream.synchronize()
                self._leave(name)

    def _enter(self, name: str) -> _Trial:
        with self._lock:
            if name not in self._trials:
                if self._device == "cuda" and len(self._trials) >= MOST:
                    raise ValueError(f"{len(self._trials)} trials on one GPU: at most {MOST}; use gpus={1 / MOST:g} or more")
                self._trials[name] = _Trial(self._stream())
            return self._trials[name]

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device != "cuda":
            return None
        if self._streams:
            return self._streams.pop()
        stream = torch.cuda.Stream()
        cuda.count_faults_apart(stream)
        return stream

    def _leave(self, name: str) -> None:
        with self._lock:
            trial = self._trials.pop(name)
            trial.training = None
            if trial.stream is not None:
                self._streams.append(trial.stream)


class HostActor:
    """A :class:`Host` in a Ray actor that ends when nobody has called it for a while.

    Args:
        visible_devices: the trials' GPU, as CUDA_VISIBLE_DEVICES names it; None leaves it as it is.
        config: see :class:`Host`.
    """

    def __init__(self, visible_devices: str | None, config: dict[str, Any]) -> None:
        if visible_devices is not None:  # Ray hides all GPUs from an actor that asks for none; CUDA has not looked yet
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._host = Host(TrialConfig.from_dict(config))
        self._calls, self._heard = 0, time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def pid(self) -> int:
        """The process's id."""
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host."""
        with self._lock:
            self._calls += 1
        try:
            return getattr(self._host, method)(*arguments)
        finally:
            with self._lock:
                self._calls, self._heard = self._calls - 1, time.monotonic()

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS / 10)
            with self._lock:
                if not self._calls and time.monotonic() - self._heard > IDLE_SECONDS:
                    os._exit(0)


class Lane:
    """A trial's end of the host of its GPU.

    Args:
        config: the trial.
        study: tells the hosts of different studies apart.
        name: the trial's; while one of that name is left in the host, by a process that died, it is replaced.

    Raises:
        ray.exceptions.RayError: the host cannot be reached.
        ValueError: the host cannot train this.
    """

    def __init__(self, config: TrialConfig, study: str, name: str) -> None:
        self._name = name
        context = ray.get_runtime_context()
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if config.device == "cuda" else None
        host = "/".join(map(str, (study, context.get_node_id(), gpu, *key_of(config))))
        actor = ray.remote(HostActor).options(
            name=host,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # or it would end with the trial that made it
            num_cpus=0,
            max_concurrency=2 * MOST,
            scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
        )
        for left in reversed(range(_STARTS)):
            self._actor = actor.remote(gpu, config.to_dict())
            try:
                self.pid: int = ray.get(self._actor.pid.remote())
                """Of the host's process."""
                return
            except ray.exceptions.ActorDiedError as error:
                if "ValueError" in str(error) or not left:
                    raise
                time.sleep(1.0)

    def begin(self, values: dict[str, Any], checkpoints: list[str]) -> Beginning:
        """Build the trial of ``TrialConfig.to_dict()``, continued from the first whole checkpoint.

        Raises:
            ValueError: the trial cannot be built.
        """
        beginning: Beginning = self._call("begin", TrialConfig.from_dict(values), checkpoints)
        return beginning

    def step(self) -> dict[str, Any]:
        """One epoch's metrics."""
        metrics: dict[str, Any] = self._call("step")
        return metrics

    def save(self, folder: Path) -> None:
        """Write the trial's state; the host is on this node."""
        self._call("save", folder)

    def profile(self) -> dict[str, bytes]:
        """The files of a profile that the last step completed."""
        files: dict[str, bytes] = self._call("profile")
        return files

    def close(self) -> None:
        """Take the trial out of the host."""
        with suppress(ray.exceptions.RayError):  # the host has ended, and the trial with it
            self._call("end")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(self._actor.call.remote(method, self._name, *arguments))
        except ValueError:
            raise
        except ray.exceptions.RayTaskError:
            ray.kill(self._actor)
            raise


def end_hosts(study: str) -> None:
    """End the hosts of ``study``; for the end of its run on a cluster that goes on."""
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] == NAMESPACE and str(found["name"]).startswith(f"{study}/"):
            ray.kill(ray.get_actor(found["name"], namespace=NAMESPACE))
