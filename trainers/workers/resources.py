"""What a trial's processes take of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from trainers.config import TrialConfig
from trainers.config.data import DATA
from trainers.config.model import CHANNELS

IN_PROCESS, PACKED, RAY_TRAIN, OWN_LOOP = (
    "trainers.workers.in_process:InProcess",
    "trainers.workers.in_process:Packed",
    "trainers.workers.ray_train_run:RayTrainRun",
    "trainers.workers.own_loop:OwnLoop",
)
"""The executors, by module and class (:mod:`trainers.workers.executors`)."""
MOST_TRIALS = 32
"""Trials at once in a process: CUDA streams that torch gives one."""
TRIALS_PER_PROCESS = 12
"""Trials at once in a process where nothing else is asked for: as many as share a GPU by default,
or more where their shares are smaller.
Two processes of six had 12 % fewer trials a second of a whole study on four H100, and 4 % more of
one kind of net on an H200 (docs/benchmarks/studies.md)."""
SHARES = ((100e6, 1 / 12), (1e9, 1 / 4))
"""Default shares of a GPU, as (most multiply-accumulates of a step's mean layer, share). With each
share so many trials at once were faster than fewer on an H200 (docs/benchmarks/studies.md); a
larger trial takes a whole GPU. It is the mean layer that counts since layers run one after the
other: a deep and narrow net leaves most of a GPU idle, however long it takes."""
FUSED_SHARE = 1 / 24
"""Share of a GPU of an LSTM whose steps are one kernel: 24 in a process train 1.4 times as fast as
twelve (an H100, docs/benchmarks/studies.md)."""
FEW_LAYERS = 32
"""Most layers of a net that shares a GPU with eleven or more others. Twelve of 100 layers at once
are no faster than four (an H100, docs/benchmarks/studies.md), and take three times the memory."""
MOST_LAYERS = 1000
"""Most layers of a net that shares a process: four of 1,000 are twice as fast there as by turns,
four of 3,000 are not (docs/benchmarks/studies.md)."""
RECURRENT_UNITS = 8192
"""Most units of an LSTM, times the batch, that shares a GPU with eleven or more others: twelve with
1,000 steps keep some 8 GB."""


def choose_executor(lanes: int) -> str:
    """Return the executor of a trial in a process that trains ``lanes`` trials at once."""
    return PACKED if lanes > 1 else IN_PROCESS


class WorkerResources(NamedTuple):
    """What two trials must share to run in the same processes.

    Attributes:
        workers, threads, device, gpus: the keys of :class:`~trainers.config.TrialConfig` of these
            names; ``gpus`` None where it does not matter.
        packed: the settings of a process that several trials share at the same time; "" where a
            process is a trial's alone.
        lanes: trials at once in a process.
        executor: what trains the trial there, see :mod:`trainers.workers.executors`.
        own: whether the trial runs the user's code. Its processes then train no other trial, since
            nobody knows what that code has changed in them (global hooks, replaced functions,
            modules).
    """

    workers: int
    threads: int
    device: str
    gpus: float | None = None
    packed: str = ""
    lanes: int = 1
    executor: str = IN_PROCESS
    own: bool = False

    @classmethod
    def of(
        cls, config: TrialConfig, wanted: str = "auto", *, by_train: bool = False
    ) -> WorkerResources:
        """Return what a trial takes.

        Args:
            config: the trial.
            wanted: the study's key ``executor``.
            by_train: whether Ray Train starts its workers.
        """
        share = 1.0 if config.gpus is None else config.gpus
        gpus = share if config.device == "cuda" and config.workers == 1 else None
        lanes = 1 if by_train else trials_per_process(wanted, config)
        packed = str(key_of(config)) if lanes > 1 else ""
        ours = OWN_LOOP if config.own_loop else choose_executor(lanes)
        executor = RAY_TRAIN if by_train else ours
        own = bool(config.user_code)
        return cls(
            config.workers, config.threads, config.device, gpus, packed, lanes, executor, own
        )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """CPUs and GPUs of every rank.

        A rank takes its threads and, on device cuda, a GPU; a trial of one worker takes its share
        of one.
        """
        bundle = {"CPU": float(self.threads)}
        if self.device == "cuda":
            bundle["GPU"] = 1.0 if self.gpus is None else self.gpus
        return [bundle] * self.workers

    @property
    def processes(self) -> int:
        """Worker processes: one a rank, or the one that drives Ray Train's."""
        return 1 if self.executor == RAY_TRAIN else self.workers

    @property
    def cpus(self) -> float:
        """CPUs that all ranks take together."""
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def gpus_in_all(self) -> float:
        """GPUs, or the share of one, that all ranks take together."""
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)


