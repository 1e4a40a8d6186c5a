"""Training steps on an NVIDIA GPU from one CUDA graph, replayed for every step of an epoch.

A step of a small net has some forty kernels of a few microseconds, which Python needs longer to
launch than the GPU to run. Captured once in a CUDA graph and replayed, they run back to back. The
graph reads its batch through a counter on the device, so an epoch is a sequence of replays without
input from the host. Every step writes its loss and its number of wrong answers to its own place on
the device, and the host reads them all once at the end. A GPU starts at most some 700,000 small
kernels per second (an H100), which limits concurrent small nets: a step should have few kernels.

Numbers are constants in a graph, so a varying learning rate is stored on the device and updated
before each replay. A few optimizers take their rate only as a number; for these the graph has the
forward and backward passes, and the update is launched after each replay. Each replay draws new
random numbers from torch's generator.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lns_ops.tensor import storage_of
from trainers.data import Split
from trainers.models.loss import Loss
from trainers.telemetry.tally import Tally

WARM_UP_STEPS = 2
"""The steps before capture, which compile kernels, upload tables and create optimizer state."""
STEPS_TO_CAPTURE = WARM_UP_STEPS + 1
"""The training steps that making a :class:`GraphedEpochs` runs."""
QUEUED_STEPS = 16
"""Number of steps per group. After launching a group, an epoch waits for the end of the previous
one, so at most two groups are queued."""

_capturing = threading.Lock()
"""Lock that a thread holds while it captures a graph.

The start of a capture waits for the whole device, which is forbidden during another capture. It
also waits for the steps that other threads have queued, so epochs queue only a few steps.
"""


class GraphedEpochs:
    """The training steps on one GPU, replayed from a CUDA graph.

    Several threads can have one each, with their own stream, which must be current during
    construction and use.

    Args:
        model, optimizer: on the GPU; captured as they are, so replaced parameters or state need a
            new object. Capturing leaves their values unchanged.
        data: training examples, on the GPU.
        batch_size: number of examples per step.
        loss: loss of the trial.
        micro_batches: number of equal parts of a batch, whose gradients are added up in order.
        updates: whether the graph includes the update. Its options are then fixed at the capture,
            except for a learning rate that is a tensor on the GPU.

    Attributes:
        steps: number of steps per epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Split,
        batch_size: int,
        loss: Loss,
        micro_batches: int = 1,
        updates: bool = True,
    ) -> None:
        self._model, self._optimizer, self._data = model, optimizer, data
        self._updates = updates
        self._batch_size, self._lose, self._micro_batches = batch_size, loss, micro_batches
        device, examples = data.y.device, len(data.y)
        self.steps = examples // batch_size
        self._order = torch.arange(self.steps * batch_size, device=device).view(
            self.steps, batch_size
        )
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._losses = torch.zeros(self.steps, device=device)
        self._wrong = torch.zeros(self.steps, dtype=torch.int64, device=device)
        self._asked: Tensor | int = torch.zeros_like(self._wrong)  # or the number of every step
        with _capturing, self._unchanged():
            current = torch.cuda.current_stream(device)
            stream = (
                torch.cuda.Stream(device)
                if current == torch.cuda.default_stream(device)
                else current
            )
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._step.zero_()  # an epoch may have but one step
                    self._train_step()
                    if not updates:
                        self._optimizer.step()
            current.wait_stream(stream)
            self._optimizer.zero_grad(set_to_none=True)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._train_step()
            current.wait_stream(stream)  # torch sets the graph's random numbers up there, too
        self._gradients = [(p, p.grad) for p in model.parameters()]

    def train(self, order: Tensor, before_step: Callable[[int], None] = lambda step: None) -> Tally:
        """Train once over the examples in ``order``; the last, incomplete batch is left out.

        Args:
            order: indices of examples, int64, on any device.
            before_step: called with each step's number in the epoch.

        Returns:
            Losses and answers. The loss is NaN once a batch's was not finite; the batches after
                it are not counted.
        """
        self._order.copy_(order[: self._order.numel()].view_as(self._order))
        self._step.zero_()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # where a replay writes it
        queued = torch.cuda.Event(blocking=True)
        for step in range(self.steps):
            if step % QUEUED_STEPS == 0:
                queued.synchronize()
                with _capturing:
                    queued.record()
            before_step(step)
            self._graph.replay()
            if not self._updates:
                self._optimizer.step()
        return self._tally()

    def _tally(self) -> Tally:
        """Return the sum of the steps' results, in their order."""
        loss, counted = 0.0, 0
        for value in self._losses.tolist():
            counted += 1
            loss += value
            if not math.isfinite(value):
                loss = math.nan
                break
        asked = self._asked
        answers = int(asked[:counted].sum()) if isinstance(asked, Tensor) else counted * asked
        wrong = int(self._wrong[:counted].sum())
        return Tally(loss, wrong, counted * self._batch_size, answers)

    def _train_step(self) -> None:
        """Run the captured part of a step: read the batch at the step counter, forward, backward,
        update, and write the results."""
        chosen = self._order.index_select(0, self._step.view(1)).view(-1)
        self._optimizer.zero_grad(set_to_none=True)
        parts = [self._forward_backward(part) for part in chosen.chunk(self._micro_batches)]
        if self._updates:
            self._optimizer.step()
        loss, wrong, asked = (sum(values[1:], values[0]) for values in zip(*parts, strict=True))
        place = self._step.view(1)
        self._losses.index_copy_(0, place, loss.float().view(1))
        self._wrong.index_copy_(0, place, wrong.view(1))
        if isinstance(asked, Tensor) and isinstance(self._asked, Tensor):
            self._asked.index_copy_(0, place, asked.view(1))
        else:
            self._asked = asked
        self._step.add_(1)

    def _forward_backward(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """Add the gradients of ``chosen`` examples.

        Returns:
            Their summed loss, and the numbers of wrong answers and of answers.
        """
        x, y = self._data.x.index_select(0, chosen), self._data.y.index_select(0, chosen)
        outputs = self._model(x)
        loss = self._lose(outputs, y)
        loss.backward()
        return loss.detach(), self._lose.wrong(outputs, y), self._lose.answers(y)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restore parameters, buffers and optimizer state after the context; zero new state."""
        parameters = [
            storage_of(p.detach()) for p in (*self._model.parameters(), *self._model.buffers())
        ]
        before = [p.clone() for p in parameters]
        states = {id(t): t.clone() for t in self._states()}
        yield
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
        for state in self._states():
            if id(state) in states:
                state.copy_(states[id(state)])
            else:
                state.zero_()

    def _states(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        return [
            storage_of(value)
            for state in self._optimizer.state.values()
            for value in state.values()
        ]
