"""The strategies of training and evaluation: eager, from a CUDA graph, or in pipeline stages.

A trial has one strategy, chosen when it is built. Sharded models do not need their own strategy;
they have another synchroniser and other tensors.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.comm.collectives import Collectives
from trainers.config import TrialConfig
from trainers.data import Examples, Split, epoch_order, share
from trainers.optim.lr import put_on_device
from trainers.sync.base import Synchroniser
from trainers.telemetry.tally import Tally
from trainers.training.build import Components, digest
from trainers.training.cuda_graph import STEPS_TO_CAPTURE, GraphedEpochs
from trainers.training.evaluate import evaluate
from trainers.training.step import train_step
from trainers.user_code import seeded

if TYPE_CHECKING:
    from trainers.parallel.pipeline import Pipeline


def seed_of(text: str) -> int:
    """Return a 63-bit seed from the SHA-256 of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def choose_step(components: Components) -> Step:
    """Return the strategy of a trial.

    On a GPU, steps are captured in a CUDA graph if
    :attr:`~trainers.config.TrialConfig.step_captured` is true.
    """
    if components.pipeline is not None:
        return PipelineStep(components, components.pipeline)
    config = components.config
    if components.workers.device.type == "cuda" and config.step_captured:
        return GraphStep(components)
    return StatefulStep(components) if _stateful(config) else Step(components)


def _stateful(config: TrialConfig) -> bool:
    """Return whether a model may draw random numbers or update statistics during training."""
    return not config.model.stateless or config.loss.own


