"""What a trial's processes take of a cluster. Loads no torch: who starts processes need not wait
for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainers.config import TrialConfig


MOST = 32
"""Trials at once in a process: CUDA streams that torch gives one."""
LANES = 6
"""Trials at once in a process where nothing else is asked for: two processes of six train small
nets on an H200 a little faster than one of twelve, whose threads wait for Python's global lock
(docs/benchmarks/studies.md)."""
SHARES = ((200e6, 1 / 12), (2e9, 1 / 4))
"""Of a GPU that a trial takes by default, by the multiply-accumulates of a step below which it
does: where so many at once were faster than fewer on an H200. A larger trial takes a whole one."""
INPUTS = {"mnist": 784, "digits": 64}
CLASSES = 10


class WorkerResources(NamedTuple):
    """What two trials must share to run in the same processes: the keys of
    :class:`~trainers.config.TrialConfig` of these names, and where several share one process at the
    same time, the settings that are a process's (``packed``; "" where a process is a trial's
    alone); and whether Ray Train makes the ranks' processes (``by_train``), which one process
    drives.
    """

    workers: int
    threads: int
    device: str
    gpus: float | None = None
    packed: str = ""
    lanes: int = 1
    by_train: bool = False

    @classmethod
    def of(cls, config: TrialConfig, lanes: int = 1) -> WorkerResources:
        """Of a trial that may share a process with so many others, less itself."""
        share = 1.0 if config.gpus is None else config.gpus
        gpus = share if config.device == "cuda" and config.workers == 1 else None
        if config.workers > 1 or lanes == 1:
            return cls(config.workers, config.threads, config.device, gpus)
        return cls(config.workers, config.threads, config.device, gpus, str(key_of(config)), lanes)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """CPUs and GPUs of every rank: its threads and, on device cuda, a GPU, or a trial's share
        of one where it is alone."""
        bundle = {"CPU": float(self.threads)}
        if self.device == "cuda":
            bundle["GPU"] = 1.0 if self.gpus is None else self.gpus
        return [bundle] * self.workers

    @property
    def processes(self) -> int:
        """Of ours: one a rank."""
        return 1 if self.by_train else self.workers

    @property
    def cpus(self) -> float:
        """CPUs that all ranks take together."""
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def gpus_in_all(self) -> float:
        """GPUs, or the share of one, that all ranks take together."""
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)


def key_of(config: TrialConfig) -> tuple[Any, ...]:
    """What trials must share to run in one process at the same time: settings that are the
    process's."""
    return (config.device, config.threads, config.precision.accumulation)


def gpus_of(values: Mapping[str, Any]) -> float:
    """GPUs, or the share of one, that all ranks of a trial take together; ``values`` as of
    ``TrialConfig.to_dict()``."""
    if values["device"] != "cuda":
        return 0.0
    if values["workers"] > 1:
        return float(values["workers"])
    return 1.0 if values["gpus"] is None else float(values["gpus"])


def captured(config: TrialConfig) -> bool:
    """Whether a trial's step is one CUDA graph: on one GPU, and the same every time."""
    alone = config.device == "cuda" and config.workers == 1 and not config.memory.offload_optimizer
    return alone and not config.lr_schedule.varies and config.autocast != "float16"


def packs(config: TrialConfig) -> bool:
    """Whether a trial is faster beside others in one process: small, so that processes would take
    turns on its GPU, and captured, so that threads do not wait for each other's Python.
    """
    return captured(config) and config.gpus is not None and config.gpus <= SHARES[-1][1]


def lanes_of(executor: str, config: TrialConfig) -> int:
    """Trials at once in a process that trains this one, by the study's ``executor``."""
    if executor == "packed":
        return MOST
    return LANES if executor == "auto" and packs(config) else 1


def choose_share(config: TrialConfig) -> float:
    """The share of a GPU that a trial of one worker takes where none is asked for, see
    :data:`SHARES`."""
    if not captured(config):
        return 1.0
    macs = 3.0 * config.batch_size * _macs(config)
    return next((share for most, share in SHARES if macs <= most), 1.0)


def _macs(config: TrialConfig) -> float:
    """Multiply-accumulates of an example's forward pass."""
    return sum(weights * places for weights, places in _layers(config))


def parameters(config: TrialConfig) -> float:
    """Weights of a trial's net, biases left out."""
    return sum(weights for weights, _ in _layers(config))


def _layers(config: TrialConfig) -> Iterator[tuple[float, float]]:
    """Of each layer, its weights and at how many places of an example it applies them."""
    model, inputs = config.model, INPUTS.get(config.data.name, INPUTS["mnist"])
    if model.name == "cnn":
        side, channels = math.isqrt(inputs), [1, *(model.channels or [8, 16])]
        for fan_in, fan_out in pairwise(channels):
            yield 9.0 * fan_in * fan_out, float(side * side)
            side //= 2
        inputs = channels[-1] * side * side
    yield from (
        (float(fan_in * fan_out), 1.0)
        for fan_in, fan_out in pairwise([inputs, *model.hidden, CLASSES])
    )


def cpus_of(values: Mapping[str, Any]) -> int:
    """CPUs that all ranks take together."""
    return int(values["workers"]) * int(values["threads"])
