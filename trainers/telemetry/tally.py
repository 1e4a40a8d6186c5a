"""Running sums of loss and wrong answers over batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """The running sums of loss (nats), wrong answers and examples."""

    loss: float = 0.0
    wrong: int = 0
    examples: int = 0

    def add(self, loss: float, wrong: int, examples: int) -> None:
        """Add one batch."""
        self.loss += loss
        self.wrong += wrong
        self.examples += examples

    def metrics(self, split: str) -> dict[str, float]:
        """Return ``split/loss``, the mean in nats, and ``split/error``, a fraction in 0 .. 1.

        Both are NaN where nothing was added.
        """
        count = self.examples or float("nan")
        return {f"{split}/loss": self.loss / count, f"{split}/error": self.wrong / count}
