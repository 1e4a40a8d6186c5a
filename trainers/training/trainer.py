"""Training: one trial from its config to its metrics, an epoch at a time.

Both executors use it, the in-process one and the Ray Train worker, and so may a script::

    training = Training(TrialConfig(epochs=3))
    while training.epoch < training.config.epochs:
        print(training.train_epoch())
    print(training.test())

Everything that decides the result is in the config: weights come from (seed, name), the data order from (seed, epoch), so a run
that is saved and restored continues bit for bit. Divergence is a result: once the loss is not finite, training stops computing and
reports NaN losses and errors of the remaining epochs as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

import lns_ops.cpu
from lns_ops import NonFiniteError, check_faults, matmul_accumulation
from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.checkpoint.state import (
    gather_ranks,
    gather_stages,
    load_model_tensors,
    model_tensors,
    of_rank,
)
from trainers.comm.collectives import Collectives
from trainers.comm.mesh import place
from trainers.config import TrialConfig
from trainers.config.schedule_changes import optimizer_at
from trainers.data import Dataset, DatasetInfo, Split, epoch_order, load, share
from trainers.models import build
from trainers.models.forward import set_forward_
from trainers.models.init import initialize_
from trainers.models.precision import apply_precision
from trainers.optim.build import make_optimizer
from trainers.optim.offload import Offload
from trainers.optim.wrappers import OffloadedOptimizer, ScaledOptimizer
from trainers.parallel.factory import make_parts
from trainers.sync.factory import make_synchroniser
from trainers.telemetry.metrics import Telemetry
from trainers.telemetry.profiler import Profiler
from trainers.telemetry.roofline import kernel_ceiling
from trainers.telemetry.spans import Spans
from trainers.telemetry.tally import Tally
from trainers.training.cuda_graph import STEPS_TO_CAPTURE, GraphedEpochs
from trainers.training.device import check_device, resolve_device
from trainers.training.evaluate import evaluate
from trainers.training.format_analysis import analysis_metrics
from trainers.training.step import train_step

if TYPE_CHECKING:
    from trainers.parallel.pipeline import Pipeline
    from trainers.sync.base import Synchroniser, Updater
from trainers.optim.lr import Rate

STAGE_SEED = 1_000_003
"""Between the seeds of stochastic rounding of two workers' stages."""


RANKS_SHARE = ("workers", "layout.pp", "layout.tp", "layout.dp", "layout.virtual_stages", "wire", "sync.name")
"""Keys in which two trials must agree for a rank of one to take what belonged to the same rank of the other."""


def set_threads(threads: int) -> None:
    """Compute with so many CPU threads in this process, in torch and in the LNS kernels."""
    torch.set_num_threads(threads)
    lns_ops.cpu.set_num_threads(threads)


def check(config: TrialConfig, info: DatasetInfo) -> None:
    """Refuse what could only fail, before any process starts.

    Args:
        config: the trial.
        info: its data, from :func:`trainers.data.prepare`.

    Raises:
        ValueError: a batch larger than the training set, or a learning rate or momentum that underflows in the LNS format.
    """
    _check_batch(config, info.train)
    model, scale = apply_precision(nn.Linear(1, 1), config.precision), config.lr_schedule.scale(config.batch_size)
    for epoch in (0, *(change["epoch"] for change in config.changes)):
        make_optimizer(model, optimizer_at(config, epoch), config.precision, config.update_examples, scale=scale)


def _check_batch(config: TrialConfig, examples: int) -> None:
    if examples < config.batch_size:
        raise ValueError(f"batch_size={config.batch_size}: there are {examples} training examples; use a smaller batch")