def key_of(config: TrialConfig) -> tuple[Any, ...]:
    """Return the settings of a process, which trials in it at the same time must share."""
    return (config.device, config.threads, config.precision.accumulation)


def gpus_of(values: Mapping[str, Any]) -> float:
    """Return the GPUs, or the share of one, that all ranks of a trial take together.

    Args:
        values: the trial, as ``TrialConfig.to_dict()`` has it.
    """
    if values["device"] != "cuda":
        return 0.0
    if values["workers"] > 1:
        return float(values["workers"])
    return 1.0 if values["gpus"] is None else float(values["gpus"])


def captured(config: TrialConfig) -> bool:
    """Return whether a step is a CUDA graph, perhaps without its update."""
    return config.device == "cuda" and config.step_captured


def packs(config: TrialConfig) -> bool:
    """Return whether a trial is faster beside others in one process.

    It is where it is small, so that processes would take turns on its GPU, and Python has little to
    do, for which threads wait for each other: the graph has the update. An LSTM has a layer for
    each step of its sequences: twelve of them are twice as fast in processes of their own (an H100,
    docs/benchmarks/studies.md), unless all steps are one kernel. Telemetry counts in Python, and
    the memory of the whole process.
    """
    if config.gpus is None or config.gpus > SHARES[-1][1] or config.telemetry:
        return False
    few_layers = config.model.feedforward or config.recurrence_fused
    if not (few_layers and captured(config) and config.update_captured):
        return False
    return sum(1 for _ in _layers(config)) <= MOST_LAYERS


def trials_per_process(executor: str, config: TrialConfig) -> int:
    """Return how many trials are at once in a process that trains this one.

    Args:
        executor: the study's key.
    """
    if config.workers > 1 or config.user_code:
        return 1
    if executor == "packed":
        return MOST_TRIALS
    if executor != "auto" or config.gpus is None or not packs(config):
        return 1
    return max(TRIALS_PER_PROCESS, min(MOST_TRIALS, round(1 / config.gpus)))


def choose_share(config: TrialConfig) -> float:
    """Return the share of a GPU, by :data:`SHARES`, of a trial that asks for none.

    It is a whole one for nets that were not measured side by side: a resnet, a gpt, an LSTM
    with dropout.
    """
    model = config.model
    measured = model.feedforward or (model.name == "lstm" and model.stateless)
    if not (captured(config) and measured):
        return 1.0
    layers = [weights * places for weights, places in _layers(config)]
    macs = 3.0 * config.batch_size * sum(layers) / len(layers)
    share = next((share for most, share in SHARES if macs <= most), 1.0)
    # what is kept for the backward pass grows with depth and length, which the mean hides
    is_long = len(layers) > FEW_LAYERS or (
        config.model.name == "lstm"
        and config.batch_size * config.model.arguments.width > RECURRENT_UNITS
    )
    if is_long:
        return max(share, SHARES[-1][1])
    small = share == SHARES[0][1] and config.recurrence_fused
    return FUSED_SHARE if small and packs(replace(config, gpus=FUSED_SHARE)) else share


def parameters(config: TrialConfig) -> float:
    """Return how many weights an mlp or cnn has, biases left out.

    It is 0 for others, whose size their data decide.
    """
    return sum(weights for weights, _ in _layers(config)) if config.model.feedforward else 0.0


def _layers(config: TrialConfig) -> Iterator[tuple[float, float]]:
    """Yield each layer's weights, and at how many places of an example it applies them.

    An LSTM applies them at one step after the other, each by itself.
    """
    if config.model.name == "lstm":
        width = config.model.arguments.width
        yield from ((8.0 * width * width, 1.0) for _ in range(config.model.arguments.layers))
        return
    if not config.model.feedforward or config.own_loop:
        return
    model, known = config.model, DATA.get(config.data.name)
    shape = (known and known.shape) or DATA["mnist"].shape
    inputs, classes = math.prod(shape), (known and known.classes) or DATA["mnist"].classes
    if model.name == "cnn":
        colours = shape[0] if len(shape) == 3 else 1
        side, channels = math.isqrt(inputs // colours), [colours, *(model.channels or CHANNELS)]
        for fan_in, fan_out in pairwise(channels):
            yield 9.0 * fan_in * fan_out, float(side * side)
            side //= 2
        inputs = channels[-1] * side * side
    layers = pairwise([inputs, *model.hidden, classes])
    yield from ((float(fan_in * fan_out), 1.0) for fan_in, fan_out in layers)


def cpus_of(values: Mapping[str, Any]) -> int:
    """Return the CPUs that all ranks of a trial take together, see :func:`gpus_of`."""
    return int(values["workers"]) * int(values["threads"])
