"""Running sums of loss and wrong answers over batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trainers.data.split import Split
from trainers.models.loss import Loss


@dataclass
class Tally:
    """The running sums of loss, wrong answers, examples and answers.

    The loss of a class is in nats. An example has one answer, or several: a sentence one for each
    of its tokens.
    """

    loss: float = 0.0
    wrong: int = 0
    examples: int = 0
    answers: int = 0

    def add(self, other: Tally) -> None:
        """Add what another tally counted."""
        self.loss += other.loss
        self.wrong += other.wrong
        self.examples += other.examples
        self.answers += other.answers

    def metrics(self, split: str, counts_errors: bool = True) -> dict[str, float]:
        """Return ``split/loss``, the mean over answers, and ``split/error``, a fraction in 0 .. 1.

        Both are NaN where nothing was added; the error is left out where answers are not right or
        wrong.
        """
        count = self.answers or float("nan")
        found = {f"{split}/loss": self.loss / count}
        return found | {f"{split}/error": self.wrong / count} if counts_errors else found


def tallied(outputs: Tensor, batch: Split, summed: Tensor, loss: Loss) -> Tally:
    """Return what is to be counted of a batch.

    Args:
        outputs: outputs of the model.
        batch: the examples.
        summed: the loss of the batch.
        loss: the loss.
    """
    wrong, answers = loss.wrong(outputs, batch.y), loss.answers(batch.y)
    return Tally(summed.item(), int(wrong), len(batch.y), int(answers))


def faulty(examples: int, answers: int) -> Tally:
    """Return a tally whose loss is NaN, and all answers of whose examples are wrong.

    Args:
        examples: number of examples.
        answers: answers of an example.
    """
    return Tally(math.nan, examples * answers, examples, examples * answers)
