"""Save and restore a trial: what a checkpoint holds, and which parts of it another layout can use.

A checkpoint has whole tensors, whatever the layout, and beside them what belongs to single ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
from trainers.config import TrialConfig
from trainers.sync.base import Synchroniser
from trainers.training.build import Components

SAME_TRIAL = ("model", "precision", "seed", "optimizer.name")
"""Keys in which two trials must agree for one to continue the other's checkpoint."""
RANKS_SHARE = (
    "workers",
    "layout.pp",
    "layout.tp",
    "layout.dp",
    "layout.virtual_stages",
    "wire",
    "sync.name",
)
"""Keys in which two trials must agree for a rank of one to take what belonged to the same rank of
the other."""


@dataclass(frozen=True)
class Progress:
    """How far a trial has come; the attributes are those of
    :class:`trainers.training.trainer.Training`."""

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
    """Write a trial's state into ``folder``; whole or absent, whenever the process dies.
    Collective: rank 0 writes."""
    config, workers, scaler = components.config, components.workers, components.scaler
    own = sync.state()
    # on every rank or on none
    ranks = gather_ranks(own, workers.rank, workers.world_size) if own else {}
    scale = {} if scaler is None else {"scaler": scaler.state_dict()}
    with sync.evaluating():
        tensors = _whole(components, model_tensors(components.kept, components.optimizer))
        if workers.rank == 0:
            state = {**vars(progress), **scale, "config": config.to_dict(), "origin": origin}
            save_checkpoint(folder, tensors | ranks, state)


def restore(components: Components, sync: Synchroniser, folder: Path) -> Progress:
    """Take over the state in ``folder``, of this layout or another, and return how far that trial
    has come.

    Raises:
        ValueError: no whole checkpoint there, or one of another model or precision.
    """
    tensors, state = load_checkpoint(folder)
    config, saved_config = components.config, TrialConfig.from_dict(state["config"])
    for key in SAME_TRIAL:
        saved_value, own = (attrgetter(key)(trial) for trial in (saved_config, config))
        if saved_value != own:
            raise ValueError(
                f"{folder}: checkpoint of {key}={saved_value}, this trial has {own}; use its own"
                " config"
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
    # older ones lack history and tested
    return Progress(**{name: state[name] for name in vars(Progress()) if name in state})


def _whole(components: Components, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Make the trial's tensors of every worker's, on rank 0; collective."""
    workers = components.workers
    if components.partition is not None:
        tensors = components.partition.whole(tensors)
    if components.pipeline is not None:
        first = components.place.dp_rank == 0
        tensors = gather_stages(tensors if first else {}, workers.rank, workers.world_size)
    return tensors
