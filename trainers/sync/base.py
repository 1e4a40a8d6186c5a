"""The interface through which the training loop keeps the replicas of one trial together.

The loop calls :meth:`Synchroniser.begin_step` before forward, :meth:`gradients` between backward
and :meth:`update`, :meth:`after_step` after every step and :meth:`end_epoch` after the last step of
an epoch. Every rank makes the same calls in the same order, even if its own loss is not finite any
more. The number of steps alone determines when a collective runs, so no rank waits for a call that
another rank never makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class Updater(Protocol):
    """The part of an optimizer that a training step calls; torch's and our wrappers have it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""

    def step(self) -> Any:
        """Update the weights by the gradients."""


class Synchroniser:
    """The synchroniser of a single replica, which does nothing; base class of all others.

    Attributes:
        whole: whether every replica evaluates all examples instead of its share.
        together: whether forward passes are collective, so that all replicas must run the same
            number.
    """

    whole = False
    together = False

    def combine(self, logits: Tensor) -> Tensor:
        """Return the trial's predictions, given this replica's ``logits``, ``[B, classes]``.

        A collective if replicas predict together.
        """
        return logits

    def gradients(self, parameters: Iterable[Tensor], *, finite: bool) -> bool:
        """Replace the gradients by the ones for this replica's update; return whether to update.

        False skips the update.
        """
        return finite

    def begin_step(self, micro_batches: int) -> None:
        """Prepare for a step of ``micro_batches`` backward passes; called before forward."""

    def begin_epoch(self) -> None:
        """Prepare for an epoch; called before its first step."""

    def shares(self, steps: int, part: int) -> Iterator[tuple[int, int]]:
        """Yield (step, part): the parts of an epoch's batches that this replica takes.

        By default it takes its own ``part`` of each of ``steps`` batches.
        """
        for step in range(steps):
            yield step, part

    def update(self, optimizer: Updater) -> bool:
        """Update the weights by the gradients; return whether the replica can continue."""
        optimizer.step()
        return True

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the epoch that has just ended, the same on every rank.

        A collective.
        """
        return {}

    def after_step(self, *, finite: bool) -> bool:
        """Finish a step and return whether training continues.

        Ranks that communicate in this call return the same.

        Args:
            finite: False if the update was skipped because a loss was not finite.
        """
        return finite

    def end_epoch(self, *, finite: bool, last: bool = False) -> bool:
        """Finish an epoch and return whether training continues, the same on every rank.

        Args:
            finite: False if a loss was not finite.
            last: whether this was the trial's last epoch.
        """
        return finite

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Give the model, within the context, the weights whose metrics the trial reports."""
        yield

    def state(self) -> dict[str, Tensor]:
        """Return the tensors, by name, that a checkpoint must hold for this rank alone."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the tensors that :meth:`state` returned."""
