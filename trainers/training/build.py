"""The construction of one worker's components of a trial, from the config and the worker's rank.

The order affects the result: all ranks create process groups in the same order, weights are drawn
for the whole model before it is partitioned, the precision is applied to this worker's part, and
the optimizer gets the parameters that this worker updates.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

import lns_ops.cpu
from lns_ops import NonFiniteError, check_faults
from lns_ops.tensor import storage_of
from trainers._compat import choose_cudnn
from trainers.comm.collectives import Collectives
from trainers.comm.mesh import Place, place
from trainers.config import DataConfig, LossConfig, OptimizerConfig, TrialConfig
from trainers.data import Dataset, Examples, Split, load
from trainers.data.datasets import HELD
from trainers.models import make_model
from trainers.models.factory import check_chain
from trainers.models.forward import set_forward_
from trainers.models.loss import Loss
from trainers.models.precision import apply_precision
from trainers.optim.build import make_optimizer
from trainers.optim.offload import Offload
from trainers.optim.wrappers import OffloadedOptimizer, ScaledOptimizer
from trainers.parallel.choice import make_parts
from trainers.sync.choice import make_synchroniser
from trainers.sync.pairwise import add_pairwise_
from trainers.telemetry.energy import operator_picojoules
from trainers.telemetry.metrics import Telemetry
from trainers.telemetry.profiler import Profiler
from trainers.telemetry.roofline import kernel_ceiling
from trainers.telemetry.spans import Spans
from trainers.training.device import check_device, resolve_device, return_freed_memory
from trainers.training.evaluate import Metrics
from trainers.user_code import forget, names_code

if TYPE_CHECKING:
    from trainers.parallel.partitioned import PartitionedModel
    from trainers.parallel.pipeline import Pipeline
    from trainers.sync.base import Synchroniser, Updater

CHECKED = 100
"""Maximum number of validation examples on which the user's code is tried before a trial starts."""
STAGE_SEED = 1_000_003
"""Difference between the stochastic rounding seeds of consecutive pipeline stages."""


class NoTelemetry:
    """Replacement for :class:`Telemetry` in a trial without ``telemetry``; measures nothing."""

    def counting(self, steps: int = 1) -> AbstractContextManager[None]:
        """Count nothing."""
        return nullcontext()

    def begin(self) -> None:
        """Do nothing."""

    def begin_steps(self) -> None:
        """Do nothing."""

    def metrics(self, seconds: float) -> dict[str, float]:
        """Report nothing."""
        return {}


@dataclass(frozen=True)
class Workers:
    """Reductions over all workers of a trial.

    Attributes:
        rank, world_size: this worker's rank, and the number of workers.
        device: this worker's device.
    """

    rank: int
    world_size: int
    device: torch.device

    def summed(self, values: list[float]) -> list[float]:
        """Return the sums of ``values`` over all workers, in float64."""
        if self.world_size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def faultless(self) -> bool:
        """Return whether no worker has encoded a NaN or an infinity since the last call.

        A GPU counts them without raising an error; there the call is a collective.
        """
        if self.device.type != "cuda":
            return True
        try:
            check_faults(self.device)
        except NonFiniteError:
            return not self.summed([1.0])[0]
        return not self.summed([0.0])[0]


@dataclass(frozen=True, kw_only=True)
class Components:
    """One worker's components of a trial.

    Attributes:
        config: the trial.
        workers: reductions over all workers, and this worker's rank.
        place: this worker's place in the layout.
        data: data set, on the worker's device.
        loss: loss function.
        answers: number of answers per example.
        metrics: further metrics of the answers.
        parameters: number of parameters of the whole model.
        model: module that this worker computes with.
        kept: module that this worker updates and saves: the model, this worker's parts, or a CPU
            copy of either.
        optimizer: optimizer of the parameters of ``kept``.
        updater: object that a training step calls as its optimizer.
        collectives: collectives of the replicas; None with one.
        within: collectives of the workers of one replica that cut tensors; None where each replica
            has one worker.
        pipeline: this worker's stages; None where a replica has only one.
        partition: this worker's parts of tensors; None where tensors are whole.
        offload: exchange between ``model`` and the copy on the CPU; None without one.
        scaler: scaler of the loss; None without float16.
        spans, profiler, telemetry: records of what the worker does, and its cost.
    """

    config: TrialConfig
    workers: Workers
    place: Place
    data: Dataset
    loss: Loss
    answers: int
    metrics: Metrics
    parameters: int
    model: nn.Module
    kept: nn.Module
    optimizer: torch.optim.Optimizer
    updater: Updater
    collectives: Collectives | None
    within: Collectives | None
    pipeline: Pipeline | None
    partition: PartitionedModel | None
    offload: Offload | None
    scaler: GradScaler | None
    spans: Spans
    profiler: Profiler
    telemetry: Telemetry | NoTelemetry

    @property
    def sent(self) -> int:
        """The number of bytes that this worker has sent to others."""
        return sum(
            part.sent for part in (self.collectives, self.within, self.pipeline) if part is not None
        )

    def synchroniser(self) -> Synchroniser:
        """Return the synchroniser that keeps this replica and the others together."""
        if self.partition is not None:
            return self.partition.synchroniser()
        return make_synchroniser(self.config, self.model, self.optimizer, self.collectives)


