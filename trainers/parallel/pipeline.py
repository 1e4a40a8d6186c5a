"""Pipeline parallelism: each worker holds one stage of the model, or several, interleaved.

A worker passes its activations on to the worker of the next stage. torch.distributed.pipelining
runs the schedules. This module adds the partition (:mod:`trainers.parallel.pipeline_partition`),
stages that pass LNS values as codes, evaluation, and the counting of bytes.

- **Codes between stages.** LNS activations and gradients are sent as 2-byte codes. The pipeline
  needs a floating-point type, because it silently drops gradients of int16. So codes are viewed as
  float16, without any computation, and two autograd functions pack and unpack them in both
  directions. This only works because an activation has a single consumer: gradients in this form
  could not be added.
- **Shapes are static**, given at the start. To infer them, the pipeline would run a forward pass on
  uninitialised memory.
- **Sums, not means**: the loss is summed, and gradients of micro-batches are added up in their
  order without scaling. They have the same bits as in one process with the same micro-batches, in
  every schedule, for float32 and LNS.
- **Zero-bubble schedules** compute the weights' gradients later than the inputs' gradients
  (:mod:`trainers.parallel.pipeline_zero_bubble`). With ``zbv`` and ``dualpipev`` the first worker
  has both the first and the last stage, so it has the loss.

Source of the schedules: GPipe: Y. Huang et al. 2019 (arXiv:1811.06965); 1F1B and interleaved: D.
Narayanan et al. 2021 (arXiv:2104.04473); zero-bubble and ZBV: P. Qi et al. 2023 (arXiv:2401.10241);
DualPipeV: DeepSeek-AI 2024 (arXiv:2412.19437).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lns_ops import LNSFormat, LNSTensor
from trainers import _compat
from trainers.comm.collectives import Collectives
from trainers.comm.mesh import Place
from trainers.config.layout import DEFERRING, Layout
from trainers.config.memory import MemoryConfig
from trainers.data import Examples, Split
from trainers.data.batches import evaluation_batches
from trainers.models.forward import set_forward_
from trainers.models.loss import CROSS_ENTROPY, Loss
from trainers.parallel.pipeline_partition import split
from trainers.parallel.pipeline_zero_bubble import Deferred, defer_
from trainers.sync.base import Synchroniser, Updater
from trainers.telemetry.spans import Spans
from trainers.telemetry.tally import Tally, tallied

SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""The schedules of one stage a worker."""
MULTI: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""The schedules that take a list of stages a worker."""


class _Pack(torch.autograd.Function):
    """LNS values that leave a stage, as codes viewed as float16; their gradients come back so."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor) -> Tensor:
        """Return the codes of ``x`` viewed as float16."""
        ctx.fmt = x.fmt
        return x.codes.contiguous().view(torch.float16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> LNSTensor:
        """Return the gradient, codes viewed as float16, as LNS values."""
        return LNSTensor(grad.contiguous().view(torch.int16), ctx.fmt)


class _Unpack(torch.autograd.Function):
    """LNS values that enter a stage, from codes viewed as float16; their gradients leave so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LNSFormat) -> LNSTensor:
        """Return the LNS values of codes viewed as float16."""
        return LNSTensor(x.contiguous().view(torch.int16), fmt)

    @staticmethod
    def backward(ctx: Any, grad: LNSTensor) -> tuple[Tensor, None]:
        """Return the codes of the gradient viewed as float16."""
        return grad.codes.contiguous().view(torch.float16), None


class Stage(nn.Module):
    """Consecutive layers of a model.

    Tensors that come from or go to another stage are float32, or codes viewed as float16 with
    ``fmt``.

    Args:
        layers: layers of this stage.
        fmt: LNS format of activations, None for float32.
        first, last: whether the stage takes the model's input, and whether it gives the model's
            output; these tensors are not converted.
    """

    def __init__(
        self, layers: nn.Sequential, fmt: LNSFormat | None, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.layers, self.fmt, self.first, self.last = layers, fmt, first, last

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the inputs."""
        if self.fmt is not None and not self.first:
            x = _Unpack.apply(x, self.fmt)  # type: ignore[no-untyped-call]
        y: Tensor = self.layers(x)
        if self.last:
            return y
        # sent tensors must be contiguous; an LSTM's outputs are not
        apply: Callable[..., Tensor] = _Pack.apply
        return y.contiguous() if self.fmt is None else apply(y)


class _TimedStage(PipelineStage):
    """A stage whose computing is marked; the rest of a schedule is waiting for neighbours."""

    spans: Spans

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        with self.spans("stage", f"forward {self.stage_index}.{fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch."""
        with self.spans("stage", f"backward {self.stage_index}.{bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute the deferred weight gradients of a micro-batch."""
        with self.spans("stage", f"weights {self.stage_index}.{bwd_chunk_id}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline:
    """One worker's stages of a replica.

    Args:
        model: the whole model, initialised; the layers that this worker does not hold may be
            dropped afterwards.
        layout: pp, schedule, micro_batches.
        place: this worker's place in the layout.
        share: examples of a step that a replica takes.
        example: one example, ``[1, ...]``, which says what shapes pass between stages.
        fmt: LNS format of activations, None for float32.
        device: device of the stages.
        loss: loss of the trial.
        spans: marks what the stages do.
        memory: memory options of every stage.

    Attributes:
        own: this worker's layers under their names in ``model``; convert them to LNS before the
            first step.
        sent: bytes of activations and gradients that this worker has sent to other stages.
    """

    def __init__(
        self,
        model: nn.Sequential,
        layout: Layout,
        place: Place,
        share: int,
        example: Tensor,
        fmt: LNSFormat | None,
        device: torch.device,
        loss: Loss = CROSS_ENTROPY,
        spans: Spans | None = None,
        memory: MemoryConfig | None = None,
    ) -> None:
        assert place.pp_group is not None
        self._spans = spans or Spans()
        self._place, self._group, self._fmt, self._device = place, place.pp_group, fmt, device
        self._collectives = Collectives(place.pp_group, device, self._spans)
        self._micro_batch = share // layout.micro_batches
        names, self._shapes = split(model, layout.stages, example)
        self._input = example.dtype
        self._layout = layout
        self._indices = [
            index for index in range(layout.stages) if layout.owner(index) == place.pp_rank
        ]
        parts = [
            OrderedDict((name, model.get_submodule(name)) for name in names[index])
            for index in self._indices
        ]
        self.own = nn.Sequential(OrderedDict(item for part in parts for item in part.items()))
        last = layout.stages - 1
        self._stages = [
            Stage(nn.Sequential(part), fmt, first=index == 0, last=index == last)
            for index, part in zip(self._indices, parts, strict=True)
        ]
        for stage in self._stages:
            set_forward_(stage.layers, memory or MemoryConfig())
        self._schedule = self._make_schedule(layout)
        self._loss, self._tally = loss, Tally()
        self.sent = 0

    @property
    def last(self) -> bool:
        """Whether this worker holds the last stage, the only one that knows losses and answers."""
        return self._stages[-1].last

    def train_step(self, optimizer: Updater, batch: Split, sync: Synchroniser) -> Tally:
        """Take one step of all stages together, each called with the whole share ``batch``.

        Returns:
            Losses and answers, on the last stage; an empty tally on others; a NaN loss on all where
                a loss is not finite.
        """
        optimizer.zero_grad(set_to_none=True)
        tally = self._forward_backward(batch)
        with self._spans("synchronise"):
            update = self._collectives.all_true(
                sync.gradients(self.own.parameters(), finite=math.isfinite(tally.loss))
            )
        with self._spans("update"):
            if not (update and self._collectives.all_true(sync.update(optimizer))):
                tally.loss = math.nan
        return tally

    def agree(self, value: bool) -> bool:
        """Tell whether ``value`` is true on every stage of this replica."""
        return self._collectives.all_true(value)

    @torch.no_grad()
    def evaluate(self, split: Examples) -> Tally:
        """Return loss and errors on ``split``, on the last stage; an empty tally on others."""
        tally, training = Tally(), self.own.training
        self.own.eval()
        for batch in evaluation_batches(split):
            logits = self._relay(batch.x)
            if logits is not None:
                tally.add(tallied(logits, batch, self._loss(logits, batch.y), self._loss))
        self.own.train(training)
        return tally

    def _forward_backward(self, batch: Split) -> Tally:
        """Run the schedule once; return an empty tally where the last stage is elsewhere."""
        self._tally = Tally()
        arguments = (batch.x,) if self._stages[0].first else ()
        target = {"target": batch.y} if self.last else {}
        with self._spans("schedule"):
            self._schedule.step(*arguments, return_outputs=False, **target)
        self.sent += self._bytes_a_step(len(batch.y))
        return self._tally

    def _lose(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the summed loss of a micro-batch, and count it."""
        with self._spans("stage", "loss"):
            loss = self._loss(logits, target)
            self._tally.add(tallied(logits, Split(logits, target), loss, self._loss))
            return loss

    def _bytes_a_step(self, examples: int) -> int:
        """Return the bytes of activations and gradients that a step sends to other workers."""
        values = 0
        for index in self._indices:
            for neighbour, shape in (
                (index + 1, self._shapes[index + 1]),
                (index - 1, self._shapes[index]),
            ):
                if 0 <= neighbour < self._layout.stages and neighbour not in self._indices:
                    values += shape.numel()
        return examples * values * (4 if self._fmt is None else 2)

    def _example(self, index: int) -> Tensor:
        """Return an example of what enters stage ``index``, or leaves the last stage.

        It has the shape and the type, and requires a gradient where the tensor does.
        """
        inner = 0 < index < len(self._shapes) - 1
        dtype = torch.float16 if inner and self._fmt is not None else torch.float32
        if not index:
            dtype = self._input
        return torch.empty(
            self._micro_batch,
            *self._shapes[index],
            dtype=dtype,
            device=self._device,
            requires_grad=index > 0,
        )

    def _make_schedule(self, layout: Layout) -> Any:
        """Return torch's schedule of this worker's stages."""
        stages = [
            self._make_stage(index, stage)
            for index, stage in zip(self._indices, self._stages, strict=True)
        ]
        options: dict[str, Any] = {
            "n_microbatches": layout.micro_batches,
            "loss_fn": self._lose,
            "scale_grads": False,
        }
        if layout.schedule in SINGLE:
            return SINGLE[layout.schedule](stages[0], **options)
        return MULTI[layout.schedule](stages, **options)

    def _make_stage(self, index: int, stage: Stage) -> _TimedStage:
        """Return torch's stage ``index``, with deferred weight gradients if the schedule defers."""
        deferred = Deferred() if self._layout.schedule in DEFERRING else None
        if deferred is not None:
            defer_(stage, deferred)
        made = _TimedStage(
            stage,
            index,
            self._layout.stages,
            self._device,
            input_args=self._example(index),
            output_args=self._example(index + 1),
            group=self._group,
            dw_builder=deferred.take if deferred is not None else None,
        )
        made.spans = self._spans
        _compat.leave_out_messages_to_itself(made)
        return made

    def _relay(self, x: Tensor) -> Tensor | None:
        """Pass ``x`` through all stages; return the logits on the last stage, None on others."""
        y = x
        for index, stage in zip(self._indices, self._stages, strict=True):
            if not stage.first and index - 1 not in self._indices:
                example = self._example(index)
                y = torch.empty(
                    len(x), *example.shape[1:], dtype=example.dtype, device=self._device
                )
                dist.recv(y, self._rank_of(index - 1), self._group)
            y = stage(y)
            if not stage.last and index + 1 not in self._indices:
                dist.send(y, self._rank_of(index + 1), self._group)
        return y if self.last else None

    def _rank_of(self, stage: int) -> int:
        """Return the rank, in the default group, of the worker with ``stage`` of this replica."""
        return dist.get_global_rank(self._group, self._layout.owner(stage))
