"""Pipeline parallelism: a worker holds one stage of the model (or several, interleaved) and passes activations on.

torch.distributed.pipelining runs the schedules. What is ours: where to cut (:mod:`trainers.split`), stages that pass LNS values as codes,
evaluation, and counting.

- **Codes between stages.** LNS activations and gradients travel as 2-byte codes. The pipeline must see a floating type, or it drops
  the gradient without a word (int16 has none); so codes are viewed as float16, never computed with, and two autograd functions pack
  and unpack them in both directions. This is sound because an activation has one consumer: gradients viewed so could not be added.
- **Shapes are static**, given at the start. Left to find out, the pipeline would run a forward pass on uninitialised memory.
- **Sums, not means**: the loss is summed, gradients of micro-batches are added up in their order and not scaled, so they are bit for
  bit those of one process that takes the same micro-batches, in every schedule, for float32 and LNS.

Zero-bubble schedules are not offered: they split backward passes of inputs and weights, which LNS linear layers do not defer.
Source of the schedules: GPipe: Y. Huang et al. 2019 (arXiv:1811.06965); 1F1B and interleaved: D. Narayanan et al. 2021 (arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lns_ops import LNSFormat, LNSTensor
from trainers.collectives import Collectives
from trainers.data import Split
from trainers.layout import Layout, Place
from trainers.split import split
from trainers.step import EVALUATION_BATCH, Tally
from trainers.synchroniser import Synchroniser


class _Pack(torch.autograd.Function):
    """LNS values out of a stage: codes as float16; gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: LNSTensor) -> Tensor:
        ctx.fmt = x.fmt
        return x.codes.contiguous().view(torch.float16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> LNSTensor:
        return LNSTensor(grad.contiguous().view(torch.int16), ctx.fmt)


class _Unpack(torch.autograd.Function):
    """Codes as float16 into a stage: LNS values; gradients go out the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: LNSFormat) -> LNSTensor:
        return LNSTensor(x.contiguous().view(torch.int16), fmt)

    @staticmethod
    def backward(ctx: Any, grad: LNSTensor) -> tuple[Tensor, None]:
        return grad.codes.contiguous().view(torch.float16), None


class Stage(nn.Module):
    """Consecutive layers; tensors that come from or go to another stage are float32, or codes viewed as float16 with ``fmt``.

    Args:
        layers: of this stage.
        fmt: of activations, None for float32.
        first, last: whether it takes the model's input and gives its output, which are what they are.
    """

    def __init__(self, layers: nn.Sequential, fmt: LNSFormat | None, *, first: bool, last: bool) -> None:
        super().__init__()
        self.layers, self.fmt, self.first, self.last = layers, fmt, first, last

    def forward(self, x: Tensor) -> Tensor:
        """``[B, I]`` to ``[B, O]``."""
        if self.fmt is not None and not self.first:
            x = _Unpack.apply(x, self.fmt)  # type: ignore[no-untyped-call]
        y: Tensor = self.layers(x)
        return y if self.fmt is None or self.last else _Pack.apply(y)  # type: ignore[no-untyped-call]


class Pipeline:
    """One worker's part of a replica.

    Args:
        model: the whole model, initialised; its layers that this worker does not hold may be dropped afterwards.
        layout: pp, schedule, micro_batches.
        place: this worker's.
        share: examples of a step that a replica takes.
        fmt: LNS format of activations, None for float32.
        device: of the stages.

    Attributes:
        own: this worker's layers under their names in ``model``; convert them to LNS before the first step.
        sent: bytes of activations and gradients that this worker has sent to other stages.
    """

    def __init__(
        self, model: nn.Sequential, layout: Layout, place: Place, share: int, fmt: LNSFormat | None, device: torch.device
    ) -> None:
        assert place.pp_group is not None
        self._place, self._group, self._fmt, self._device = place, place.pp_group, fmt, device
        self._collectives = Collectives(place.pp_group, device)
        self._micro_batch = share // layout.micro_batches
        names = split(model, layout.stages)
        self._widths = widths(model, names)
        self._indices = range(place.pp_rank, layout.stages, place.pp)
        parts = [OrderedDict((name, model.get_submodule(name)) for name in names[index]) for index in self._indices]
        self.own = nn.Sequential(OrderedDict(item for part in parts for item in part.items()))
        last = layout.stages - 1
        self._stages = [
            Stage(nn.Sequential(part), fmt, first=index == 0, last=index == last)
            for index, part in zip(self._indices, parts, strict=True)
        ]
        self._schedule = self._make_schedule(layout)
        self._wrong = 0
        self.sent = 0

    @property
    def last(self) -> bool:
        """Whether this worker holds the last stage, which alone knows loss and answers."""
        return self._stages[-1].last

    def train_step(self, optimizer: torch.optim.Optimizer, batch: Split, sync: Synchroniser) -> tuple[float, int]:
        """One step of all stages together, each with the whole share ``batch``.

        Returns:
            Summed loss and wrong answers, on the last stage; (0, 0) on others; NaN on all where a loss is not finite.
        """
        optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(batch)
        go = self._collectives.all_true(sync.gradients(self.own.parameters(), math.isfinite(loss)))
        go = go and self._collectives.all_true(sync.update(optimizer))
        return loss if go else math.nan, self._wrong

    def agree(self, value: bool) -> bool:
        """Whether ``value`` is true on every stage of this replica."""
        return self._collectives.all_true(value)

    @torch.no_grad()
    def evaluate(self, split: Split) -> Tally:
        """Loss and errors on ``split``, on the last stage; an empty tally on others."""
        tally = Tally()
        for x, y in zip(split.x.split(EVALUATION_BATCH), split.y.split(EVALUATION_BATCH), strict=True):
            logits = self._relay(x)
            if logits is not None:
                loss = F.cross_entropy(logits, y, reduction="sum").item()
                tally.add(loss, int((logits.argmax(1) != y).sum()), len(y))
        return tally

    def _forward_backward(self, batch: Split) -> float:
        losses: list[Tensor] = []
        self._wrong = 0
        arguments = (batch.x,) if self._stages[0].first else ()
        target = {"target": batch.y, "losses": losses} if self.last else {}
        self._schedule.step(*arguments, return_outputs=False, **target)
        self.sent += self._bytes_a_step(len(batch.y))
        return sum(loss.item() for loss in losses)

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        self._wrong += int((logits.argmax(1) != target).sum())
        return F.cross_entropy(logits, target, reduction="sum")

    def _bytes_a_step(self, examples: int) -> int:
        """Activations to the next stage and gradients to the one before; two stages of one worker are never neighbours."""
        last = len(self._widths) - 2
        values = sum((index < last) * self._widths[index + 1] + (index > 0) * self._widths[index] for index in self._indices)
        return examples * values * (4 if self._fmt is None else 2)

    def _example(self, index: int) -> Tensor:
        """What enters stage ``index`` (or leaves the last): shape, type and whether it has a gradient."""
        inner = 0 < index < len(self._widths) - 1
        dtype = torch.float16 if inner and self._fmt is not None else torch.float32
        return torch.empty(self._micro_batch, self._widths[index], dtype=dtype, device=self._device, requires_grad=index > 0)

    def _make_schedule(self, layout: Layout) -> Any:
        stages = [
            PipelineStage(
                stage, index, layout.stages, self._device, input_args=self._example(index), output_args=self._example(index + 1),
                group=self._group,
            )
            for index, stage in zip(self._indices, self._stages, strict=True)
        ]  # fmt: skip
        options: dict[str, Any] = {"n_microbatches": layout.micro_batches, "loss_fn": self._loss, "scale_grads": False}
        if layout.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, **options)  # type: ignore[arg-type]
        return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[layout.schedule](stages[0], **options)

    def _relay(self, x: Tensor) -> Tensor | None:
        """``x`` through all stages in turn; the logits on the last stage, None on others."""
        previous, following = (
            dist.get_global_rank(self._group, (self._place.pp_rank + step) % self._place.pp) for step in (-1, 1)
        )
        y: Tensor | None = None
        for index, stage in zip(self._indices, self._stages, strict=True):
            if not stage.first:
                example = self._example(index)
                x = torch.empty(len(x), example.shape[1], dtype=example.dtype, device=self._device)
                dist.recv(x, previous, self._group)
            y = stage(x)
            if not stage.last:
                dist.send(y, following, self._group)
        return y if self.last else None


def widths(model: nn.Sequential, names: list[list[str]]) -> list[int]:
    """Values of an example that enter each stage, whose first layer is a linear one, and that leave the last."""
    linear = {name: layer for name, layer in model.named_children() if isinstance(layer, nn.Linear)}
    return [*(linear[part[0]].in_features for part in names), list(linear.values())[-1].out_features]