class Training:
    """The state of one trial in one process.

    Args:
        config: the trial.
        rank, world_size: this worker's place; with more than one, the default torch.distributed group must exist.

    Attributes:
        epoch: finished epochs.
        history: the metrics of each, as :meth:`train_epoch` returned them. They travel in the checkpoint, so that whoever keeps a record
            of a run can complete it from the state that the run continues from.
        tested: what :meth:`test` returned last, likewise; empty before.
        origin: who trains it and with which code, in words of whoever drives it; :meth:`save` puts it into checkpoints.
        profiler: has the files of a profile (:meth:`trainers.telemetry.profiler.Profiler.take`).

    Raises:
        ValueError: the data are not to be had, or the config asks for what cannot be (its message says what).
    """

    def __init__(self, config: TrialConfig, *, rank: int = 0, world_size: int = 1) -> None:
        set_threads(config.threads)
        self.config, self.rank, self.world_size = config, rank, world_size
        self.device = torch.device(resolve_device(config.device) if world_size == 1 or config.device != "auto" else "cpu")
        check_device(self.device.type)
        self.data = load(config.data)
        _check_batch(config, len(self.data.train.y))
        inputs, classes = self.data.train.x.shape[1], int(self.data.train.y.max()) + 1
        model = initialize_(build(config.model, inputs, classes), config.seed)
        self._parameters = sum(p.numel() for p in model.parameters())
        self.data = Dataset(*(Split(split.x.to(self.device), split.y.to(self.device)) for split in self.data))
        self.place = place(config.layout, rank, world_size, self.device.type)
        self._spans = Spans(self.device)
        self.profiler = Profiler(config.profile, rank, self.device, self._spans)
        self.pipeline = self._make_pipeline(model) if self.place.pp > 1 else None
        self.model = apply_precision((self.pipeline.own if self.pipeline else model).to(self.device), config.precision)
        self.scaler = GradScaler(self.device.type) if config.autocast == "float16" else None
        if self.pipeline is None:
            assert isinstance(self.model, nn.Sequential)
            set_forward_(self.model, config.memory, config.autocast, self.scaler)
        self.collectives = Collectives(self.place.dp_group, self.device, self._spans) if self.place.dp > 1 else None
        tp_group = self.place.parts.get_group() if self.place.parts is not None else None
        self._within = Collectives(tp_group, self.device, self._spans) if tp_group is not None else None
        self._parts = make_parts(self.model, self.place, self.collectives, self._within, config.wire, config.seed)
        self._own = self._parts.own if self._parts else self.model
        """What this worker updates and keeps: the model, its parts of it, or a copy on the CPU of either."""
        self._offload = Offload(self._own) if config.memory.offload_optimizer else None
        if self._offload is not None:
            self._own = self._offload.own
        self._options = config.optimizer
        self.optimizer = self._make_optimizer()
        self._steps_per_epoch = len(self.data.train.y) // config.batch_size
        self._rate = Rate(config, self.optimizer, self._steps_per_epoch)
        self._telemetry = self._make_telemetry() if config.telemetry else None
        self.sync = self._make_sync()
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self.tested: dict[str, float] = {}
        self.origin: dict[str, Any] = {}
        self.diverged = False
        self._graphed: GraphedEpochs | None = None

    def train_epoch(self) -> dict[str, float]:
        """Train one epoch, then evaluate on the validation split.

        Returns:
            ``epoch`` (finished ones), ``train/loss`` and ``train/error`` (as met during the epoch), ``validation/loss`` and
            ``validation/error`` (losses in nats, errors as fractions), ``samples_per_second`` (training alone, all workers). With
            several workers also ``bytes/sent`` (bytes that a worker sent while training this epoch, mean over the workers) and
            ``bytes/parameter_step`` (the same over parameters and steps). Every ``analysis_every`` epochs ``analysis/LAYER/...``.
            With telemetry also :data:`trainers.telemetry.metrics.NAMES`.
        """
        self._change_options()
        # The setting is the process's, which other trials have used or use in turn.
        with matmul_accumulation(self.config.precision.accumulation):
            if self._telemetry is not None:
                self._telemetry.begin()
            start, before = time.perf_counter(), self._sent()
            try:
                tally = self._train_batches()
            finally:
                self.profiler.stop()
            seconds = time.perf_counter() - start
            sent = self._sent() - before
            costs = self._telemetry.metrics(seconds) if self._telemetry is not None else {}
            self.epoch += 1
            total = self._over_ranks(tally)
            metrics = {"epoch": float(self.epoch), **total.metrics("train"), **self._evaluate(self.data.validation, "validation")}
        metrics |= self._traffic(sent, total.examples // self.config.batch_size) | self.sync.metrics() | costs
        metrics["samples_per_second"] = total.examples / seconds
        metrics |= self._analysed()
        self.history.append(dict(metrics))
        return metrics

    def _analysed(self) -> dict[str, float]:
        every = self.config.analysis_every
        if not every or self.epoch % every or self.diverged:
            return {}
        with matmul_accumulation(self.config.precision.accumulation), self.sync.evaluating():
            return analysis_metrics(self.model, self.config, self.data.train)

    def test(self) -> dict[str, float]:
        """``test/loss`` (nats) and ``test/error`` (fraction) of the weights as they are."""
        with matmul_accumulation(self.config.precision.accumulation):
            self.tested = self._evaluate(self.data.test, "test")
        return dict(self.tested)

    def _make_pipeline(self, model: nn.Module) -> Pipeline:
        from trainers.parallel.pipeline import (
            Pipeline,  # torch's brings its compiler along, seconds that other trials need not wait
        )

        assert isinstance(model, nn.Sequential)
        precision, examples = self.config.precision, self.config.batch_size // self.place.dp
        fmt = precision.lns_format if precision.scope == "everywhere" else None
        return Pipeline(model, self.config.layout, self.place, examples, fmt, self.device, self._spans, self.config.memory)

    def _make_sync(self) -> Synchroniser:
        if self._parts is not None:
            return self._parts.synchroniser()
        return make_synchroniser(self.config, self.model, self.optimizer, self.collectives)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config, seed = self.config, (self.config.seed + self.place.pp_rank * STAGE_SEED) % (1 << 31)
        scale = config.lr_schedule.scale(config.batch_size)
        return make_optimizer(self._own, self._options, config.precision, config.update_examples, seed, scale)

    def _change_options(self) -> None:
        """The optimizer's options as ``changes`` has them after this epoch; its state stays, a captured graph does not."""
        wanted = optimizer_at(self.config, self.epoch)
        if wanted == self._options:
            return
        self._options, self._graphed = wanted, None
        for group, new in zip(self.optimizer.param_groups, self._make_optimizer().param_groups, strict=True):
            group.update((name, value) for name, value in new.items() if name != "params")
        self._rate = Rate(self.config, self.optimizer, self._steps_per_epoch)

    def _make_telemetry(self) -> Telemetry:
        precision, device = self.config.precision, self.device.type

        def ceiling() -> float:
            dtype = torch.float32 if self.config.autocast == "none" else getattr(torch, self.config.autocast)
            return kernel_ceiling(precision.lns_format, precision.accumulation, dtype, device, self.config.threads)

        aligned = self.config.sync.name != "asynchronous"
        waits = not (self.config.layout.fsdp and device == "cuda")
        formulas = self._parts.formulas if self._parts else None
        return Telemetry(self._spans, self.device, self.world_size, aligned, ceiling, waits, formulas)

    def _counting(self, steps: int = 1) -> AbstractContextManager[None]:
        """Around the trial's first step, or ``steps`` of them."""
        return nullcontext() if self._telemetry is None else self._telemetry.counting(steps)

    def _sent(self) -> int:
        return sum(part.sent for part in (self.collectives, self._within, self.pipeline) if part is not None)

    def _traffic(self, sent: int, steps: int) -> dict[str, float]:
        """Bytes that the workers sent, a mean over them."""
        if self.world_size == 1:
            return {}
        mean = self._summed([float(sent)])[0] / self.world_size
        return {"bytes/sent": mean, "bytes/parameter_step": mean / (self._parameters * steps) if steps else math.nan}

    def _train_batches(self) -> Tally:
        if self.diverged:
            return Tally()
        if self._replays:
            return self._replay_batches()
        tally, finite = Tally(), True
        self.sync.begin_epoch()
        for step, batch in self._batches():
            self.profiler.step(self.epoch * self._steps_per_epoch + step)
            self._rate.set(self.epoch, step)
            if finite:
                with self._counting():
                    loss, wrong = self._train_step(batch)
                finite = math.isfinite(loss)
                tally.add(loss, wrong, len(batch.y) if self._counts else 0)
            self._straggle()
            going = self._agreed(self.sync.after_step(finite))
            self._spans.step()
            if not going:
                self.diverged = True
                return tally
        if not self._faultless():
            finite, tally.loss = False, math.nan
        self.diverged = not self._agreed(self.sync.end_epoch(finite, last=self.epoch + 1 == self.config.epochs))
        return tally

    def _faultless(self) -> bool:
        """Whether no worker has encoded a NaN or an infinity since this was asked last: a GPU counts them and goes on. Collective there."""
        if self.device.type != "cuda":
            return True
        try:
            check_faults(self.device)
        except NonFiniteError:
            return not self._summed([1.0])[0]
        return not self._summed([0.0])[0]

    def _train_step(self, batch: Split) -> tuple[float, int]:
        optimizer = self._updater()
        if self.pipeline is not None:
            return self.pipeline.train_step(optimizer, batch, self.sync)
        return train_step(self.model, optimizer, batch, self.sync, self.config.layout.micro_batches, self._spans)

    def _updater(self) -> Updater:
        if self._offload is not None:
            return OffloadedOptimizer(self.optimizer, self._offload)
        return self.optimizer if self.scaler is None else ScaledOptimizer(self.optimizer, self.scaler)

    @property
    def _replays(self) -> bool:
        """Whether a step can be captured: it runs on this GPU alone, and the same every time."""
        alone = self.device.type == "cuda" and self.world_size == 1 and self._offload is None
        return alone and not self.config.lr_schedule.varies and self.scaler is None

    @property
    def _counts(self) -> bool:
        """Whether this worker knows the answers: every replica, of a pipeline the last stage."""
        return self.pipeline is None or self.pipeline.last

    def _agreed(self, go: bool) -> bool:
        """``go`` of all stages of this replica."""
        return go if self.pipeline is None else self.pipeline.agree(go)

    def _straggle(self) -> None:
        """The last replica's delay, injected for study."""
        if self.config.sync.straggler_seconds and self.place.dp_rank == self.place.dp - 1:
            time.sleep(self.config.sync.straggler_seconds)

    def _batches(self) -> Iterator[tuple[int, Split]]:
        """The steps of the epoch with this replica's shares of their batches; the last, incomplete batch is left out."""
        split, size = self.data.train, self.config.batch_size
        order = epoch_order(len(split.y), self.config.seed, self.epoch)
        for step, part in self.sync.shares(len(order) // size, self.place.dp_rank):
            yield step, share(split, order, batch_size=size, step=step, part=part, parts=self.place.dp)

    def _replay_batches(self) -> Tally:
        """On a GPU: the epoch's steps from a CUDA graph."""
        if self._graphed is None:
            parts = self.config.layout.micro_batches
            with self._counting(STEPS_TO_CAPTURE):
                self._graphed = GraphedEpochs(self.model, self.optimizer, self.data.train, self.config.batch_size, parts)
            self._spans.begin()
        order = epoch_order(len(self.data.train.y), self.config.seed, self.epoch)
        before = self.epoch * self._steps_per_epoch
        loss, wrong, counted = self._graphed.train(order.to(self.device), lambda step: self.profiler.step(before + step))
        self._spans.step(self._graphed.steps)
        self.diverged = not (self._faultless() and math.isfinite(loss))
        if self.diverged:
            loss = math.nan
        return Tally(loss, wrong, counted * self.config.batch_size)

    def _evaluate(self, split: Split, name: str) -> dict[str, float]:
        mine = slice(None) if self.sync.whole else slice(self.place.dp_rank, None, self.place.dp)
        own = Split(split.x[mine], split.y[mine])
        like = math.ceil(len(split.y) / self.place.dp) if self.sync.together else None
        with self.sync.evaluating():
            try:
                tally = self.pipeline.evaluate(own) if self.pipeline else evaluate(self.model, own, self.sync.combine, like)
                check_faults(self.device)
            except NonFiniteError:
                tally = Tally(math.nan, len(own.y), len(own.y))
        return self._over_ranks(tally).metrics(name)

    def _over_ranks(self, tally: Tally) -> Tally:
        """The sum over the workers; of those that have computed the same examples together, the first counts."""
        if self.place.tp_rank:
            tally = Tally()
        loss, wrong, examples = self._summed([tally.loss, float(tally.wrong), float(tally.examples)])
        return Tally(loss, int(wrong), int(examples))

    def _summed(self, values: list[float]) -> list[float]:
        """``values`` summed over all workers, in float64."""
        if self.world_size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def save(self, folder: Path) -> None:
        """Write the state into ``folder``; whole or absent, whenever the process dies.

        With several workers every one calls it: rank 0 writes, and has first from the others what is theirs alone.
        """
        own = self.sync.state()
        ranks = gather_ranks(own, self.rank, self.world_size) if own else {}  # on every rank or on none
        progress = {"epoch": self.epoch, "diverged": self.diverged, "history": self.history, "tested": self.tested}
        if self.scaler is not None:
            progress["scaler"] = self.scaler.state_dict()
        with self.sync.evaluating():
            tensors = model_tensors(self._own, self.optimizer)
            if self._parts is not None:
                tensors = self._parts.whole(tensors)
            if self.pipeline is not None:
                tensors = gather_stages(tensors if self.place.dp_rank == 0 else {}, self.rank, self.world_size)
            if self.rank == 0:
                save_checkpoint(folder, tensors | ranks, {**progress, "config": self.config.to_dict(), "origin": self.origin})

    def restore(self, folder: Path) -> None:
        """Continue from the state in ``folder``; the next epoch comes out as if there had been no break.

        A checkpoint of another layout is read too; what belonged to its ranks alone (residues of error feedback, replicas' own weights
        and optimizer state) is then left out.

        Raises:
            ValueError: no whole checkpoint there, or one of another model or precision.
        """
        tensors, state = load_checkpoint(folder)
        saved_config = TrialConfig.from_dict(state["config"])
        for key in ("model", "precision", "seed", "optimizer.name"):
            saved_value, own = (attrgetter(key)(config) for config in (saved_config, self.config))
            if saved_value != own:
                raise ValueError(f"{folder}: checkpoint of {key}={saved_value}, this trial has {own}; use its own config")
        self._graphed = None
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])
        load_model_tensors(self._own, self.optimizer, self._parts.parts(tensors) if self._parts else tensors)
        if self._offload is not None:
            self._offload.push()
        alike = all(get(saved_config) == get(self.config) for get in map(attrgetter, RANKS_SHARE))
        self.sync.load_state(of_rank(tensors, self.rank, self.device) if alike else {})
        self.epoch, self.diverged = int(state["epoch"]), bool(state["diverged"])
        self.history, self.tested = list(state.get("history", [])), dict(state.get("tested", {}))  # older checkpoints lack them
