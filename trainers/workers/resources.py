"""Resources of a trial's processes: CPUs, GPUs, and processes shared with other trials."""

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
"""Maximum number of concurrent trials in a process; torch has this many CUDA streams."""
TRIALS_PER_PROCESS = 12
"""Default number of concurrent trials in a process: the number of trials that share a GPU by
default; more if their shares are smaller. Two processes of six trials had 12 % fewer trials per
second in a whole study on four H100, and 4 % more for one kind of net on an H200
(docs/benchmarks/studies.md)."""
SHARES = ((100e6, 1 / 12), (1e9, 1 / 4))
"""Default shares of a GPU, as (maximum multiply-accumulates per step of the mean layer, share).
With each share, the resulting number of concurrent trials was faster than fewer on an H200
(docs/benchmarks/studies.md). A larger trial gets a whole GPU. The mean layer counts because layers
run one after another: a deep and narrow net leaves most of a GPU idle."""
FUSED_SHARE = 1 / 24
"""GPU share of an LSTM whose steps are one kernel: 24 in a process train 1.4 times as fast as
twelve (an H100, docs/benchmarks/studies.md)."""
FEW_LAYERS = 32
"""Maximum number of layers of a net that shares a GPU with eleven or more others. With 100 layers,
twelve concurrent trials are as fast as four (an H100, docs/benchmarks/studies.md), and take three
times the memory."""
MOST_LAYERS = 1000
"""Maximum number of layers of a net that shares a process. With 1,000 layers, four trials in one
process are twice as fast as one after another; with 3,000 they are not faster
(docs/benchmarks/studies.md)."""
RECURRENT_UNITS = 8192
"""Maximum units times batch size of an LSTM that shares a GPU with eleven or more others; twelve
with 1,000 steps take about 8 GB."""


def choose_executor(lanes: int) -> str:
    """Return the executor of a trial in a process with ``lanes`` concurrent trials."""
    return PACKED if lanes > 1 else IN_PROCESS


class WorkerResources(NamedTuple):
    """Properties of a trial that must be equal for two trials to use the same processes.

    Attributes:
        workers, threads, device, gpus: keys of :class:`~trainers.config.TrialConfig`; ``gpus`` is
            None if it does not apply.
        packed: process-wide settings of concurrent trials in one process; "" with one lane.
        lanes: maximum number of concurrent trials in a process.
        executor: the trial's executor, see :mod:`trainers.workers.executors`.
        own: whether the trial runs the user's code. Its processes are then not reused for other
            trials, because the code may have changed global state (hooks, replaced functions,
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
        """Return the resources of a trial.

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

        A rank takes one CPU per thread and, on device cuda, a GPU; a trial with one worker takes
        its share of a GPU.
        """
        bundle = {"CPU": float(self.threads)}
        if self.device == "cuda":
            bundle["GPU"] = 1.0 if self.gpus is None else self.gpus
        return [bundle] * self.workers

    @property
    def processes(self) -> int:
        """Number of worker processes: one per rank, or one that controls Ray Train's."""
        return 1 if self.executor == RAY_TRAIN else self.workers

    @property
    def cpus(self) -> float:
        """Total CPUs of all ranks."""
        return sum(bundle["CPU"] for bundle in self.bundles)

    @property
    def gpus_in_all(self) -> float:
        """Total GPUs, or the share of one, of all ranks."""
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)


def key_of(config: TrialConfig) -> tuple[Any, ...]:
    """Return the process-wide settings, which concurrent trials in a process must share."""
    return (config.device, config.threads, config.precision.sums_of_codes)


def gpus_of(values: Mapping[str, Any]) -> float:
    """Return the total GPUs, or the share of one, of all ranks of a trial.

    Args:
        values: ``TrialConfig.to_dict()``.
    """
    if values["device"] != "cuda":
        return 0.0
    if values["workers"] > 1:
        return float(values["workers"])
    return 1.0 if values["gpus"] is None else float(values["gpus"])


def captured(config: TrialConfig) -> bool:
    """Return whether a step is captured in a CUDA graph, with or without its update."""
    return config.device == "cuda" and config.step_captured


def packs(config: TrialConfig) -> bool:
    """Return whether a trial is faster beside others in one process.

    This holds for small trials, for which processes would take turns on the GPU, if Python has
    little to do (the graph includes the update), because threads wait for each other in Python. An
    LSTM has a layer for each step of its sequences: twelve LSTMs are twice as fast in separate
    processes (an H100, docs/benchmarks/studies.md), unless all steps are one kernel. Trials with
    telemetry are excluded, because it counts in Python and measures the memory of the process.
    """
    if config.gpus is None or config.gpus > SHARES[-1][1] or config.telemetry:
        return False
    few_layers = config.model.feedforward or config.recurrence_fused
    if not (few_layers and captured(config) and config.update_captured):
        return False
    return sum(1 for _ in _layers(config)) <= MOST_LAYERS


def trials_per_process(executor: str, config: TrialConfig) -> int:
    """Return the number of concurrent trials in a process that trains this one.

    Args:
        executor: the study's key ``executor``.
        config: the trial.
    """
    if config.workers > 1 or config.user_code:
        return 1
    if executor == "packed":
        return MOST_TRIALS
    if executor != "auto" or config.gpus is None or not packs(config):
        return 1
    return max(TRIALS_PER_PROCESS, min(MOST_TRIALS, round(1 / config.gpus)))


def choose_share(config: TrialConfig) -> float:
    """Return the default GPU share of a trial, by :data:`SHARES`.

    It is a whole GPU for nets that were not measured side by side: a resnet, a gpt, an LSTM with
    dropout.
    """
    model = config.model
    measured = model.feedforward or (model.name == "lstm" and model.stateless)
    if not (captured(config) and measured):
        return 1.0
    layers = [weights * places for weights, places in _layers(config)]
    macs = 3.0 * config.batch_size * sum(layers) / len(layers)
    share = next((share for most, share in SHARES if macs <= most), 1.0)
    # memory for the backward pass grows with depth and length, which the mean does not show
    is_long = len(layers) > FEW_LAYERS or (
        config.model.name == "lstm"
        and config.batch_size * config.model.arguments.width > RECURRENT_UNITS
    )
    if is_long:
        return max(share, SHARES[-1][1])
    small = share == SHARES[0][1] and config.recurrence_fused
    return FUSED_SHARE if small and packs(replace(config, gpus=FUSED_SHARE)) else share


def parameters(config: TrialConfig) -> float:
    """Return the number of weights of an mlp or cnn, without biases.

    It is 0 for other models, whose size depends on their data.
    """
    return sum(weights for weights, _ in _layers(config)) if config.model.feedforward else 0.0


def _layers(config: TrialConfig) -> Iterator[tuple[float, float]]:
    """Yield each layer's number of weights, and the number of places per example where it is
    applied.

    An LSTM's steps count as separate, with one place each.
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
    """Return the total CPUs of all ranks of a trial, see :func:`gpus_of`."""
    return int(values["workers"]) * int(values["threads"])