def set_threads(threads: int) -> None:
    """Set the CPU threads of this process, in torch and in the LNS kernels."""
    torch.set_num_threads(threads)
    lns_ops.cpu.set_num_threads(threads)


def compute_repeatably() -> None:
    """Make cuDNN use deterministic algorithms from now on.

    By default it may sum the terms of a convolution's gradient in varying order, so an interrupted
    float32 network would not resume with the same bits (torch's notes on reproducibility).
    """
    choose_cudnn(deterministic=True, benchmark=False)


def _check_made_alike(
    config: TrialConfig, model: nn.Module, data: Dataset, world_size: int
) -> None:
    """Check that the user's factories returned the same on all workers; a collective.

    Raises:
        ValueError: the workers' weights or examples differ.
    """
    made: dict[str, list[torch.Tensor]] = {
        "model": list(model.state_dict().values()),
        "data": [tensor for split in data for tensor in _known(split)],
    }
    for part, tensors in made.items():
        name = getattr(config, part).name
        if not names_code(name):
            continue
        digests: list[Any] = [None] * world_size
        dist.all_gather_object(digests, digest(*tensors))
        if len(set(digests)) > 1:
            raise ValueError(
                f"{part}.name={name!r}: made something else on another worker, so that the replicas"
                " would not be replicas; take random numbers from torch, NumPy or random alone, and"
                " sort what you list from folders or sets"
            )


def digest(*tensors: torch.Tensor) -> str:
    """Return the SHA-256 of the tensors' bits, as hex digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = storage_of(tensor.detach()).cpu().to_dense().contiguous().flatten()
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _known(split: Examples) -> Split:
    """Return the examples, or only the first ones if they are not in memory."""
    return split if isinstance(split, Split) else split.head(CHECKED)


def make_whole_model(config: TrialConfig, data: Dataset) -> nn.Module:
    """Return the trial's model for the shapes of its data, with initial weights."""
    x, y = data.train.head(1)
    tokens = 0
    if not x.is_floating_point():
        held = [split.x for split in data if isinstance(split, Split)]
        tokens = max([1 + int(each.max()) for each in held] or [data.outputs])  # to tell apart
    each_step = y.dim() - int(y.is_floating_point()) > 1
    model = make_model(
        config.model, x.shape[1:], data.outputs, config.seed, tokens=tokens, each_step=each_step
    )
    if config.model.own:
        check_chain(config, model)
    return model


@lru_cache(maxsize=HELD)
def _load_fitting(data: DataConfig, loss: str) -> Dataset:
    """Load data with targets of the data type that a built-in loss takes.

    They are cached, because the check of all targets takes as long as other checks of small trials.
    """
    return Loss(LossConfig(name=loss)).fit(data.name, load(data))


def load_data(config: TrialConfig) -> Dataset:
    """Load a trial's data; flattened for the mlp.

    Raises:
        ValueError: they cannot be loaded, or their targets do not fit the loss.
    """
    own = config.loss.own
    data = load(config.data) if own else _load_fitting(config.data, config.loss.name)
    if config.model.name != "mlp" or data.train.head(1).x.dim() == 2:
        return data
    return Dataset(
        *(split.map(lambda part: Split(part.x.reshape(len(part.x), -1), part.y)) for split in data)
    )


def check_batch(config: TrialConfig, examples: int) -> None:
    """Check that the batch is not larger than the training set."""
    if examples < config.batch_size:
        raise ValueError(
            f"batch_size={config.batch_size}: there are {examples} training examples, and a batch"
            f" takes no example twice; use at most batch_size={examples}"
        )


def make_trial_optimizer(
    config: TrialConfig, options: OptimizerConfig, kept: nn.Module, answers: int, stage: int = 0
) -> torch.optim.Optimizer:
    """Return the trial's optimizer for the parameters in ``kept``.

    Args:
        config: the trial.
        options: options of the optimizer.
        kept: module that the worker updates.
        answers: number of answers per example, whose losses are summed.
        stage: pipeline stage of the worker, which determines the seed of stochastic rounding.
    """
    seed = (config.seed + stage * STAGE_SEED) % (1 << 31)
    scale = config.lr_schedule.scale(config.batch_size)
    terms = config.update_examples * answers
    return make_optimizer(kept, options, config.precision, terms, seed, scale)


