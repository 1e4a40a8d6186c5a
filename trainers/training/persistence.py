"""Saving and restoring a trial, possibly with another layout.

A checkpoint has whole tensors, independent of the layout, and the state of single ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from trainers.checkpoint.files import load_checkpoint, save_checkpoint
from trainers.checkpoint.state import (
    gather_ranks,
    gather_stages,
    load_model_tensors,
    model_tensors,
    of_rank,
)
from trainers.config import ModelConfig, TrialConfig
from trainers.sync.base import Synchroniser
from trainers.training.build import Components
from trainers.user_code import placeless

SAME_TRIAL = ("model", "precision", "seed", "optimizer.name")
"""Keys that must be equal for one trial to resume from another's checkpoint."""
RANKS_SHARE = (
    "workers",
    "layout.pp",
    "layout.tp",
    "layout.dp",
    "layout.virtual_stages",
    "layout.schedule",
    "wire",
    "sync.name",
)
"""Keys that must also be equal for a rank to load the state of the other trial's same rank."""


@dataclass(frozen=True)
class Progress:
    """The progress of a trial, in attributes of :class:`trainers.training.trainer.Training`."""

    epoch: int = 0
    diverged: bool = False
    history: list[dict[str, float]] = field(default_factory=list)
    tested: dict[str, float] = field(default_factory=dict)


def save(
    components: Components,
    sync: Synchroniser,
    progress: Progress,
    origin: dict[str, Any],
    folder: Path,
) -> None:
    """Write a trial's state into ``folder`` atomically: it is complete or absent, even after a
    kill.

    A collective; rank 0 writes.
    """
    config, workers, scaler = components.config, components.workers, components.scaler
    rank_state = sync.state()  # on every rank or on none
    ranks = gather_ranks(rank_state, workers.rank, workers.world_size) if rank_state else {}
    scale = {} if scaler is None else {"scaler": scaler.state_dict()}
    with sync.evaluating():
        tensors = _whole(components, model_tensors(components.kept, components.optimizer))
        if workers.rank == 0:
            state = {**vars(progress), **scale, "config": config.to_dict(), "origin": origin}
            save_checkpoint(folder, tensors | ranks, state)


def restore(components: Components, sync: Synchroniser, folder: Path) -> Progress:
    """Load the state in ``folder``, of this layout or another; return the trial's progress.

    Raises:
        ValueError: the checkpoint is missing, damaged, or of another model or precision.
    """
    tensors, state = load_checkpoint(folder)
    config, saved_config = components.config, TrialConfig.from_dict(state["config"])
    for key in SAME_TRIAL:
        saved_value, value = (attrgetter(key)(trial) for trial in (saved_config, config))
        if _compared(saved_value) != _compared(value):
            raise ValueError(
                f"{folder}: checkpoint of {key}={saved_value}, this trial has {value};"
                " restore it with the config it was saved with"
            )
    if components.scaler is not None and "scaler" in state:
        components.scaler.load_state_dict(state["scaler"])
    own_tensors = components.partition.parts(tensors) if components.partition else tensors
    load_model_tensors(components.kept, components.optimizer, own_tensors)
    if components.offload is not None:
        components.offload.push()
    alike = all(get(saved_config) == get(config) for get in map(attrgetter, RANKS_SHARE))
    sync.load_state(
        of_rank(tensors, components.workers.rank, components.workers.device) if alike else {}
    )
    # checkpoints of earlier versions lack history and tested
    return Progress(**{name: state[name] for name in vars(Progress()) if name in state})


def _compared(value: Any) -> Any:
    """Return a config value for comparisons: without the folder of a user model's file."""
    return placeless(asdict(value)) if isinstance(value, ModelConfig) else value


def _whole(components: Components, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Assemble a trial's whole tensors from all workers on rank 0; a collective."""
    workers = components.workers
    if components.partition is not None:
        tensors = components.partition.whole(tensors)
    if components.pipeline is not None:
        first = components.place.dp_rank == 0
        tensors = gather_stages(tensors if first else {}, workers.rank, workers.world_size)
    return tensors
