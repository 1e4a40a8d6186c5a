"""The choice of the synchroniser that a trial's config asks for."""

from __future__ import annotations

import torch
from torch import nn

from trainers.comm.collectives import Collectives
from trainers.config import TrialConfig
from trainers.sync.base import Synchroniser
from trainers.sync.synchronous import Synchronous
from trainers.sync.weight_averaging import Elastic, Ensemble, FinalAverage, OuterStep


def make_synchroniser(
    config: TrialConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    collectives: Collectives | None,
) -> Synchroniser:
    """Return the synchroniser that ``config`` asks for.

    Args:
        config: the trial.
        model, optimizer: the replica.
        collectives: collectives of the replicas; None where there is only one.
    """
    if collectives is None:
        return Synchroniser()
    if config.sync.name == "synchronous":
        parameters, tree = model.parameters(), config.layout.pairwise
        return Synchronous(config.wire, collectives, config.seed, parameters, tree=tree)
    if config.sync.name == "asynchronous":
        from trainers.sync.async_client import Asynchronous

        return Asynchronous(config, model, collectives)
    kinds: dict[str, type[OuterStep | Elastic | FinalAverage]] = {
        "local_sgd": OuterStep,
        "diloco": OuterStep,
        "elastic": Elastic,
        "final_average": FinalAverage,
        "ensemble": Ensemble,
    }
    return kinds[config.sync.name](config, model, optimizer, collectives)
