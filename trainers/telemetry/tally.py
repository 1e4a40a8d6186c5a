"""Running sums of loss and wrong answers over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor

from trainers.data.split import Split
from trainers.models.loss import Loss


@dataclass
class Tally:
    """The running sums of loss, wrong answers, examples and answers.

    The loss of classes is in nats. An example can have several answers: a sentence has one for each
    token.
    """

    loss: float = 0.0
    wrong: int = 0
    examples: int = 0
    answers: int = 0

    def add(self, other: Tally) -> None:
        """Add another tally's sums."""
        self.loss += other.loss
        self.wrong += other.wrong
        self.examples += other.examples
        self.answers += other.answers

    def metrics(self, split: str, counts_errors: bool = True) -> dict[str, float]:
        """Return ``split/loss``, the mean over answers, and ``split/error``, a fraction in 0 .. 1.

        Both are NaN for an empty tally. The error is left out if the loss does not count errors.
        """
        count = self.answers or float("nan")
        found = {f"{split}/loss": self.loss / count}
        return found | {f"{split}/error": self.wrong / count} if counts_errors else found


class Moment(TypedDict):
    """Where a trial is within an epoch, for a live display only.

    Attributes:
        epoch: number of the epoch, from 1.
        step, steps: number of the current step, from 1, and of the epoch's steps. On a GPU, steps
            of a CUDA graph are counted when they are started.
        loss: mean training loss of the epoch so far; None if the trial does not read it (CUDA
            graphs).
    """

    epoch: int
    step: int
    steps: int
    loss: float | None


def tallied(outputs: Tensor, batch: Split, summed: Tensor, loss: Loss) -> Tally:
    """Return the tally of one batch.

    Args:
        outputs: outputs of the model.
        batch: the examples.
        summed: the loss of the batch.
        loss: the loss.
    """
    wrong, answers = loss.wrong(outputs, batch.y), loss.answers(batch.y)
    return Tally(summed.item(), int(wrong), len(batch.y), int(answers))


def faulty(examples: int, answers: int) -> Tally:
    """Return a tally with NaN as loss and only wrong answers.

    Args:
        examples: number of examples.
        answers: number of answers per example.
    """
    return Tally(math.nan, examples * answers, examples, examples * answers)