def _make_model_and_data(config: TrialConfig) -> tuple[nn.Module, Dataset, int]:
    """Return a trial's model, its data, and the number of the model's parameters."""
    data = load_data(config)
    check_batch(config, data.train.size)
    whole = make_whole_model(config, data)
    set_threads(config.threads)  # the user's code may have set others
    compute_repeatably()
    return whole, data, sum(p.numel() for p in whole.parameters())


def build(config: TrialConfig, rank: int, world_size: int) -> Components:
    """Return the components of worker ``rank`` of ``world_size``; a collective with more than one.

    Raises:
        ValueError: the data cannot be had, or the config asks for something impossible; the message
            says what.
    """
    if config.own_code:
        forget()
    set_threads(config.threads)
    device = torch.device(
        resolve_device(config.device) if world_size == 1 or config.device != "auto" else "cpu"
    )
    check_device(device.type)
    loss = Loss(config.loss, config.precision.gradient_scale)
    whole, data, parameters = _make_model_and_data(config)
    data = Dataset(*(split.to(device) for split in data))
    here = place(config.layout, rank, world_size, device.type)
    if world_size > 1:
        _check_made_alike(config, whole, data, world_size)
    spans = Spans(device)
    profiler = Profiler(config.profile, rank, device, spans)
    first = data.train.head(1)
    parts = (whole, config, here, first.x.cpu(), loss, device, spans)
    pipeline = _make_pipeline(*parts) if here.pp > 1 else None
    model = apply_precision((pipeline.own if pipeline else whole).to(device), config.precision)
    scaler = GradScaler(device.type) if config.autocast == "float16" else None
    if pipeline is None:
        set_forward_(model, config.memory, config.autocast, scaler)
    if config.memory.activation_checkpoints and device.type == "cpu":
        return_freed_memory()
    collectives = Collectives(here.dp_group, device, spans) if here.dp > 1 else None
    within = Collectives(here.parts.get_group(), device, spans) if here.parts is not None else None
    partition = make_parts(model, here, collectives, within, config.wire, config.seed)
    held = partition.own if partition else model
    if config.layout.pairwise:
        add_pairwise_(model.parameters(), config.layout.micro_batches)
    offload = Offload(held) if config.memory.offload_optimizer else None
    kept = offload.own if offload else held
    answers = loss.answers_each(first.y)
    optimizer = make_trial_optimizer(config, config.optimizer, kept, answers, here.pp_rank)
    telemetry = _make_telemetry(config, spans, device, world_size, partition)
    return Components(
        config=config, workers=Workers(rank, world_size, device), place=here, data=data,
        loss=loss, answers=answers, metrics=Metrics(config.metrics, data.outputs, here, device),
        parameters=parameters, model=model, kept=kept, optimizer=optimizer,
        updater=_make_updater(optimizer, offload, scaler), collectives=collectives, within=within,
        pipeline=pipeline, partition=partition, offload=offload, scaler=scaler, spans=spans,
        profiler=profiler, telemetry=telemetry,
    )  # fmt: skip


def _make_pipeline(
    model: nn.Module,
    config: TrialConfig,
    here: Place,
    example: torch.Tensor,
    loss: Loss,
    device: torch.device,
    spans: Spans,
) -> Pipeline:
    """Return this worker's pipeline stages."""
    # torch's pipelining loads its compiler, which takes seconds that other trials need not wait
    from trainers.parallel.pipeline import Pipeline

    assert isinstance(model, nn.Sequential)
    precision, share = config.precision, config.batch_size // here.dp
    fmt = precision.lns_format if precision.scope == "everywhere" else None
    return Pipeline(
        model, config.layout, here, share, example, fmt, device, loss, spans, config.memory
    )


def _make_updater(
    optimizer: torch.optim.Optimizer, offload: Offload | None, scaler: GradScaler | None
) -> Updater:
    """Return the object that a training step calls as its optimizer."""
    if offload is not None:
        return OffloadedOptimizer(optimizer, offload)
    return optimizer if scaler is None else ScaledOptimizer(optimizer, scaler)


def _make_telemetry(
    config: TrialConfig,
    spans: Spans,
    device: torch.device,
    world_size: int,
    partition: PartitionedModel | None,
) -> Telemetry | NoTelemetry:
    """Return the telemetry of this worker."""
    if not config.telemetry:
        return NoTelemetry()
    precision = config.precision

    def ceiling() -> float:
        dtype = torch.float32 if config.autocast == "none" else getattr(torch, config.autocast)
        return kernel_ceiling(
            precision.lns_format, precision.accumulation, dtype, device.type, config.threads
        )

    return Telemetry(
        spans,
        device,
        world_size,
        ceiling,
        aligned=config.sync.name != "asynchronous",
        waits=not (config.layout.fsdp and device.type == "cuda"),
        formulas=partition.formulas if partition else None,
        picojoules=partial(operator_picojoules, config),
    )
