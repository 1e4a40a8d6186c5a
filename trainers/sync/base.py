"""What the replicas of one trial do to stay together, as the training loop sees it.

The loop calls :meth:`Synchroniser.begin_step` before forward, :meth:`gradients` between backward
and :meth:`update`, :meth:`after_step` after every step and :meth:`end_epoch` after the last of an
epoch. Every rank makes the same calls in the same order, whether or not its own loss is still
finite, so that none waits for another: what is collective is decided by the count of steps alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class Updater(Protocol):
    """What a training step asks of an optimizer: torch's have it, and what stands between it and
    one."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Change the weights by the gradients."""


class Synchroniser:
    """One replica alone: nothing to do. The base of all others.

    Attributes:
        whole: whether every replica evaluates all examples, not its share of them.
        together: whether forward passes are collective, so that every replica must make as many.
    """

    whole = False
    together = False

    def combine(self, logits: Tensor) -> Tensor:
        """What the trial predicts where this replica has ``logits``, ``[B, classes]``; collective
        where replicas predict together."""
        return logits

    def gradients(self, parameters: Iterable[Tensor], finite: bool) -> bool:
        """Make the gradients what this replica's update shall use; whether to update (False leaves
        the weights alone)."""
        return finite

    def begin_step(self, micro_batches: int) -> None:
        """Before a step's first forward pass; backward will run so many times."""

    def begin_epoch(self) -> None:
        """Before an epoch's first step."""

    def shares(self, steps: int, part: int) -> Iterator[tuple[int, int]]:
        """Which parts of which batches of an epoch this replica takes: by default its own ``part``
        of each of ``steps``."""
        for step in range(steps):
            yield step, part

    def update(self, optimizer: Updater) -> bool:
        """Change the weights by the gradients; whether they are still good."""
        optimizer.step()
        return True

    def metrics(self) -> dict[str, float]:
        """What to report of the epoch that has just ended, the same on every rank; collective."""
        return {}

    def after_step(self, finite: bool) -> bool:
        """After a step, done or left out (``finite`` False); whether training goes on, the same on
        every rank that has been asked."""
        return finite

    def end_epoch(self, finite: bool, last: bool = False) -> bool:
        """After an epoch's last step (``last``: of the trial's last epoch); whether training goes
        on, the same on every rank."""
        return finite

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While inside, the model has the weights that the trial's figures are about."""
        yield

    def state(self) -> dict[str, Tensor]:
        """Tensors of this rank alone that a checkpoint must hold, by name."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue with what :meth:`state` gave."""
