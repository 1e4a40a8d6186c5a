"""Hyperparameters that change in the middle of a trial.

They are written as ``changes: [{epoch: 4, optimizer.lr: 0.02}]``. An entry is valid from the end of
its epoch until a later entry changes the same key. Weights and optimizer state are kept. Population
based training (:mod:`study.search.population`) writes its changes in this form, as the config of an
ordinary trial, which reproduces the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from trainers.config.optimizer import OptimizerConfig

PREFIX = "optimizer."
CHANGEABLE = tuple(
    PREFIX + option.name for option in fields(OptimizerConfig) if option.name != "name"
)
"""The keys that may change."""


def optimizer_at(
    optimizer: OptimizerConfig, changes: Sequence[Mapping[str, Any]], epoch: int
) -> OptimizerConfig:
    """Return the optimizer's config after ``epoch`` epochs.

    Raises:
        ValueError: the optimizer does not accept the options.
    """
    options: dict[str, Any] = {}
    for change in changes:
        if change["epoch"] <= epoch:
            options |= {
                key.removeprefix(PREFIX): value for key, value in change.items() if key != "epoch"
            }
    return replace(optimizer, **options)


def check_changes(optimizer: OptimizerConfig, changes: Sequence[Any], epochs: int) -> None:
    """Refuse changes that cannot be applied in a trial of ``epochs`` epochs.

    Raises:
        ValueError: an entry cannot be applied; the message has the entry, the rule and the remedy.
    """
    before = 0
    for change in changes:
        _check_entry(change, before, epochs)
        before = change["epoch"]
        try:
            optimizer_at(optimizer, changes, before)
        except ValueError as error:
            raise ValueError(f"changes, epoch {before}: {error}") from None


def _check_entry(change: Any, before: int, epochs: int) -> None:
    """Refuse an entry without an epoch in (``before``, ``epochs``) or without a changeable key."""
    example = "use for example changes=[{epoch: 4, optimizer.lr: 0.02}]"
    if (
        not isinstance(change, Mapping)
        or not isinstance(change.get("epoch"), int)
        or len(change) < 2
    ):
        raise ValueError(
            f"changes: {change!r} must have an epoch and at least one key that changes; {example}"
        )
    if not before < change["epoch"] < epochs:
        raise ValueError(
            f"changes: epoch={change['epoch']} with epochs={epochs}: must be after epoch {before}"
            f" and before the last; {example}"
        )
    for key in change:
        if key != "epoch" and key not in CHANGEABLE:
            raise ValueError(
                f"changes: {key} cannot change in the middle of a trial; leave it out, or use one"
                f" of {', '.join(CHANGEABLE)}"
            )