class Step:
    """The eager strategy, one step after the other; the base of the other strategies.

    Args:
        components: components of the trial.

    Attributes:
        tally: this worker's losses and answers of the current epoch so far; empty if a strategy
            does not read them before the epoch's end.
    """

    def __init__(self, components: Components) -> None:
        self.tally = Tally()
        self._components, self._config, self._place = (
            components,
            components.config,
            components.place,
        )
        is_last_replica = components.place.dp_rank == components.place.dp - 1
        self._delay = components.config.sync.straggler_seconds if is_last_replica else 0.0

    def train_epoch(
        self, split: Examples, epoch: int, sync: Synchroniser, before_step: Callable[[int], None]
    ) -> tuple[Tally, bool]:
        """Train once over ``split``.

        Args:
            split: training examples, on the worker's device.
            epoch: number of finished epochs.
            sync: synchroniser of the replicas.
            before_step: called with each step's number in the epoch.

        Returns:
            This worker's losses and answers, and whether training continues.
        """
        components, finite = self._components, True
        self.tally = tally = Tally()
        sync.begin_epoch()
        for step, batch in self.batches(split, epoch, sync):
            before_step(step)
            if finite:
                with components.telemetry.counting():
                    found = self.train_step(batch, sync)
                finite = math.isfinite(found.loss)
                tally.add(found)
            if self._delay:
                time.sleep(self._delay)  # simulates a straggler
            goes_on = self._all_go_on(sync.after_step(finite=finite))
            components.spans.step()
            if not goes_on:
                return tally, False
        if not components.workers.faultless():
            finite, tally.loss = False, math.nan
        last = epoch + 1 == self._config.epochs
        return tally, self._all_go_on(sync.end_epoch(finite=finite, last=last))

    def batches(
        self, split: Examples, epoch: int, sync: Synchroniser
    ) -> Iterator[tuple[int, Split]]:
        """Yield an epoch's steps with this replica's shares of their batches.

        The last, incomplete batch is left out.
        """
        size, place = self._config.batch_size, self._place
        order, steps = epoch_order(split.size, self._config.seed, epoch), deque[int]()

        def shares() -> Iterator[Tensor]:
            for step, part in sync.shares(len(order) // size, place.dp_rank):
                steps.append(step)
                yield share(order, batch_size=size, step=step, part=part, parts=place.dp)

        # all workers of a replica draw the same examples
        seed = seed_of(f"examples/{self._config.seed}/{epoch}/{place.dp_rank}")
        for batch in split.load(shares(), seed):
            yield steps.popleft(), batch

    def train_step(self, batch: Split, sync: Synchroniser) -> Tally:
        """Take one step with this replica's share of a batch.

        Returns:
            This worker's losses and answers; the loss is NaN if it, or the loss of a worker whose
                result arrived here, is not finite.
        """
        components = self._components
        return train_step(
            components.model,
            components.updater,
            batch,
            sync,
            self._config.layout.micro_batches,
            components.spans,
            components.loss,
        )

    def evaluate(self, split: Examples, sync: Synchroniser, like: int | None) -> Tally:
        """Evaluate on ``split`` and return this worker's losses and answers.

        Args:
            split: examples, on the worker's device.
            sync: combines the logits of replicas that predict together.
            like: see :func:`trainers.data.batches.evaluation_batches`.
        """
        own = self._components
        return evaluate(own.model, split, own.loss, own.metrics, sync.combine, like)

    def forget(self) -> None:
        """Discard captured state, because the optimizer or its state has changed."""

    def _all_go_on(self, goes_on: bool) -> bool:
        """Return whether all workers of this replica continue."""
        return goes_on


class StatefulStep(Step):
    """Eager steps of a model that may draw random numbers and keep statistics.

    Random numbers of torch, NumPy and Python are seeded by (seed, epoch, rank), in training
    (dropout) and in evaluation, so a resumed trial draws the same numbers. Floating-point buffers
    that differ between the replicas (running statistics of batch norm) are replaced by their mean
    at the end of every epoch, before evaluation and checkpoints.
    """

    def train_epoch(
        self, split: Examples, epoch: int, sync: Synchroniser, before_step: Callable[[int], None]
    ) -> tuple[Tally, bool]:
        """Train once over ``split``, as :meth:`Step.train_epoch`."""
        own = self._components
        with self._seeded(epoch):
            result = super().train_epoch(split, epoch, sync, before_step)
        if _stateful(self._config) and own.collectives is not None:
            _average_buffers(own.model, own.collectives)
        return result

    def evaluate(self, split: Examples, sync: Synchroniser, like: int | None) -> Tally:
        """Evaluate on ``split``, as :meth:`Step.evaluate`."""
        with self._seeded("evaluation"):
            return super().evaluate(split, sync, like)

    def _seeded(self, epoch: int | str) -> AbstractContextManager[None]:
        """Return a context with the random numbers of an epoch, or of evaluation.

        It does nothing for models without random numbers, because threads of other trials share the
        generators.
        """
        if not _stateful(self._config):
            return nullcontext()
        seed, here = self._config.seed, self._place
        name = f"{epoch}/{seed}" if isinstance(epoch, str) else f"{seed}/{epoch}"
        # workers with parts of the same layer draw the same numbers; otherwise the rank decides
        return seeded(seed_of(f"{name}/{here.pp_rank * here.dp + here.dp_rank}"))


@torch.no_grad()
def _average_buffers(model: nn.Module, replicas: Collectives) -> None:
    """Replace floating-point buffers that differ between replicas by their mean, in float64."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    digests: list[Any] = [None] * replicas.size
    dist.all_gather_object(digests, [digest(buffer) for buffer in buffers], group=replicas.group)
    for place, buffer in enumerate(buffers):
        if len({of_replica[place] for of_replica in digests}) > 1:
            buffer.copy_(replicas.all_reduce_(buffer.double()) / replicas.size)


class PipelineStep(StatefulStep):
    """The strategy of pipeline stages that step together.

    Only the last stage has losses and answers.

    Args:
        components: components of the trial.
        pipeline: this worker's stages.
    """

    def __init__(self, components: Components, pipeline: Pipeline) -> None:
        super().__init__(components)
        self._pipeline = pipeline

    def train_step(self, batch: Split, sync: Synchroniser) -> Tally:
        """Take one step, as :meth:`Step.train_step`."""
        return self._pipeline.train_step(self._components.updater, batch, sync)

    def evaluate(self, split: Examples, sync: Synchroniser, like: int | None) -> Tally:
        """Evaluate on ``split``, as :meth:`Step.evaluate`.

        The logits of pipeline stages are not combined across replicas.
        """
        return self._pipeline.evaluate(split)

    def _all_go_on(self, goes_on: bool) -> bool:
        """Return whether all stages of this replica continue."""
        return self._pipeline.agree(goes_on)


class GraphStep(StatefulStep):
    """The strategy of steps on one GPU, replayed from a CUDA graph that the first epoch captures.

    The update is part of the graph, except for optimizers that take a varying rate only from the
    host.

    Args:
        components: components of the trial.
    """

    def __init__(self, components: Components) -> None:
        super().__init__(components)
        self._graphed: GraphedEpochs | None = None

    def train_epoch(
        self, split: Examples, epoch: int, sync: Synchroniser, before_step: Callable[[int], None]
    ) -> tuple[Tally, bool]:
        """Train once over ``split``, as :meth:`Step.train_epoch`."""
        components, config = self._components, self._config
        assert isinstance(split, Split)
        if self._graphed is None:
            varies, updates = config.lr_schedule.varies, config.update_captured
            if varies and updates:
                put_on_device(components.optimizer, components.workers.device)
            with components.telemetry.counting(STEPS_TO_CAPTURE), self._seeded(epoch):
                self._graphed = GraphedEpochs(
                    components.model,
                    components.optimizer,
                    split,
                    config.batch_size,
                    components.loss,
                    config.layout.micro_batches,
                    updates=updates,
                )
            components.telemetry.begin_steps()
        order = epoch_order(len(split.y), config.seed, epoch).to(components.workers.device)
        with self._seeded(epoch):
            tally = self._graphed.train(order, before_step)
        components.spans.step(self._graphed.steps)
        goes_on = components.workers.faultless() and math.isfinite(tally.loss)
        if not goes_on:
            tally.loss = math.nan
        return tally, goes_on

    def forget(self) -> None:
        """Discard the graph; the next epoch captures a new one."""
        self._graphed = None
